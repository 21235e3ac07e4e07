"""Running steps of the platform kinds, whose workers die or must stop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.flows.step import FlowStep, Handler
from tests.flows.memory_step_io import run_failing_step, run_step
from tests.support.types import Json


@asynccontextmanager
async def running_step(handler: Handler, step: FlowStep) -> "AsyncIterator[asyncio.Task[Json]]":
    """Execute a step in the background; if it has not ended, its worker dies at the end of the context."""
    task = asyncio.create_task(run_step(handler, step))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def assert_stops(handler: Handler, step: FlowStep) -> None:
    """Check that a cancelled step stops where it would wait."""
    step.cancelled.set()
    assert (await run_failing_step(handler, step)).error.code == "CANCELLED"
