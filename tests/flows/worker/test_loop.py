"""The number of steps that a worker executes at a time."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.flows.contract import StepReportAnswer
from penstock.flows.model import ClaimedStep, StepReport
from penstock.flows.step import FlowStep, Workers
from penstock.flows.worker.loop import StepWorker
from penstock.kernel.telemetry.telemetry import Telemetry

KIND = "work"
CONCURRENCY = 4
Name = tuple[str, str, int]


class EndlessSource:
    """A source with a number of steps: each report prefetches a step, up to the capacity."""

    def __init__(self, steps: int, *, is_lost: bool = False) -> None:
        self._left = steps
        self._is_lost = is_lost
        self.is_empty = asyncio.Event()
        self.batches: list[int] = []

    async def claim(self, worker: str, capacities: Mapping[str, int], limit: int, wait: float) -> Sequence[ClaimedStep]:
        del worker, capacities, wait
        await asyncio.sleep(0)
        return self._take(limit)

    async def settle(
        self, worker: str, done: Sequence[tuple[ClaimedStep, StepReport]], kinds: Sequence[str], capacity: int
    ) -> tuple[Sequence[StepReportAnswer], Sequence[ClaimedStep]]:
        del worker, kinds
        self.batches.append(len(done))
        for _ in range(3):  # the answer is delayed, while claims are answered
            await asyncio.sleep(0)
        return [StepReportAnswer.SETTLED] * len(done), self._take(min(capacity, len(done)))

    async def heartbeat(self, claimed: Sequence[Name]) -> Mapping[Name, bool]:
        return {} if self._is_lost else dict.fromkeys(claimed, False)

    def wake(self) -> None:
        """Do nothing: no claim waits."""

    async def log(self, claimed: ClaimedStep, level: str, message: str) -> None:
        raise AssertionError("these steps write nothing")

    async def write(self, claimed: ClaimedStep, name: str, data: bytes) -> None:
        raise AssertionError("these steps write nothing")

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        raise AssertionError("these steps write nothing")

    def _take(self, count: int) -> list[ClaimedStep]:
        prefetched = [_make_claim(n) for n in range(self._left, max(0, self._left - count), -1)]
        self._left -= len(prefetched)
        if not self._left:
            self.is_empty.set()
        return prefetched


def _make_claim(n: int) -> ClaimedStep:
    return ClaimedStep(n, 0, f"run-{n}", "step", KIND, 1, 1, {}, {}, datetime.now(UTC), None, None, is_plain=True)


def _make_worker(
    source: EndlessSource, handler: Any, concurrency: int, lease_for: timedelta = timedelta(minutes=1)
) -> StepWorker:
    workers = Workers()
    workers.worker(KIND)(handler)
    return StepWorker(source, workers, Telemetry(), name="w", concurrency=concurrency, lease_for=lease_for)


async def test_running_steps_are_limited() -> None:
    """F17: a prefetched step uses the slot of the reported step, and no claim uses it before."""
    running, most = 0, 0

    async def handler(step: FlowStep) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(step.claimed.run % 7):  # they end at different times
            await asyncio.sleep(0)
        running -= 1

    source = EndlessSource(steps=200)
    async with _make_worker(source, handler, CONCURRENCY).run(), asyncio.timeout(10):
        await source.is_empty.wait()
    assert most == CONCURRENCY


async def test_reports_are_sent_in_two_batches() -> None:
    """F17: while the database settles one batch, the worker fills the other; a few reports are sent together."""

    async def handler(_step: FlowStep) -> None: ...

    many, few = EndlessSource(steps=1_000), EndlessSource(steps=60)
    for source, concurrency in ((many, 100), (few, 6)):
        async with _make_worker(source, handler, concurrency).run(), asyncio.timeout(10):
            await source.is_empty.wait()
    assert max(many.batches) == 50
    assert set(few.batches) == {6}


async def test_lost_step_frees_its_slot() -> None:
    """F4, F17: after its claim is lost, the worker claims another step."""
    never = asyncio.Event()

    async def handler(_step: FlowStep) -> None:
        await never.wait()

    source = EndlessSource(steps=3, is_lost=True)
    worker = _make_worker(source, handler, 1, timedelta(milliseconds=30))
    async with worker.run(timedelta(0)), asyncio.timeout(10):
        await source.is_empty.wait()
