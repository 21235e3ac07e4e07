"""Runs, plans and partitions: a typed function per statement."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import asyncpg

from penstock.harvest.contract import HarvestRunState, HarvestRunType, PlanState
from penstock.harvest.model import MACHINES, PLAN, RUN, Heatmap, PlannedPartition
from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.errors import Conflict
from penstock.kernel.states import journal

SQL = sql.load("penstock.harvest", MACHINES)
AT_EASE = 6 * 3600.0  # seconds for a statement over all records of a feed, however many there are


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A run that is asked for."""

    run_id: UUID
    feed: str
    run_type: HarvestRunType | None
    state: PlanState
    requested_by: str
    trace_id: str
    watermark: datetime | None


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run, as far as its workers need to know it."""

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
    tx: Connection, run_id: UUID, feed: str, run_type: HarvestRunType | None, by: str, now: datetime, trace_id: str
) -> None:
    """Keep that a run is wanted."""
    entry = journal.JournalEntry(PLAN.name, str(run_id), None, PlanState.PLANNING.value, by, now)
    numbers = await journal.append(tx, [entry])
    await tx.execute(SQL["ask"], run_id, feed, run_type, by, now, trace_id, numbers)


async def plan(connection: Connection, run_id: UUID) -> PlanRow | None:
    row = await connection.fetchrow(SQL["plan"], run_id)
    if row is None:
        return None
    wanted = HarvestRunType(row["run_type"]) if row["run_type"] else None
    state = PlanState(row["state"])
    return PlanRow(run_id, row["feed"], wanted, state, row["requested_by"], row["trace_id"], row["watermark"])


async def settle_plan(
    tx: Connection, run_id: UUID, state: PlanState, by: str, now: datetime, *, counts: int = 0, error: str | None = None
) -> bool:
    """The plan became a run, or failed; False when it is settled already."""
    if await tx.fetchval(SQL["settle_plan"], run_id, state, counts, error, now) is None:
        return False
    entry = journal.JournalEntry(PLAN.name, str(run_id), PlanState.PLANNING.value, state.value, by, now, error)
    await tx.execute(SQL["note_plan_moves"], run_id, await journal.append(tx, [entry]))
    return True


async def create_run(
    tx: Connection, row: PlanRow, run_type: HarvestRunType, upper_bound: datetime, heatmap: Heatmap, now: datetime
) -> list[str]:
    """The run and its partitions, whose names are returned."""
    entry = journal.JournalEntry(RUN.name, str(row.run_id), None, HarvestRunState.CREATED.value, row.requested_by, now)
    numbers = await journal.append(tx, [entry])
    parts = [{"range": str(part.range), "count": part.count} for part in heatmap.parts]
    proof = {"total": heatmap.total, "sum": heatmap.sum, "counts": heatmap.counts, "rounds": heatmap.rounds}
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
        {**proof, "parts": parts},
        numbers,
    )
    names = [f"partition-{number}" for number in range(len(heatmap.parts))]
    await tx.execute(SQL["create_partitions"], row.run_id, names, *_columns(heatmap.parts), now)
    return names


def _columns(parts: Sequence[PlannedPartition]) -> tuple[list[object], ...]:
    return (
        [part.range.kind for part in parts],
        [part.range.lower for part in parts],
        [part.range.upper for part in parts],
        [part.count for part in parts],
    )


async def run(connection: Connection, run_id: UUID, *, lock: bool = False) -> RunRow | None:
    row = await connection.fetchrow(SQL["lock_run" if lock else "run"], run_id)
    return _run(row) if row else None


async def move_run(
    tx: Connection, run_id: UUID, current: HarvestRunState, move: str, by: str, now: datetime, reason: str | None = None
) -> bool:
    """Make *move* if the run stands at *current*; False when it does not."""
    sources, target = RUN.move(move).sources, RUN.move(move).target
    if current not in sources:  # another move may lead from here to there; this one does not
        where = " or ".join(state.value for state in sources)
        raise Conflict("BAD_MOVE", f"run {run_id} is {current.value}", hint=f"{move} is for a run that is {where}")
    error = reason if target in (HarvestRunState.FAILED, HarvestRunState.CONSOLIDATION_SKIPPED) else None
    if await tx.fetchval(SQL["move_run"], run_id, target, current, error, now) is None:
        return False
    entry = journal.JournalEntry(RUN.name, str(run_id), current.value, target.value, by, now, reason)
    await tx.execute(SQL["note_moves"], run_id, await journal.append(tx, [entry]))
    return True


async def complete_run(
    tx: Connection, run_id: UUID, by: str, now: datetime, reached: datetime | None, deleted: int | None
) -> None:
    """H8: the end of a run that is being consolidated; its caller holds it."""
    await tx.execute(SQL["complete_run"], run_id, now, reached, deleted)
    entry = journal.JournalEntry(
        RUN.name, str(run_id), HarvestRunState.CONSOLIDATING.value, HarvestRunState.COMPLETED.value, by, now
    )
    await tx.execute(SQL["note_moves"], run_id, await journal.append(tx, [entry]))


async def save_watermark(tx: Connection, feed: str, run_id: UUID, reached: datetime, now: datetime) -> None:
    """H8: up to when the feed is known, and since which run."""
    await tx.execute(SQL["save_watermark"], feed, reached, run_id, now)
    await tx.execute(SQL["note_watermark"], feed, run_id, reached, now)


async def force(tx: Connection, run_id: UUID, by: str, reason: str) -> None:
    """H5: who wanted it, and why."""
    await tx.execute(SQL["force_run"], run_id, by, reason)


async def unforce(tx: Connection, run_id: UUID) -> None:
    """H5: it was forced once, not for good; the journal and the alert still tell."""
    await tx.execute(SQL["unforce_run"], run_id)


async def feed_watermarks(db: Database, feeds: Sequence[str]) -> dict[str, datetime]:
    """Up to when *feeds* are known; those that are not are left out."""
    return {row["feed"]: row["watermark"] for row in await db.fetch(SQL["feed_watermarks"], feeds)}


async def prune_runs(db: Database, before: datetime) -> int:
    """Forget some runs that ended *before*, never the last of a feed; how many."""
    return int(await db.fetchval(SQL["prune_runs"], before))


def _run(row: asyncpg.Record) -> RunRow:
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
