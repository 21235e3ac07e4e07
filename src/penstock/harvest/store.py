"""Plans and runs in the database: a typed function per statement."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import asyncpg

from penstock.harvest.contract import HarvestRunState, HarvestRunType, PlanState
from penstock.harvest.model import MACHINES, PLAN, RUN, Heatmap, PlannedPartition
from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.errors import Conflict
from penstock.kernel.states import journal

SQL = sql.load("penstock.harvest", MACHINES)
LONG_TIMEOUT = 6 * 3600.0  # seconds, for a statement over all records of a feed


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A requested run."""

    run_id: UUID
    feed: str
    run_type: HarvestRunType | None
    state: PlanState
    requested_by: str
    trace_id: str
    watermark: datetime | None


@dataclass(frozen=True, slots=True)
class RunRow:
    """The columns of a run that its workers need."""

    run_id: UUID
    feed: str
    run_type: HarvestRunType
    state: HarvestRunState
    expected: int
    completed: int
    failed: int
    upper_bound: datetime
    trace_id: str
    forced_by: str | None


class CompletedRun(NamedTuple):
    """Figures of a completed run."""

    records: int
    seconds: float


async def lock_feed(tx: Connection, feed: str) -> datetime | None:
    """Lock the feed until the end of the transaction, and return its watermark."""
    await tx.execute(SQL["insert_feed"], feed)
    row = await tx.fetchrow(SQL["lock_feed"], feed)
    return row["watermark"] if row else None


async def find_active_run(tx: Connection, feed: str) -> UUID | None:
    return await tx.fetchval(SQL["find_active_run"], feed)  # type: ignore[no-any-return]


async def find_latest_run(tx: Connection, feed: str) -> UUID | None:
    return await tx.fetchval(SQL["find_latest_run"], feed)  # type: ignore[no-any-return]


async def read_last_request(tx: Connection, feed: str) -> datetime | None:
    return await tx.fetchval(SQL["read_last_request"], feed)  # type: ignore[no-any-return]


async def read_last_full(tx: Connection, feed: str) -> datetime | None:
    return await tx.fetchval(SQL["read_last_full"], feed)  # type: ignore[no-any-return]


async def close_breaker(tx: Connection, feed: str) -> None:
    """H15: close the circuit breaker, which consecutive failures had opened."""
    await tx.execute(SQL["close_breaker"], feed)


async def insert_plan(
    tx: Connection, run_id: UUID, feed: str, run_type: HarvestRunType | None, by: str, now: datetime, trace_id: str
) -> None:
    """Insert a request for a run."""
    entry = journal.JournalEntry(PLAN.name, str(run_id), None, PlanState.PLANNING.value, by, now)
    numbers = await journal.append(tx, [entry])
    await tx.execute(SQL["insert_plan"], run_id, feed, run_type, by, now, trace_id, numbers)


async def read_plan(connection: Connection, run_id: UUID) -> PlanRow | None:
    row = await connection.fetchrow(SQL["read_plan"], run_id)
    if row is None:
        return None
    run_type = HarvestRunType(row["run_type"]) if row["run_type"] else None
    state = PlanState(row["state"])
    return PlanRow(run_id, row["feed"], run_type, state, row["requested_by"], row["trace_id"], row["watermark"])


async def settle_plan(
    tx: Connection, run_id: UUID, state: PlanState, by: str, now: datetime, *, counts: int = 0, error: str | None = None
) -> str | None:
    """End a plan as planned or failed, and return its feed; return None if it has ended already."""
    feed: str | None = await tx.fetchval(SQL["settle_plan"], run_id, state, counts, error, now)
    if feed is not None:
        entry = journal.JournalEntry(PLAN.name, str(run_id), PlanState.PLANNING.value, state.value, by, now, error)
        await tx.execute(SQL["append_plan_moves"], run_id, await journal.append(tx, [entry]))
    return feed


async def insert_run(
    tx: Connection, row: PlanRow, run_type: HarvestRunType, upper_bound: datetime, heatmap: Heatmap, now: datetime
) -> list[str]:
    """Insert the run and its partitions, and return the names of the partitions."""
    entry = journal.JournalEntry(RUN.name, str(row.run_id), None, HarvestRunState.CREATED.value, row.requested_by, now)
    numbers = await journal.append(tx, [entry])
    parts = [{"range": str(part.range), "count": part.count} for part in heatmap.parts]
    proof = {"total": heatmap.total, "sum": heatmap.sum, "counts": heatmap.counts, "rounds": heatmap.rounds}
    await tx.execute(
        SQL["insert_run"],
        row.run_id,
        row.feed,
        run_type,
        len(heatmap.parts),
        row.watermark,
        now,
        upper_bound,
        row.trace_id,
        row.requested_by,
        {**proof, "parts": parts},
        numbers,
    )
    names = [f"partition-{number}" for number in range(len(heatmap.parts))]
    await tx.execute(SQL["insert_partitions"], row.run_id, names, *_make_partition_columns(heatmap.parts), now)
    return names


def _make_partition_columns(parts: Sequence[PlannedPartition]) -> tuple[list[object], ...]:
    return (
        [part.range.kind for part in parts],
        [part.range.lower for part in parts],
        [part.range.upper for part in parts],
        [part.count for part in parts],
    )


async def read_run(connection: Connection, run_id: UUID, *, lock: bool = False) -> RunRow | None:
    row = await connection.fetchrow(SQL["lock_run" if lock else "read_run"], run_id)
    return _make_run(row) if row else None


async def move_run(
    tx: Connection, run_id: UUID, current: HarvestRunState, move: str, by: str, now: datetime, reason: str | None = None
) -> bool:
    """Make *move* if the state of the run is *current*; return False if it is another one."""
    sources, target = RUN.move(move).sources, RUN.move(move).target
    if current not in sources:  # another move may have the same target
        allowed = " or ".join(state.value for state in sources)
        hint = f"{move} requires a run that is {allowed}; penstock harvest partitions {run_id} shows its partitions"
        raise Conflict("BAD_MOVE", f"{move} is not possible: run {run_id} is {current.value}", hint=hint)
    error = reason if target in (HarvestRunState.FAILED, HarvestRunState.CONSOLIDATION_SKIPPED) else None
    if await tx.fetchval(SQL["move_run"], run_id, target, current, error, now) is None:
        return False
    entry = journal.JournalEntry(RUN.name, str(run_id), current.value, target.value, by, now, reason)
    await tx.execute(SQL["append_moves"], run_id, await journal.append(tx, [entry]))
    return True


async def complete_run(
    tx: Connection, run_id: UUID, by: str, now: datetime, watermark: datetime | None, deleted: int | None
) -> CompletedRun:
    """H8: complete a run that is being consolidated and that the caller has locked."""
    [row] = await tx.fetch(SQL["complete_run"], run_id, now, watermark, deleted)
    entry = journal.JournalEntry(
        RUN.name, str(run_id), HarvestRunState.CONSOLIDATING.value, HarvestRunState.COMPLETED.value, by, now
    )
    await tx.execute(SQL["append_moves"], run_id, await journal.append(tx, [entry]))
    return CompletedRun(int(row["records"]), float(row["seconds"]))


async def save_watermark(tx: Connection, feed: str, run_id: UUID, watermark: datetime, now: datetime) -> None:
    """H8: save the watermark of the feed, and append it to the history."""
    await tx.execute(SQL["save_watermark"], feed, watermark, run_id, now)
    await tx.execute(SQL["insert_watermark"], feed, run_id, watermark, now)


async def force_run(tx: Connection, run_id: UUID, by: str, reason: str) -> None:
    """H5: record the actor and the reason of a forced consolidation."""
    await tx.execute(SQL["force_run"], run_id, by, reason)


async def unforce_run(tx: Connection, run_id: UUID) -> None:
    """H5: end the effect of a force on later attempts; the journal and the alert still contain it."""
    await tx.execute(SQL["unforce_run"], run_id)


async def list_watermarks(db: Database, feeds: Sequence[str]) -> dict[str, datetime]:
    """Return the watermarks of *feeds*, without the feeds that have none."""
    return {row["feed"]: row["watermark"] for row in await db.fetch(SQL["list_watermarks"], feeds)}


async def prune_runs(db: Database, before: datetime) -> int:
    """Delete some runs that ended before *before*, never the last one of a feed, and return their number."""
    return int(await db.fetchval(SQL["prune_runs"], before))


def _make_run(row: asyncpg.Record) -> RunRow:
    return RunRow(
        row["run_id"],
        row["feed"],
        HarvestRunType(row["run_type"]),
        HarvestRunState(row["state"]),
        row["expected_workers"],
        row["completed_workers"],
        row["failed_workers"],
        row["upper_bound"],
        row["trace_id"],
        row["forced_by"],
    )
