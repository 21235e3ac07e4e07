"""Periodic tasks: run at an interval while a process lives; a failed round does not stop the next."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from random import uniform

import structlog

from penstock.kernel.errors import PenstockError
from penstock.kernel.tasks.wait import cancel_and_wait

PeriodicTask = Callable[[], Awaitable[object]]


@asynccontextmanager
async def run_periodically(name: str, run: PeriodicTask, every: timedelta) -> AsyncIterator[None]:
    """Call *run* about every *every* in the background; log a failed round and continue with the next."""
    task = asyncio.create_task(_run_rounds(name, run, every.total_seconds()), name=f"periodic {name}")
    try:
        yield
    finally:
        await cancel_and_wait(task)


async def _run_rounds(name: str, run: PeriodicTask, seconds: float) -> None:
    log = structlog.get_logger().bind(task=name)
    while True:
        try:
            await run()
        except PenstockError as error:
            log.warning("periodic_task_failed", code=error.code, error=error.message)
        except Exception:
            log.exception("periodic_task_crashed")
        await asyncio.sleep(seconds * uniform(0.8, 1.2))  # noqa: S311 - jitter: pods must not run in step
