"""From blocking code to what is async: an event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class AsyncBridge:
    """Any number of threads may call; never the loop's own, which would wait for itself."""

    def __init__(self, name: str = "bridge") -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """What *work* returns or raises; whoever stops waiting for it stops it."""
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

    def each(self, items: AsyncIterator[T]) -> Generator[T, None, None]:
        """Every item as it is asked for; what *items* holds open is closed at the end, early or not."""
        try:
            while (item := self.call(_next(items))) is not None:
                yield item[0]
        finally:
            self.call(_closed(items))

    @contextmanager
    def entered(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """What *manager* gives, as long as we stay inside."""
        value = self.call(manager.__aenter__())
        try:
            yield value
        except BaseException as error:
            if not self.call(manager.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            self.call(manager.__aexit__(None, None, None))

    def close(self) -> None:
        """Stop what is still under way; closing twice is closing once."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._closing.wait())


async def _next(items: AsyncIterator[T]) -> tuple[T] | None:
    """In a tuple: an item may be None, and the end is no error."""
    async for item in items:
        return (item,)
    return None


async def _closed(items: AsyncIterator[Any]) -> None:
    if (close := getattr(items, "aclose", None)) is not None:
        await close()
