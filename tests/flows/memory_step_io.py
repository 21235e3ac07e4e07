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
    """Step input and output in memory."""

    logs: list[str] = field(default_factory=list)
    written: dict[str, bytes] = field(default_factory=dict)
    artifacts: dict[tuple[str, str], bytes] = field(default_factory=dict)  # of earlier steps

    async def log(self, claimed: ClaimedStep, level: str, message: str) -> None:
        self.logs.append(message)

    async def write(self, claimed: ClaimedStep, name: str, data: bytes) -> None:
        self.written[name] = data

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        if (step_id, name) not in self.artifacts:
            raise NotFound("ARTIFACT_NOT_FOUND", f"step {step_id} has no artifact {name}")
        return self.artifacts[step_id, name]


def make_step(
    kind: str,
    inputs: Mapping[str, Any],
    *,
    attempt: int = 1,
    step_io: MemoryStepIO | None = None,
    run_id: str = "run-1",
) -> FlowStep:
    """Return a step as its worker gets it; every attempt has its own fence."""
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


async def run_step(handler: Handler, step: FlowStep) -> Json:
    """Run a step, and return its outputs."""
    outputs = handler(step)
    if inspect.isawaitable(outputs):
        outputs = await outputs
    return dict(outputs or {})


async def run_failing_step(handler: Handler, step: FlowStep) -> StepFailed:
    """Run a step that must fail, and return its error."""
    try:
        outputs = await run_step(handler, step)
    except StepFailed as error:
        return error
    raise AssertionError(f"the step did not fail: {outputs}")
