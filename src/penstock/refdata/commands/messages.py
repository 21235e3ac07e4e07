"""From a message on the bus to an event that can be judged, or the reason why it is refused."""

import uuid
from typing import NamedTuple
from uuid import UUID

import msgspec

from penstock.kernel.bus import BusDelivery, BusMessage
from penstock.kernel.errors import PenstockError
from penstock.kernel.telemetry.telemetry import TRACEPARENT, normalize_traceparent
from penstock.refdata.contract import (
    FILLED_LIMIT,
    Command,
    CommandSource,
    EventType,
    Name,
    decode_command,
    encode_command,
    message_key,
)
from penstock.refdata.model import CommandEvent, CommandRefusal, DictionaryKey, format_error

_GIVE_UP = "penstock-give-up"  # a header: refuse the event that is named, unless it came before
_NAMESPACE = uuid.UUID("4b1d2f6e-6a0f-5f0b-9d7a-3c1f4a9a6f10")
_NOT_DELIVERED = CommandRefusal(
    "NOT_DELIVERED", "no command of this id is left on the bus; send it again under another one"
)


class ParsedMessage(NamedTuple):
    """A message as far as it could be read: an event, a refusal, or both when it is known whose it is."""

    event: CommandEvent | None
    refusal: CommandRefusal | None = None
    attempt: int = 1

    @property
    def is_probe(self) -> bool:
        """Whether it was sent after a command, to see whether that one came."""
        return self.refusal is _NOT_DELIVERED


class _CommandIdentity(msgspec.Struct, rename="camel"):
    """What must be readable for a refusal to be kept."""

    tenant_id: Name
    dict_code: Name
    event_id: UUID | None = None


_IDENTITIES = msgspec.json.Decoder(_CommandIdentity)


def parse_message(delivery: BusDelivery) -> ParsedMessage:
    """What a message of the commands' topic asks for."""
    message = delivery.message
    if message.headers.get(_GIVE_UP):
        return ParsedMessage(_named(delivery), _NOT_DELIVERED, delivery.attempt)
    try:
        command = decode_command(message.value, limit=FILLED_LIMIT)
    except PenstockError as error:
        return ParsedMessage(
            _named(delivery), CommandRefusal(error.code, format_error(error.message)), delivery.attempt
        )
    if command.tenant_id is None:
        return ParsedMessage(None, CommandRefusal("MALFORMED", "tenantId is missing"))
    target = DictionaryKey(command.tenant_id, command.dict_code)
    event_id, source = command.event_id or derive_event_id(delivery), command.source or CommandSource.KAFKA
    event = CommandEvent(target, event_id, source, command, read_trace(message))
    if message.key != message_key(*target):
        said = f"the message's key is {message.key!r}, its command's {message_key(*target)!r}"
        return ParsedMessage(event, CommandRefusal("KEY_MISMATCH", format_error(said)), delivery.attempt)
    return ParsedMessage(event, None, delivery.attempt)


def derive_event_id(delivery: BusDelivery) -> UUID:
    """R10: the id of what came without one: the same whenever the same message is read."""
    return uuid.uuid5(_NAMESPACE, f"{delivery.message.topic}/{delivery.partition}/{delivery.position}")


def build_command_message(topic: str, event: CommandEvent) -> BusMessage:
    """The message that carries a command."""
    headers = {TRACEPARENT: event.trace} if event.trace else {}
    return BusMessage(topic, message_key(*event.target), encode_command(event.command), headers)


def read_trace(message: BusMessage) -> str | None:
    """R26: the trace a message belongs to, when somebody follows it."""
    return normalize_traceparent(message.headers.get(TRACEPARENT))


def build_give_up_message(topic: str, target: DictionaryKey, event_id: UUID) -> BusMessage:
    """The message that ends an update whose command is not on the bus: being ordered behind it, it would come later."""
    identity = _CommandIdentity(target.tenant_id, target.dict_code, event_id)
    return BusMessage(topic, message_key(*target), msgspec.json.encode(identity), {_GIVE_UP: "1"})


def _named(delivery: BusDelivery) -> CommandEvent | None:
    """Whose a message is that cannot be read to its end."""
    try:
        known = _IDENTITIES.decode(delivery.message.value)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    target = DictionaryKey(known.tenant_id, known.dict_code)
    nothing = Command(dict_code=known.dict_code, event_type=EventType.DELTA, items=[])
    event_id = known.event_id or derive_event_id(delivery)
    return CommandEvent(target, event_id, CommandSource.KAFKA, nothing, read_trace(delivery.message))
