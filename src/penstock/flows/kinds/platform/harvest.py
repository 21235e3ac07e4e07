"""F14: steps that harvest a feed: they start a run of harvest, and wait for its end."""

from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import count
from typing import Annotated, Protocol
from uuid import UUID

from pydantic import StringConstraints

from penstock.flows.definition.spec import SpecModel
from penstock.flows.kinds.inputs import read_inputs
from penstock.flows.kinds.platform.common import call_until_available, derive_id, describe_requester, pause
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.harvest.contract import NAME, HarvestRunState, PlanState
from penstock.kernel.text import format_time

KIND = "harvest.run"
_FAILED = (PlanState.FAILED.value, HarvestRunState.FAILED.value, HarvestRunState.CONSOLIDATION_SKIPPED.value)


class HarvestInputs(SpecModel):
    """The feed, and whether the run is full or incremental."""

    feed: Annotated[str, StringConstraints(pattern=NAME[:-1] + r"\z")]
    full: bool = False


@dataclass(frozen=True, slots=True)
class HarvestOutputs:
    """The state and the result of a harvest run."""

    state: str
    records: int
    consolidated: int
    rejected: int
    watermark_after: datetime | None
    error: str | None

    @property
    def is_completed(self) -> bool:
        return self.state == HarvestRunState.COMPLETED.value

    @property
    def is_failed(self) -> bool:
        return self.state in _FAILED


class HarvestService(Protocol):
    """The functions of harvest that the steps use."""

    async def start(self, feed: str, by: str, *, full: bool, run_id: UUID) -> UUID | None:
        """Start a run, unless it was started before; return the id of another active run of the feed, or None."""

    async def run(self, run_id: UUID) -> HarvestOutputs | None:
        """Return a run, or None if it does not exist."""


def make_harvest_handler(feeds: HarvestService) -> Handler:
    """Return the handler of steps that harvest feeds."""

    async def harvest_feed(step: FlowStep) -> Outputs:
        inputs = read_inputs(HarvestInputs, step.inputs)
        run_id = await _find_run_id(step, feeds)
        start = partial(feeds.start, inputs.feed, describe_requester(step), full=inputs.full, run_id=run_id)
        while (other := await call_until_available(step, start)) is not None:
            await step.log(f"waiting for run {other} of feed {inputs.feed}, which is active")
            await _wait_for_end(step, feeds, other)
        run = await _wait_for_end(step, feeds, run_id)
        if run is None or not run.is_completed:
            raise _make_failure(inputs.feed, run_id, run)
        return {
            "runId": str(run_id),
            "state": run.state,
            "records": run.records,
            "consolidated": run.consolidated,
            "rejected": run.rejected,
            "watermarkAfter": run.watermark_after and format_time(run.watermark_after),
        }

    return harvest_feed


async def _find_run_id(step: FlowStep, feeds: HarvestService) -> UUID:
    """Return the id of the run of this step: the first derived id whose run has not failed."""
    for failures in count():
        run_id = derive_id(step, *([failures] if failures else []))
        run = await call_until_available(step, partial(feeds.run, run_id))
        if run is None or not run.is_failed:
            return run_id
    raise AssertionError("there is always another id")


async def _wait_for_end(step: FlowStep, feeds: HarvestService, run_id: UUID) -> HarvestOutputs | None:
    """Return the run when it has ended; None if it was deleted."""
    while True:
        run = await call_until_available(step, partial(feeds.run, run_id))
        if run is None or run.is_completed or run.is_failed:
            return run
        await pause(step)


def _make_failure(feed: str, run_id: UUID, run: HarvestOutputs | None) -> StepFailed:
    state = run.state if run else "deleted"
    error = f": {run.error}" if run and run.error else ""
    details = {"runId": str(run_id), "state": state, "error": run.error if run else None}
    return StepFailed("HARVEST_FAILED", f"run {run_id} of feed {feed} is {state}{error}", details, retryable=True)
