"""The contract of refdata: commands, their limits and states, and the invalidations that follow a commit."""

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from penstock.kernel.errors import Invalid, TooLarge

PREFIX = "/v1/tenants"
COMMAND_LIMIT = 880_000  # bytes: the limit of the bus, less what is added on the way
COMPLETE_COMMAND_LIMIT = COMMAND_LIMIT + 2_000  # with tenant, id, source and time filled in
ITEM_LIMIT = 20_000
_ITEMS_LIMIT = COMMAND_LIMIT - 2_000  # bytes of the items of a command; names and ids take the rest
KEY_LIMIT = 512
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"  # no colon: it separates tenant and dictionary in a message key
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_BIGINT = 2**63 - 1
EXACT = msgspec.json.Decoder(
    float_hook=lambda digits: Raw(digits.encode())
)  # any JSON document, without loss of digits

# The `$` of Python also matches before a line break, and JSON Schema has no `\Z`.
Name = Annotated[str, Meta(pattern=NAME[:-1] + r"(?![\s\S])")]
Count = Annotated[int, Meta(ge=1, le=10_000)]


class EventType(StrEnum):
    """The kind of a command: SNAPSHOT lists all items, DELTA the changed ones."""

    SNAPSHOT = "SNAPSHOT"
    DELTA = "DELTA"


class Op(StrEnum):
    """The operation on an item."""

    UPSERT = "UPSERT"
    DELETE = "DELETE"


class CommandSource(StrEnum):
    """The channel on which a command arrived."""

    REST = "REST"
    KAFKA = "KAFKA"


class UpdateState(StrEnum):
    """R7: the state of an update."""

    PENDING = "PENDING"
    COMMITTED = "COMMITTED"
    FAILED = "FAILED"


class CommandItem(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """An item of a command. The payload keeps its original text, so that no digit is lost."""

    key: Annotated[str, Meta(min_length=1, max_length=KEY_LIMIT)]
    op: Op = Op.UPSERT
    payload: Raw | UnsetType = UNSET

    @property
    def text(self) -> str:
        """Return the payload as JSON text."""
        return "null" if self.payload is UNSET else bytes(self.payload).decode()


class SnapshotEntry(msgspec.Struct, array_like=True, gc=False):
    """An item of a snapshot, kept small because there may be millions."""

    key: str
    payload: Raw

    @property
    def text(self) -> str:
        """Return the payload as JSON text."""
        return bytes(self.payload).decode()


class Command(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, rename="camel", kw_only=True):
    """R6, §8.1: a change of one dictionary of one tenant."""

    dict_code: Name
    event_type: EventType
    items: Annotated[list[CommandItem], Meta(max_length=ITEM_LIMIT)]
    event_id: UUID | None = None
    tenant_id: Name | None = None
    source: CommandSource | None = None
    source_revision: Annotated[int, Meta(ge=-_BIGINT, le=_BIGINT)] | None = None
    snapshot_id: UUID | None = None
    chunk_index: Count | None = None
    chunks_total: Count | None = None
    occurred_at: Annotated[datetime, Meta(tz=True)] | None = None
    allow_row_drop: bool = False  # R30: the snapshot may delete more than maxDropPercent

    def list_entries(self) -> list[SnapshotEntry]:
        """Return the items of a SNAPSHOT, which all have a payload."""
        return [SnapshotEntry(item.key, item.payload) for item in self.items if item.payload is not UNSET]

    @property
    def is_chunk(self) -> bool:
        """Return whether the command belongs to a snapshot with an id, alone or with other chunks."""
        return self.snapshot_id is not None

    @property
    def chunk_position(self) -> tuple[int, int]:
        """Return the index of the chunk and the number of chunks."""
        return self.chunk_index or 1, self.chunks_total or 1


class Invalidation(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """R15, §8.2: the notice of a commit to the pods, with the changed keys if they are few, and the trace."""

    event_id: UUID
    tenant_id: Name
    dict_code: Name
    version: Annotated[int, Meta(ge=0, le=_BIGINT)]
    committed_at: Annotated[datetime, Meta(tz=True)]
    keys: Sequence[str] | None = None
    traceparent: str | None = None


_COMMANDS = msgspec.json.Decoder(Command)
INVALIDATIONS = msgspec.json.Decoder(Invalidation)


def decode_command(body: bytes, limit: int = COMMAND_LIMIT) -> Command:
    """Return the command in *body*; Invalid names the problem and its place."""
    if len(body) > limit:
        hint = "send a SNAPSHOT in chunks (snapshotId, chunkIndex, chunksTotal), or a DELTA as several commands"
        raise TooLarge(
            "COMMAND_TOO_LARGE", f"the command has {len(body)} bytes; the limit is {COMMAND_LIMIT}", hint=hint
        )
    try:
        body.decode()  # the decoder does not read payloads
        command = _COMMANDS.decode(body)
    except UnicodeDecodeError as error:
        raise Invalid(
            "MALFORMED", f"the body is not UTF-8: {error.reason} at byte {error.start}", hint="send UTF-8"
        ) from error
    except msgspec.ValidationError as error:
        raise Invalid("MALFORMED", str(error), hint="see the example of a command in docs/refdata.md") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise Invalid(
            "MALFORMED", f"the body is not JSON: {error}", hint="see the example of a command in docs/refdata.md"
        ) from error
    if b"\\u0000" in body and _NUL.search(body):
        raise Invalid(
            "MALFORMED", "a text contains the character NUL, which PostgreSQL cannot store", hint="remove the character"
        )
    return _check_command(command)


def encode_command(command: Command) -> bytes:
    """Return *command* as the bytes of a message."""
    return msgspec.json.encode(command)


def split_sizes(sizes: Iterable[int]) -> Iterator[int]:
    """Yield the number of items of each command, for items of these encoded *sizes* in bytes; 0 for no items."""
    count = used = 0
    for size in sizes:
        if count and (used + size > _ITEMS_LIMIT or count == ITEM_LIMIT):
            yield count
            count = used = 0
        count += 1
        used += size
    yield count


def split_items(items: Sequence[CommandItem]) -> Iterator[list[CommandItem]]:
    """Yield *items* in lists that each fit into one command; one empty list for no items."""
    rest = iter(items)
    for count in split_sizes(len(msgspec.json.encode(item)) + 1 for item in items):
        yield list(islice(rest, count))


def make_message_key(tenant_id: str, dict_code: str) -> str:
    """R9: return the message key, by which the commands of a dictionary are ordered."""
    return f"{tenant_id}:{dict_code}"


def _check_command(command: Command) -> Command:
    _check_items(command)
    _check_chunk(command)
    if command.occurred_at is not None:
        try:
            command.occurred_at = command.occurred_at.astimezone(UTC)
        except OverflowError:
            raise Invalid("MALFORMED", "occurredAt is out of range in UTC - at `$.occurredAt`") from None
    return command


def _check_items(command: Command) -> None:
    is_snapshot = command.event_type is EventType.SNAPSHOT
    for index, item in enumerate(command.items):
        if item.op is Op.UPSERT and (item.payload is UNSET or bytes(item.payload) == b"null"):
            raise _make_item_error(index, "payload", "an UPSERT needs a payload")
        if item.op is Op.DELETE and is_snapshot:
            raise _make_item_error(index, "op", "a SNAPSHOT has no DELETE: items that it does not list are deleted")
    if is_snapshot and len({item.key for item in command.items}) < len(command.items):
        raise Invalid("DUPLICATE_KEY", "a SNAPSHOT contains a key more than once", hint="send one item per key")


def _check_chunk(command: Command) -> None:
    chunk = (command.snapshot_id, command.chunk_index, command.chunks_total)
    # §8.1 shows a DELTA with chunkIndex and chunksTotal 1, and no snapshotId.
    if command.event_type is EventType.DELTA and (chunk[0] is not None or chunk[1:] not in ((None, None), (1, 1))):
        raise Invalid(
            "BAD_CHUNK", "a DELTA cannot be sent in chunks", hint="remove snapshotId, chunkIndex and chunksTotal"
        )
    index, total = command.chunk_position
    if total > 1 and None in chunk:
        raise Invalid("BAD_CHUNK", "a chunk needs snapshotId, chunkIndex and chunksTotal", hint="send all three")
    if index > total:
        raise Invalid(
            "BAD_CHUNK",
            f"chunkIndex is {index}, but chunksTotal is {total}",
            hint="chunkIndex goes from 1 to chunksTotal",
        )


def _make_item_error(index: int, field: str, message: str) -> Invalid:
    hint = "see the example of a command in docs/refdata.md"
    return Invalid("MALFORMED", f"{message} - at `$.items[{index}].{field}`", hint=hint)


def make_json_schema(kind: type = Command) -> dict[str, Any]:
    """Return the JSON Schema of a command, or of another *kind* of message, without references."""
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="{name}")
    inlined: dict[str, Any] = _inline(schema, parts)
    return inlined


def _inline(schema: Any, parts: dict[str, Any]) -> Any:
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inline(parts[schema["$ref"]], parts)
        return {name: _inline(inner, parts) for name, inner in schema.items()}
    return [_inline(inner, parts) for inner in schema] if isinstance(schema, list) else schema
