"""Waiting for something, but not for ever."""

import asyncio
import contextlib


async def happens(event: asyncio.Event, within: float) -> bool:
    """Whether *event* is set within so many seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), within)
    return event.is_set()
