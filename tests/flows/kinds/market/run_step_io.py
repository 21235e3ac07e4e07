"""Run steps without an engine: one by one, with logs and artifacts kept in dicts."""

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

    async def log(self, held: ClaimedStep, level: str, message: str) -> None:
        self.logs.setdefault(held.step_id, []).append(f"{level}: {message}")

    async def write(self, held: ClaimedStep, name: str, data: bytes) -> None:
        self.artifacts[held.step_id, name] = data
        self.wrote[name].set()

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        if (step_id, name) not in self.artifacts:
            raise NotFound("NO_SUCH_ARTIFACT", f"step {step_id} has no artifact {name}")
        return self.artifacts[step_id, name]

    def document(self, step_id: str, name: str) -> Any:
        """An artifact of JSON."""
        return orjson.loads(self.artifacts[step_id, name])

    def step(self, kind: str, inputs: Mapping[str, Any], step_id: str | None = None) -> FlowStep:
        """A step of this run, as its worker gets it."""
        name = step_id or kind.partition("_")[0].lower()
        late = datetime(2026, 1, 1, tzinfo=UTC)
        return FlowStep(ClaimedStep(1, 1, "run-1", name, kind, 1, 1, inputs, {}, late, None, None, is_plain=True), self)

    async def do(self, workers: Workers, kind: str, inputs: Mapping[str, Any], step_id: str | None = None) -> Json:
        """The outputs of a step."""
        outputs = workers.handlers[kind](self.step(kind, inputs, step_id))
        found = await outputs if inspect.isawaitable(outputs) else outputs
        return dict(found or {})

    async def fail(
        self, workers: Workers, kind: str, inputs: Mapping[str, Any], step_id: str | None = None
    ) -> StepError:
        """The error of a step that must fail."""
        try:
            outputs = await self.do(workers, kind, inputs, step_id)
        except StepFailed as failed:
            return failed.error
        raise AssertionError(f"it did not fail: {outputs}")
