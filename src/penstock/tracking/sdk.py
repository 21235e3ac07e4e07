"""T18: a stage's daemon in Python. Claims, heartbeats and reports go on behind a plain loop.

    async with StageDaemon("shard-worker", "http://127.0.0.1:8085") as daemon:
        async for item in daemon:
            work(item.filename, item.shard)

An item is done when the loop asks for the next one, unless it was failed or retried before. What leaves the loop by an
exception is tried again later. Delivery is at least once: an item can come again (`attempt` > 1) if its worker died
between the work and the report.
"""

import asyncio
import signal
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import structlog

from penstock.kernel.backoff import Backoff, delay
from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.ids import worker_name
from penstock.kernel.outcome import readable
from penstock.kernel.waiting import ended, happens
from penstock.tracking.client import Claimed, Ended, PipelineClient
from penstock.tracking.contract import Answer, Said, Stage
from penstock.tracking.model import queue_named

T = TypeVar("T")
_WAIT = 2.0  # seconds one request waits for work; so long may a stop take
_REPORTS = 500  # in one request


@dataclass(eq=False)
class Item:
    """One row to work on, held for this daemon until it is ended or lost."""

    filename: str
    shard: int
    attempt: int
    fence: int
    _end: Callable[["Item", Ended], None] = field(repr=False)
    is_ended: bool = False
    is_lost: bool = False  # somebody else may have it by now: stop working on it

    def done(self) -> None:
        """The work is finished."""
        self._say(Said.DONE)

    def fail(self, error: str) -> None:
        """It cannot be done; it stays failed until somebody retries it."""
        self._say(Said.FAILED, error)

    def retry(self, error: str, *, after: float | None = None) -> None:
        """Not now: hand it out again, after so many seconds or after a while that grows with its attempts."""
        seconds = delay(self.attempt).total_seconds() if after is None else after
        self._say(Said.RETRY, error, seconds)

    def release(self) -> None:
        """Not begun: hand it out again, as if it had never been claimed."""
        self._say(Said.RELEASE)

    def ended_from(self, loop: asyncio.AbstractEventLoop) -> "Item":
        """The item, for a thread in which *loop* does not run."""
        end = self._end

        def hand_over(item: Item, how: Ended) -> None:
            loop.call_soon_threadsafe(end, item, how)

        self._end = hand_over
        return self

    def _say(self, outcome: Said, error: str | None = None, after: float | None = None) -> None:
        if not self.is_ended:
            self.is_ended = True
            said = readable(error) if error else None
            self._end(self, Ended(self.filename, self.shard, self.fence, outcome, said, after))


class StageDaemon:
    """The rows of one stage, one after another, for as long as nobody says stop."""

    def __init__(
        self,
        stage: str,
        url: str,
        *,
        worker: str | None = None,
        batch: int = 10,
        lease: float = 60,
        token: str | None = None,
        handle_signals: bool = True,
    ) -> None:
        self.stage = queue_named(stage)
        self.worker = worker or worker_name(self.stage)
        self._batch = batch
        self._lease = lease
        self._client = PipelineClient(url, token=token)
        self._handle_signals = handle_signals
        self._waiting: deque[Item] = deque()
        self._current: Item | None = None
        self._stopping = asyncio.Event()
        self._reporter = _Reporter(self._client, self.stage)
        self._tasks: list[asyncio.Task[None]] = []
        self._log = structlog.get_logger().bind(stage=self.stage.value, worker=self.worker)

    async def __aenter__(self) -> "StageDaemon":
        await self._client.__aenter__()
        self._tasks = [
            asyncio.create_task(self._reporter.run(), name=f"reports of {self.worker}"),
            asyncio.create_task(self._keep(), name=f"heartbeats of {self.worker}"),
        ]
        self._listen_to_signals()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ignore_signals()
        self._give_up_current(error)
        while self._waiting:
            self._waiting.popleft().release()
        try:
            await self._reporter.flush(within=self._lease)
        finally:
            for task in self._tasks:
                await ended(task)
            await self._client.__aexit__(kind, error, trace)

    def __aiter__(self) -> "StageDaemon":
        return self

    async def __anext__(self) -> Item:
        if self._current is not None:
            self._current.done()
            self._current = None
        self._reporter.complain()
        while not self._stopping.is_set():
            self._drop_lost()
            if self._waiting:
                self._current = self._waiting.popleft()
                return self._current
            self._waiting.extend(await self._claim())
        raise StopAsyncIteration

    def stop(self) -> None:
        """End the loop after the current item, and give back the others."""
        self._stopping.set()

    async def flush(self) -> None:
        """Wait until everything said so far is on record."""
        await self._reporter.flush(within=self._lease)

    async def _claim(self) -> list[Item]:
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                held = await self._client.claim(
                    self.stage, self.worker, limit=self._batch, lease=self._lease, wait=_WAIT
                )
            except Transient as error:
                self._log.warning("claim_failed", code=error.code, error=error.message)
                await happens(self._stopping, backoff.next().total_seconds())
            else:
                return [self._item(one) for one in held]
        return []

    def _item(self, one: Claimed) -> Item:
        item = Item(one.filename, one.shard, one.attempt, one.fence, self._reporter.add)
        self._reporter.held.add(item)
        return item

    async def _keep(self) -> None:
        """Hold on to everything that is not yet reported, and mark what was lost meanwhile."""
        while True:
            await asyncio.sleep(self._lease / 3)
            held = {(item.filename, item.shard, item.fence): item for item in self._reporter.held}
            if not held:
                continue
            try:
                lost = await self._client.heartbeat(self.stage, self.worker, held, lease=self._lease)
            except PenstockError as error:
                self._log.warning("heartbeat_failed", code=error.code, error=error.message)
                continue
            for name in lost & held.keys():
                held[name].is_lost = True
                self._reporter.held.discard(held[name])
                self._log.warning("item_lost", filename=name[0], shard=name[1], fence=name[2])

    def _drop_lost(self) -> None:
        self._waiting = deque(item for item in self._waiting if not item.is_lost)

    def _give_up_current(self, error: BaseException | None) -> None:
        if self._current is None:
            return
        if isinstance(error, Exception):
            self._current.retry(f"{type(error).__name__}: {error}")
        else:  # the loop was left: nobody said that the work is done
            self._current.release()

    def _listen_to_signals(self) -> None:
        if self._handle_signals and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self.stop()
        self._ignore_signals()  # a second one ends it at once

    def _ignore_signals(self) -> None:
        if self._handle_signals and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().remove_signal_handler(number)


class _Reporter:
    """Sends what was said of items, as much as there is in each request, for as long as it takes."""

    def __init__(self, client: PipelineClient, stage: Stage) -> None:
        self.held: set[Item] = set()
        self._client = client
        self._stage = stage
        self._said: deque[tuple[Item, Ended]] = deque()
        self._some = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._error: PenstockError | None = None
        self._log = structlog.get_logger().bind(stage=stage.value)

    def add(self, item: Item, how: Ended) -> None:
        self._said.append((item, how))
        self._idle.clear()
        self._some.set()

    def complain(self) -> None:
        """Raise what the server would not take: going on would only make more of it."""
        if self._error is not None:
            raise self._error

    async def flush(self, *, within: float) -> None:
        if not await happens(self._idle, within):
            self._log.warning("reports_unsent", reports=len(self._said))
        self.complain()

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            await self._some.wait()
            batch = list(self._said)[:_REPORTS]
            try:
                results = await self._client.report(self._stage, [how for _, how in batch])
            except Transient as error:
                self._log.warning("report_failed", code=error.code, error=error.message)
                await asyncio.sleep(backoff.next().total_seconds())
                continue
            except PenstockError as error:
                self._error = error
                self._idle.set()
                return
            backoff.reset()
            self._settle(batch, results)

    def _settle(self, batch: list[tuple[Item, Ended]], results: list[dict[str, Any]]) -> None:
        for (item, how), result in zip(batch, results, strict=True):
            self._said.popleft()
            self.held.discard(item)
            if result["result"] in (Answer.SUPERSEDED, Answer.UNKNOWN):
                item.is_lost = True
                self._log.warning("report_superseded", filename=how.filename, shard=how.shard, fence=how.fence)
        if not self._said:
            self._some.clear()
            self._idle.set()


class SyncStageDaemon:
    """The same for code without asyncio: `with SyncStageDaemon(…) as daemon: for item in daemon: …`.

    Heartbeats and reports go on in a thread of their own while the loop's body works.
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

        self._daemon = self._run(enter())
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
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        try:
            item = self._run(self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None
        return item.ended_from(self._loop)

    def stop(self) -> None:
        """End the loop after the current item, and give back the others."""
        self._loop.call_soon_threadsafe(self._inner.stop)

    def flush(self) -> None:
        """Wait until everything said so far is on record."""
        self._run(self._inner.flush())

    @property
    def _inner(self) -> StageDaemon:
        if self._daemon is None:
            raise RuntimeError("use the daemon in `with`")
        return self._daemon

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._restore_signals()
        self.stop()

    def _restore_signals(self) -> None:
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
