"""Wait with a timeout, and cancel tasks without swallowing the cancellation of the caller."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_CANCEL_AGAIN = 10.0


async def wait_event(event: asyncio.Event, timeout: float) -> bool:
    """Return whether *event* is set before *timeout* seconds have passed."""
    # Not wait_for: in Python 3.11 it may swallow a cancellation.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()
    return event.is_set()


async def wait_any_event(events: Sequence[asyncio.Event], timeout: float) -> bool:
    """Return whether one of *events* is set before *timeout* seconds have passed."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(timeout)
    finally:
        for task in waiting:
            task.cancel()
    return any(event.is_set() for event in events)


async def cancel_and_wait(task: "asyncio.Task[None]") -> None:
    """Cancel *task* and wait for its end. Suppressing CancelledError instead would swallow the caller's own."""
    while not task.done():
        task.cancel()
        # Repeated, because code in between may replace the CancelledError by another error.
        await asyncio.wait([task], timeout=_CANCEL_AGAIN)
    if not task.cancelled():
        task.result()


async def run_with_timeout(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Return what *work* returns; raise TimeoutError after *seconds*, and leave the cancelled task to end by itself.

    `asyncio.timeout` would wait for that end: a cancelled query waits for an answer of the server, and a server
    that is frozen sends none.
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
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, or asyncio logs it
