"""F17: workers and handlers that go wrong: each step is told for itself, and nothing is done for ever."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.flows.contract import StepReportAnswer
from penstock.flows.model import ClaimedStep, StepReport
from penstock.flows.step import FlowStep, Handler, StepFailed, Workers
from penstock.flows.worker.local import LocalWorkSource
from penstock.flows.worker.loop import StepWorker
from penstock.flows.worker.reports import check_outputs
from penstock.kernel.telemetry.telemetry import Telemetry
from tests.flows.stepper import LEASE, WORK, FlowsStepper, flows_stepper, work
from tests.support.wait import becomes

AGAIN = {"maxAttempts": 2, "backoff": 0}


@pytest.fixture
async def flows(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsStepper]:
    async with flows_stepper(database_url, tmp_path) as one:
        yield one


@asynccontextmanager
async def working(
    flows: FlowsStepper, handler: Handler, concurrency: int = 4, work_source: Any = None
) -> AsyncIterator[None]:
    known = Workers()
    known.worker(WORK)(handler)
    work_source = work_source or flows.work_source
    worker = StepWorker(work_source, known, Telemetry(), name="w", concurrency=concurrency, lease_for=LEASE)
    async with worker.run():
        yield


async def ended(flows: FlowsStepper) -> str:
    async def has_ended() -> bool:
        return await flows.status() != "RUNNING"

    await becomes(has_ended, "the run ends")
    return await flows.status()


async def test_what_others_cancel_is_no_word_to_the_worker(flows: FlowsStepper) -> None:
    """F10, F11: a handler whose own task was cancelled under it has failed, and not more often than it may."""
    calls = 0

    async def broken(_step: FlowStep) -> Mapping[str, Any]:
        nonlocal calls
        calls += 1
        if calls <= 5:  # else it would never end
            other = asyncio.create_task(asyncio.Event().wait())
            other.cancel()
            await other
        return {}

    await flows.start({"a": work(retry=AGAIN)})
    async with working(flows, broken):
        assert await ended(flows) == "FAILED"
    assert (calls, (await flows.step("a"))["error"]["code"]) == (2, "WORKER_ERROR")


async def test_a_handlers_own_timeout_is_told_in_its_words(flows: FlowsStepper) -> None:
    """F5: only a step that took longer than it may has timed out."""

    async def late(step: FlowStep) -> Mapping[str, Any]:
        if step.step_id == "own":
            raise TimeoutError("the warehouse did not answer")
        await asyncio.Event().wait()
        return {}

    await flows.start({"own": work(required=False), "long": work(required=False, timeout=0.01)})
    async with working(flows, late):
        await ended(flows)
    own, long = (await flows.step("own"))["error"], (await flows.step("long"))["error"]
    assert (own["code"], "the warehouse did not answer" in own["message"]) == ("WORKER_ERROR", True)
    assert long["code"] == "STEP_TIMEOUT"


@pytest.mark.parametrize(("text", "is_kept"), [("\\u0000", True), ("\\\\u0000", True), ("\0", False), ("\\\0", False)])
def test_only_the_character_nul_cannot_be_kept(text: str, is_kept: bool) -> None:
    """F5: a text that spells it out is a text."""
    if is_kept:
        assert check_outputs({"v": text}) == {"v": text}
    else:
        with pytest.raises(StepFailed, match="NUL"):
            check_outputs({"v": text})


class PeakSource(LocalWorkSource):
    """Notes how many steps its worker holds at most."""

    held, most = 0, 0

    async def claim(self, worker: str, capacities: Mapping[str, int], limit: int, wait: float) -> Sequence[ClaimedStep]:
        return self._noted(await super().claim(worker, capacities, limit, wait))

    async def settle(
        self, worker: str, done: Sequence[tuple[ClaimedStep, StepReport]], kinds: Sequence[str], capacity: int
    ) -> tuple[Sequence[StepReportAnswer], Sequence[ClaimedStep]]:
        answers, handed = await super().settle(worker, done, kinds, capacity)
        self.held -= len(done)
        return answers, self._noted(handed)

    def _noted(self, held: Sequence[ClaimedStep]) -> Sequence[ClaimedStep]:
        self.held += len(held)
        self.most = max(self.most, self.held)
        return held


async def test_a_worker_holds_no_more_than_it_does_at_once(flows: FlowsStepper) -> None:
    """F16, F17: what it claims and what its reports bring are counted together."""
    work_source = PeakSource(flows.engine, flows.storage)

    async def nothing(_step: FlowStep) -> Mapping[str, Any]:
        return {}

    roots = {f"r{n}": work() for n in range(6)}
    await flows.start(roots | {f"{root}-{n}": work(root) for root in roots for n in range(10)})
    async with working(flows, nothing, 4, work_source):
        assert await ended(flows) == "SUCCEEDED"
    assert work_source.most <= 4
