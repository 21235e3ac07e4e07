"""Refdata without I/O: states, the order of versions, and what is told of a change."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from penstock.kernel.machine import StateMachine, Transition
from penstock.kernel.text import make_storable
from penstock.refdata.contract import Command, EventType, Invalidation, SnapshotEntry, UpdateState

MAX_SENT_KEYS = 100  # changed keys an invalidation names; more, and the reader loads everything
MAX_SENT_KEY_BYTES = 6_000  # a signal is short
ERROR_LIMIT = 1_000

UPDATE = StateMachine(
    "refdata.update",
    UpdateState,
    initial=UpdateState.PENDING,
    moves=[
        Transition("commit", (UpdateState.PENDING,), UpdateState.COMMITTED),
        Transition("refuse", (UpdateState.PENDING,), UpdateState.FAILED),
    ],
)


class SnapshotSetStatus(StrEnum):
    """Where a snapshot that comes in chunks stands."""

    OPEN = "OPEN"
    COMMITTED = "COMMITTED"
    FAILED = "FAILED"


SNAPSHOT = StateMachine(
    "refdata.snapshot",
    SnapshotSetStatus,
    initial=SnapshotSetStatus.OPEN,
    moves=[
        Transition("complete", (SnapshotSetStatus.OPEN,), SnapshotSetStatus.COMMITTED),
        Transition("refuse", (SnapshotSetStatus.OPEN,), SnapshotSetStatus.FAILED),
    ],
)


class DictionaryKey(NamedTuple):
    """One dictionary of one tenant: what a version belongs to."""

    tenant_id: str
    dict_code: str


class DictionaryHead(NamedTuple):
    """The last version of a dictionary, and the source's own last revision."""

    version: int = 0
    revision: int | None = None


class VersionStamp(NamedTuple):
    """R24: a version and when it was committed, in µs: after a restore the same number may be another commit.

    R30: one that is pinned is read in the place of the last; its stamp is when it was pinned.
    """

    version: int
    stamp: int
    is_pinned: bool = False


class RetainedVersion(NamedTuple):
    """R30: a version that is kept."""

    version: int
    items: int
    retained_at: datetime
    is_pinned: bool


class CommitEntry(NamedTuple):
    """One commit of a dictionary, as a pod that follows sees it; the keys where they are told."""

    mark: VersionStamp
    event_id: UUID
    source: str
    keys: list[str] | None
    trace: str | None


class CommandRefusal(NamedTuple):
    """Why a command is not applied; sending it again will not help."""

    code: str
    message: str


class CommandVerdict(NamedTuple):
    """What became of a command: a version, a refusal, or neither as long as its snapshot is incomplete.

    One that is *repeated* was judged before; it is told again, and nothing is done.
    """

    version: int | None = None
    refusal: CommandRefusal | None = None
    is_repeated: bool = False

    @property
    def status(self) -> UpdateState:
        if self.refusal is not None:
            return UpdateState.FAILED
        return UpdateState.PENDING if self.version is None else UpdateState.COMMITTED


class CommandEvent(NamedTuple):
    """A command that can be judged: it is known whose it is."""

    target: DictionaryKey
    event_id: UUID
    source: str
    command: Command
    trace: str | None = None


class ItemChange(NamedTuple):
    """A command that is applied, under the version it becomes."""

    target: DictionaryKey
    event_id: UUID
    command: Command
    version: int
    occurred_at: datetime
    applied_at: datetime

    def values(self) -> dict[str, Any]:
        """What a template may use, but for the item."""
        return {
            "tenantId": self.target.tenant_id,
            "eventVersion": self.version,
            "eventId": self.event_id,
            "occurredAt": self.occurred_at,
            "eventEpoch": int(self.occurred_at.timestamp() * 1000),
        }


class CommandCommit(NamedTuple):
    """A new version of a dictionary, as it is written down and told."""

    target: DictionaryKey
    event_id: UUID
    version: int
    event_type: str
    source: str
    source_revision: int | None
    items: int
    keys: Sequence[str] | None
    trace: str | None = None


class UpdateRecord(NamedTuple):
    """R7: how an update stands."""

    tenant_id: str
    event_id: UUID
    dict_code: str
    status: UpdateState
    committed_version: int | None
    error_code: str | None
    error_message: str | None
    created_at: datetime
    updated_at: datetime
    body_hash: bytes | None = None


class DictionarySummary(NamedTuple):
    """The last committed version of a dictionary, its time, and the version that readers are pinned to."""

    version: int
    committed_at: datetime | None
    pinned_version: int | None


class VersionRecord(NamedTuple):
    """One version of a dictionary, and what made it."""

    version: int
    event_id: UUID
    event_type: str
    source: str
    source_revision: int | None
    items: int
    keys: Sequence[str] | None
    committed_at: datetime


@dataclass(frozen=True, slots=True)
class SnapshotSet:
    """A snapshot that comes in chunks, as far as it came."""

    status: SnapshotSetStatus
    chunks_total: int
    source_revision: int | None
    committed_version: int | None = None
    refusal: CommandRefusal | None = None


def check_revision(target: DictionaryKey, revision: int | None, standing: DictionaryHead) -> CommandRefusal | None:
    """R12: the refusal of a revision older than the last one; an equal one may pass."""
    if revision is None or standing.revision is None or revision >= standing.revision:
        return None
    said = f"sourceRevision {revision} is older than {standing.revision}, the last of {target.dict_code}"
    return CommandRefusal("STALE_REVISION", said)


def next_head(standing: DictionaryHead, revision: int | None) -> DictionaryHead:
    """How a dictionary stands after one more change."""
    return DictionaryHead(standing.version + 1, standing.revision if revision is None else revision)


def check_chunk(command: Command, known: SnapshotSet) -> CommandRefusal | None:
    """R13: why a chunk does not belong to the set of its snapshotId."""
    _, total = command.chunk_position
    if total != known.chunks_total:
        said = f"this chunk says it is one of {total}, those before it one of {known.chunks_total}"
        return CommandRefusal("CHUNKS_TOTAL_DIFFERS", said)
    if command.source_revision != known.source_revision:
        said = f"this chunk has sourceRevision {command.source_revision}, those before it {known.source_revision}"
        return CommandRefusal("SOURCE_REVISION_DIFFERS", said)
    return None


def encode_snapshot(entries: Sequence[SnapshotEntry]) -> str:
    """R3: what `:snapshotJson` is: a list of objects with `key` and `payload`."""
    return msgspec.json.encode([{"key": entry.key, "payload": entry.payload} for entry in entries]).decode()


def encode_invalidation(commit: CommandCommit, committed_at: datetime) -> str:
    """R15, §8.2: what the pods are told."""
    told = Invalidation(
        commit.event_id, *commit.target, commit.version, committed_at, commit.keys, traceparent=commit.trace
    )
    return msgspec.json.encode(told).decode()


def list_changed_keys(command: Command) -> list[str] | None:
    """The keys a DELTA touches, when they are few enough to be told."""
    if command.event_type is not EventType.DELTA:
        return None
    keys = list(dict.fromkeys(item.key for item in command.items))
    is_few = len(keys) <= MAX_SENT_KEYS and sum(len(msgspec.json.encode(key)) for key in keys) <= MAX_SENT_KEY_BYTES
    return keys if is_few else None


def format_error(text: str) -> str:
    """*text* as it can be kept and shown."""
    return make_storable(text, ERROR_LIMIT)


def describe_missing_chunks(have: Sequence[int], total: int) -> str:
    """Which chunks did not come, in words."""
    missing = sorted(set(range(1, total + 1)) - set(have))
    shown = ", ".join(map(str, missing[:20]))
    return f"{shown} and {len(missing) - 20} more" if len(missing) > 20 else shown


def group_runs(ops: Sequence[tuple[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Neighbours of one kind together, in order: what one prepared statement can do at a time."""
    grouped: list[tuple[str, list[Any]]] = []
    for kind, args in ops:
        if grouped and grouped[-1][0] == kind:
            grouped[-1][1].append(args)
        else:
            grouped.append((kind, [args]))
    return grouped
