"""Drain a PgQueuer queue with one worker and print its rate as JSON; run by the python of PgQueuer's environment.

Durability is PgQueuer's default, `durable`: all its tables are logged, and a commit is as durable as the server makes
it. What its tuning guide recommends is applied: `pgq autovac`, asyncpg, uvloop, no concurrency limit.
"""

import argparse
import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from importlib.metadata import version
from time import perf_counter
from typing import Any

import asyncpg
import uvloop
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver  # type: ignore[import-not-found]
from pgqueuer.ports.repository import EntrypointExecutionParameter  # type: ignore[import-not-found]
from pgqueuer.qm import QueueManager  # type: ignore[import-not-found]
from pgqueuer.queries import Queries  # type: ignore[import-not-found]
from pgqueuer.types import QueueExecutionMode  # type: ignore[import-not-found]

ENTRYPOINT = "noop"
HEARTBEAT = timedelta(seconds=30)  # PgQueuer's default
POOL = 4
WARM_UP = 10  # batches
VERIFY = """
SELECT (SELECT count(*) FROM pgqueuer) AS left_over,
       (SELECT count(DISTINCT job_id) FROM pgqueuer_log WHERE status = 'successful') AS successful,
       (SELECT count(*) FROM pg_class
        WHERE oid IN ('pgqueuer'::regclass, 'pgqueuer_log'::regclass) AND relpersistence <> 'p') AS unlogged
"""


class TimedQueries(Queries):  # type: ignore[misc]
    """PgQueuer's queries, which remember when the first dequeue began and when the last job was logged."""

    began = 0.0
    ended = 0.0

    async def dequeue(self, *args: Any, **options: Any) -> Any:
        self.began = self.began or perf_counter()
        return await super().dequeue(*args, **options)

    async def log_jobs(self, job_status: list[Any]) -> None:
        await super().log_jobs(job_status)
        self.ended = perf_counter()


async def drain_with_queries(queries: TimedQueries, batch: int) -> None:
    """Take a batch, do nothing with it, log it, until none is left: two statements a batch."""
    async for jobs in _batches(queries, batch):
        await _log(queries, jobs)


async def drain_overlapping(queries: TimedQueries, batch: int) -> None:
    """The same with two connections at once: a batch is logged while the next is taken."""
    logging: asyncio.Task[None] | None = None
    async for jobs in _batches(queries, batch):
        if logging:
            await logging
        logging = asyncio.create_task(_log(queries, jobs))
    if logging:
        await logging


async def drain_with_manager(queries: TimedQueries, batch: int) -> None:
    """PgQueuer's own worker: a task per job, statuses logged from a buffer beside the next dequeue."""
    manager = QueueManager(queries)
    manager.entrypoint(ENTRYPOINT)(_noop)
    await manager.run(
        mode=QueueExecutionMode.drain,
        batch_size=batch,
        dequeue_timeout=timedelta(milliseconds=1),  # how long it idles at the end before it looks whether it is done
        heartbeat_timeout=HEARTBEAT,
        log_aggregation_interval=timedelta(0),  # no statistics during the measurement
    )


async def _batches(queries: TimedQueries, batch: int) -> AsyncIterator[list[Any]]:
    entrypoints = {ENTRYPOINT: EntrypointExecutionParameter(concurrency_limit=0)}
    worker = uuid.uuid4()
    while jobs := await queries.dequeue(batch, entrypoints, worker, None, HEARTBEAT):
        for job in jobs:
            await _noop(job)
        yield jobs


async def _log(queries: TimedQueries, jobs: list[Any]) -> None:
    await queries.log_jobs([(job, "successful", None) for job in jobs])


@asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn)
    try:
        yield AsyncpgDriver(connection)
    finally:
        await connection.close()


@asynccontextmanager
async def _pooled(dsn: str) -> AsyncIterator[Any]:
    async with asyncpg.create_pool(dsn, min_size=POOL, max_size=POOL) as pool:
        yield AsyncpgPoolDriver(pool)


Connect = Callable[[str], AbstractAsyncContextManager[Any]]
Drain = Callable[[TimedQueries, int], Awaitable[None]]
WAYS: dict[str, tuple[Connect, Drain]] = {
    "queries": (_connected, drain_with_queries),
    "queries-pool": (_pooled, drain_overlapping),
    "manager": (_connected, drain_with_manager),
    "manager-pool": (_pooled, drain_with_manager),
}


async def measure(dsn: str, rows: int, batch: int, how: str) -> dict[str, Any]:
    """How fast a queue of *rows* jobs is drained, after a warm-up; exits when not every job was logged successful."""
    connect, drain = WAYS[how]
    async with connect(dsn) as driver:
        for jobs in (WARM_UP * batch, rows):
            queries = TimedQueries(driver)
            await _fill(queries, jobs)
            await drain(queries, batch)
            await _verify(driver, jobs)
    seconds = queries.ended - queries.began
    found = {"rows": rows, "batch": batch, "seconds": round(seconds, 4), "rate": round(rows / seconds, 1)}
    return {**found, "version": version("pgqueuer"), "how": how}


async def _fill(queries: TimedQueries, jobs: int) -> None:
    if not await queries.schema_is_installed():
        await queries.install()
        await queries.optimize_autovacuum()
    await queries.clear_queue()
    await queries.clear_queue_log()
    await queries.clear_statistics_log()
    await queries.enqueue([ENTRYPOINT] * jobs, [None] * jobs, [0] * jobs)
    await queries.driver.execute("VACUUM ANALYZE pgqueuer, pgqueuer_log")


async def _verify(driver: Any, jobs: int) -> None:
    [found] = await driver.fetch(VERIFY)
    if found != {"left_over": 0, "successful": jobs, "unlogged": 0}:
        sys.exit(f"of {jobs} jobs: {found}")


async def _noop(job: Any) -> None:
    """The job: nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--how", choices=WAYS, default="queries")
    args = parser.parse_args()
    print(json.dumps(uvloop.run(measure(args.dsn, args.rows, args.batch, args.how))))


if __name__ == "__main__":
    main()
