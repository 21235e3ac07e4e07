"""Refdata without I/O: states, versions, results of commands, and invalidations."""

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

MAX_SENT_KEYS = 100  # in an invalidation; with more changed keys, pods load all items
MAX_SENT_KEY_BYTES = 6_000  # a signal must be short
ERROR_LIMIT = 1_000

UPDATE = StateMachine(
    "refdata.update",
    UpdateState,
    initial=UpdateState.PENDING,
    moves=[
        Transition("commit", (UpdateState.PENDING,), UpdateState.COMMITTED),
        Transition("fail", (UpdateState.PENDING,), UpdateState.FAILED),
    ],
)


class SnapshotSetStatus(StrEnum):
    """The state of a snapshot that is sent in chunks."""

    OPEN = "OPEN"
    COMMITTED = "COMMITTED"
    FAILED = "FAILED"


SNAPSHOT = StateMachine(
    "refdata.snapshot",
    SnapshotSetStatus,
    initial=SnapshotSetStatus.OPEN,
    moves=[
        Transition("complete", (SnapshotSetStatus.OPEN,), SnapshotSetStatus.COMMITTED),
        Transition("fail", (SnapshotSetStatus.OPEN,), SnapshotSetStatus.FAILED),
    ],
)


class DictionaryKey(NamedTuple):
    """A dictionary of a tenant; each has its own versions."""

    tenant_id: str
    dict_code: str


class DictionaryHead(NamedTuple):
    """The last version of a dictionary, and the last revision of its source."""

    version: int = 0
    revision: int | None = None


class VersionStamp(NamedTuple):
    """R24: a version and the time of its commit in µs. After a restore the same version may be another commit.

    R30: a pinned version is read instead of the last one; its stamp is the time of the pin.
    """

    version: int
    stamp: int
    is_pinned: bool = False


class RetainedVersion(NamedTuple):
    """R30: a version that can be pinned or restored."""

    version: int
    items: int
    retained_at: datetime
    is_pinned: bool


class CommitEntry(NamedTuple):
    """A commit of a dictionary, with the changed keys if they are few."""

    mark: VersionStamp
    event_id: UUID
    source: str
    keys: list[str] | None
    trace: str | None


class CommandRefusal(NamedTuple):
    """The permanent reason why a command is not applied."""

    code: str
    message: str


class CommandVerdict(NamedTuple):
    """The result of a command: a version, a refusal, or neither while its snapshot is incomplete.

    A repeated command was processed before; it gets the same result and changes nothing.
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
    """A command with a known dictionary and event id."""

    target: DictionaryKey
    event_id: UUID
    source: str
    command: Command
    trace: str | None = None

    @property
    def id(self) -> "CommandId":
        """Return the identity of the command."""
        return CommandId(self.target, self.event_id, self.source, self.trace)


class CommandId(NamedTuple):
    """The identity of a command, as its log line has it."""

    target: DictionaryKey
    event_id: UUID
    source: str
    trace: str | None = None


class ItemChange(NamedTuple):
    """A command that is applied, with the new version."""

    target: DictionaryKey
    event_id: UUID
    command: Command
    version: int
    occurred_at: datetime
    applied_at: datetime

    def get_values(self) -> dict[str, Any]:
        """Return the parameters of SQL templates, except those of an item."""
        return {
            "tenantId": self.target.tenant_id,
            "eventVersion": self.version,
            "eventId": self.event_id,
            "occurredAt": self.occurred_at,
            "eventEpoch": int(self.occurred_at.timestamp() * 1000),
        }


class CommandCommit(NamedTuple):
    """A new version of a dictionary, as stored in the history and announced to pods."""

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
    """R7: an update and its state."""

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
    """A version of a dictionary and the command that made it."""

    version: int
    event_id: UUID
    event_type: str
    source: str
    source_revision: int | None
    items: int
    keys: Sequence[str] | None
    committed_at: datetime


class DriftCheck(NamedTuple):
    """R5: the value of a driftCheckSql at a version, and the unresolved changes of the value without a new version."""

    check_hash: str
    version: int
    value: str | None
    expected: str | None = None  # the value before the first unresolved change
    drifts: int = 0
    drifted_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class SnapshotSet:
    """The state of a snapshot that is sent in chunks."""

    status: SnapshotSetStatus
    chunks_total: int
    source_revision: int | None
    committed_version: int | None = None
    refusal: CommandRefusal | None = None


def check_revision(target: DictionaryKey, revision: int | None, head: DictionaryHead) -> CommandRefusal | None:
    """R12: return the refusal of a revision lower than the last one; an equal one is accepted."""
    if revision is None or head.revision is None or revision >= head.revision:
        return None
    message = f"sourceRevision {revision} is lower than {head.revision}, the last one of {target.dict_code}"
    return CommandRefusal("STALE_REVISION", message)


def make_next_head(head: DictionaryHead, revision: int | None) -> DictionaryHead:
    """Return the head of a dictionary after one more change."""
    return DictionaryHead(head.version + 1, head.revision if revision is None else revision)


def check_chunk(command: Command, chunks: SnapshotSet) -> CommandRefusal | None:
    """R13: return the refusal of a chunk that does not fit the earlier chunks of its snapshot."""
    _, total = command.chunk_position
    if total != chunks.chunks_total:
        message = f"chunksTotal is {total}; the earlier chunks of the snapshot have {chunks.chunks_total}"
        return CommandRefusal("CHUNKS_TOTAL_DIFFERS", message)
    if command.source_revision != chunks.source_revision:
        revisions = f"{command.source_revision}; the earlier chunks of the snapshot have {chunks.source_revision}"
        return CommandRefusal("SOURCE_REVISION_DIFFERS", f"sourceRevision is {revisions}")
    return None


def compare_drift(last: DriftCheck | None, check: DriftCheck, *, is_reloaded: bool, now: datetime) -> DriftCheck:
    """R5: return *check* with the drift since *last*.

    Drift is resolved when the value is as before, or when pods have loaded all items (*is_reloaded*).
    """
    if last is None or last.check_hash != check.check_hash:
        return check
    if last.version != check.version:
        return check if is_reloaded else check._replace(drifts=last.drifts, drifted_at=last.drifted_at)
    if last.value == check.value:
        return last
    if last.drifts and last.expected == check.value:
        return check
    expected = last.expected if last.drifts else last.value
    return check._replace(expected=expected, drifts=last.drifts + 1, drifted_at=now)


def encode_snapshot(entries: Sequence[SnapshotEntry]) -> str:
    """R3: return the value of `:snapshotJson`, a list of objects with `key` and `payload`."""
    return msgspec.json.encode([{"key": entry.key, "payload": entry.payload} for entry in entries]).decode()


def encode_invalidation(commit: CommandCommit, committed_at: datetime) -> str:
    """R15, §8.2: return the invalidation of *commit* as JSON."""
    invalidation = Invalidation(
        commit.event_id, *commit.target, commit.version, committed_at, commit.keys, traceparent=commit.trace
    )
    return msgspec.json.encode(invalidation).decode()


def list_changed_keys(command: Command) -> list[str] | None:
    """Return the keys that a DELTA changes, or None if they are too many for an invalidation."""
    if command.event_type is not EventType.DELTA:
        return None
    keys = list(dict.fromkeys(item.key for item in command.items))
    is_few = len(keys) <= MAX_SENT_KEYS and sum(len(msgspec.json.encode(key)) for key in keys) <= MAX_SENT_KEY_BYTES
    return keys if is_few else None


def format_error(text: str) -> str:
    """Return *text* with its length limited and without characters that cannot be stored."""
    return make_storable(text, ERROR_LIMIT)


def describe_missing_chunks(received: Sequence[int], total: int) -> str:
    """Return the indexes of the missing chunks as text."""
    missing = sorted(set(range(1, total + 1)) - set(received))
    shown = ", ".join(map(str, missing[:20]))
    return f"{shown} and {len(missing) - 20} more" if len(missing) > 20 else shown


def group_runs(ops: Sequence[tuple[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Return runs of adjacent operations of the same kind, each for one prepared statement."""
    grouped: list[tuple[str, list[Any]]] = []
    for kind, args in ops:
        if grouped and grouped[-1][0] == kind:
            grouped[-1][1].append(args)
        else:
            grouped.append((kind, [args]))
    return grouped
