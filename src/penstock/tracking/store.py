"""The tables of tracking on PostgreSQL: one typed function per statement; all SQL is below this module."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection
from penstock.kernel.machine import Transition
from penstock.kernel.states import journal
from penstock.kernel.states.journal import APPENDED_MOVES, StoredEntry
from penstock.tracking.contract import Stage, StageStatus
from penstock.tracking.explain import RowFailure
from penstock.tracking.lease import Lease
from penstock.tracking.model import (
    FILE_STAGE,
    MACHINES,
    QUEUES,
    ClaimedRow,
    FailureFilter,
    OverdueRows,
    ReapedRow,
    RowFilter,
    RowKey,
    ShardRow,
    StageCount,
    StagePause,
    WaitingRow,
)

CHANNEL = "penstock_tracking"
BEGINNING = datetime(1, 1, 1, tzinfo=UTC)
_LAST_CHARACTER = "\U0010ffff"
_OLDEST_LIMIT = 10_000  # rows of a queue that are read to find the oldest
_READY = "ready"  # the state of a count: new, and the previous stage is done
_SUBJECT = "t.filename || '/' || t.shard"
# Time and reason of a failure are read from the journal only if the filter needs them. Without a journal entry (its
# retention has ended) the time of the last move counts.
_FAILED = f"""t.<status> = {{stage.FAILED}}
      AND t.filename >= $1 AND t.filename < $2
      AND ($3::integer[] IS NULL OR t.shard = ANY ($3))
      AND (coalesce($4::timestamptz, $5::timestamptz) IS NULL AND $6::text IS NULL OR EXISTS (
          SELECT
          FROM (VALUES (1)) AS always
          LEFT JOIN LATERAL (
              SELECT at, reason FROM journal_move
              WHERE id = ANY (t.moves) AND subject = {_SUBJECT} AND machine = <machine> AND target = {{stage.FAILED}}
              ORDER BY id DESC, n DESC LIMIT 1
          ) AS last ON true
          WHERE ($4 IS NULL OR coalesce(last.at, t.updated_at) >= $4)
            AND ($5 IS NULL OR coalesce(last.at, t.updated_at) < $5)
            AND ($6 IS NULL OR position($6 IN coalesce(last.reason, '')) > 0)
      ))"""

Leases = Mapping[Stage, Lease[StageStatus]]


def _make_statements(stage: Stage) -> Mapping[str, str]:
    """Return the statements for *stage*, with its columns and conditions filled in."""
    words = {
        "<failed>": sql.fill(_FAILED, {"stage": MACHINES[stage]}),
        "<status>": f"{stage.field}_status",
        "<attempts>": f"{stage.field}_attempts",
        "<may_start>": _make_start_condition(stage),
        "<is_paused>": _is_paused(stage),
        "<machine>": f"'{MACHINES[stage].name}'",
        "<moves>": APPENDED_MOVES,
    }
    return {name: _fill(body, words) for name, body in sql.load(__package__, {"stage": MACHINES[stage]}).items()}


def _fill(body: str, words: Mapping[str, str]) -> str:
    for word, text in words.items():
        body = body.replace(word, text)
    return body


def _make_start_condition(stage: Stage) -> str:
    return f"t.{stage.before.field}_status = {MACHINES[stage].format_sql('DONE')}" if stage.before else "true"


def _is_paused(stage: Stage) -> str:
    return f"EXISTS (SELECT FROM pipeline_pause WHERE stage = '{stage}')"


SQL = {stage: _make_statements(stage) for stage in Stage}
_ANY = SQL[FILE_STAGE]  # for statements that are equal for all stages


def declare_leases(max_attempts: int) -> Leases:
    """Return the lease of each stage whose rows are claimed."""
    return {
        stage: Lease(
            "pipeline_tracking",
            MACHINES[stage],
            ready=StageStatus.NEW,
            claimed=StageStatus.STARTED,
            done=StageStatus.DONE,
            failed=StageStatus.FAILED,
            key={"filename": "text", "shard": "integer"},
            state=f"{stage.field}_status",
            attempts=f"{stage.field}_attempts",
            stamp="updated_at",
            condition=f"{_make_start_condition(stage)} AND NOT {_is_paused(stage)}",
            subject=_SUBJECT,
            max_attempts=max_attempts,
        )
        for stage in QUEUES
    }


async def lock_file(tx: Connection, filename: str) -> None:
    """Block other registrations and whole-file moves of *filename* until *tx* ends."""
    await tx.execute(_ANY["lock_file"], filename)


async def insert_rows(
    tx: Connection,
    filename: str,
    shards: Sequence[int],
    status: StageStatus,
    *,
    worker: str | None,
    actor: str,
    now: datetime,
) -> None:
    """Insert rows of a file whose event-ingest has *status*."""
    await tx.execute(_ANY["insert_rows"], filename, shards, status.value, worker, actor, now)


async def find_file(tx: Connection, filename: str) -> list[ShardRow]:
    """Return all shards of *filename*; empty if it is not registered."""
    return [_make_row(record) for record in await tx.fetch(_ANY["find_file"], filename)]


async def find_row(tx: Connection, filename: str, shard: int) -> ShardRow | None:
    """Return one shard of a file, if it exists."""
    record = await tx.fetchrow(_ANY["find_row"], filename, shard)
    return _make_row(record) if record else None


async def move(
    tx: Connection,
    stage: Stage,
    step: Transition[StageStatus],
    filename: str,
    shard: int | None,
    *,
    worker: str | None,
    actor: str,
    reason: str | None,
    now: datetime,
) -> list[tuple[ShardRow, bool]]:
    """Move all rows that need it, or none; return each row as it was before, and whether it was moved."""
    sources = [source.value for source in step.sources]
    of_file = "$2::integer IS NULL" if shard is None else "t.shard = $2"  # two statements, because the plans differ
    query = SQL[stage]["move"].replace("<of_file>", of_file)
    records = await tx.fetch(query, filename, shard, step.target.value, sources, worker, actor, reason, now)
    return [(_make_row(record), record["moved"]) for record in records]


async def claim(
    tx: Connection, lease: Lease[StageStatus], *, worker: str, limit: int, lease_for: timedelta, now: datetime
) -> list[ClaimedRow]:
    """T12: claim rows for *worker*, oldest first."""
    rows = await lease.claim(tx, worker=worker, limit=limit, lease_for=lease_for, now=now)
    until = now + lease_for
    return [
        ClaimedRow(row.row["filename"], row.row["shard"], row.fence, row.attempt, row.row["created_at"], until)
        for row in rows
    ]


async def heartbeat(
    tx: Connection, lease: Lease[StageStatus], keys: Sequence[RowKey], *, until: datetime
) -> set[RowKey]:
    """T14: extend the leases of *keys* and return those still valid."""
    extended = await lease.heartbeat(tx, (((key.filename, key.shard), key.fence) for key in keys), until=until)
    return {RowKey(filename, shard, fence) for (filename, shard), fence in extended}


async def reap(tx: Connection, lease: Lease[StageStatus], *, now: datetime) -> list[ReapedRow]:
    """T14: take back rows with an expired lease, and return them with their new status."""
    return [ReapedRow(key[0], key[1], status) for key, status in await lease.reap(tx, now=now)]


async def list_moves(tx: Connection, rows: Sequence[ShardRow], after: tuple[int, int], limit: int) -> list[StoredEntry]:
    """T15: return the moves of *rows*, oldest first, after a position (entry and index) in the journal."""
    numbers = sorted({number for row in rows for number in row.moves})
    subjects = [make_subject(row.filename, row.shard) for row in rows]
    return await journal.read_history(tx, numbers, subjects, after=after, limit=limit)


async def find_claims(tx: Connection, stage: Stage, worker: str) -> list[RowKey]:
    """Return the rows of *stage* that *worker* has claimed with a lease."""
    rows = await tx.fetch(SQL[stage]["find_claims"], worker)
    return [RowKey(row["filename"], row["shard"], row["fence"]) for row in rows]


async def find_statuses(
    tx: Connection, stage: Stage, names: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], StageStatus]:
    """Return the status in *stage* of each row, by file and shard; rows that do not exist are missing."""
    files, shards = [name[0] for name in names], [name[1] for name in names]
    rows = await tx.fetch(SQL[stage]["find_statuses"], files, shards)
    return {(row["filename"], row["shard"]): StageStatus(row["status"]) for row in rows}


async def find_complete(tx: Connection, stage: Stage, filenames: Sequence[str]) -> dict[str, int]:
    """Return those of *filenames* whose shards are all done in *stage*, with the number of their shards."""
    rows = await tx.fetch(SQL[stage]["find_complete"], filenames)
    return {row["filename"]: row["shards"] for row in rows}


async def list_queue(
    tx: Connection,
    stage: Stage,
    after: tuple[datetime, int],
    *,
    updated_since: datetime | None,
    updated_before: datetime | None,
    limit: int,
    offset: int,
) -> list[WaitingRow]:
    """Return the rows that wait for *stage*, after a position in its queue."""
    rows = await tx.fetch(SQL[stage]["list_queue"], *after, updated_since, updated_before, limit, offset)
    return [WaitingRow(row["filename"], row["shard"], row["created_at"], row["due_at"], row["id"]) for row in rows]


async def count_ahead(tx: Connection, stage: Stage, row: ShardRow, limit: int) -> int:
    """Return the number of rows ahead of *row* in its queue, at most *limit*."""
    return int(await tx.fetchval(SQL[stage]["count_ahead"], row.due_at, row.id, limit))


async def find_oldest(tx: Connection, stage: Stage) -> datetime | None:
    """Return when the oldest of the first rows in the queue was registered; None if the queue is empty."""
    created_at: datetime | None = await tx.fetchval(SQL[stage]["find_oldest"], _OLDEST_LIMIT)
    return created_at


async def list_overdue(
    tx: Connection, stage: Stage, *, expired_before: datetime, started_before: datetime
) -> list[OverdueRows]:
    """Count rows of *stage* with a lease that expired, or a start without a lease, before the given times."""
    rows = await tx.fetch(SQL[stage]["list_overdue"], expired_before, started_before)
    return [OverdueRows(stage, row["has_lease"], row["rows"], row["since"]) for row in rows]


async def list_rows(tx: Connection, wanted: RowFilter, after: tuple[str, int], limit: int) -> list[ShardRow]:
    """Return the rows that match *wanted*, by file and shard, after one of them."""
    await tx.execute(_ANY["limit_listing_time"])
    names = (*after, wanted.prefix, wanted.prefix + _LAST_CHARACTER)
    conditions = (wanted.shard, wanted.updated_since, wanted.updated_before)
    return [_make_row(record) for record in await tx.fetch(_list_rows(wanted), *names, *conditions, limit)]


def _list_rows(wanted: RowFilter) -> str:
    """Return the statement with stage and status as literals, which the partial indexes need."""
    stages = [wanted.stage] if wanted.stage else list(Stage)
    terms = [
        f"t.{stage.field}_status = {MACHINES[stage].format_sql(wanted.status.name)}"
        for stage in stages
        if wanted.status
    ]
    condition = f"({' OR '.join(terms) or 'true'})"
    # A started row always has a lease, if only an endless one: this condition makes the index on leases usable.
    condition += " AND t.lease_until IS NOT NULL" if wanted.status is StageStatus.STARTED else ""
    return _ANY["list_rows"].replace("<filter>", condition)


async def find_failed_files(tx: Connection, stage: Stage, failed: FailureFilter, limit: int) -> list[str]:
    """Return the files with failures that match *failed*."""
    records = await tx.fetch(SQL[stage]["find_failed_files"], *_make_parameters(failed), limit)
    return [record["filename"] for record in records]


async def retry_rows(
    tx: Connection, stage: Stage, failed: FailureFilter, limit: int, *, actor: str, reason: str | None, now: datetime
) -> int:
    """Reset up to *limit* failed rows to new, and return their number."""
    return int(await tx.fetchval(SQL[stage]["retry_rows"], *_make_parameters(failed), limit, now, actor, reason))


def _make_parameters(failed: FailureFilter) -> tuple[Any, ...]:
    names = (failed.prefix, failed.prefix + _LAST_CHARACTER)
    return (*names, failed.shards, failed.failed_since, failed.failed_before, failed.error_contains)


async def find_last_failure(tx: Connection, stage: Stage, row: ShardRow) -> RowFailure | None:
    """Return time and error of the last failure of *row* in *stage*; None if the journal no longer has it."""
    record = await tx.fetchrow(SQL[stage]["find_last_failure"], make_subject(row.filename, row.shard), row.moves)
    return RowFailure(record["at"], record["reason"]) if record else None


async def count_rows(tx: Connection) -> list[StageCount]:
    """Return the exact number of rows by stage, state and shard."""
    return [_count(record) for record in await tx.fetch(_ANY["count_rows"])]


async def fold_counts(tx: Connection) -> int:
    """Fold the changes into the counts, and return the number of changes."""
    return int(await tx.fetchval(_ANY["fold_counts"]))


async def list_pauses(tx: Connection) -> dict[Stage, StagePause]:
    """Return the pauses of the paused stages."""
    records = await tx.fetch(_ANY["list_pauses"])
    pauses = [
        StagePause(Stage(record["stage"]), record["since"], record["actor"], record["reason"]) for record in records
    ]
    return {pause.stage: pause for pause in pauses}


async def pause(tx: Connection, stage: Stage, *, actor: str, reason: str | None, now: datetime) -> None:
    """Pause *stage*; an existing pause is left unchanged."""
    await tx.execute(_ANY["pause"], stage.value, now, actor, reason)


async def resume(tx: Connection, stage: Stage) -> None:
    """End the pause of *stage*."""
    await tx.execute(_ANY["resume"], stage.value)


def make_subject(filename: str, shard: int) -> str:
    """Return the name of a row in the journal."""
    return f"{filename}/{shard}"


def _make_row(record: asyncpg.Record) -> ShardRow:
    return ShardRow(
        id=record["id"],
        filename=record["filename"],
        shard=record["shard"],
        status={stage: StageStatus(record[f"{stage.field}_status"]) for stage in Stage},
        attempts={stage: record[f"{stage.field}_attempts"] for stage in Stage},
        created_at=record["created_at"],
        updated_at=record["updated_at"],
        due_at=record["due_at"],
        fence=record["fence"],
        worker=record["worker"],
        lease_until=record["lease_until"],
        moves=record["moves"],
    )


def _count(record: asyncpg.Record) -> StageCount:
    is_ready = record["state"] == _READY
    status = StageStatus.NEW if is_ready else StageStatus(record["state"])
    return StageCount(Stage(record["stage"]), status, is_ready, record["shard"], record["rows"])
