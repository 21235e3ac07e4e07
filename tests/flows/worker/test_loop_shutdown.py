"""F17: a worker that stops during a claim or a report: no step waits for its lease."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.flows.contract import StepReportAnswer
from penstock.flows.model import ClaimedStep, StepReport
from penstock.flows.step import FlowStep, Workers
from penstock.flows.worker.local import LocalWorkSource
from penstock.flows.worker.loop import StepWorker
from penstock.kernel.telemetry.telemetry import Telemetry
from tests.flows.stepper import LEASE, WORK, FlowsStepper, flows_stepper, work


class SlowSource(LocalWorkSource):
    """A source whose answers are delayed until the test releases them."""

    def __init__(self, flows: FlowsStepper, slow: str) -> None:
        super().__init__(flows.engine, flows.storage)
        self._slow = slow
        self.has_answered, self.may_continue = asyncio.Event(), asyncio.Event()

    async def claim(self, worker: str, capacities: Mapping[str, int], limit: int, wait: float) -> Sequence[ClaimedStep]:
        claimed = await super().claim(worker, capacities, limit, wait)
        if claimed and self._slow == "claim":
            await self._delay_answer()
        return claimed

    async def settle(
        self, worker: str, done: Sequence[tuple[ClaimedStep, StepReport]], kinds: Sequence[str], capacity: int
    ) -> tuple[Sequence[StepReportAnswer], Sequence[ClaimedStep]]:
        answers = await super().settle(worker, done, kinds, capacity)
        if self._slow == "settle":
            await self._delay_answer()
        return answers

    async def _delay_answer(self) -> None:
        self.has_answered.set()
        await self.may_continue.wait()


@asynccontextmanager
async def stopping_worker(flows: FlowsStepper, work_source: SlowSource) -> AsyncIterator[None]:
    """Stop a worker as soon as an answer is delayed; wait for its end when the context ends."""
    go = asyncio.Event()

    async def serve() -> None:
        worker = StepWorker(work_source, make_workers(), Telemetry(), name="w", concurrency=4, lease_for=LEASE)
        async with worker.run():
            await go.wait()

    serving = asyncio.create_task(serve())
    await work_source.has_answered.wait()
    go.set()
    yield
    await serving


def make_workers() -> Workers:
    workers = Workers()

    @workers.worker(WORK)
    async def nothing(_step: FlowStep) -> Mapping[str, Any]:
        return {}

    return workers


async def test_late_claim_is_released(database_url: str, tmp_path: Path) -> None:
    """F11, F17: the claimed steps are READY at once, and no attempt is counted."""
    async with flows_stepper(database_url, tmp_path) as flows:
        work_source = SlowSource(flows, "claim")
        await flows.start({"a": work(), "b": work("a")})
        async with stopping_worker(flows, work_source):
            assert (await flows.steps())["a"] == "RUNNING"
            work_source.may_continue.set()
        step = await flows.step("a")
        assert (step["status"], step["attempts"], step["lease_until"]) == ("READY", 0, None)


async def test_late_prefetched_step_is_released(database_url: str, tmp_path: Path) -> None:
    """F5, F17: the stop waits for the report, and the prefetched step is READY at once."""
    async with flows_stepper(database_url, tmp_path) as flows:
        work_source = SlowSource(flows, "settle")
        await flows.start({"a": work(), "b": work("a")})
        async with stopping_worker(flows, work_source):
            assert await flows.steps() == {"a": "SUCCEEDED", "b": "RUNNING"}
            work_source.may_continue.set()
        step = await flows.step("b")
        assert (step["status"], step["attempts"], step["lease_until"]) == ("READY", 0, None)
