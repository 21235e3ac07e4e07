"""H5: progress, messages and end of partitions. The transaction that ends the last partition ends the fetch phase."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import asyncpg
import msgspec

from penstock.harvest import store
from penstock.harvest.alerts import AlertCode, AlertSeverity, raise_alert
from penstock.harvest.contract import (
    CONSOLIDATIONS,
    WORK_DONE,
    WORK_ITEMS,
    ConsolidateMessage,
    HarvestRunState,
    HarvestRunType,
    PartitionState,
    WorkDoneMessage,
    WorkMessage,
)
from penstock.harvest.model import PARTITION, PagePosition, PartitionKind, PartitionRange
from penstock.harvest.store import SQL
from penstock.kernel.bus import Bus, BusMessage
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Corrupt, Transient
from penstock.kernel.states import journal


@dataclass(frozen=True, slots=True)
class PartitionTask:
    """The state of a partition when a worker receives its message."""

    run_id: UUID
    partition_id: str
    feed: str
    run_type: HarvestRunType
    run_state: HarvestRunState
    range: PartitionRange
    position: PagePosition
    scan: int
    scan_started_at: datetime
    last_scan_at: datetime | None
    counted: int
    received: int
    seen: int
    missed: int
    was_clean: bool
    completed: bool
    rescues: int
    status: PartitionState | None
    watermark_before: datetime | None
    upper_bound: datetime
    trace_id: str


@dataclass(frozen=True, slots=True)
class HarvestPosition:
    """The progress of a partition after a turn: further in its pass, or at the start of the next pass."""

    position: PagePosition
    scan: int
    counted: int
    received: int = 0
    seen: int = 0
    missed: int = 0
    was_clean: bool = False


@dataclass(frozen=True, slots=True)
class EndedPartition:
    """The new status of a partition, with its records and its error."""

    partition_id: str
    status: PartitionState
    records: int
    error: str | None = None


class FailedPartition(NamedTuple):
    """A failed partition, and where it stopped."""

    name: str
    offset: int
    scan: int


@dataclass(frozen=True, slots=True)
class PartitionCounters:
    """H5: the counters of the partitions of a run."""

    completed: int
    expected: int
    failed: int

    @property
    def is_all(self) -> bool:
        return self.completed + self.failed == self.expected


async def read_task(connection: Connection, run_id: UUID, partition_id: str) -> PartitionTask | None:
    """Return the state of a partition."""
    row = await connection.fetchrow(SQL["read_task"], run_id, partition_id)
    return _make_task(row) if row else None


async def lock_task(tx: Connection, run_id: UUID, partition_id: str) -> PartitionTask | None:
    """Lock a partition until the end of the transaction, and return its state."""
    await tx.fetchval(SQL["lock_partition"], run_id, partition_id)
    # Read after the lock: the run may have been cancelled during the wait.
    return await read_task(tx, run_id, partition_id)


async def advance(
    tx: Connection, task: PartitionTask, step: HarvestPosition, now: datetime, *, is_complete: bool = False
) -> None:
    """H4: move a partition on from *task*; the caller has locked it and compared its state with *task*."""
    await tx.execute(
        SQL["advance_partition"],
        task.run_id,
        task.partition_id,
        task.position.offset,
        step.position.offset,
        step.position.cursor,
        step.scan,
        step.seen,
        step.missed,
        step.counted,
        is_complete,
        now,
        step.received,
        step.was_clean,
    )


async def record_work(
    tx: Connection,
    run_id: UUID,
    part: EndedPartition,
    row_id: UUID,
    worker: str,
    now: datetime,
    *,
    payload: object = None,
    started: datetime | None = None,
) -> None:
    """Record the worker, the status and the progress of a partition."""
    values = (part.partition_id, worker, part.status, part.records, part.error)
    await tx.execute(SQL["upsert_work"], row_id, run_id, *values, payload, now, started or now)


async def append_moves(
    tx: Connection, run_id: UUID, parts: Sequence[EndedPartition], source: PartitionState, by: str, now: datetime
) -> None:
    """Append moves of partitions to the history of their run."""
    entries = [
        journal.JournalEntry(
            PARTITION.name, f"{run_id}/{part.partition_id}", source.value, part.status.value, by, now, part.error
        )
        for part in parts
    ]
    if entries:
        await tx.execute(SQL["append_moves"], run_id, await journal.append(tx, entries))


async def count_ended(
    tx: Connection, run_id: UUID, ended: Sequence[EndedPartition], now: datetime
) -> PartitionCounters | None:
    """H5: count partitions in the transaction that ends them; return None if the run is not fetching any more."""
    failed = sum(part.status is PartitionState.FAILED for part in ended)
    row = await tx.fetchrow(SQL["count_ended"], run_id, len(ended) - failed, failed, now)
    return PartitionCounters(row["completed_workers"], row["expected_workers"], row["failed_workers"]) if row else None


async def list_failed(tx: Connection, run_id: UUID, name: str | None) -> list[FailedPartition]:
    """Return the failed partitions of a run, or only the partition *name*."""
    rows = await tx.fetch(SQL["list_failed_partitions"], run_id, name)
    return [FailedPartition(row["partition_id"], row["next_offset"], row["scan"]) for row in rows]


async def lock_all(tx: Connection, run_id: UUID) -> list[str]:
    """Lock all partitions of a run, always before the run, and return their names."""
    return [row["partition_id"] for row in await tx.fetch(SQL["lock_partitions"], run_id)]


async def list_unfinished(tx: Connection, run_id: UUID) -> list[tuple[str, int]]:
    """Return the unfinished partitions of a run, with the records seen."""
    rows = await tx.fetch(SQL["list_unfinished_partitions"], run_id)
    return [(row["partition_id"], row["seen"]) for row in rows]


async def revive(tx: Connection, run_id: UUID, names: Sequence[str], now: datetime) -> None:
    """H11: set failed partitions to running."""
    await tx.execute(SQL["revive_partitions"], run_id, list(names), now)


def _make_task(row: asyncpg.Record) -> PartitionTask:
    return PartitionTask(
        run_id=row["run_id"],
        partition_id=row["partition_id"],
        feed=row["feed"],
        run_type=HarvestRunType(row["run_type"]),
        run_state=HarvestRunState(row["state"]),
        range=PartitionRange(PartitionKind(row["kind"]), row["lower_bound"], row["upper_bound"]),
        position=PagePosition(row["next_offset"], row["next_cursor"]),
        scan=row["scan"],
        scan_started_at=row["scan_started_at"],
        last_scan_at=row["last_scan_at"],
        counted=row["counted"],
        received=row["received"],
        seen=row["seen"],
        missed=row["missed"],
        was_clean=row["was_clean"],
        completed=row["completed"],
        rescues=row["rescues"],
        status=PartitionState(row["status"]) if row["status"] else None,
        watermark_before=row["watermark_before"],
        upper_bound=row["run_upper_bound"],
        trace_id=row["trace_id"],
    )


async def flush_outbox(bus: Bus) -> None:
    """Publish committed messages now; if that fails, the relay publishes them later."""
    with suppress(Transient):
        await bus.relay()


def make_work_item(run_id: UUID, partition_id: str, offset: int, scan: int, trace_id: str) -> BusMessage:
    item = WorkMessage(run_id, partition_id, offset, trace_id, scan)
    return BusMessage(WORK_ITEMS, f"{run_id}/{partition_id}", msgspec.json.encode(item))


def make_consolidation(run_id: UUID, trace_id: str, *, force: bool = False) -> BusMessage:
    return BusMessage(CONSOLIDATIONS, str(run_id), msgspec.json.encode(ConsolidateMessage(run_id, trace_id, force)))


async def end_partitions(
    tx: Connection,
    bus: Bus,
    feed: str,
    run_id: UUID,
    trace_id: str,
    ended: Sequence[EndedPartition],
    by: str,
    now: datetime,
) -> str | None:
    """Count partitions that are marked as ended, and publish events; the last one of a run triggers consolidation.

    Return the error of the run if its consolidation is skipped.
    """
    await append_moves(tx, run_id, ended, PartitionState.RUNNING, by, now)
    counters = await count_ended(tx, run_id, ended, now)
    if counters is None:
        raise Corrupt("RUN_NOT_FETCHING", f"a partition of run {run_id} ended after the run itself had ended")
    events = [
        WorkDoneMessage(run_id, feed, part.partition_id, part.status, part.records, now, trace_id, part.error)
        for part in ended
    ]
    await bus.publish([BusMessage(WORK_DONE, str(run_id), msgspec.json.encode(event)) for event in events], tx=tx)
    if not counters.is_all:
        return None
    return await _end_fetching(tx, bus, feed, run_id, trace_id, counters, by, now)


async def _end_fetching(
    tx: Connection,
    bus: Bus,
    feed: str,
    run_id: UUID,
    trace_id: str,
    counters: PartitionCounters,
    by: str,
    now: datetime,
) -> str | None:
    if counters.failed == 0:
        await store.move_run(tx, run_id, HarvestRunState.WORKERS_RUNNING, "trigger", by, now)
        await bus.publish([make_consolidation(run_id, trace_id)], tx=tx)
        return None
    reason = f"{counters.failed} of {counters.expected} partitions failed"
    await store.move_run(tx, run_id, HarvestRunState.WORKERS_RUNNING, "skip", by, now, reason)
    message = f"Run {run_id} of {feed}: {reason}. Consolidation skipped, watermark NOT advanced."
    await raise_alert(tx, feed, run_id, AlertCode.CONSOLIDATION_SKIPPED, AlertSeverity.ERROR, message, now)
    return reason
