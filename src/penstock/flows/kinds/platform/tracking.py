"""F14: steps that wait until a file has gone through a stage of the pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol

from pydantic import Field

from penstock.flows.definition.spec import SpecModel
from penstock.flows.kinds.inputs import read
from penstock.flows.kinds.platform.common import call_until_available, pause
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.tracking.contract import NAME_LIMIT, Stage

KIND = "tracking.wait"
_TOLD = 20  # shards an error names


class TrackingInputs(SpecModel):
    """Which file, and how far."""

    filename: Annotated[str, Field(min_length=1, max_length=NAME_LIMIT)]
    stage: Stage = list(Stage)[-1]
    poll_seconds: float = Field(1, ge=0.2, le=3_600)


@dataclass(frozen=True, slots=True)
class ShardInput:
    """How one shard of a file stands: done with the stage that is asked for, or failed there or before, and why."""

    number: int
    is_done: bool
    failure: str | None = None


class TrackingService(Protocol):
    """What is needed of tracking."""

    async def shards(self, filename: str, stage: Stage) -> Sequence[ShardInput]:
        """How the shards of a file stand; none when nobody registered it."""


def tracking_worker(files: TrackingService) -> Handler:
    """The worker that waits for files."""

    async def work(step: FlowStep) -> Outputs:
        given = read(TrackingInputs, step.inputs)
        while True:
            shards = await call_until_available(step, partial(files.shards, given.filename, given.stage))
            if failed := [shard for shard in shards if shard.failure is not None]:
                raise _failure(given.filename, failed)
            if shards and all(shard.is_done for shard in shards):
                return {"filename": given.filename, "stage": given.stage.value, "shards": len(shards)}
            await pause(step, given.poll_seconds)

    return work


def _failure(filename: str, failed: Sequence[ShardInput]) -> StepFailed:
    told = {str(shard.number): shard.failure for shard in failed[:_TOLD]}
    more = f"; and {len(failed) - _TOLD} more" if len(failed) > _TOLD else ""
    said = "; ".join(f"shard {number}: {why}" for number, why in told.items())
    return StepFailed("TRACKING_FAILED", f"{filename}: {said}{more}", {"shards": told}, retryable=True)
