"""F14: steps that harvest a feed: they have a run of it planned, and wait for its end."""

from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import count
from typing import Annotated, Protocol
from uuid import UUID

from pydantic import StringConstraints

from penstock.flows.definition.spec import SpecModel
from penstock.flows.kinds.inputs import read
from penstock.flows.kinds.platform.common import call_until_available, derive_id, pause, requester
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.harvest.contract import NAME, HarvestRunState, PlanState

KIND = "harvest.run"
_FAILED = (PlanState.FAILED.value, HarvestRunState.FAILED.value, HarvestRunState.CONSOLIDATION_SKIPPED.value)


class HarvestInputs(SpecModel):
    """Which feed, and how much of it."""

    feed: Annotated[str, StringConstraints(pattern=NAME[:-1] + r"\z")]
    full: bool = False


@dataclass(frozen=True, slots=True)
class HarvestOutputs:
    """A run of harvest, as far as a step needs to know it."""

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
    """What is needed of harvest."""

    async def start(self, feed: str, by: str, *, full: bool, run_id: UUID) -> UUID | None:
        """Have a run planned, unless that was done; None, or the run that is under way instead."""

    async def run(self, run_id: UUID) -> HarvestOutputs | None:
        """How a run stands; None when there is none."""


def harvest_worker(feeds: HarvestService) -> Handler:
    """The worker that has feeds harvested."""

    async def work(step: FlowStep) -> Outputs:
        given = read(HarvestInputs, step.inputs)
        run_id = await _next_name(step, feeds)
        start = partial(feeds.start, given.feed, requester(step), full=given.full, run_id=run_id)
        while (other := await call_until_available(step, start)) is not None:
            await step.log(f"run {other} of {given.feed} is under way: it comes first")
            await _ended(step, feeds, other)
        run = await _ended(step, feeds, run_id)
        if run is None or not run.is_completed:
            raise _failure(given.feed, run_id, run)
        return {
            "runId": str(run_id),
            "state": run.state,
            "records": run.records,
            "consolidated": run.consolidated,
            "rejected": run.rejected,
            "watermarkAfter": run.watermark_after and run.watermark_after.isoformat(),
        }

    return work


async def _next_name(step: FlowStep, feeds: HarvestService) -> UUID:
    """The id of the run that is, or will be, this step's; whoever tries it again does not want one that failed."""
    for failures in count():
        run_id = derive_id(step, *([failures] if failures else []))
        known = await call_until_available(step, partial(feeds.run, run_id))
        if known is None or not known.is_failed:
            return run_id
    raise AssertionError("there is always another name")


async def _ended(step: FlowStep, feeds: HarvestService, run_id: UUID) -> HarvestOutputs | None:
    """The run once nothing is done for it any more; None when it is forgotten."""
    while True:
        run = await call_until_available(step, partial(feeds.run, run_id))
        if run is None or run.is_completed or run.is_failed:
            return run
        await pause(step)


def _failure(feed: str, run_id: UUID, run: HarvestOutputs | None) -> StepFailed:
    state = run.state if run else "forgotten"
    because = f": {run.error}" if run and run.error else ""
    details = {"runId": str(run_id), "state": state, "error": run.error if run else None}
    return StepFailed("HARVEST_FAILED", f"run {run_id} of {feed} is {state}{because}", details, retryable=True)
