"""The pipeline's tables on PostgreSQL: a typed function per statement, and nothing of the dialect above it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import asyncpg

from penstock.kernel import sql
from penstock.kernel.backoff import delay
from penstock.kernel.db import Connection
from penstock.kernel.lease import Held, Lease, Settled
from penstock.kernel.lease import Report as LeaseReport
from penstock.kernel.machine import Move
from penstock.tracking.contract import Answer, Said, Stage, Status
from penstock.tracking.model import FILE_STAGE, MACHINES, QUEUES, TARGETS, Count, Pause, Report, Result, Row

CHANNEL = "penstock_tracking"
BEGINNING = datetime(1, 1, 1, tzinfo=UTC)
_LAST_CHARACTER = "\U0010ffff"
_READY = "ready"  # a count's word for: new, and the stage before it is done
_SUBJECT = "t.filename || '/' || t.shard"
_FAILED_SO = f"""t.<status> = {{stage.FAILED}}
      AND t.filename >= $1 AND t.filename < $2
      AND ($3::integer[] IS NULL OR t.shard = ANY ($3))
      AND ($4::timestamptz IS NULL OR t.updated_at >= $4)
      AND ($5::timestamptz IS NULL OR t.updated_at < $5)
      AND ($6::text IS NULL OR position($6 IN coalesce(
          (SELECT reason FROM journal WHERE machine = <machine> AND subject = {_SUBJECT} ORDER BY id DESC LIMIT 1), ''
      )) > 0)"""

Leases = Mapping[Stage, Lease[Status]]


@dataclass(frozen=True, slots=True)
class Stands:
    """Which rows are asked for; None leaves open."""

    stage: Stage | None = None
    status: Status | None = None
    shard: int | None = None
    prefix: str = ""
    updated_since: datetime | None = None
    updated_before: datetime | None = None


@dataclass(frozen=True, slots=True)
class FailedSo:
    """Which failed rows are meant; None leaves open."""

    prefix: str = ""
    shards: Sequence[int] | None = None
    failed_since: datetime | None = None
    failed_before: datetime | None = None
    error_contains: str | None = None


def _statements(stage: Stage) -> Mapping[str, str]:
    words = {
        "<failed_so>": sql.fill(_FAILED_SO, {"stage": MACHINES[stage]}),
        "<status>": f"{stage.field}_status",
        "<attempts>": f"{stage.field}_attempts",
        "<may_start>": _may_start(stage),
        "<is_paused>": _is_paused(stage),
        "<machine>": f"'{MACHINES[stage].name}'",
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
            ready=Status.NEW,
            held=Status.STARTED,
            done=Status.DONE,
            failed=Status.FAILED,
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
    status: Status,
    *,
    worker: str | None,
    actor: str,
    now: datetime,
) -> None:
    """New rows of a file whose event-ingest is *status*."""
    await tx.execute(_ANY["insert_rows"], filename, shards, status.value, worker, actor, now)


async def rows_of_file(tx: Connection, filename: str) -> list[Row]:
    """All shards of *filename*; empty when nobody registered it."""
    return [_row(record) for record in await tx.fetch(_ANY["rows_of_file"], filename)]


async def find_row(tx: Connection, filename: str, shard: int) -> Row | None:
    record = await tx.fetchrow(_ANY["row"], filename, shard)
    return _row(record) if record else None


async def move(
    tx: Connection,
    stage: Stage,
    step: Move[Status],
    filename: str,
    shard: int | None,
    *,
    worker: str | None,
    actor: str,
    reason: str | None,
    now: datetime,
) -> list[tuple[Row, bool]]:
    """The rows as they were found, and whether each was moved: all that had to, or none."""
    sources = [source.value for source in step.sources]
    records = await tx.fetch(
        SQL[stage]["move"], filename, shard, step.target.value, sources, worker, actor, reason, now
    )
    return [(_row(record), record["moved"]) for record in records]


async def heartbeat(
    tx: Connection, lease: Lease[Status], rows: Sequence[asyncpg.Record], *, until: datetime
) -> set[int]:
    """Extend the leases of *rows*; the ids still held."""
    held = [Held(row["id"], row["fence"], 0, row) for row in rows]
    return await lease.heartbeat(tx, held, until=until)


async def rows_by_key(tx: Connection, stage: Stage, keys: Sequence[tuple[str, int]]) -> list[asyncpg.Record]:
    """What is known of rows named by file and shard: id, fence, status, attempts."""
    return await tx.fetch(SQL[stage]["rows_by_key"], [key[0] for key in keys], [key[1] for key in keys])


async def held_by(tx: Connection, stage: Stage, worker: str) -> list[asyncpg.Record]:
    """What *worker* holds under a lease."""
    return await tx.fetch(SQL[stage]["held_by"], worker)


async def settle(
    tx: Connection, stage: Stage, lease: Lease[Status], reports: Sequence[Report], *, now: datetime
) -> list[Result]:
    """T13: end what is still held; one result per report, in their order."""
    keys = list({(report.filename, report.shard): None for report in reports})
    found = {(row["filename"], row["shard"]): row for row in await rows_by_key(tx, stage, keys)}
    known = [(report, found[key]) for report in reports if (key := (report.filename, report.shard)) in found]
    told = await lease.settle(tx, [_lease_report(report, row, now) for report, row in known], now=now)
    settled = {(one.id, one.fence): one for one in told}
    answered: set[tuple[int, int]] = set()
    return [_result(report, found.get((report.filename, report.shard)), settled, answered) for report in reports]


def _result(
    report: Report,
    row: asyncpg.Record | None,
    settled: Mapping[tuple[int, int], Settled[Status]],
    answered: set[tuple[int, int]],
) -> Result:
    """Of two reports on one row the first was believed; the other said the same, or came too late."""
    if row is None:
        return Result(report, Answer.UNKNOWN, None)
    key = row["id"], report.fence
    one = settled.get(key)
    if one is None:
        return Result(report, Answer.SUPERSEDED, Status(row["status"]))
    if one.moved and key not in answered:
        answered.add(key)
        return Result(report, Answer.SETTLED, one.state)
    says_so = one.state in (TARGETS[report.said], Status.FAILED if report.said is Said.RETRY else one.state)
    return Result(report, Answer.UNCHANGED if says_so else Answer.SUPERSEDED, one.state)


def _lease_report(report: Report, row: asyncpg.Record, now: datetime) -> LeaseReport[Status]:
    due_at = None
    if report.said is Said.RETRY:
        due_at = now + (delay(row["attempts"]) if report.retry_after is None else report.retry_after)
    counts = report.said is not Said.RELEASE
    return LeaseReport(row["id"], report.fence, TARGETS[report.said], report.error, due_at, counts)


async def list_queue(
    tx: Connection,
    stage: Stage,
    after: tuple[datetime, int],
    *,
    updated_since: datetime | None,
    updated_before: datetime | None,
    limit: int,
    offset: int,
) -> list[asyncpg.Record]:
    """What waits for *stage* after a place in its queue: id, filename, shard, created_at, due_at."""
    return await tx.fetch(SQL[stage]["list_queue"], *after, updated_since, updated_before, limit, offset)


async def count_ahead(tx: Connection, stage: Stage, row: Row, limit: int) -> int:
    """How many rows of the queue come before *row*, up to *limit*."""
    return int(await tx.fetchval(SQL[stage]["count_ahead"], row.due_at, row.id, limit))


async def oldest(tx: Connection, stage: Stage) -> datetime | None:
    """When the first row of the queue was created."""
    found: datetime | None = await tx.fetchval(SQL[stage]["oldest"])
    return found


async def list_files(tx: Connection, stands: Stands, after: str, limit: int) -> list[str]:
    """Files after *after* with a row that stands so, by name."""
    within = (after, stands.prefix, stands.prefix + _LAST_CHARACTER)
    asked = (stands.shard, stands.updated_since, stands.updated_before)
    records = await tx.fetch(_standing("list_files", stands), *within, *asked, limit)
    return [record["filename"] for record in records]


async def list_rows(tx: Connection, stands: Stands, filenames: Sequence[str]) -> list[Row]:
    """The rows of *filenames* that stand so."""
    asked = (stands.shard, stands.updated_since, stands.updated_before)
    return [_row(record) for record in await tx.fetch(_standing("list_rows", stands), filenames, *asked)]


def _standing(name: str, stands: Stands) -> str:
    """The statement for just this stage and status, as literals: only so the index of open rows is used."""
    stages = [stands.stage] if stands.stage else list(Stage)
    words = [f"t.{stage.field}_status = {MACHINES[stage].sql(stands.status.name)}" for stage in stages if stands.status]
    return _ANY[name].replace("<stands>", " OR ".join(words) or "true")


async def failed_files(tx: Connection, stage: Stage, failed: FailedSo, limit: int) -> list[str]:
    """Files whose rows failed so."""
    return [record["filename"] for record in await tx.fetch(SQL[stage]["failed_files"], *_asked(failed), limit)]


async def retry_rows(
    tx: Connection, stage: Stage, failed: FailedSo, limit: int, *, actor: str, reason: str | None, now: datetime
) -> int:
    """Set up to *limit* failed rows back to new; how many."""
    return int(await tx.fetchval(SQL[stage]["retry_rows"], *_asked(failed), limit, now, actor, reason))


def _asked(failed: FailedSo) -> tuple[Any, ...]:
    bounds = (failed.prefix, failed.prefix + _LAST_CHARACTER)
    return (*bounds, failed.shards, failed.failed_since, failed.failed_before, failed.error_contains)


async def last_error(tx: Connection, stage: Stage, row: Row) -> str | None:
    """Why *row* failed last in *stage*."""
    found: str | None = await tx.fetchval(SQL[stage]["last_error"], subject(row.filename, row.shard))
    return found


async def counts(tx: Connection) -> list[Count]:
    """How many rows stand where, exactly."""
    return [_count(record) for record in await tx.fetch(_ANY["counts"])]


async def fold_counts(tx: Connection) -> int:
    """Put the changes of the counts together; how many there were."""
    return int(await tx.fetchval(_ANY["fold_counts"]))


async def pauses(tx: Connection) -> dict[Stage, Pause]:
    """The stages that are paused."""
    records = await tx.fetch(_ANY["pauses"])
    found = [Pause(Stage(record["stage"]), record["since"], record["actor"], record["reason"]) for record in records]
    return {pause.stage: pause for pause in found}


async def pause(tx: Connection, stage: Stage, *, actor: str, reason: str | None, now: datetime) -> None:
    await tx.execute(_ANY["pause"], stage.value, now, actor, reason)


async def resume(tx: Connection, stage: Stage) -> None:
    await tx.execute(_ANY["resume"], stage.value)


def subject(filename: str, shard: int) -> str:
    """What the journal calls a row."""
    return f"{filename}/{shard}"


def _row(record: asyncpg.Record) -> Row:
    return Row(
        id=record["id"],
        filename=record["filename"],
        shard=record["shard"],
        status={stage: Status(record[f"{stage.field}_status"]) for stage in Stage},
        attempts={stage: record[f"{stage.field}_attempts"] for stage in Stage},
        created_at=record["created_at"],
        updated_at=record["updated_at"],
        due_at=record["due_at"],
        fence=record["fence"],
        worker=record["worker"],
        lease_until=record["lease_until"],
    )


def _count(record: asyncpg.Record) -> Count:
    is_ready = record["standing"] == _READY
    status = Status.NEW if is_ready else Status(record["standing"])
    return Count(Stage(record["stage"]), status, is_ready, record["shard"], record["rows"])
