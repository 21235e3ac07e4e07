"""Runs, plans and partitions: a typed function per statement."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import asyncpg

from penstock.harvest.contract import PartitionState, PlanState, RunState, RunType
from penstock.harvest.model import MACHINES, PARTITION, PLAN, RUN, Heatmap, Kind, Part, Position, Range
from penstock.kernel import journal, sql
from penstock.kernel.db import Connection
from penstock.kernel.errors import Conflict

SQL = sql.load("penstock.harvest", MACHINES)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A run that is asked for."""

    run_id: UUID
    feed: str
    run_type: RunType | None
    state: PlanState
    requested_by: str
    trace_id: str
    watermark: datetime | None


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run, as far as its workers need to know it."""

    run_id: UUID
    feed: str
    run_type: RunType
    state: RunState
    expected: int
    completed: int
    failed: int
    watermark_before: datetime | None
    upper_bound: datetime
    trace_id: str
    pricing_version: int | None
    forced_by: str | None
    rejected: int


@dataclass(frozen=True, slots=True)
class Task:
    """A partition as it stands when a message about it comes."""

    run_id: UUID
    partition_id: str
    feed: str
    run_type: RunType
    run_state: RunState
    range: Range
    position: Position
    scan: int
    scan_started_at: datetime
    last_scan_at: datetime | None
    counted: int
    seen: int
    missed: int
    completed: bool
    status: PartitionState | None
    watermark_before: datetime | None
    upper_bound: datetime
    trace_id: str


@dataclass(frozen=True, slots=True)
class Step:
    """Where a turn leaves its partition: further on in its pass, at the beginning of the next, or at the end."""

    position: Position
    scan: int
    seen: int
    missed: int
    counted: int
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """A partition that has come to its end, well or not."""

    partition_id: str
    status: PartitionState
    records: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """H5: how many partitions of a run have ended."""

    completed: int
    expected: int
    failed: int

    @property
    def is_all(self) -> bool:
        return self.completed + self.failed == self.expected


async def lock_feed(tx: Connection, feed: str) -> datetime | None:
    """Hold the feed until the end of the transaction; its watermark."""
    await tx.execute(SQL["know_feed"], feed)
    row = await tx.fetchrow(SQL["lock_feed"], feed)
    return row["watermark"] if row else None


async def active_run(tx: Connection, feed: str) -> UUID | None:
    return await tx.fetchval(SQL["active"], feed)  # type: ignore[no-any-return]


async def latest_run(tx: Connection, feed: str) -> UUID | None:
    return await tx.fetchval(SQL["latest"], feed)  # type: ignore[no-any-return]


async def last_asked(tx: Connection, feed: str) -> datetime | None:
    return await tx.fetchval(SQL["last_asked"], feed)  # type: ignore[no-any-return]


async def last_full(tx: Connection, feed: str) -> datetime | None:
    return await tx.fetchval(SQL["last_full"], feed)  # type: ignore[no-any-return]


async def close_breaker(tx: Connection, feed: str) -> None:
    """H15: let requests go again that failures in a row had stopped."""
    await tx.execute(SQL["close_breaker"], feed)


async def ask(
    tx: Connection, run_id: UUID, feed: str, run_type: RunType | None, by: str, now: datetime, trace_id: str
) -> None:
    """Keep that a run is wanted."""
    entry = journal.Entry(PLAN.name, str(run_id), None, PlanState.PLANNING.value, by, now)
    numbers = await journal.append(tx, [entry])
    await tx.execute(SQL["ask"], run_id, feed, run_type, by, now, trace_id, numbers)


async def plan(connection: Connection, run_id: UUID) -> PlanRow | None:
    row = await connection.fetchrow(SQL["plan"], run_id)
    if row is None:
        return None
    wanted = RunType(row["run_type"]) if row["run_type"] else None
    state = PlanState(row["state"])
    return PlanRow(run_id, row["feed"], wanted, state, row["requested_by"], row["trace_id"], row["watermark"])


async def settle_plan(
    tx: Connection, run_id: UUID, state: PlanState, by: str, now: datetime, *, counts: int = 0, error: str | None = None
) -> bool:
    """The plan became a run, or failed; False when it is settled already."""
    if await tx.fetchval(SQL["settle_plan"], run_id, state, counts, error, now) is None:
        return False
    entry = journal.Entry(PLAN.name, str(run_id), PlanState.PLANNING.value, state.value, by, now, error)
    await tx.execute(SQL["note_plan_moves"], run_id, await journal.append(tx, [entry]))
    return True


async def create_run(
    tx: Connection, row: PlanRow, run_type: RunType, upper_bound: datetime, heatmap: Heatmap, now: datetime
) -> list[str]:
    """The run and its partitions, whose names are returned."""
    entry = journal.Entry(RUN.name, str(row.run_id), None, RunState.CREATED.value, row.requested_by, now)
    numbers = await journal.append(tx, [entry])
    await tx.execute(
        SQL["create_run"],
        row.run_id,
        row.feed,
        run_type,
        len(heatmap.parts),
        row.watermark,
        now,
        upper_bound,
        row.trace_id,
        row.requested_by,
        _proof(heatmap),
        numbers,
    )
    names = [f"partition-{number}" for number in range(len(heatmap.parts))]
    await tx.execute(SQL["create_partitions"], row.run_id, names, *_columns(heatmap.parts), now)
    return names


def _columns(parts: Sequence[Part]) -> tuple[list[object], ...]:
    return (
        [part.range.kind for part in parts],
        [part.range.lower for part in parts],
        [part.range.upper for part in parts],
        [part.count for part in parts],
    )


def _proof(heatmap: Heatmap) -> dict[str, object]:
    parts = [{"range": str(part.range), "count": part.count} for part in heatmap.parts]
    told = {"total": heatmap.total, "sum": heatmap.sum, "counts": heatmap.counts, "rounds": heatmap.rounds}
    return {**told, "parts": parts}


async def run(connection: Connection, run_id: UUID, *, lock: bool = False) -> RunRow | None:
    row = await connection.fetchrow(SQL["lock_run" if lock else "run"], run_id)
    return _run(row) if row else None


async def task(connection: Connection, run_id: UUID, partition_id: str) -> Task | None:
    """A partition, as it stands."""
    row = await connection.fetchrow(SQL["task"], run_id, partition_id)
    return _task(row) if row else None


async def hold(tx: Connection, run_id: UUID, partition_id: str) -> Task | None:
    """Hold a partition until the end of the transaction; as it stands then."""
    await tx.fetchval(SQL["lock_partition"], run_id, partition_id)
    # Asked anew: while we waited for it, its run may have been cancelled.
    return await task(tx, run_id, partition_id)


async def advance(tx: Connection, task: Task, step: Step, now: datetime) -> bool:
    """H4: the compare-and-set; False when the partition does not stand where *task* says."""
    done = await tx.execute(
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
        step.is_complete,
        now,
    )
    return done == "UPDATE 1"


async def note_work(
    tx: Connection, run_id: UUID, one: Ended, row_id: UUID, worker: str, now: datetime, payload: object = None
) -> None:
    """Who works on a partition, and how it stands."""
    said = (one.partition_id, worker, one.status, one.records, one.error)
    await tx.execute(SQL["note_work"], row_id, run_id, *said, payload, now)


async def note_partitions(
    tx: Connection, run_id: UUID, ended: Sequence[Ended], move_from: PartitionState, by: str, now: datetime
) -> None:
    """The history of partitions is kept with their run's."""
    entries = [
        journal.Entry(
            PARTITION.name, f"{run_id}/{one.partition_id}", move_from.value, one.status.value, by, now, one.error
        )
        for one in ended
    ]
    if entries:
        await tx.execute(SQL["note_moves"], run_id, await journal.append(tx, entries))


async def count_ended(tx: Connection, run_id: UUID, ended: Sequence[Ended], now: datetime) -> Counters | None:
    """H5: once per partition, in the transaction that ends it; None when the run is not fetching any more."""
    failed = sum(one.status is PartitionState.FAILED for one in ended)
    row = await tx.fetchrow(SQL["count_ended"], run_id, len(ended) - failed, failed, now)
    return Counters(row["completed_workers"], row["expected_workers"], row["failed_workers"]) if row else None


async def move_run(
    tx: Connection, run_id: UUID, current: RunState, move: str, by: str, now: datetime, reason: str | None = None
) -> bool:
    """Make *move* if the run stands at *current*; False when it does not."""
    sources, target = RUN.move(move).sources, RUN.move(move).target
    if current not in sources:  # another move may lead from here to there; this one does not
        where = " or ".join(state.value for state in sources)
        raise Conflict("BAD_MOVE", f"run {run_id} is {current.value}", hint=f"{move} is for a run that is {where}")
    error = reason if target in (RunState.FAILED, RunState.CONSOLIDATION_SKIPPED) else None
    if await tx.fetchval(SQL["move_run"], run_id, target, current, error, now) is None:
        return False
    entry = journal.Entry(RUN.name, str(run_id), current.value, target.value, by, now, reason)
    await tx.execute(SQL["note_moves"], run_id, await journal.append(tx, [entry]))
    return True


async def failed_partitions(tx: Connection, run_id: UUID, only: str | None) -> list[tuple[str, int, int]]:
    rows = await tx.fetch(SQL["failed_partitions"], run_id, only)
    return [(row["partition_id"], row["next_offset"], row["scan"]) for row in rows]


async def lock_partitions(tx: Connection, run_id: UUID) -> list[str]:
    """Hold all partitions of a run; always before its own row."""
    return [row["partition_id"] for row in await tx.fetch(SQL["all_partitions"], run_id)]


async def unfinished_partitions(tx: Connection, run_id: UUID) -> list[tuple[str, int]]:
    rows = await tx.fetch(SQL["unfinished_partitions"], run_id)
    return [(row["partition_id"], row["seen"]) for row in rows]


async def complete_run(
    tx: Connection, run_id: UUID, by: str, now: datetime, reached: datetime | None, deleted: int | None
) -> None:
    """H8: the end of a run that is being consolidated; its caller holds it."""
    await tx.execute(SQL["complete_run"], run_id, now, reached, deleted)
    entry = journal.Entry(RUN.name, str(run_id), RunState.CONSOLIDATING.value, RunState.COMPLETED.value, by, now)
    await tx.execute(SQL["note_moves"], run_id, await journal.append(tx, [entry]))


async def save_watermark(tx: Connection, feed: str, run_id: UUID, reached: datetime, now: datetime) -> None:
    """H8: up to when the feed is known, and since which run."""
    await tx.execute(SQL["save_watermark"], feed, reached, run_id, now)
    await tx.execute(SQL["note_watermark"], feed, run_id, reached, now)


async def revive(tx: Connection, run_id: UUID, names: Sequence[str], now: datetime) -> None:
    """H11: failed partitions are worked on again."""
    await tx.execute(SQL["revive_partitions"], run_id, list(names), now)


async def force(tx: Connection, run_id: UUID, by: str, reason: str) -> None:
    """H5: who wanted it, and why."""
    await tx.execute(SQL["force_run"], run_id, by, reason)


def _run(row: asyncpg.Record) -> RunRow:
    return RunRow(
        row["run_id"],
        row["feed"],
        RunType(row["run_type"]),
        RunState(row["state"]),
        row["expected_workers"],
        row["completed_workers"],
        row["failed_workers"],
        row["watermark_before"],
        row["upper_bound"],
        row["trace_id"],
        row["pricing_version"],
        row["forced_by"],
        row["rejected"],
    )


def _task(row: asyncpg.Record) -> Task:
    return Task(
        run_id=row["run_id"],
        partition_id=row["partition_id"],
        feed=row["feed"],
        run_type=RunType(row["run_type"]),
        run_state=RunState(row["state"]),
        range=Range(Kind(row["kind"]), row["lower_bound"], row["upper_bound"]),
        position=Position(row["next_offset"], row["next_cursor"]),
        scan=row["scan"],
        scan_started_at=row["scan_started_at"],
        last_scan_at=row["last_scan_at"],
        counted=row["counted"],
        seen=row["seen"],
        missed=row["missed"],
        completed=row["completed"],
        status=PartitionState(row["status"]) if row["status"] else None,
        watermark_before=row["watermark_before"],
        upper_bound=row["run_upper_bound"],
        trace_id=row["trace_id"],
    )
