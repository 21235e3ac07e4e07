"""F17: the interface of step handlers: a running step, and the workers of each step kind."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.flows.config import FlowsSection
from penstock.flows.contract import make_artifact_folder
from penstock.flows.model import ClaimedStep, StepError
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import BadConfig
from penstock.kernel.tasks.backoff import Sleep

Outputs = Mapping[str, Any] | None
Handler = Callable[["FlowStep"], Awaitable[Outputs]] | Callable[["FlowStep"], Outputs]
CheckInputs = Callable[[Mapping[str, Any]], None]  # raises Invalid for wrong inputs
# From the document or None, the inputs of the step and the names of its artifacts, to outputs to add, or an error.
Verdict = Callable[[bytes | None, Mapping[str, Any], frozenset[str]], Mapping[str, Any] | StepError]
# From a statement, its parameters and the maximum number of rows, to the rows.
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
    """A failure of a step: an error code, a message, and details for the diagnosis.

    *retryable* is the opinion of the worker; the `retry` policy of the step has priority.
    """

    def __init__(self, code: str, message: str, details: Any = None, *, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.error = StepError(code, message, details)
        self.retryable = retryable


class StepIO(Protocol):
    """The input and output of running steps: on the database and the store, or over HTTP."""

    async def log(self, claimed: ClaimedStep, level: str, message: str) -> None:
        """F18: store a log line of this attempt."""

    async def write(self, claimed: ClaimedStep, name: str, data: bytes) -> None:
        """F6: store *data* under this attempt; it is published when the report of the attempt is accepted."""

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        """Return the artifact *name* of a step that has ended; NotFound if the step has none of that name."""


class FlowStep:
    """A running step, as its handler receives it."""

    def __init__(self, claimed: ClaimedStep, io: StepIO) -> None:
        self.claimed = claimed
        self.run_id, self.step_id, self.kind = claimed.run_id, claimed.step_id, claimed.kind
        self.attempt, self.fence = claimed.attempt, claimed.fence
        self.inputs, self.scope = claimed.inputs, claimed.scope
        self.cancelled = asyncio.Event()  # F9: set when the run is cancelled, or the claim is lost
        self.is_lost = False  # the claim is lost: a report of this attempt has no effect
        self.artifacts: list[str] = []
        self._io = io

    async def log(self, message: str, level: str = "info") -> None:
        """F18: write a log line; `penstock flow logs` shows it."""
        await self._io.log(self.claimed, level, message)

    async def write(self, name: str, data: bytes | str) -> str:
        """F6: write an artifact; return its path, which exists once this step has ended."""
        await self._io.write(self.claimed, name, data.encode() if isinstance(data, str) else data)
        if name not in self.artifacts:
            self.artifacts.append(name)
        return f"{make_artifact_folder(self.kind, self.run_id, self.step_id)}/{name}"

    async def read(self, step_id: str, name: str) -> bytes:
        """Return the artifact *name* of an earlier step of the run."""
        return await self._io.read(self.run_id, step_id, name)


class Workers:
    """The handlers of step kinds. A handler returns the outputs, or raises StepFailed."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.input_checks: dict[str, CheckInputs] = {}
        self.report_checks: dict[str, ReportCheck] = {}

    def worker(
        self, kind: str, *, check_inputs: CheckInputs | None = None, check_report: ReportCheck | None = None
    ) -> Callable[[Handler], Handler]:
        """Decorate the function that executes steps of *kind*.

        *check_inputs* is called with the inputs as written, references included, when the server loads a flow or a run
        is requested. *check_report* decides whether a success is accepted. The server calls both.
        """

        def register(handler: Handler) -> Handler:
            if kind in self.handlers:
                raise ValueError(f"the step kind {kind} has two workers")
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

    def select_kinds(self, kinds: Collection[str]) -> "Workers":
        """Return the workers of *kinds*, or all workers if it is empty; BadConfig UNKNOWN_KIND for an unknown kind."""
        if unknown := sorted(set(kinds) - set(self.handlers)):
            hint = f"registered kinds: {', '.join(sorted(self.handlers)) or 'none'}"
            raise BadConfig("UNKNOWN_KIND", f"no worker is registered for step kind {unknown[0]!r}", hint=hint)
        chosen = Workers()
        chosen.add(self)
        for table in (chosen.handlers, chosen.input_checks, chosen.report_checks):
            for kind in [kind for kind in table if kinds and kind not in kinds]:
                del table[kind]
        return chosen


@dataclass(frozen=True, slots=True)
class KindContext:
    """The argument of `make_workers` of a module."""

    section: FlowsSection
    query: Query | None = None  # reads `flows.database`; None if it is not configured
    clock: Clock = field(default_factory=SystemClock)
    pause: Sleep = asyncio.sleep


MakeWorkers = Callable[[KindContext], Workers]
