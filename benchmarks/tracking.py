"""The pipeline's queue beside PgQueuer: the same PostgreSQL, the same run, durable commits.

Each drain hands out and ends every row. In process that is `Tracking.claim` and `Tracking.report`; through HTTP it is
the same asked of a `pipeline-apid` by its client. A row costs two moves, each with its history and exact counters.
"""

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks import peers
from benchmarks.harness import Bench, Group
from benchmarks.servers import served
from benchmarks.session import Session
from penstock.app.schema import list_tracking_migrations
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.tracking import maintenance
from penstock.tracking.client import PipelineClient, RowResult
from penstock.tracking.config import TrackingSection
from penstock.tracking.contract import Stage, StageReportKind
from penstock.tracking.metrics import TrackingMetrics
from penstock.tracking.model import RowReport
from penstock.tracking.service import Tracking

STAGE = Stage.SHARD_SPLITTER
WORKERS = 4
PEER_WAYS = ("manager", "manager-pool")
CHUNK = 500_000
FILL = """
INSERT INTO pipeline_tracking (filename, shard, event_ingest_status)
SELECT $1 || '-' || lpad((n / 16)::text, 9, '0'), n % 16, 'done' FROM generate_series(0, $2::int - 1) AS n
"""
FINISHED = """
INSERT INTO pipeline_tracking
    (filename, shard, event_ingest_status, shard_splitter_status, shard_worker_status, mysql_sender_status, moves)
SELECT '2024' || lpad((n / 16)::text, 10, '0'), n % 16, 'done', 'done', 'done', 'done', ARRAY[1, 2, 3, 4, 5, 6, 7, 8]
FROM generate_series($1::int, $2::int - 1) AS n
"""
_names = itertools.count()


@dataclass(frozen=True)
class Sizes:
    """Rows of a drain by the size of a batch: one by one a rate shows sooner."""

    drained: dict[int, int]


@dataclass(frozen=True)
class LargeSizes:
    """Rows of a drain, finished rows beside them, and how often the summary is asked for."""

    drained: int
    finished: int
    summaries: int


Drain = Callable[[int, int], Awaitable[None]]


@asynccontextmanager
async def benches(session: Session, sizes: Sizes) -> AsyncIterator[list[Bench]]:
    """Open drains by batch size, ours and the peer's, on one server."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(run_embedded_postgres(session.postgres))
        db, tracking = await stack.enter_async_context(_tracking(url))
        client = await stack.enter_async_context(_served(url))
        python = await peers.environment("pgqueuer", *peers.PGQUEUER) if session.has_peers("PgQueuer") else None
        found: list[Bench] = []
        for batch, rows in sizes.drained.items():
            found += _ours(db, tracking, client, rows, batch)
            found += [_peer(python, url, rows, batch, how) for how in PEER_WAYS] if python else []
        yield found


@asynccontextmanager
async def large_benches(session: Session, sizes: LargeSizes) -> AsyncIterator[list[Bench]]:
    """Open the same drain and the summary, on an empty table and on one with many finished rows."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(run_embedded_postgres(session.postgres))
        found: list[Bench] = []
        for name, finished in (("an empty table", 0), (f"{sizes.finished:,} rows", sizes.finished)):
            own = await _database(url, f"pipeline_{finished}")
            db, tracking = await stack.enter_async_context(_tracking(own))
            await _fill_finished(db, finished)
            drain, rows = _in_process(tracking), sizes.drained
            found.append(_bench(f"drain in 100s, {name}", db, rows, 100, 1, drain, keep=True))
            found.append(Bench(f"claim in 100s, {name}", "rows", partial(_claims, db, tracking, rows)))
            found.append(Bench(f"summary, {name}", "answers", partial(_summaries, tracking, sizes.summaries), 50))
        yield found


GROUP = Group(benches, full=Sizes({1: 5_000, 10: 20_000, 100: 50_000}), smoke=Sizes({1: 10, 10: 50, 100: 200}))
LARGE_GROUP = Group(
    large_benches,
    full=LargeSizes(drained=50_000, finished=10_000_000, summaries=200),
    smoke=LargeSizes(drained=200, finished=1_000, summaries=5),
)


def _ours(db: Database, tracking: Tracking, client: PipelineClient, rows: int, batch: int) -> list[Bench]:
    ways = [("in process", _in_process(tracking)), ("through HTTP", _through_http(client))]
    return [
        _bench(f"batches of {batch}: {how}, {_workers(count)}", db, rows, batch, count, drain)
        for how, drain in ways
        for count in (1, WORKERS)
    ]


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _bench(name: str, db: Database, rows: int, batch: int, count: int, drain: Drain, *, keep: bool = False) -> Bench:
    async def measure() -> float:
        if not keep:
            await db.execute("TRUNCATE pipeline_tracking, journal")
        await _fill(db, rows)
        began = perf_counter()
        await asyncio.gather(*(drain(batch, number) for number in range(count)))
        rate = rows / (perf_counter() - began)
        left = await db.fetchval(f"SELECT count(*) FROM pipeline_tracking WHERE {STAGE.field}_status <> 'done'")
        assert left == 0, f"{left} rows were not drained"
        return rate

    return Bench(name, "rows", measure)


def _in_process(tracking: Tracking) -> Drain:
    async def drain(batch: int, number: int) -> None:
        while held := await tracking.claim(STAGE, f"worker-{number}", limit=batch):
            reports = [
                RowReport(claimed.filename, claimed.shard, claimed.fence, StageReportKind.DONE) for claimed in held
            ]
            await tracking.report(STAGE, reports)

    return drain


def _through_http(client: PipelineClient) -> Drain:
    async def drain(batch: int, number: int) -> None:
        while held := await client.claim(STAGE, f"worker-{number}", limit=batch):
            await client.report(
                STAGE,
                [RowResult(claimed.filename, claimed.shard, claimed.fence, StageReportKind.DONE) for claimed in held],
            )

    return drain


def _peer(python: Path, url: str, rows: int, batch: int, how: str) -> Bench:
    async def measure() -> float:
        args = ("--dsn", url, "--rows", str(rows), "--batch", str(batch), "--how", how)
        result = await peers.ask(python, peers.PGQUEUER_DRAIN, *args)
        return float(result["rate"])

    return Bench(f"batches of {batch}: PgQueuer, {how}", "rows", measure)


async def _claims(db: Database, tracking: Tracking, rows: int) -> float:
    """Return rows a second while claiming; what is claimed is reported, but not timed."""
    await _fill(db, rows)
    seconds, began = 0.0, perf_counter()
    while held := await tracking.claim(STAGE, "worker", limit=100):
        seconds += perf_counter() - began
        await tracking.report(
            STAGE, [RowReport(claimed.filename, claimed.shard, claimed.fence, StageReportKind.DONE) for claimed in held]
        )
        began = perf_counter()
    return rows / seconds


async def _summaries(tracking: Tracking, times: int) -> float:
    began = perf_counter()
    for _ in range(times):
        await tracking.count_rows()
    return times / (perf_counter() - began)


@asynccontextmanager
async def _tracking(url: str) -> AsyncIterator[tuple[Database, Tracking]]:
    """The service as `pipeline-apid` runs it, with its periodic tasks."""
    async with AsyncExitStack() as stack:
        db = await stack.enter_async_context(Database.open(url, prefers_indexes=True))
        await migrate.migrate(db, list_tracking_migrations())
        metrics = TrackingMetrics(Telemetry().registry)
        tracking = await stack.enter_async_context(Tracking.open(db, TrackingSection(), metrics))
        for name, task, every in maintenance.list_periodic_tasks(tracking):
            await stack.enter_async_context(run_periodically(name, task, every))
        yield db, tracking


@asynccontextmanager
async def _served(url: str) -> AsyncIterator[PipelineClient]:
    """A client of a `pipeline-apid` on the same database, which is a process of its own."""
    command = ["-m", "penstock.cli.pipeline_apid", "--port", "0", "--database", url, "--json"]
    async with served(*command) as api, PipelineClient(api) as client:
        yield client


async def _database(url: str, name: str) -> str:
    """Another database on the same server."""
    async with Database.open(url, size=2) as admin:
        await admin.execute(f'CREATE DATABASE "{name}"')
    head, _, query = url.partition("?")
    return f"{head.rpartition('/')[0]}/{name}" + (f"?{query}" if query else "")


async def _fill(db: Database, rows: int) -> None:
    """Rows that wait, written down: what a drain is timed for must not be the writing of what was there before."""
    await db.execute(FILL, f"f{next(_names):06}", rows)
    await db.execute("CHECKPOINT")


async def _fill_finished(db: Database, rows: int) -> None:
    for start in range(0, rows, CHUNK):
        print(f"filling {start:,} of {rows:,} rows", file=sys.stderr)
        await db.execute(FINISHED, start, min(start + CHUNK, rows))
    await db.execute("VACUUM ANALYZE pipeline_tracking")
