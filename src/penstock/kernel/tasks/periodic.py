"""Chores: done now and then for as long as a process lives, whatever happens to one round."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from random import uniform

import structlog

from penstock.kernel.errors import PenstockError
from penstock.kernel.tasks.wait import ended

Chore = Callable[[], Awaitable[object]]


@asynccontextmanager
async def repeating(name: str, chore: Chore, every: timedelta) -> AsyncIterator[None]:
    """Do *chore* about *every* so often in the background; a round that fails is logged, the next one comes."""
    task = asyncio.create_task(_repeat(name, chore, every.total_seconds()), name=f"chore {name}")
    try:
        yield
    finally:
        await ended(task)


async def _repeat(name: str, chore: Chore, seconds: float) -> None:
    log = structlog.get_logger().bind(chore=name)
    while True:
        try:
            await chore()
        except PenstockError as error:
            log.warning("chore_failed", code=error.code, error=error.message)
        except Exception:
            log.exception("chore_crashed")
        await asyncio.sleep(seconds * uniform(0.8, 1.2))  # noqa: S311 - so that pods do not march in step
