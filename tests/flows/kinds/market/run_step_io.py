"""Execution of steps without an engine: one after the other, with logs and artifacts in memory."""

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from penstock.flows.model import ClaimedStep, StepError
from penstock.flows.step import FlowStep, StepFailed, Workers
from penstock.kernel.errors import NotFound
from tests.support.types import Json


class RunStepIO:
    """Input and output of the steps of one run."""

    def __init__(self) -> None:
        self.logs: dict[str, list[str]] = {}
        self.artifacts: dict[tuple[str, str], bytes] = {}
        self.wrote: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def log(self, claimed: ClaimedStep, level: str, message: str) -> None:
        self.logs.setdefault(claimed.step_id, []).append(f"{level}: {message}")

    async def write(self, claimed: ClaimedStep, name: str, data: bytes) -> None:
        self.artifacts[claimed.step_id, name] = data
        self.wrote[name].set()

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        if (step_id, name) not in self.artifacts:
            raise NotFound("NO_SUCH_ARTIFACT", f"step {step_id} has no artifact {name}")
        return self.artifacts[step_id, name]

    def document(self, step_id: str, name: str) -> Any:
        """Return a JSON artifact."""
        return orjson.loads(self.artifacts[step_id, name])

    def step(self, kind: str, inputs: Mapping[str, Any], step_id: str | None = None) -> FlowStep:
        """Return a step of this run, as its handler receives it."""
        name = step_id or kind.partition("_")[0].lower()
        late = datetime(2026, 1, 1, tzinfo=UTC)
        return FlowStep(ClaimedStep(1, 1, "run-1", name, kind, 1, 1, inputs, {}, late, None, None, is_plain=True), self)

    async def run_step(
        self, workers: Workers, kind: str, inputs: Mapping[str, Any], step_id: str | None = None
    ) -> Json:
        """Execute a step and return its outputs."""
        outputs = workers.handlers[kind](self.step(kind, inputs, step_id))
        result = await outputs if inspect.isawaitable(outputs) else outputs
        return dict(result or {})

    async def run_failing_step(
        self, workers: Workers, kind: str, inputs: Mapping[str, Any], step_id: str | None = None
    ) -> StepError:
        """Execute a step that must fail, and return its error."""
        try:
            outputs = await self.run_step(workers, kind, inputs, step_id)
        except StepFailed as failed:
            return failed.error
        raise AssertionError(f"it did not fail: {outputs}")
