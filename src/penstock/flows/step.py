"""F17: a step as its worker sees it, and the workers by the kind of step they do."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.flows.config import FlowsSection
from penstock.flows.contract import artifact_folder
from penstock.flows.model import ClaimedStep, StepError
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import BadConfig
from penstock.kernel.tasks.backoff import Sleep

Outputs = Mapping[str, Any] | None
Handler = Callable[["FlowStep"], Awaitable[Outputs]] | Callable[["FlowStep"], Outputs]
CheckInputs = Callable[[Mapping[str, Any]], None]  # raises Invalid for inputs that cannot be right
# The document or None, the inputs of the step and the names of its artifacts; outputs to add, or the step's error.
Verdict = Callable[[bytes | None, Mapping[str, Any], frozenset[str]], Mapping[str, Any] | StepError]
# A statement, its parameters and the most rows it may return.
Query = Callable[[str, Sequence[Any], int], Awaitable[Sequence[Mapping[str, Any]]]]


@dataclass(frozen=True, slots=True)
class ReportCheck:
    """F12: how the engine checks a success of a kind: by a document among the artifacts of the step.

    The artifact *document* is published if it was written, and *output* receives its address. *verdict* returns
    outputs to add, or the error that the step fails with.
    """

    document: str
    output: str
    verdict: Verdict


class StepFailed(Exception):
    """A step cannot be done: a short constant, a sentence, and what helps to find out why.

    *retryable* is what the worker knows of it; what the step's own `retry` says goes before.
    """

    def __init__(self, code: str, message: str, details: Any = None, *, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.error = StepError(code, message, details)
        self.retryable = retryable


class StepIO(Protocol):
    """What a step under way can ask for: of the database and the store, or over HTTP."""

    async def log(self, held: ClaimedStep, level: str, message: str) -> None:
        """F18: keep a line with this attempt."""

    async def write(self, held: ClaimedStep, name: str, data: bytes) -> None:
        """F6: keep *data* under this attempt; it is published when the attempt is the one that counts."""

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        """The artifact *name* of a step that has ended; NotFound when it has none."""


class FlowStep:
    """A step under way."""

    def __init__(self, held: ClaimedStep, desk: StepIO) -> None:
        self.held = held
        self.run_id, self.step_id, self.kind = held.run_id, held.step_id, held.kind
        self.attempt, self.fence = held.attempt, held.fence
        self.inputs, self.scope = held.inputs, held.scope
        self.cancelled = asyncio.Event()  # F9: set when the run is cancelled, or somebody else has the step
        self.is_lost = False  # somebody else has the step: nothing that is said of it counts
        self.artifacts: list[str] = []
        self._desk = desk

    async def log(self, message: str, level: str = "info") -> None:
        """F18: keep a line for whoever asks what happened."""
        await self._desk.log(self.held, level, message)

    async def write(self, name: str, data: bytes | str) -> str:
        """F6: write an artifact; its path, where it is once this step has ended."""
        await self._desk.write(self.held, name, data.encode() if isinstance(data, str) else data)
        if name not in self.artifacts:
            self.artifacts.append(name)
        return f"{artifact_folder(self.kind, self.run_id, self.step_id)}/{name}"

    async def read(self, step_id: str, name: str) -> bytes:
        """The artifact *name* of a step before this one."""
        return await self._desk.read(self.run_id, step_id, name)


class Workers:
    """Who does which kind of step. A handler returns the outputs, or raises StepFailed."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.input_checks: dict[str, CheckInputs] = {}
        self.report_checks: dict[str, ReportCheck] = {}

    def worker(
        self, kind: str, *, check_inputs: CheckInputs | None = None, check_report: ReportCheck | None = None
    ) -> Callable[[Handler], Handler]:
        """Decorate the function that does steps of *kind*.

        *check_inputs* is called with the inputs as they are written, references included, when the server loads
        a flow or a run is requested. *check_report* decides whether a success is accepted. The server calls both.
        """

        def register(handler: Handler) -> Handler:
            if kind in self.handlers:
                raise ValueError(f"two workers for the kind {kind}")
            self.handlers[kind] = handler
            self.declare(kind, check_inputs=check_inputs, check_report=check_report)
            return handler

        return register

    def declare(
        self, kind: str, *, check_inputs: CheckInputs | None = None, check_report: ReportCheck | None = None
    ) -> None:
        """Set the checks of *kind* as `worker` does, without a handler: for a kind of `make_workers`."""
        if check_inputs is not None:
            self.input_checks[kind] = check_inputs
        if check_report is not None:
            self.report_checks[kind] = check_report

    def add(self, others: "Workers") -> None:
        """Add the handlers and the checks of *others*."""
        for kind, handler in others.handlers.items():
            self.worker(kind)(handler)
        self.input_checks |= others.input_checks
        self.report_checks |= others.report_checks

    def only(self, kinds: Collection[str]) -> "Workers":
        """Return the workers of *kinds*, all of them when none is named; BadConfig UNKNOWN_KIND for a kind without."""
        if unknown := sorted(set(kinds) - set(self.handlers)):
            hint = f"here are: {', '.join(sorted(self.handlers)) or 'none'}"
            raise BadConfig("UNKNOWN_KIND", f"nobody here does steps of the kind {unknown[0]}", hint=hint)
        chosen = Workers()
        chosen.add(self)
        for table in (chosen.handlers, chosen.input_checks, chosen.report_checks):
            for kind in [kind for kind in table if kinds and kind not in kinds]:
                del table[kind]
        return chosen


@dataclass(frozen=True, slots=True)
class KindContext:
    """What `make_workers` of a module receives."""

    section: FlowsSection
    query: Query | None = None  # reads `flows.database`; None without one
    clock: Clock = field(default_factory=SystemClock)
    pause: Sleep = asyncio.sleep


MakeWorkers = Callable[[KindContext], Workers]
