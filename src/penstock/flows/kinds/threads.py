"""Work that blocks, in a thread of its own."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_a_thread(work: Callable[[], T], name: str) -> T:
    """What *work* returns or raises; whoever stops waiting leaves it alone.

    Not in the pool everybody shares: a few steps that take hours would fill it, and the program's end wait for them.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            settle: tuple[Callable[[Any], None], Any] = (future.set_result, context.run(work))
        except StopIteration as error:  # no future can carry it
            settle = (future.set_exception, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            settle = (future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, future, *settle)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


def _settle(future: "asyncio.Future[T]", how: Callable[[Any], None], what: Any) -> None:
    if not future.done():  # else whoever waited was cancelled
        how(what)
