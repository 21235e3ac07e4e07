"""The pipeline's tables on PostgreSQL: a typed function per statement, and nothing of the dialect above it."""

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
    FailureSample,
    RowKey,
    RowPosition,
    ShardRow,
    StageCount,
    StagePause,
    WaitingRows,
)

CHANNEL = "penstock_tracking"
BEGINNING = datetime(1, 1, 1, tzinfo=UTC)
_LAST_CHARACTER = "\U0010ffff"
_LOOKED_AT = 10_000  # rows of a queue that are looked at to find the oldest
_READY = "ready"  # a count's word for: new, and the stage before it is done
_SUBJECT = "t.filename || '/' || t.shard"
# When and why is looked up in the history only for those who ask; when that is forgotten, it failed when it last moved.
_FAILED_SO = f"""t.<status> = {{stage.FAILED}}
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


def _statements(stage: Stage) -> Mapping[str, str]:
    """The statements, filled in for *stage*: `<status>` and `<attempts>` are its columns, and so on."""
    words = {
        "<failed_so>": sql.fill(_FAILED_SO, {"stage": MACHINES[stage]}),
        "<status>": f"{stage.field}_status",
        "<attempts>": f"{stage.field}_attempts",
        "<may_start>": _may_start(stage),
        "<is_paused>": _is_paused(stage),
        "<machine>": f"'{MACHINES[stage].name}'",
        "<moves>": APPENDED_MOVES,
    }
    return {name: _filled(body, words) for name, body in sql.load(__package__, {"stage": MACHINES[stage]}).items()}


def _filled(body: str, words: Mapping[str, str]) -> str:
    for word, text in words.items():
        body = body.replace(word, text)
    return body


def _may_start(stage: Stage) -> str:
    return f"t.{stage.before.field}_status = {MACHINES[stage].sql('DONE')}" if stage.before else "true"


def _is_paused(stage: Stage) -> str:
    return f"EXISTS (SELECT FROM pipeline_pause WHERE stage = '{stage}')"


SQL = {stage: _statements(stage) for stage in Stage}
_ANY = SQL[FILE_STAGE]  # for statements that are the same for every stage


def leases(max_attempts: int) -> Leases:
    """How the rows of each queue are handed out."""
    return {
        stage: Lease(
            "pipeline_tracking",
            MACHINES[stage],
            ready=StageStatus.NEW,
            held=StageStatus.STARTED,
            done=StageStatus.DONE,
            failed=StageStatus.FAILED,
            key={"filename": "text", "shard": "integer"},
            state=f"{stage.field}_status",
            attempts=f"{stage.field}_attempts",
            stamp="updated_at",
            condition=f"{_may_start(stage)} AND NOT {_is_paused(stage)}",
            subject=_SUBJECT,
            max_attempts=max_attempts,
        )
        for stage in QUEUES
    }


async def lock_file(tx: Connection, filename: str) -> None:
    """Be the only one to register or end *filename* until *tx* ends."""
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
    """New rows of a file whose event-ingest is *status*."""
    await tx.execute(_ANY["insert_rows"], filename, shards, status.value, worker, actor, now)


async def rows_of_file(tx: Connection, filename: str) -> list[ShardRow]:
    """All shards of *filename*; empty when nobody registered it."""
    return [_row(record) for record in await tx.fetch(_ANY["rows_of_file"], filename)]


async def find_row(tx: Connection, filename: str, shard: int) -> ShardRow | None:
    record = await tx.fetchrow(_ANY["row"], filename, shard)
    return _row(record) if record else None


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
    """The rows as they were found, and whether each was moved: all that had to, or none."""
    sources = [source.value for source in step.sources]
    of_file = "$2::integer IS NULL" if shard is None else "t.shard = $2"  # two statements, as they are two plans
    query = SQL[stage]["move"].replace("<of_file>", of_file)
    records = await tx.fetch(query, filename, shard, step.target.value, sources, worker, actor, reason, now)
    return [(_row(record), record["moved"]) for record in records]


async def claim(
    tx: Connection, lease: Lease[StageStatus], *, worker: str, limit: int, lease_for: timedelta, now: datetime
) -> list[ClaimedRow]:
    """T12: rows now held by *worker* alone, oldest first."""
    held = await lease.claim(tx, worker=worker, limit=limit, lease_for=lease_for, now=now)
    until = now + lease_for
    return [
        ClaimedRow(one.row["filename"], one.row["shard"], one.fence, one.attempt, one.row["created_at"], until)
        for one in held
    ]


async def heartbeat(
    tx: Connection, lease: Lease[StageStatus], keys: Sequence[RowKey], *, until: datetime
) -> set[RowKey]:
    """T14: extend leases; what is still held of *keys*."""
    kept = await lease.heartbeat(tx, (((key.filename, key.shard), key.fence) for key in keys), until=until)
    return {RowKey(filename, shard, fence) for (filename, shard), fence in kept}


async def reap(tx: Connection, lease: Lease[StageStatus], *, now: datetime) -> list[StageStatus]:
    """T14: take back what nobody ended in time; where each row is now."""
    return [status for _, status in await lease.reap(tx, now=now)]


async def history(tx: Connection, rows: Sequence[ShardRow], after: tuple[int, int], limit: int) -> list[StoredEntry]:
    """T15: the moves of *rows*, oldest first, after an entry and a place in it."""
    numbers = sorted({number for row in rows for number in row.moves})
    subjects = [subject(row.filename, row.shard) for row in rows]
    return await journal.read_history(tx, numbers, subjects, after=after, limit=limit)


async def held_by(tx: Connection, stage: Stage, worker: str) -> list[RowKey]:
    """What *worker* holds under a lease."""
    return [
        RowKey(row["filename"], row["shard"], row["fence"]) for row in await tx.fetch(SQL[stage]["held_by"], worker)
    ]


async def statuses(
    tx: Connection, stage: Stage, names: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], StageStatus]:
    """Where rows stand in *stage*, by file and shard; those that are not there are missing."""
    files, shards = [name[0] for name in names], [name[1] for name in names]
    rows = await tx.fetch(SQL[stage]["rows_by_key"], files, shards)
    return {(row["filename"], row["shard"]): StageStatus(row["status"]) for row in rows}


async def list_queue(
    tx: Connection,
    stage: Stage,
    after: tuple[datetime, int],
    *,
    updated_since: datetime | None,
    updated_before: datetime | None,
    limit: int,
    offset: int,
) -> list[WaitingRows]:
    """What waits for *stage* after a place in its queue."""
    rows = await tx.fetch(SQL[stage]["list_queue"], *after, updated_since, updated_before, limit, offset)
    return [WaitingRows(row["filename"], row["shard"], row["created_at"], row["due_at"], row["id"]) for row in rows]


async def count_ahead(tx: Connection, stage: Stage, row: ShardRow, limit: int) -> int:
    """How many rows of the queue come before *row*, up to *limit*."""
    return int(await tx.fetchval(SQL[stage]["count_ahead"], row.due_at, row.id, limit))


async def oldest(tx: Connection, stage: Stage) -> datetime | None:
    """When the oldest row of the queue was created, as far as anybody looks."""
    found: datetime | None = await tx.fetchval(SQL[stage]["oldest"], _LOOKED_AT)
    return found


async def list_rows(tx: Connection, stands: RowPosition, after: tuple[str, int], limit: int) -> list[ShardRow]:
    """Rows that stand so, by file and shard, after one of them."""
    await tx.execute(_ANY["be_quick"])
    within = (*after, stands.prefix, stands.prefix + _LAST_CHARACTER)
    asked = (stands.shard, stands.updated_since, stands.updated_before)
    return [_row(record) for record in await tx.fetch(_list_rows(stands), *within, *asked, limit)]


def _list_rows(stands: RowPosition) -> str:
    """The statement for just this stage and status, as literals: only so the partial indexes are used."""
    stages = [stands.stage] if stands.stage else list(Stage)
    words = [f"t.{stage.field}_status = {MACHINES[stage].sql(stands.status.name)}" for stage in stages if stands.status]
    stands_so = f"({' OR '.join(words) or 'true'})"
    # What is started has a lease, if only one without end: that index is the short way to it.
    stands_so += " AND t.lease_until IS NOT NULL" if stands.status is StageStatus.STARTED else ""
    return _ANY["list_rows"].replace("<stands>", stands_so)


async def failed_files(tx: Connection, stage: Stage, failed: FailureSample, limit: int) -> list[str]:
    """Files whose rows failed so."""
    return [record["filename"] for record in await tx.fetch(SQL[stage]["failed_files"], *_asked(failed), limit)]


async def retry_rows(
    tx: Connection, stage: Stage, failed: FailureSample, limit: int, *, actor: str, reason: str | None, now: datetime
) -> int:
    """Set up to *limit* failed rows back to new; how many."""
    return int(await tx.fetchval(SQL[stage]["retry_rows"], *_asked(failed), limit, now, actor, reason))


def _asked(failed: FailureSample) -> tuple[Any, ...]:
    bounds = (failed.prefix, failed.prefix + _LAST_CHARACTER)
    return (*bounds, failed.shards, failed.failed_since, failed.failed_before, failed.error_contains)


async def last_failure(tx: Connection, stage: Stage, row: ShardRow) -> RowFailure | None:
    """When and why *row* failed last in *stage*; None when that is forgotten."""
    found = await tx.fetchrow(SQL[stage]["last_failure"], subject(row.filename, row.shard), row.moves)
    return RowFailure(found["at"], found["reason"]) if found else None


async def counts(tx: Connection) -> list[StageCount]:
    """How many rows stand where, exactly."""
    return [_count(record) for record in await tx.fetch(_ANY["counts"])]


async def fold_counts(tx: Connection) -> int:
    """Put the changes of the counts together; how many there were."""
    return int(await tx.fetchval(_ANY["fold_counts"]))


async def pauses(tx: Connection) -> dict[Stage, StagePause]:
    """The stages that are paused."""
    records = await tx.fetch(_ANY["pauses"])
    found = [
        StagePause(Stage(record["stage"]), record["since"], record["actor"], record["reason"]) for record in records
    ]
    return {pause.stage: pause for pause in found}


async def pause(tx: Connection, stage: Stage, *, actor: str, reason: str | None, now: datetime) -> None:
    await tx.execute(_ANY["pause"], stage.value, now, actor, reason)


async def resume(tx: Connection, stage: Stage) -> None:
    await tx.execute(_ANY["resume"], stage.value)


def subject(filename: str, shard: int) -> str:
    """What the journal calls a row."""
    return f"{filename}/{shard}"


def _row(record: asyncpg.Record) -> ShardRow:
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
    is_ready = record["standing"] == _READY
    status = StageStatus.NEW if is_ready else StageStatus(record["standing"])
    return StageCount(Stage(record["stage"]), status, is_ready, record["shard"], record["rows"])
