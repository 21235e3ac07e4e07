"""The work loop of all workers: take a batch, handle it, settle it, with back-off and graceful stop."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from random import uniform
from time import monotonic
from typing import Generic, Protocol, TypeVar

import structlog

from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.outcome import Failed, Outcome, Retry
from penstock.kernel.tasks.wait import cancel_and_wait, wait_event
from penstock.kernel.telemetry.telemetry import Telemetry

T = TypeVar("T")
Handler = Callable[[Sequence[T], asyncio.Event], Awaitable[Sequence[Outcome | None]]]


class WorkSource(Protocol[T]):
    """A source of work items: a table with leases, or a topic of the bus."""

    name: str
    lease_for: timedelta

    async def take(self, limit: int) -> Sequence[T]:
        """Claim and return up to *limit* items; return none if there is no work."""

    async def wait(self, timeout: float) -> None:
        """Return when there may be work, at the latest after *timeout* seconds."""

    async def extend(self, items: Sequence[T]) -> None:
        """Extend the leases of *items*."""

    async def settle(self, results: Sequence[tuple[T, Outcome | None]]) -> int:
        """Settle each item (None: release it untouched); return how many were lost to other workers."""

    def find_lane(self, item: T) -> Hashable:
        """Return the lane of *item*; the items of a lane are handled in order, one at a time."""


class Worker(Generic[T]):
    """A worker that takes batches from a queue, handles and settles them, until it is stopped."""

    def __init__(
        self,
        queue: WorkSource[T],
        handler: Handler[T],
        telemetry: Telemetry,
        *,
        batch: int = 100,
        poll: timedelta = timedelta(seconds=1),
    ) -> None:
        self._queue = queue
        self._handler = handler
        self._batch = batch
        self._poll = poll
        self._stopping = asyncio.Event()
        self._log = structlog.get_logger().bind(queue=queue.name)
        self._metrics = telemetry.work

    def stop(self) -> None:
        """Take no more items, finish running ones and release the others; `run` then returns."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until stopped; retry errors of the queue with back-off."""
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                if not await self.step():
                    await self._idle(self._poll.total_seconds() * uniform(0.5, 1))  # noqa: S311 - jitter, not secrecy
                backoff.reset()
            except Exception as error:  # noqa: BLE001 - the edge of the loop: a worker survives errors of its queue
                self._log_error("queue_failed", error)
                await wait_event(self._stopping, backoff.compute_next().total_seconds())

    async def drain(self) -> int:
        """Work until the queue is empty, and return the number of handled items."""
        total = 0
        while not self._stopping.is_set() and (count := await self.step()):
            total += count
        return total

    async def step(self) -> int:
        """Take, handle and settle one batch, and return its size."""
        items = await self._queue.take(self._batch)
        if items:
            async with self._extend_leases(items):
                with self._metrics.time_batch(self._queue.name):
                    outcomes = await self._handler(items, self._stopping)
                await self._settle(list(zip(items, outcomes, strict=True)))
        return len(items)

    async def _settle(self, results: Sequence[tuple[T, Outcome | None]]) -> None:
        lost = await self._settle_with_retries(results)
        self._metrics.count(self._queue.name, [outcome for _, outcome in results], lost)
        if lost:
            self._log.warning("work_superseded", lost=lost)

    async def _settle_with_retries(self, results: Sequence[tuple[T, Outcome | None]]) -> int:
        """Settle the results; retry for the length of a lease, so that a short outage of the queue loses no work."""
        backoff, deadline = Backoff(), monotonic() + self._queue.lease_for.total_seconds()
        while True:
            try:
                return await self._queue.settle(results)
            except Transient as error:
                if monotonic() > deadline:
                    raise
                self._log_error("settle_failed", error)
            await asyncio.sleep(backoff.compute_next().total_seconds())

    def _log_error(self, event: str, error: Exception) -> None:
        if isinstance(error, Transient):
            self._log.warning(event, code=error.code, error=error.message)
        else:
            self._log.error(event, exc_info=error)

    @asynccontextmanager
    async def _extend_leases(self, items: Sequence[T]) -> AsyncIterator[None]:
        """Extend the leases of *items* until the end of the block."""
        task = asyncio.create_task(self._send_heartbeats(items), name=f"heartbeat {self._queue.name}")
        try:
            yield
        finally:
            await cancel_and_wait(task)

    async def _send_heartbeats(self, items: Sequence[T]) -> None:
        while True:
            await asyncio.sleep(self._queue.lease_for.total_seconds() / 3)
            try:
                await self._queue.extend(items)
            except Exception as error:  # noqa: BLE001 - after a failed heartbeat the next may succeed
                self._log_error("heartbeat_failed", error)

    async def _idle(self, seconds: float) -> None:
        """Wait for work or for a stop, up to *seconds*."""
        waits = [asyncio.create_task(self._queue.wait(seconds)), asyncio.create_task(self._stopping.wait())]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


def handle_each(
    handle: Callable[[T], Awaitable[Outcome]], queue: WorkSource[T], *, concurrency: int = 10
) -> Handler[T]:
    """Return a handler that calls *handle* per item: lanes concurrently, the items of a lane one after another.

    A lane ends at its first Retry, or when the worker is stopped; its later items are released untouched.
    """

    async def handle_in_lanes(items: Sequence[T], stopping: asyncio.Event) -> Sequence[Outcome | None]:
        outcomes: list[Outcome | None] = [None] * len(items)
        lanes: dict[Hashable, list[int]] = defaultdict(list)
        for index, item in enumerate(items):
            lanes[queue.find_lane(item)].append(index)
        slots = asyncio.Semaphore(concurrency)

        async def handle_lane(indexes: Sequence[int]) -> None:
            async with slots:
                for index in indexes:
                    if stopping.is_set():
                        return
                    outcomes[index] = outcome = await run_to_outcome(handle(items[index]))
                    if isinstance(outcome, Retry):
                        return

        async with asyncio.TaskGroup() as group:
            for indexes in lanes.values():
                group.create_task(handle_lane(indexes))
        return outcomes

    return handle_in_lanes


async def run_to_outcome(work: Awaitable[Outcome]) -> Outcome:
    """Return the outcome of *work*; exceptions become outcomes."""
    try:
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # the worker is cancelled
            raise
        return Retry("a task that the handler awaited was cancelled")
    except Transient as error:
        return Retry(f"{error.code}: {error.message}", counts=False)
    except PenstockError as error:
        return Failed(f"{error.code}: {error.message}")
    except Exception as error:  # noqa: BLE001 - the edge: a bug of a handler must not stop the loop
        structlog.get_logger().exception("handler_crashed")
        return Retry(f"{type(error).__name__}: {error}")
