"""H5: progress, messages and end of partitions. The transaction that ends the last partition ends fetching."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
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
    """A partition as it stands when a message about it comes."""

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
    told: int
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
    """Where a turn leaves its partition: further on in its pass, or at the beginning of the next."""

    position: PagePosition
    scan: int
    counted: int
    told: int = 0
    seen: int = 0
    missed: int = 0
    was_clean: bool = False


@dataclass(frozen=True, slots=True)
class EndedPartition:
    """A partition that has come to its end, well or not."""

    partition_id: str
    status: PartitionState
    records: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionCounters:
    """H5: how many partitions of a run have ended."""

    completed: int
    expected: int
    failed: int

    @property
    def is_all(self) -> bool:
        return self.completed + self.failed == self.expected


async def task(connection: Connection, run_id: UUID, partition_id: str) -> PartitionTask | None:
    """A partition, as it stands."""
    row = await connection.fetchrow(SQL["task"], run_id, partition_id)
    return _task(row) if row else None


async def hold(tx: Connection, run_id: UUID, partition_id: str) -> PartitionTask | None:
    """Hold a partition until the end of the transaction; as it stands then."""
    await tx.fetchval(SQL["lock_partition"], run_id, partition_id)
    # Asked anew: while we waited for it, its run may have been cancelled.
    return await task(tx, run_id, partition_id)


async def advance(
    tx: Connection, task: PartitionTask, step: HarvestPosition, now: datetime, *, is_complete: bool = False
) -> None:
    """H4: the compare-and-set; its caller holds the partition, and has seen that it stands where *task* says."""
    await tx.execute(
        SQL["advance"],
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
        step.told,
        step.was_clean,
    )


async def note_work(
    tx: Connection,
    run_id: UUID,
    one: EndedPartition,
    row_id: UUID,
    worker: str,
    now: datetime,
    *,
    payload: object = None,
    began: datetime | None = None,
) -> None:
    """Who works on a partition, since when, and how it stands."""
    said = (one.partition_id, worker, one.status, one.records, one.error)
    await tx.execute(SQL["note_work"], row_id, run_id, *said, payload, now, began or now)


async def note_partitions(
    tx: Connection, run_id: UUID, ended: Sequence[EndedPartition], move_from: PartitionState, by: str, now: datetime
) -> None:
    """The history of partitions is kept with their run's."""
    entries = [
        journal.JournalEntry(
            PARTITION.name, f"{run_id}/{one.partition_id}", move_from.value, one.status.value, by, now, one.error
        )
        for one in ended
    ]
    if entries:
        await tx.execute(SQL["note_moves"], run_id, await journal.append(tx, entries))


async def count_ended(
    tx: Connection, run_id: UUID, ended: Sequence[EndedPartition], now: datetime
) -> PartitionCounters | None:
    """H5: once per partition, in the transaction that ends it; None when the run is not fetching any more."""
    failed = sum(one.status is PartitionState.FAILED for one in ended)
    row = await tx.fetchrow(SQL["count_ended"], run_id, len(ended) - failed, failed, now)
    return PartitionCounters(row["completed_workers"], row["expected_workers"], row["failed_workers"]) if row else None


async def failed_partitions(tx: Connection, run_id: UUID, only: str | None) -> list[tuple[str, int, int]]:
    rows = await tx.fetch(SQL["failed_partitions"], run_id, only)
    return [(row["partition_id"], row["next_offset"], row["scan"]) for row in rows]


async def lock_partitions(tx: Connection, run_id: UUID) -> list[str]:
    """Hold all partitions of a run; always before its own row."""
    return [row["partition_id"] for row in await tx.fetch(SQL["all_partitions"], run_id)]


async def unfinished_partitions(tx: Connection, run_id: UUID) -> list[tuple[str, int]]:
    rows = await tx.fetch(SQL["unfinished_partitions"], run_id)
    return [(row["partition_id"], row["seen"]) for row in rows]


async def revive(tx: Connection, run_id: UUID, names: Sequence[str], now: datetime) -> None:
    """H11: failed partitions are worked on again."""
    await tx.execute(SQL["revive_partitions"], run_id, list(names), now)


def _task(row: asyncpg.Record) -> PartitionTask:
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
        told=row["told"],
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


async def hurry(bus: Bus) -> None:
    """Send what was just committed; what cannot be sent now is sent by the relay, and is no failure of the caller's."""
    with suppress(Transient):
        await bus.relay()


def work_item(run_id: UUID, partition_id: str, offset: int, scan: int, trace_id: str) -> BusMessage:
    item = WorkMessage(run_id, partition_id, offset, trace_id, scan)
    return BusMessage(WORK_ITEMS, f"{run_id}/{partition_id}", msgspec.json.encode(item))


def consolidation(run_id: UUID, trace_id: str, *, force: bool = False) -> BusMessage:
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
) -> None:
    """Count partitions, already marked as ended, and tell of them; the last of a run triggers consolidation."""
    await note_partitions(tx, run_id, ended, PartitionState.RUNNING, by, now)
    counters = await count_ended(tx, run_id, ended, now)
    if counters is None:
        raise Corrupt("RUN_NOT_FETCHING", f"a partition of run {run_id} ended after the run did")
    done = [
        WorkDoneMessage(run_id, feed, one.partition_id, one.status, one.records, now, trace_id, one.error)
        for one in ended
    ]
    await bus.publish([BusMessage(WORK_DONE, str(run_id), msgspec.json.encode(one)) for one in done], tx=tx)
    if counters.is_all:
        await _end_fetching(tx, bus, feed, run_id, trace_id, counters, by, now)


async def _end_fetching(
    tx: Connection,
    bus: Bus,
    feed: str,
    run_id: UUID,
    trace_id: str,
    counters: PartitionCounters,
    by: str,
    now: datetime,
) -> None:
    if counters.failed == 0:
        await store.move_run(tx, run_id, HarvestRunState.WORKERS_RUNNING, "trigger", by, now)
        await bus.publish([consolidation(run_id, trace_id)], tx=tx)
        return
    reason = f"{counters.failed} of {counters.expected} partitions failed"
    await store.move_run(tx, run_id, HarvestRunState.WORKERS_RUNNING, "skip", by, now, reason)
    message = f"Run {run_id} of {feed}: {reason}. Consolidation skipped, watermark NOT advanced."
    await raise_alert(tx, feed, run_id, AlertCode.CONSOLIDATION_SKIPPED, AlertSeverity.ERROR, message, now)
