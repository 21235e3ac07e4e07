"""A bridge from blocking code to async code: an event loop in a separate thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class AsyncBridge:
    """An event loop that other threads can call; a call from its own thread would deadlock."""

    def __init__(self, name: str = "bridge") -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return or raise the result of *work*; *work* is cancelled if the caller is interrupted."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Generator[T, None, None]:
        """Yield each of *items* on demand; *items* is closed at the end, also if the caller stops early."""
        try:
            while (item := self.call(_read_next(items))) is not None:
                yield item[0]
        finally:
            self.call(_close(items))

    @contextmanager
    def enter(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Enter the async *manager* for the duration of the block."""
        value = self.call(manager.__aenter__())
        try:
            yield value
        except BaseException as error:
            if not self.call(manager.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            self.call(manager.__aexit__(None, None, None))

    def close(self) -> None:
        """Cancel running calls and stop the thread; a second call has no effect."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._closing.wait())


async def _read_next(items: AsyncIterator[T]) -> tuple[T] | None:
    """Return the next item in a tuple, because an item may be None; None at the end."""
    async for item in items:
        return (item,)
    return None


async def _close(items: AsyncIterator[Any]) -> None:
    if (close := getattr(items, "aclose", None)) is not None:
        await close()
