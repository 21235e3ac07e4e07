"""A daemon of a stage: the claimed rows as a plain loop."""

import asyncio
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from types import TracebackType

import structlog

from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.ids import make_worker_name
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.wait import cancel_and_wait, wait_event
from penstock.tracking.client import PipelineClient
from penstock.tracking.contract import BATCH_LIMIT
from penstock.tracking.model import ClaimedRow, parse_queue
from penstock.tracking.sdk.item import Item
from penstock.tracking.sdk.reporter import Reporter

_WAIT = 2.0  # seconds a claim waits for a row; a stop can take as long
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StageDaemon:
    """The rows of one stage, one after another, until `stop` is called."""

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
        self.stage = parse_queue(stage)
        self.worker = worker or make_worker_name(self.stage)
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
            asyncio.create_task(self._send_heartbeats(), name=f"heartbeats of {self.worker}"),
        ]
        self._handle_stop_signals()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release_signals()
        self._end_current(error)
        while self._waiting:
            self._waiting.popleft().release()
        try:
            await self._reporter.flush(timeout=self._lease)
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
            self._raise_background_error()
            self._waiting = deque(item for item in self._waiting if not item.is_lost)
            if self._waiting:
                self._current = self._waiting.popleft()
                return self._current
            self._waiting.extend(await self._claim())
        raise StopAsyncIteration

    def stop(self) -> None:
        """End the loop after the current item, and release the other claimed items."""
        self._stopping.set()

    async def flush(self) -> None:
        """Wait until the server has all outcomes reported so far."""
        await self._reporter.flush(timeout=self._lease)

    async def _claim(self) -> list[Item]:
        backoff = Backoff()
        while not self._stopping.is_set():
            self._raise_background_error()
            try:
                rows = await self._client.claim(
                    self.stage, self.worker, limit=self._batch, lease=self._lease, wait=_WAIT
                )
            except Transient as error:
                self._log.warning("claim_failed", code=error.code, error=error.message)
                await wait_event(self._stopping, backoff.compute_next().total_seconds())
            else:
                return [self._make_item(row) for row in rows]
        return []

    def _raise_background_error(self) -> None:
        """Raise the error that ended the background tasks: the loop must not go on without them."""
        self._reporter.raise_error()
        for task in self._tasks:
            if task.done():
                task.result()

    def _make_item(self, row: ClaimedRow) -> Item:
        item = Item(row.filename, row.shard, row.attempt, row.fence, self._reporter.add)
        self._reporter.items.add(item)
        return item

    async def _send_heartbeats(self) -> None:
        """Extend the leases of all items that are not reported yet; retry a failed heartbeat earlier."""
        is_extended = True
        while True:
            await asyncio.sleep(self._lease / 3 if is_extended else self._lease / 10)
            items = {(item.filename, item.shard, item.fence): item for item in self._reporter.items}
            batches = [{name: items[name] for name in names} for names in _split(list(items))]
            is_extended = all([await self._extend(batch) for batch in batches])

    async def _extend(self, items: Mapping[tuple[str, int, int], Item]) -> bool:
        """Send one heartbeat, and mark lost items; return whether the server answered."""
        try:
            async with asyncio.timeout(self._lease / 3):  # a hanging request must not use up the lease
                lost = await self._client.heartbeat(self.stage, self.worker, items, lease=self._lease)
        except (PenstockError, TimeoutError) as error:
            self._log.warning("heartbeat_failed", error=str(error) or "timeout")
            return False
        # An item that ended meanwhile is not lost; the answer to its report decides.
        for item in {items[name] for name in lost & items.keys() if not items[name].is_ended}:
            item.is_lost = True
            self._reporter.items.discard(item)
            self._log.warning("item_lost", filename=item.filename, shard=item.shard, fence=item.fence)
        return True

    def _end_current(self, error: BaseException | None) -> None:
        if self._current is None:
            return
        if isinstance(error, Exception):
            self._current.retry(f"{type(error).__name__}: {error}")
        else:  # the loop was left early: the work may be incomplete
            self._current.release()

    def _handle_stop_signals(self) -> None:
        if self._handle_signals and threading.current_thread() is threading.main_thread():
            _RUNNING.add(self)
            for number in _SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, _stop_all)

    def _release_signals(self) -> None:
        if self in _RUNNING:
            _RUNNING.discard(self)
            if not _RUNNING:
                _remove_signal_handlers()


_RUNNING: set[StageDaemon] = set()  # daemons of this process that a signal stops


def _stop_all() -> None:
    for daemon in _RUNNING:
        daemon.stop()
    _remove_signal_handlers()  # a second signal ends the process at once


def _remove_signal_handlers() -> None:
    for number in _SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)


def _split(names: list[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int]]]:
    """Split *names* into batches of the size of one heartbeat."""
    for start in range(0, len(names), BATCH_LIMIT):
        yield names[start : start + BATCH_LIMIT]
