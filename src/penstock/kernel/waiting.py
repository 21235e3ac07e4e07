"""Waiting for something, but not for ever; ending a task without hiding one's own end."""

import asyncio
import contextlib


async def happens(event: asyncio.Event, within: float) -> bool:
    """Whether *event* is set within so many seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), within)
    return event.is_set()


async def ended(task: "asyncio.Task[None]") -> None:
    """Cancel *task* and wait for its end. To suppress CancelledError here would also swallow the caller's own."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
