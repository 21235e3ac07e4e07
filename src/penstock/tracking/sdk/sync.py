"""A daemon of a stage for code without asyncio."""

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

from penstock.tracking.sdk.daemon import StageDaemon
from penstock.tracking.sdk.item import Item

T = TypeVar("T")


class SyncStageDaemon:
    """A `StageDaemon` for code without asyncio: `with SyncStageDaemon(…) as daemon: for item in daemon: …`.

    Heartbeats and reports run in a separate thread while the body of the loop works.
    """

    def __init__(self, stage: str, url: str, **options: Any) -> None:
        self._stage, self._url = stage, url
        self._handle_signals = options.pop("handle_signals", True)
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"daemon of {stage}", daemon=True)
        self._daemon: StageDaemon | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "SyncStageDaemon":
        self._thread.start()

        async def enter() -> StageDaemon:
            return await StageDaemon(self._stage, self._url, **self._options, handle_signals=False).__aenter__()

        try:
            self._daemon = self._run(enter())
        except BaseException:
            self._end_thread()
            raise
        if self._handle_signals and threading.current_thread() is threading.main_thread():
            self._handlers = {n: signal.signal(n, self._on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore_signals()
        try:
            self._run(self._inner.__aexit__(kind, error, trace))
        finally:
            self._end_thread()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        try:
            item = self._run(self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None
        return item.make_thread_safe(self._loop, self._thread.ident)

    def stop(self) -> None:
        """End the loop after the current item, and release the other claimed items."""
        self._loop.call_soon_threadsafe(self._inner.stop)

    def flush(self) -> None:
        """Wait until the server has all outcomes reported so far."""
        self._run(self._inner.flush())

    @property
    def _inner(self) -> StageDaemon:
        if self._daemon is None:
            raise RuntimeError("SyncStageDaemon must be used in a `with` statement")
        return self._daemon

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._restore_signals()
        self.stop()

    def _restore_signals(self) -> None:
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
