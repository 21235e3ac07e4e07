"""Waiting for something, but not for ever; ending a task without hiding one's own end."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_CANCEL_AGAIN = 10.0


async def happens(event: asyncio.Event, within: float) -> bool:
    """Whether *event* is set within so many seconds."""
    # Not wait_for: in Python 3.11 it may swallow a cancellation.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within):
            await event.wait()
    return event.is_set()


async def any_happens(events: Sequence[asyncio.Event], within: float) -> bool:
    """Whether one of *events* is set within so many seconds."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=within, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(within)
    finally:
        for one in waiting:
            one.cancel()
    return any(event.is_set() for event in events)


async def ended(task: "asyncio.Task[None]") -> None:
    """Cancel *task* and wait for its end. To suppress CancelledError here would also swallow the caller's own."""
    while not task.done():
        task.cancel()
        # Again, should it get lost: something on the way may raise another error in its place.
        await asyncio.wait([task], timeout=_CANCEL_AGAIN)
    if not task.cancelled():
        task.result()


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What *work* returns; TimeoutError when it takes longer, and then it is left to end by itself.

    Unlike `asyncio.timeout` this does not wait for its end: a query that is cancelled waits for the server to agree,
    and a server that is frozen does not.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if not done:
        _abandon(task)
        raise TimeoutError
    return task.result()


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what *works* return, all run at once; when one fails, no other is left running."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _abandon(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else will look at it
