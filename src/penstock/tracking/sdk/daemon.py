"""The rows of one stage as a plain loop."""

import asyncio
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from types import TracebackType

import structlog

from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.ids import worker_name
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.wait import cancel_and_wait, wait_event
from penstock.tracking.client import PipelineClient
from penstock.tracking.contract import BATCH_LIMIT
from penstock.tracking.model import ClaimedRow, queue_named
from penstock.tracking.sdk.item import Item
from penstock.tracking.sdk.reporter import Reporter

_WAIT = 2.0  # seconds one request waits for work; so long may a stop take
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
        self._reporter = Reporter(self._client, self.stage)
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
                await cancel_and_wait(task)
            await self._client.__aexit__(kind, error, trace)

    def __aiter__(self) -> "StageDaemon":
        return self

    async def __anext__(self) -> Item:
        if self._current is not None:
            self._current.done()
            self._current = None
        while not self._stopping.is_set():
            self._check()
            self._waiting = deque(item for item in self._waiting if not item.is_lost)
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
            self._check()
            try:
                held = await self._client.claim(
                    self.stage, self.worker, limit=self._batch, lease=self._lease, wait=_WAIT
                )
            except Transient as error:
                self._log.warning("claim_failed", code=error.code, error=error.message)
                await wait_event(self._stopping, backoff.next().total_seconds())
            else:
                return [self._item(one) for one in held]
        return []

    def _check(self) -> None:
        """Raise what ended the work behind the loop: without reports and heartbeats it must not go on."""
        self._reporter.complain()
        for task in self._tasks:
            if task.done():
                task.result()

    def _item(self, one: ClaimedRow) -> Item:
        item = Item(one.filename, one.shard, one.attempt, one.fence, self._reporter.add)
        self._reporter.held.add(item)
        return item

    async def _keep(self) -> None:
        """Hold on to everything that is not yet reported; after a failure try again sooner, the lease runs."""
        is_kept = True
        while True:
            await asyncio.sleep(self._lease / 3 if is_kept else self._lease / 10)
            items = {(item.filename, item.shard, item.fence): item for item in self._reporter.held}
            pieces = [{name: items[name] for name in some} for some in _pieces(list(items))]
            is_kept = all([await self._extend(piece) for piece in pieces])

    async def _extend(self, items: Mapping[tuple[str, int, int], Item]) -> bool:
        """Whether the server answered; what it says was lost is marked so."""
        try:
            async with asyncio.timeout(self._lease / 3):  # a request that hangs must not cost the lease
                lost = await self._client.heartbeat(self.stage, self.worker, items, lease=self._lease)
        except (PenstockError, TimeoutError) as error:
            self._log.warning("heartbeat_failed", error=str(error) or "no answer in time")
            return False
        # One that was ended meanwhile is not lost: its report tells.
        for item in {items[name] for name in lost & items.keys() if not items[name].is_ended}:
            item.is_lost = True
            self._reporter.held.discard(item)
            self._log.warning("item_lost", filename=item.filename, shard=item.shard, fence=item.fence)
        return True

    def _give_up_current(self, error: BaseException | None) -> None:
        if self._current is None:
            return
        if isinstance(error, Exception):
            self._current.retry(f"{type(error).__name__}: {error}")
        else:  # the loop was left: nobody said that the work is done
            self._current.release()

    def _listen_to_signals(self) -> None:
        if self._handle_signals and threading.current_thread() is threading.main_thread():
            _RUNNING.add(self)
            for number in _SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, _stop_all)

    def _ignore_signals(self) -> None:
        if self in _RUNNING:
            _RUNNING.discard(self)
            if not _RUNNING:
                _leave_signals_alone()


_RUNNING: set[StageDaemon] = set()  # those of this process that a signal stops


def _stop_all() -> None:
    for daemon in _RUNNING:
        daemon.stop()
    _leave_signals_alone()  # a second one ends the process at once


def _leave_signals_alone() -> None:
    for number in _SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)


def _pieces(names: list[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int]]]:
    """As many as one heartbeat takes, at a time."""
    for start in range(0, len(names), BATCH_LIMIT):
        yield names[start : start + BATCH_LIMIT]
