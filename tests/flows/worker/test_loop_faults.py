"""F17: faulty workers and handlers: each step has its own outcome, and no step repeats without limit."""

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
    async with flows_stepper(database_url, tmp_path) as stepper:
        yield stepper


@asynccontextmanager
async def running_worker(
    flows: FlowsStepper, handler: Handler, concurrency: int = 4, work_source: Any = None
) -> AsyncIterator[None]:
    workers = Workers()
    workers.worker(WORK)(handler)
    work_source = work_source or flows.work_source
    worker = StepWorker(work_source, workers, Telemetry(), name="w", concurrency=concurrency, lease_for=LEASE)
    async with worker.run():
        yield


async def wait_for_end(flows: FlowsStepper) -> str:
    async def has_ended() -> bool:
        return await flows.status() != "RUNNING"

    await becomes(has_ended, "the run ends")
    return await flows.status()


async def test_cancelled_subtask_is_a_failure(flows: FlowsStepper) -> None:
    """F10, F11: a handler whose own task was cancelled has failed, and is retried up to maxAttempts."""
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
    async with running_worker(flows, broken):
        assert await wait_for_end(flows) == "FAILED"
    assert (calls, (await flows.step("a"))["error"]["code"]) == (2, "WORKER_ERROR")


async def test_timeout_inside_a_handler_keeps_its_message(flows: FlowsStepper) -> None:
    """F5: only a step that exceeds its own timeout has STEP_TIMEOUT."""

    async def late(step: FlowStep) -> Mapping[str, Any]:
        if step.step_id == "own":
            raise TimeoutError("the warehouse did not answer")
        await asyncio.Event().wait()
        return {}

    await flows.start({"own": work(required=False), "long": work(required=False, timeout=0.01)})
    async with running_worker(flows, late):
        await wait_for_end(flows)
    own, long = (await flows.step("own"))["error"], (await flows.step("long"))["error"]
    assert (own["code"], "the warehouse did not answer" in own["message"]) == ("WORKER_ERROR", True)
    assert long["code"] == "STEP_TIMEOUT"


@pytest.mark.parametrize(("text", "is_kept"), [("\\u0000", True), ("\\\\u0000", True), ("\0", False), ("\\\0", False)])
def test_only_the_character_nul_is_refused(text: str, is_kept: bool) -> None:
    """F5: a text with the escape sequence of NUL is accepted."""
    if is_kept:
        assert check_outputs({"v": text}) == {"v": text}
    else:
        with pytest.raises(StepFailed, match="NUL"):
            check_outputs({"v": text})


class PeakSource(LocalWorkSource):
    """A source that records the maximum number of steps its worker has claimed."""

    claimed, most = 0, 0

    async def claim(self, worker: str, capacities: Mapping[str, int], limit: int, wait: float) -> Sequence[ClaimedStep]:
        return self._count(await super().claim(worker, capacities, limit, wait))

    async def settle(
        self, worker: str, done: Sequence[tuple[ClaimedStep, StepReport]], kinds: Sequence[str], capacity: int
    ) -> tuple[Sequence[StepReportAnswer], Sequence[ClaimedStep]]:
        answers, prefetched = await super().settle(worker, done, kinds, capacity)
        self.claimed -= len(done)
        return answers, self._count(prefetched)

    def _count(self, claimed: Sequence[ClaimedStep]) -> Sequence[ClaimedStep]:
        self.claimed += len(claimed)
        self.most = max(self.most, self.claimed)
        return claimed


async def test_claimed_and_prefetched_steps_are_limited(flows: FlowsStepper) -> None:
    """F16, F17: claimed and prefetched steps together do not exceed the concurrency."""
    work_source = PeakSource(flows.engine, flows.storage)

    async def nothing(_step: FlowStep) -> Mapping[str, Any]:
        return {}

    roots = {f"r{n}": work() for n in range(6)}
    await flows.start(roots | {f"{root}-{n}": work(root) for root in roots for n in range(10)})
    async with running_worker(flows, nothing, 4, work_source):
        assert await wait_for_end(flows) == "SUCCEEDED"
    assert work_source.most <= 4
