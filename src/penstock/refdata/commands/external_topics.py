"""R10: messages of external topics, and their mapping to commands."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import structlog
from msgspec import Raw

from penstock.kernel.bus import BusDelivery, BusMessage
from penstock.kernel.errors import Invalid, PenstockError, Transient
from penstock.kernel.tasks.outcome import Done, Failed, Outcome, Retry
from penstock.kernel.text import REPLACEMENT
from penstock.kernel.work.worker import Handler
from penstock.refdata.commands.messages import derive_event_id, read_trace
from penstock.refdata.commands.service import Refdata
from penstock.refdata.config import ExternalTopicSection
from penstock.refdata.contract import COMMAND_LIMIT, EXACT, CommandSource, Op, decode_command
from penstock.refdata.model import CommandEvent, DictionaryKey

_ENCODER = msgspec.json.Encoder()
_MISSING = object()
ReadField = Callable[[BusMessage, Any], Any]

_FIELDS = {
    "event_id": "eventId",
    "source_revision": "sourceRevision",
    "occurred_at": "occurredAt",
    "snapshot_id": "snapshotId",
    "chunk_index": "chunkIndex",
    "chunks_total": "chunksTotal",
}
_NUMBERS = ("source_revision", "chunk_index", "chunks_total")


class TopicMapping:
    """The mapping of the messages of one topic to commands."""

    def __init__(self, section: ExternalTopicSection) -> None:
        self._section = section
        self._tenant = _make_reader(section.tenant_id)
        self._code = _make_reader(section.dict_code)
        self._type = _make_reader(section.event_type)
        self._items = _make_reader(section.items) if section.items else None
        self._key, self._payload = _make_reader(section.key), _make_reader(section.payload)
        self._op = _make_reader(section.op) if section.op else None
        self._rest = {name: _make_reader(source) for name in _FIELDS if (source := getattr(section, name))}

    def map_message(self, delivery: BusDelivery) -> CommandEvent:
        """Return the command of a message; Invalid if it does not fit the mapping."""
        message = delivery.message
        document = _decode_document(message)
        body: dict[str, Any] = {
            "tenantId": _read_name("tenantId", self._tenant(message, document)),
            "dictCode": _read_name("dictCode", self._code(message, document)),
            "eventType": _read_name("eventType", self._type(message, document)),
            "source": CommandSource.KAFKA,
            "items": self._map_items(message, document),
        }
        for name, read in self._rest.items():
            if (value := read(message, document)) is not _MISSING and value is not None:
                # A number may be text, as it is in headers.
                is_numeral = name in _NUMBERS and isinstance(value, str) and value.lstrip("-").isdigit()
                body[_FIELDS[name]] = Raw(value.encode()) if is_numeral else value
        body.setdefault("eventId", str(derive_event_id(delivery)))
        try:
            encoded = _ENCODER.encode(body)
        except RecursionError as error:
            raise Invalid("MALFORMED", "the message is nested too deeply") from error
        command, trace = decode_command(encoded), read_trace(message)
        if command.tenant_id is None or command.event_id is None:
            raise Invalid("MAPPING_FAILED", "tenantId or eventId is missing")
        return CommandEvent(
            DictionaryKey(command.tenant_id, command.dict_code), command.event_id, CommandSource.KAFKA, command, trace
        )

    def _map_items(self, message: BusMessage, document: Any) -> list[dict[str, Any]]:
        if self._items is None:
            return [self._map_item(message, document)]
        elements = self._items(message, document)
        if not isinstance(elements, list):
            raise Invalid("MAPPING_FAILED", f"items: {self._section.items} is not a list in this message")
        return [self._map_item(message, element) for element in elements]

    def _map_item(self, message: BusMessage, element: Any) -> dict[str, Any]:
        key = _read_name("key", self._key(message, element))
        op = self._op(message, element) if self._op else _MISSING
        # A message without a value is a tombstone, as in compacted topics.
        if element is _MISSING or (op is not _MISSING and _to_text(op) in self._section.deletes):
            return {"key": key, "op": Op.DELETE}
        payload = self._payload(message, element)
        if payload is _MISSING:
            raise Invalid("MAPPING_FAILED", f"payload: {self._section.payload} is missing in this message")
        return {"key": key, "op": Op.UPSERT, "payload": payload}


def _decode_document(message: BusMessage) -> Any:
    if not message.value:
        return _MISSING
    if len(message.value) > COMMAND_LIMIT:
        raise Invalid("COMMAND_TOO_LARGE", f"the message has {len(message.value)} bytes; the limit is {COMMAND_LIMIT}")
    try:
        return EXACT.decode(message.value)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Invalid("MALFORMED", f"the message is not JSON: {error}") from error


def _make_reader(source: str) -> ReadField:
    """Return a function that reads a field from its *source*: `=text`, `/json/pointer`, `key` or `header:name`."""
    if source.startswith("="):
        return lambda _message, _document: source[1:]
    if source == "key":
        return lambda message, _document: message.key or _MISSING
    if source.startswith("header:"):
        return lambda message, _document: message.headers.get(source.removeprefix("header:"), _MISSING)
    steps = [step.replace("~1", "/").replace("~0", "~") for step in source.split("/")[1:]] if source != "/" else []
    return lambda _message, document: _read_pointer(document, steps)


def _read_pointer(document: Any, steps: list[str]) -> Any:
    for step in steps:
        if isinstance(document, Mapping):
            document = document.get(step, _MISSING)
        elif isinstance(document, list) and step.isascii() and step.isdecimal() and int(step) < len(document):
            document = document[int(step)]
        else:
            return _MISSING
    return document


def _read_name(name: str, value: Any) -> str:
    """Return a name or a key, which is text, or a number with its original digits."""
    if isinstance(value, bool) or not isinstance(value, str | int | Raw):
        problem = "is missing" if value is _MISSING else f"must be text, not {type(value).__name__}"
        raise Invalid("MAPPING_FAILED", f"{name}: {problem}")
    if isinstance(value, str) and REPLACEMENT in value:
        # Invalid bytes were replaced, so two different keys may be equal now.
        raise Invalid("MAPPING_FAILED", f"{name}: is not UTF-8")
    return bytes(value).decode() if isinstance(value, Raw) else str(value)


def _to_text(value: Any) -> str:
    """Return text unchanged, and other values as JSON."""
    return value if isinstance(value, str) else _ENCODER.encode(value).decode()


def make_adapter_handler(refdata: Refdata, mapping: TopicMapping) -> Handler[BusDelivery]:
    """R10: return the handler of an external topic."""

    async def handle(deliveries: Sequence[BusDelivery], _stopping: asyncio.Event) -> Sequence[Outcome | None]:
        events: list[CommandEvent] = []
        outcomes: list[Outcome | None] = []
        for delivery in deliveries:
            try:
                events.append(mapping.map_message(delivery))
                outcomes.append(Done())
            except PenstockError as error:
                outcomes.append(Failed(f"{error.code}: {error.message}"))
        try:
            await refdata.submit_all(events)
        except Transient as error:
            return [Retry(f"{error.code}: {error.message}", counts=False)] * len(deliveries)
        except Exception as error:  # noqa: BLE001 - the edge: a message must not block its partition
            structlog.get_logger().exception("adapter_crashed")
            return [Retry(f"{type(error).__name__}: {error}")] * len(deliveries)
        return outcomes

    return handle
