"""The contract of refdata: the commands that change a dictionary, their limits and states, and notices of commits."""

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
COMMAND_LIMIT = 880_000  # bytes: what the bus carries, with room for what is added on the way
FILLED_LIMIT = COMMAND_LIMIT + 2_000  # with tenant, id, source and time filled in
ITEM_LIMIT = 20_000
_ITEM_ROOM = COMMAND_LIMIT - 2_000  # bytes of one command's items: the names and ids around them need the rest
KEY_LIMIT = 512
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"  # without a colon: it parts tenant and dictionary in a message's key
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_BIGINT = 2**63 - 1
EXACT = msgspec.json.Decoder(float_hook=lambda digits: Raw(digits.encode()))  # any document, and no digit of it lost

# Python's `$` lets a line break pass, and its `\Z` is unknown to JSON Schema.
Name = Annotated[str, Meta(pattern=NAME[:-1] + r"(?![\s\S])")]
Count = Annotated[int, Meta(ge=1, le=10_000)]


class EventType(StrEnum):
    """Whether a command names all there is, or what changed."""

    SNAPSHOT = "SNAPSHOT"
    DELTA = "DELTA"


class Op(StrEnum):
    """What becomes of one key."""

    UPSERT = "UPSERT"
    DELETE = "DELETE"


class CommandSource(StrEnum):
    """The way a command came in."""

    REST = "REST"
    KAFKA = "KAFKA"


class UpdateState(StrEnum):
    """R7: where an update stands."""

    PENDING = "PENDING"
    COMMITTED = "COMMITTED"
    FAILED = "FAILED"


class CommandItem(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One key of a command. Its payload stays the text it came as, so that no digit is lost."""

    key: Annotated[str, Meta(min_length=1, max_length=KEY_LIMIT)]
    op: Op = Op.UPSERT
    payload: Raw | UnsetType = UNSET

    @property
    def text(self) -> str:
        """The payload as JSON text."""
        return "null" if self.payload is UNSET else bytes(self.payload).decode()


class SnapshotEntry(msgspec.Struct, array_like=True, gc=False):
    """One key of a snapshot, as little as it takes: there may be millions of them."""

    key: str
    payload: Raw

    @property
    def text(self) -> str:
        """The payload as JSON text."""
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
    allow_row_drop: bool = False  # R30: it is meant that most items go

    def entries(self) -> list[SnapshotEntry]:
        """The items of a SNAPSHOT, which all have a payload."""
        return [SnapshotEntry(item.key, item.payload) for item in self.items if item.payload is not UNSET]

    @property
    def is_chunk(self) -> bool:
        """Whether it is a part of a snapshot that has an id, or all of it: what came of that one before counts."""
        return self.snapshot_id is not None

    @property
    def chunk_position(self) -> tuple[int, int]:
        """Which chunk it is, and of how many."""
        return self.chunk_index or 1, self.chunks_total or 1


class Invalidation(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """R15, §8.2: what pods are told of a commit; the changed keys when they are few, and the trace it belongs to."""

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
    """The command in *body*, or Invalid with what is wrong and where."""
    if len(body) > limit:
        hint = "send a SNAPSHOT in chunks (snapshotId, chunkIndex, chunksTotal), a DELTA in several"
        raise TooLarge("COMMAND_TOO_LARGE", f"a command has at most {COMMAND_LIMIT} bytes, not {len(body)}", hint=hint)
    try:
        body.decode()  # the decoder leaves payloads as they are, and so unread
        command = _COMMANDS.decode(body)
    except UnicodeDecodeError as error:
        raise Invalid("MALFORMED", f"not UTF-8: {error.reason} at byte {error.start}", hint="send UTF-8") from error
    except msgspec.ValidationError as error:
        raise Invalid("MALFORMED", str(error), hint="docs/refdata.md shows a command") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise Invalid("MALFORMED", f"not JSON: {error}", hint="docs/refdata.md shows a command") from error
    if b"\\u0000" in body and _NUL.search(body):
        raise Invalid("MALFORMED", "a text holds the character NUL, which no database keeps", hint="remove it")
    return _checked(command)


def encode_command(command: Command) -> bytes:
    """*command* as it goes over the bus."""
    return msgspec.json.encode(command)


def chunk_sizes(sizes: Iterable[int]) -> Iterator[int]:
    """Yield how many items go into each command, for items of these encoded *sizes* in bytes; 0 for no items."""
    count = used = 0
    for size in sizes:
        if count and (used + size > _ITEM_ROOM or count == ITEM_LIMIT):
            yield count
            count = used = 0
        count += 1
        used += size
    yield count


def chunk_items(items: Sequence[CommandItem]) -> Iterator[list[CommandItem]]:
    """Yield *items* in lists that each fit into one command; one empty list for no items."""
    rest = iter(items)
    for count in chunk_sizes(len(msgspec.json.encode(item)) + 1 for item in items):
        yield list(islice(rest, count))


def message_key(tenant_id: str, dict_code: str) -> str:
    """R9: what a command is ordered with."""
    return f"{tenant_id}:{dict_code}"


def _checked(command: Command) -> Command:
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
    for place, item in enumerate(command.items):
        if item.op is Op.UPSERT and (item.payload is UNSET or bytes(item.payload) == b"null"):
            raise _bad_item(place, "payload", "an UPSERT needs a payload")
        if item.op is Op.DELETE and is_snapshot:
            raise _bad_item(place, "op", "a SNAPSHOT lists what there is; leave out what is deleted")
    if is_snapshot and len({item.key for item in command.items}) < len(command.items):
        raise Invalid("DUPLICATE_KEY", "a SNAPSHOT names each key once", hint="send one item per key")


def _check_chunk(command: Command) -> None:
    chunk = (command.snapshot_id, command.chunk_index, command.chunks_total)
    # §8.1 shows a DELTA with chunkIndex and chunksTotal 1, and no snapshotId.
    if command.event_type is EventType.DELTA and (chunk[0] is not None or chunk[1:] not in ((None, None), (1, 1))):
        raise Invalid("BAD_CHUNK", "a DELTA comes in one piece", hint="leave out snapshotId and the chunk numbers")
    index, total = command.chunk_position
    if total > 1 and None in chunk:
        raise Invalid("BAD_CHUNK", "a chunk names its snapshotId, chunkIndex and chunksTotal", hint="give all three")
    if index > total:
        raise Invalid(
            "BAD_CHUNK", f"there is no chunk {index} of {total}", hint="chunkIndex counts from 1 to chunksTotal"
        )


def _bad_item(place: int, field: str, message: str) -> Invalid:
    return Invalid("MALFORMED", f"{message} - at `$.items[{place}].{field}`", hint="docs/refdata.md shows a command")


def json_schema(kind: type = Command) -> dict[str, Any]:
    """The JSON Schema of a command, or of another *kind* of message, in one piece."""
    found, parts = msgspec.json.schema_components([kind], ref_template="{name}")
    whole: dict[str, Any] = _inlined(found[0], parts)
    return whole


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(parts[schema["$ref"]], parts)
        return {name: _inlined(inner, parts) for name, inner in schema.items()}
    return [_inlined(inner, parts) for inner in schema] if isinstance(schema, list) else schema
