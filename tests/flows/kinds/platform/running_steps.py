"""Steps of the platform kinds whose workers die, or are told to stop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.flows.step import FlowStep, Handler
from tests.flows.memory_step_io import run_failing_step, run_step
from tests.support.types import Json


@asynccontextmanager
async def under_way(handler: Handler, step: FlowStep) -> "AsyncIterator[asyncio.Task[Json]]":
    """A step being worked on; at the end its worker dies, unless it is done."""
    task = asyncio.create_task(run_step(handler, step))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def is_stopped(handler: Handler, step: FlowStep) -> None:
    """A step that was told to stop does so where it would wait."""
    step.cancelled.set()
    assert (await run_failing_step(handler, step)).error.code == "CANCELLED"
