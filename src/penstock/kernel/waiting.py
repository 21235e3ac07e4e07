"""Waiting for something, but not for ever; ending a task without hiding one's own end."""

import asyncio
import contextlib


async def happens(event: asyncio.Event, within: float) -> bool:
    """Whether *event* is set within so many seconds."""
    # Not wait_for: in Python 3.11 it may swallow a cancellation.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within):
            await event.wait()
    return event.is_set()


async def ended(task: "asyncio.Task[None]") -> None:
    """Cancel *task* and wait for its end. To suppress CancelledError here would also swallow the caller's own."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
