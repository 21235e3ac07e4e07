"""How many steps a worker has under way at a time."""

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
PLACES = 4
Name = tuple[str, str, int]


class EndlessSource:
    """A source with steps enough: whoever hands one in is handed the next of its chain, if there is capacity."""

    def __init__(self, steps: int, *, is_lost: bool = False) -> None:
        self._left = steps
        self._is_lost = is_lost
        self.is_empty = asyncio.Event()
        self.batches: list[int] = []

    async def claim(self, worker: str, capacities: Mapping[str, int], limit: int, wait: float) -> Sequence[ClaimedStep]:
        del worker, capacities, wait
        await asyncio.sleep(0)
        return self._handed(limit)

    async def settle(
        self, worker: str, done: Sequence[tuple[ClaimedStep, StepReport]], kinds: Sequence[str], capacity: int
    ) -> tuple[Sequence[StepReportAnswer], Sequence[ClaimedStep]]:
        del worker, kinds
        self.batches.append(len(done))
        for _ in range(3):  # on its way, while claims are answered
            await asyncio.sleep(0)
        return [StepReportAnswer.SETTLED] * len(done), self._handed(min(capacity, len(done)))

    async def heartbeat(self, held: Sequence[Name]) -> Mapping[Name, bool]:
        return {} if self._is_lost else dict.fromkeys(held, False)

    def wake(self) -> None:
        """Nobody waits here."""

    async def log(self, held: ClaimedStep, level: str, message: str) -> None:
        raise AssertionError("these steps leave nothing")

    async def write(self, held: ClaimedStep, name: str, data: bytes) -> None:
        raise AssertionError("these steps leave nothing")

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        raise AssertionError("these steps leave nothing")

    def _handed(self, count: int) -> list[ClaimedStep]:
        handed = [_claimed(n) for n in range(self._left, max(0, self._left - count), -1)]
        self._left -= len(handed)
        if not self._left:
            self.is_empty.set()
        return handed


def _claimed(n: int) -> ClaimedStep:
    return ClaimedStep(n, 0, f"run-{n}", "step", KIND, 1, 1, {}, {}, datetime.now(UTC), None, None, is_plain=True)


def _worker(table: EndlessSource, handler: Any, places: int, lease_for: timedelta = timedelta(minutes=1)) -> StepWorker:
    workers = Workers()
    workers.worker(KIND)(handler)
    return StepWorker(table, workers, Telemetry(), name="w", concurrency=places, lease_for=lease_for)


async def test_a_worker_has_no_more_steps_under_way_than_it_may() -> None:
    """F17: what a report is answered with takes the place of what was reported, and no claim takes it before."""
    under_way, most = 0, 0

    async def handler(step: FlowStep) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(step.claimed.run % 7):  # they end one by one
            await asyncio.sleep(0)
        under_way -= 1

    table = EndlessSource(steps=200)
    async with _worker(table, handler, PLACES).run(), asyncio.timeout(10):
        await table.is_empty.wait()
    assert most == PLACES


async def test_many_reports_are_handed_in_by_halves() -> None:
    """F17: while the database works on one half, the other is done; a few go together, for each commit costs."""

    async def handler(_step: FlowStep) -> None: ...

    many, few = EndlessSource(steps=1_000), EndlessSource(steps=60)
    for table, places in ((many, 100), (few, 6)):
        async with _worker(table, handler, places).run(), asyncio.timeout(10):
            await table.is_empty.wait()
    assert max(many.batches) == 50
    assert set(few.batches) == {6}


async def test_a_step_that_is_lost_leaves_its_place() -> None:
    """F4, F17: somebody else has it by now; the worker takes another."""
    never = asyncio.Event()

    async def handler(_step: FlowStep) -> None:
        await never.wait()

    table = EndlessSource(steps=3, is_lost=True)
    worker = _worker(table, handler, 1, timedelta(milliseconds=30))
    async with worker.run(timedelta(0)), asyncio.timeout(10):
        await table.is_empty.wait()
