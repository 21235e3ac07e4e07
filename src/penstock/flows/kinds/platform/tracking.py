"""F14: steps that wait until a file has completed a stage of tracking."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol

from pydantic import Field

from penstock.flows.definition.spec import SpecModel
from penstock.flows.kinds.inputs import read_inputs
from penstock.flows.kinds.platform.common import call_until_available, pause
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.tracking.contract import NAME_LIMIT, Stage

KIND = "tracking.wait"
_NAMED_LIMIT = 20  # shards in the message of an error


class TrackingInputs(SpecModel):
    """The file, and the stage to wait for."""

    filename: Annotated[str, Field(min_length=1, max_length=NAME_LIMIT)]
    stage: Stage = list(Stage)[-1]
    poll_seconds: float = Field(1, ge=0.2, le=3_600)


@dataclass(frozen=True, slots=True)
class ShardInput:
    """The status of a shard: whether it has completed the stage, or the reason why it failed there or before."""

    number: int
    is_done: bool
    failure: str | None = None


class TrackingService(Protocol):
    """The functions of tracking that the steps use."""

    async def list_shards(self, filename: str, stage: Stage) -> Sequence[ShardInput]:
        """Return the status of the shards of a file; empty if the file is not registered."""


def make_tracking_handler(files: TrackingService) -> Handler:
    """Return the handler of steps that wait for files."""

    async def wait_for_files(step: FlowStep) -> Outputs:
        inputs = read_inputs(TrackingInputs, step.inputs)
        while True:
            shards = await call_until_available(step, partial(files.list_shards, inputs.filename, inputs.stage))
            if failed := [shard for shard in shards if shard.failure is not None]:
                raise _make_failure(inputs.filename, failed)
            if shards and all(shard.is_done for shard in shards):
                return {"filename": inputs.filename, "stage": inputs.stage.value, "shards": len(shards)}
            await pause(step, inputs.poll_seconds)

    return wait_for_files


def _make_failure(filename: str, failed: Sequence[ShardInput]) -> StepFailed:
    reasons = {str(shard.number): shard.failure for shard in failed[:_NAMED_LIMIT]}
    more = f"; and {len(failed) - _NAMED_LIMIT} more" if len(failed) > _NAMED_LIMIT else ""
    listed = "; ".join(f"shard {number}: {reason}" for number, reason in reasons.items())
    message = f"shards of file {filename} failed: {listed}{more}"
    return StepFailed("TRACKING_FAILED", message, {"shards": reasons}, retryable=True)
