"""A worker that is told to go while a claim or a report is on its way: nothing of it waits for a lease."""

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
    """One whose answers are on their way until the test lets them come."""

    def __init__(self, flows: FlowsStepper, slow: str) -> None:
        super().__init__(flows.engine, flows.storage)
        self._slow = slow
        self.has_answered, self.may_come = asyncio.Event(), asyncio.Event()

    async def claim(self, worker: str, capacities: Mapping[str, int], limit: int, wait: float) -> Sequence[ClaimedStep]:
        held = await super().claim(worker, capacities, limit, wait)
        if held and self._slow == "claim":
            await self._on_its_way()
        return held

    async def settle(
        self, worker: str, done: Sequence[tuple[ClaimedStep, StepReport]], kinds: Sequence[str], capacity: int
    ) -> tuple[Sequence[StepReportAnswer], Sequence[ClaimedStep]]:
        answers = await super().settle(worker, done, kinds, capacity)
        if self._slow == "settle":
            await self._on_its_way()
        return answers

    async def _on_its_way(self) -> None:
        self.has_answered.set()
        await self.may_come.wait()


@asynccontextmanager
async def told_to_go(flows: FlowsStepper, work_source: SlowSource) -> AsyncIterator[None]:
    """A worker that is told to go as soon as an answer is on its way; gone at the end."""
    go = asyncio.Event()

    async def serve() -> None:
        worker = StepWorker(work_source, workers(), Telemetry(), name="w", concurrency=4, lease_for=LEASE)
        async with worker.run():
            await go.wait()

    serving = asyncio.create_task(serve())
    await work_source.has_answered.wait()
    go.set()
    yield
    await serving


def workers() -> Workers:
    known = Workers()

    @known.worker(WORK)
    async def nothing(_step: FlowStep) -> Mapping[str, Any]:
        return {}

    return known


async def test_what_a_claim_brings_too_late_is_given_back(database_url: str, tmp_path: Path) -> None:
    """F11, F17: granted, but not begun: another has it at once, and it cost no attempt."""
    async with flows_stepper(database_url, tmp_path) as flows:
        work_source = SlowSource(flows, "claim")
        await flows.start({"a": work(), "b": work("a")})
        async with told_to_go(flows, work_source):
            assert (await flows.steps())["a"] == "RUNNING"
            work_source.may_come.set()
        step = await flows.step("a")
        assert (step["status"], step["attempts"], step["lease_until"]) == ("READY", 0, None)


async def test_what_a_report_brings_too_late_is_given_back(database_url: str, tmp_path: Path) -> None:
    """F5, F17: the report is waited for; the step that comes with its answer is another's at once."""
    async with flows_stepper(database_url, tmp_path) as flows:
        work_source = SlowSource(flows, "settle")
        await flows.start({"a": work(), "b": work("a")})
        async with told_to_go(flows, work_source):
            assert await flows.steps() == {"a": "SUCCEEDED", "b": "RUNNING"}
            work_source.may_come.set()
        step = await flows.step("b")
        assert (step["status"], step["attempts"], step["lease_until"]) == ("READY", 0, None)
