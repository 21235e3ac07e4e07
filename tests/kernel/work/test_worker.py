"""The work loop: outcomes are values, lanes are in order, and a stop releases items that were not started."""

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from penstock.kernel.errors import Invalid, Transient
from penstock.kernel.tasks.outcome import Done, Failed, Outcome, Retry
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.kernel.work.worker import Worker, handle_each


@dataclass
class Numbers:
    """A queue of numbers with a lane per tens digit; real queues have their own tests."""

    items: list[int]
    name: str = "numbers"
    lease_for: timedelta = timedelta(milliseconds=30)
    settled: dict[int, Outcome | None] = field(default_factory=dict)
    extended: asyncio.Event = field(default_factory=asyncio.Event)
    downs: int = 0
    failure: Exception = field(default_factory=lambda: Transient("DATABASE_DOWN", "no answer"))
    settle_downs: int = 0
    extend_downs: int = 0
    waited: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, limit: int) -> Sequence[int]:
        if self.downs:
            self.downs -= 1
            raise self.failure
        taken, self.items = self.items[:limit], self.items[limit:]
        return taken

    async def wait(self, timeout: float) -> None:
        self.waited.set()
        await asyncio.Event().wait()

    async def extend(self, items: Sequence[int]) -> None:
        if self.extend_downs:
            self.extend_downs -= 1
            raise self.failure
        self.extended.set()

    async def settle(self, results: Sequence[tuple[int, Outcome | None]]) -> int:
        if self.settle_downs:
            self.settle_downs -= 1
            raise Transient("DATABASE_DOWN", "no answer")
        self.settled.update(results)
        return 0

    def find_lane(self, item: int) -> Hashable:
        return item // 10


def worker(queue: Numbers, handle, telemetry: Telemetry | None = None, batch: int = 100) -> Worker[int]:  # type: ignore[no-untyped-def]
    return Worker(queue, handle_each(handle, queue), telemetry or Telemetry(), batch=batch)


async def test_every_item_is_handled_and_settled() -> None:
    """The outcome of each item is settled in the queue, batch by batch."""
    queue = Numbers([1, 2, 11, 12, 21])

    async def handle(item: int) -> Outcome:
        return Failed("odd one") if item == 11 else Done()

    assert await worker(queue, handle, batch=2).drain() == 5
    assert queue.settled == {1: Done(), 2: Done(), 11: Failed("odd one"), 12: Done(), 21: Done()}


async def test_a_lane_is_handled_in_order_one_at_a_time() -> None:
    """R9: items of a lane never overlap; other lanes continue meanwhile."""
    queue, seen, busy = Numbers([1, 2, 3, 11, 12, 13]), [], set()

    async def handle(item: int) -> Outcome:
        assert item // 10 not in busy
        busy.add(item // 10)
        await asyncio.sleep(0)
        busy.discard(item // 10)
        seen.append(item)
        return Done()

    await worker(queue, handle).drain()
    assert [n for n in seen if n < 10] == [1, 2, 3]
    assert [n for n in seen if n > 10] == [11, 12, 13]


async def test_a_retry_stops_its_lane_and_only_its_lane() -> None:
    """R9: items after a retried item of a lane are released untouched; other lanes finish."""
    queue = Numbers([1, 2, 3, 11])

    async def handle(item: int) -> Outcome:
        return Retry("later") if item == 2 else Done()

    await worker(queue, handle).step()
    assert queue.settled == {1: Done(), 2: Retry("later"), 3: None, 11: Done()}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Transient("SOURCE_DOWN", "no answer"), Retry("SOURCE_DOWN: no answer", counts=False)),
        (Invalid("BAD_ROW", "no key"), Failed("BAD_ROW: no key")),
        (ZeroDivisionError("division by zero"), Retry("ZeroDivisionError: division by zero")),
    ],
)
async def test_an_exception_becomes_an_outcome(error: Exception, outcome: Outcome) -> None:
    """R11: a transient error is retried, a permanent one is dead-lettered, and a bug never stops the loop."""
    queue = Numbers([1, 11])

    async def handle(item: int) -> Outcome:
        if item == 1:
            raise error
        return Done()

    await worker(queue, handle).step()
    assert queue.settled == {1: outcome, 11: Done()}


async def test_a_stop_finishes_started_items_and_releases_the_rest() -> None:
    """After a stop the running item ends, the later ones are released, and the loop returns."""
    queue, started, resume = Numbers([1, 2, 3]), asyncio.Event(), asyncio.Event()

    async def handle(item: int) -> Outcome:
        started.set()
        await resume.wait()
        return Done()

    loop = worker(queue, handle)
    task = asyncio.create_task(loop.run())
    await started.wait()
    loop.stop()
    resume.set()
    async with asyncio.timeout(5):
        await task
    assert queue.settled == {1: Done(), 2: None, 3: None}


async def test_an_idle_worker_stops_at_once() -> None:
    """A stop does not wait for the next poll."""
    queue = Numbers([])

    async def handle(item: int) -> Outcome:
        return Done()

    loop = worker(queue, handle)
    task = asyncio.create_task(loop.run())
    await queue.waited.wait()
    loop.stop()
    async with asyncio.timeout(5):
        await task


async def test_leases_are_extended_during_the_work() -> None:
    """T14: heartbeats extend the lease of work that takes longer."""
    queue = Numbers([1])

    async def handle(item: int) -> Outcome:
        async with asyncio.timeout(5):
            await queue.extended.wait()
        return Done()

    await worker(queue, handle).step()
    assert queue.settled == {1: Done()}


async def test_a_missed_heartbeat_is_followed_by_the_next() -> None:
    """T14: after a failed heartbeat the next one extends the lease."""
    queue = Numbers([1], extend_downs=2, failure=TimeoutError())

    async def handle(item: int) -> Outcome:
        async with asyncio.timeout(5):
            await queue.extended.wait()
        return Done()

    await worker(queue, handle).step()
    assert queue.settled == {1: Done()}


async def test_finished_work_waits_for_a_queue_that_is_down() -> None:
    """R11: an outcome that cannot be settled now is settled later, and the work is not repeated."""
    queue, calls = Numbers([1], lease_for=timedelta(seconds=30), settle_downs=2), 0

    async def handle(item: int) -> Outcome:
        nonlocal calls
        calls += 1
        return Done()

    await worker(queue, handle).step()
    assert (queue.settled, calls) == ({1: Done()}, 1)


async def test_a_cancellation_inside_a_handler_is_a_retry() -> None:
    """A handler that awaited a cancelled task has made an attempt, which counts."""
    queue = Numbers([1])

    async def handle(item: int) -> Outcome:
        helper = asyncio.create_task(asyncio.Event().wait())
        helper.cancel()
        await helper
        return Done()

    await worker(queue, handle).step()
    assert queue.settled == {1: Retry("a task that the handler awaited was cancelled")}


async def test_a_cancelled_worker_ends() -> None:
    """Cancelling the loop ends it, also during a batch."""
    queue, started = Numbers([1]), asyncio.Event()

    async def handle(item: int) -> Outcome:
        started.set()
        await asyncio.Event().wait()
        return Done()

    task = asyncio.create_task(worker(queue, handle).run())
    await started.wait()
    task.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("failure", [Transient("DATABASE_DOWN", "no answer"), TimeoutError(), RuntimeError("a bug")])
async def test_a_queue_that_fails_is_retried(failure: Exception) -> None:
    """The worker survives an outage of the database and a bug of its queue."""
    queue, handled = Numbers([7], downs=3, failure=failure), asyncio.Event()

    async def handle(item: int) -> Outcome:
        handled.set()
        return Done()

    loop = worker(queue, handle)
    task = asyncio.create_task(loop.run())
    async with asyncio.timeout(10):
        await handled.wait()
        loop.stop()
        await task
    assert queue.settled == {7: Done()}


async def test_the_loop_counts_outcomes() -> None:
    """The metrics have the outcomes by queue."""
    telemetry = Telemetry()

    async def handle(item: int) -> Outcome:
        return Failed("no") if item == 2 else Done()

    await worker(Numbers([1, 2, 11]), handle, telemetry).drain()
    exposition = telemetry.format_metrics().decode()
    assert 'penstock_work_items_total{outcome="done",queue="numbers"} 2.0' in exposition
    assert 'penstock_work_items_total{outcome="failed",queue="numbers"} 1.0' in exposition
