"""R10: how a message of somebody else's topic becomes a command."""

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
Look = Callable[[BusMessage, Any], Any]

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
    """One topic's mapping, ready to be used."""

    def __init__(self, section: ExternalTopicSection) -> None:
        self._section = section
        self._tenant = _source(section.tenant_id)
        self._code = _source(section.dict_code)
        self._type = _source(section.event_type)
        self._items = _source(section.items) if section.items else None
        self._key, self._payload = _source(section.key), _source(section.payload)
        self._op = _source(section.op) if section.op else None
        self._rest = {name: _source(said) for name in _FIELDS if (said := getattr(section, name))}

    def event(self, delivery: BusDelivery) -> CommandEvent:
        """The event a message stands for, or Invalid with the reason."""
        message = delivery.message
        document = _document(message)
        body: dict[str, Any] = {
            "tenantId": _text("tenantId", self._tenant(message, document)),
            "dictCode": _text("dictCode", self._code(message, document)),
            "eventType": _text("eventType", self._type(message, document)),
            "source": CommandSource.KAFKA,
            "items": self._item_list(message, document),
        }
        for name, look in self._rest.items():
            if (found := look(message, document)) is not _MISSING and found is not None:
                # A number may come as text, as it does in headers.
                is_numeral = name in _NUMBERS and isinstance(found, str) and found.lstrip("-").isdigit()
                body[_FIELDS[name]] = Raw(found.encode()) if is_numeral else found
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

    def _item_list(self, message: BusMessage, document: Any) -> list[dict[str, Any]]:
        if self._items is None:
            return [self._item(message, document)]
        found = self._items(message, document)
        if not isinstance(found, list):
            raise Invalid("MAPPING_FAILED", f"items: {self._section.items} is no list in this message")
        return [self._item(message, element) for element in found]

    def _item(self, message: BusMessage, element: Any) -> dict[str, Any]:
        key = _text("key", self._key(message, element))
        said = self._op(message, element) if self._op else _MISSING
        # Without a value it is a tombstone, as compacted topics have them.
        if element is _MISSING or (said is not _MISSING and _spelt(said) in self._section.deletes):
            return {"key": key, "op": Op.DELETE}
        payload = self._payload(message, element)
        if payload is _MISSING:
            raise Invalid("MAPPING_FAILED", f"payload: there is no {self._section.payload} in this message")
        return {"key": key, "op": Op.UPSERT, "payload": payload}


def _document(message: BusMessage) -> Any:
    if not message.value:
        return _MISSING
    if len(message.value) > COMMAND_LIMIT:
        raise Invalid("COMMAND_TOO_LARGE", f"a message has at most {COMMAND_LIMIT} bytes, not {len(message.value)}")
    try:
        return EXACT.decode(message.value)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Invalid("MALFORMED", f"not JSON: {error}") from error


def _source(said: str) -> Look:
    """Where a field comes from: `=text`, `/json/pointer`, `key` or `header:name`."""
    if said.startswith("="):
        return lambda _message, _document: said[1:]
    if said == "key":
        return lambda message, _document: message.key or _MISSING
    if said.startswith("header:"):
        return lambda message, _document: message.headers.get(said.removeprefix("header:"), _MISSING)
    steps = [step.replace("~1", "/").replace("~0", "~") for step in said.split("/")[1:]] if said != "/" else []
    return lambda _message, document: _at(document, steps)


def _at(document: Any, steps: list[str]) -> Any:
    for step in steps:
        if isinstance(document, Mapping):
            document = document.get(step, _MISSING)
        elif isinstance(document, list) and step.isascii() and step.isdecimal() and int(step) < len(document):
            document = document[int(step)]
        else:
            return _MISSING
    return document


def _text(name: str, found: Any) -> str:
    """A name or a key: text, or a number as it is written."""
    if isinstance(found, bool) or not isinstance(found, str | int | Raw):
        what = "missing" if found is _MISSING else f"no text but {type(found).__name__}"
        raise Invalid("MAPPING_FAILED", f"{name}: {what}")
    if isinstance(found, str) and REPLACEMENT in found:
        # Bytes that are no text were replaced: two keys may have become one.
        raise Invalid("MAPPING_FAILED", f"{name}: it is not UTF-8")
    return bytes(found).decode() if isinstance(found, Raw) else str(found)


def _spelt(found: Any) -> str:
    """Text as it is, anything else as JSON has it."""
    return found if isinstance(found, str) else _ENCODER.encode(found).decode()


def adapter_handler(refdata: Refdata, mapped: TopicMapping) -> Handler[BusDelivery]:
    """R10: the handler of somebody else's topic."""

    async def handle(deliveries: Sequence[BusDelivery], _stopping: asyncio.Event) -> Sequence[Outcome | None]:
        events: list[CommandEvent] = []
        outcomes: list[Outcome | None] = []
        for delivery in deliveries:
            try:
                events.append(mapped.event(delivery))
                outcomes.append(Done())
            except PenstockError as error:
                outcomes.append(Failed(f"{error.code}: {error.message}"))
        try:
            await refdata.submit_all(events)
        except Transient as error:
            return [Retry(f"{error.code}: {error.message}", counts=False)] * len(deliveries)
        except Exception as error:  # noqa: BLE001 - the edge: one message must not hold up its partition for ever
            structlog.get_logger().exception("adapter_crashed")
            return [Retry(f"{type(error).__name__}: {error}")] * len(deliveries)
        return outcomes

    return handle
