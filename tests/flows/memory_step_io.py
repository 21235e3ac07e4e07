"""Run steps of the built-in kinds without an engine; logs and artifacts stay in memory."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from penstock.flows.model import ClaimedStep
from penstock.flows.step import FlowStep, Handler, StepFailed
from penstock.kernel.errors import NotFound
from tests.support.types import Json


@dataclass
class MemoryStepIO:
    """Step input and output that keeps everything in memory."""

    logs: list[str] = field(default_factory=list)
    written: dict[str, bytes] = field(default_factory=dict)
    artifacts: dict[tuple[str, str], bytes] = field(default_factory=dict)  # of steps before

    async def log(self, held: ClaimedStep, level: str, message: str) -> None:
        self.logs.append(message)

    async def write(self, held: ClaimedStep, name: str, data: bytes) -> None:
        self.written[name] = data

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        if (step_id, name) not in self.artifacts:
            raise NotFound("ARTIFACT_NOT_FOUND", f"step {step_id} has no artifact {name}")
        return self.artifacts[step_id, name]


def held(
    kind: str,
    inputs: Mapping[str, Any],
    *,
    attempt: int = 1,
    step_io: MemoryStepIO | None = None,
    run_id: str = "run-1",
) -> FlowStep:
    """A step as a worker gets it; every attempt is under a fence of its own."""
    claimed = ClaimedStep(
        run=1,
        n=0,
        run_id=run_id,
        step_id="step-1",
        kind=kind,
        fence=attempt,
        attempt=attempt,
        inputs=inputs,
        scope={},
        lease_until=datetime.max.replace(tzinfo=UTC),
        time_limit=None,
        trace=None,
        is_plain=True,
    )
    return FlowStep(claimed, step_io or MemoryStepIO())


async def done(handler: Handler, step: FlowStep) -> Json:
    """The outputs of a step."""
    outputs = handler(step)
    if inspect.isawaitable(outputs):
        outputs = await outputs
    return dict(outputs or {})


async def failed(handler: Handler, step: FlowStep) -> StepFailed:
    """How a step fails, which it must."""
    try:
        outputs = await done(handler, step)
    except StepFailed as error:
        return error
    raise AssertionError(f"it did not fail: {outputs}")
