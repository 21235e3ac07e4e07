"""Messages of the commands topic: parsing, building, and the probes for lost commands."""

import uuid
from typing import NamedTuple
from uuid import UUID

import msgspec

from penstock.kernel.bus import BusDelivery, BusMessage
from penstock.kernel.errors import PenstockError
from penstock.kernel.telemetry.telemetry import TRACEPARENT, normalize_traceparent
from penstock.refdata.contract import (
    COMPLETE_COMMAND_LIMIT,
    Command,
    CommandSource,
    EventType,
    Name,
    decode_command,
    encode_command,
    make_message_key,
)
from penstock.refdata.model import CommandEvent, CommandRefusal, DictionaryKey, format_error

_GIVE_UP = "penstock-give-up"  # header of a probe: fail the named event unless its command was processed before
_NAMESPACE = uuid.UUID("4b1d2f6e-6a0f-5f0b-9d7a-3c1f4a9a6f10")
_NOT_DELIVERED = CommandRefusal(
    "NOT_DELIVERED", "the command is no longer on the bus; send it again with a new eventId"
)


class ParsedMessage(NamedTuple):
    """A parsed message: an event, a refusal, or both if the event of a refused message is known."""

    event: CommandEvent | None
    refusal: CommandRefusal | None = None
    attempt: int = 1

    @property
    def is_probe(self) -> bool:
        """Return whether the message was sent to find out whether a command has been processed."""
        return self.refusal is _NOT_DELIVERED


class _CommandIdentity(msgspec.Struct, rename="camel"):
    """The fields that are needed to store a refusal."""

    tenant_id: Name
    dict_code: Name
    event_id: UUID | None = None


_IDENTITIES = msgspec.json.Decoder(_CommandIdentity)


def parse_message(delivery: BusDelivery) -> ParsedMessage:
    """Return the command of a message of the commands topic, or its refusal."""
    message = delivery.message
    if message.headers.get(_GIVE_UP):
        return ParsedMessage(_identify_event(delivery), _NOT_DELIVERED, delivery.attempt)
    try:
        command = decode_command(message.value, limit=COMPLETE_COMMAND_LIMIT)
    except PenstockError as error:
        return ParsedMessage(
            _identify_event(delivery), CommandRefusal(error.code, format_error(error.message)), delivery.attempt
        )
    if command.tenant_id is None:
        return ParsedMessage(None, CommandRefusal("MALFORMED", "tenantId is missing"))
    target = DictionaryKey(command.tenant_id, command.dict_code)
    event_id, source = command.event_id or derive_event_id(delivery), command.source or CommandSource.KAFKA
    event = CommandEvent(target, event_id, source, command, read_trace(message))
    if message.key != make_message_key(*target):
        text = f"the key of the message is {message.key!r}; the key of its command is {make_message_key(*target)!r}"
        return ParsedMessage(event, CommandRefusal("KEY_MISMATCH", format_error(text)), delivery.attempt)
    return ParsedMessage(event, None, delivery.attempt)


def derive_event_id(delivery: BusDelivery) -> UUID:
    """R10: return an event id for a message without one; it is the same each time the message is read."""
    return uuid.uuid5(_NAMESPACE, f"{delivery.message.topic}/{delivery.partition}/{delivery.position}")


def build_command_message(topic: str, event: CommandEvent) -> BusMessage:
    """Return the message with the command of *event*."""
    headers = {TRACEPARENT: event.trace} if event.trace else {}
    return BusMessage(topic, make_message_key(*event.target), encode_command(event.command), headers)


def read_trace(message: BusMessage) -> str | None:
    """R26: return the trace of a message, if it is traced."""
    return normalize_traceparent(message.headers.get(TRACEPARENT))


def build_give_up_message(topic: str, target: DictionaryKey, event_id: UUID) -> BusMessage:
    """Return a probe: being ordered after the command of an update, it fails the update if the command is lost."""
    identity = _CommandIdentity(target.tenant_id, target.dict_code, event_id)
    return BusMessage(topic, make_message_key(*target), msgspec.json.encode(identity), {_GIVE_UP: "1"})


def _identify_event(delivery: BusDelivery) -> CommandEvent | None:
    """Return the event of a message that is malformed, if its identity can be read."""
    try:
        identity = _IDENTITIES.decode(delivery.message.value)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    target = DictionaryKey(identity.tenant_id, identity.dict_code)
    empty = Command(dict_code=identity.dict_code, event_type=EventType.DELTA, items=[])
    event_id = identity.event_id or derive_event_id(delivery)
    return CommandEvent(target, event_id, CommandSource.KAFKA, empty, read_trace(delivery.message))
