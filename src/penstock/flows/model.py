"""The data model of flows: state machines of runs and steps, claims, reports and settlements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from penstock.flows.contract import FlowRunStatus, StepReportKind, StepStatus
from penstock.kernel.errors import Conflict, NotFound
from penstock.kernel.machine import StateMachine, Transition

S, R = StepStatus, FlowRunStatus

RUN = StateMachine(
    "flows.run",
    FlowRunStatus,
    initial=R.PENDING,
    moves=[
        Transition("begin", (R.PENDING,), R.RUNNING),
        Transition("succeed", (R.RUNNING,), R.SUCCEEDED),
        Transition("fail", (R.RUNNING,), R.FAILED),
        Transition("cancel", (R.PENDING, R.RUNNING), R.CANCELLED),
        Transition("reopen", (R.FAILED, R.CANCELLED), R.RUNNING),
    ],
    groups={"active": (R.PENDING, R.RUNNING), "ended": (R.SUCCEEDED, R.FAILED, R.CANCELLED)},
)

STEP = StateMachine(
    "flows.step",
    StepStatus,
    initial=S.PENDING,
    moves=[
        Transition("ready", (S.PENDING,), S.READY),
        Transition("claim", (S.READY,), S.RUNNING),
        Transition("expand", (S.PENDING,), S.RUNNING),  # maps and sub-flows run without a worker
        Transition("succeed", (S.RUNNING,), S.SUCCEEDED),
        Transition("fail", (S.RUNNING, S.PENDING), S.FAILED),  # PENDING: its condition or inputs are invalid
        Transition("again", (S.RUNNING,), S.READY),
        Transition("skip", (S.PENDING, S.READY, S.RUNNING, S.FAILED, S.CANCELLED), S.SKIPPED),
        Transition("cancel", (S.PENDING, S.READY, S.RUNNING), S.CANCELLED),
        Transition("reopen", (S.FAILED, S.CANCELLED, S.SKIPPED), S.PENDING),
        Transition("reuse", (S.PENDING,), S.SUCCEEDED),  # F19: the outputs come from another run
    ],
    groups={
        "waiting": (S.PENDING, S.READY),
        "satisfied": (S.SUCCEEDED, S.SKIPPED),  # F8
        "ended": (S.SUCCEEDED, S.FAILED, S.SKIPPED, S.CANCELLED),
    },
)

StepKey = tuple[int, int]  # the number of a run, and of a step in it
Json = Mapping[str, Any]

UPSTREAM_FAILED = "upstream_failed"  # F7: the reason of cancelled steps
LEASE_EXPIRED = "LEASE_EXPIRED"  # F11


@dataclass(frozen=True, slots=True)
class StepError:
    """F5: the error of a failed step."""

    code: str
    message: str
    details: Any = None

    def as_dict(self) -> dict[str, Any]:
        """Return the error as stored in the database and sent by the API."""
        return {"code": self.code, "message": self.message, "details": self.details}


@dataclass(frozen=True, slots=True)
class ClaimedStep:
    """F4: a step that one worker owns until its lease expires; the references in *inputs* are resolved."""

    run: int
    n: int
    run_id: str
    step_id: str
    kind: str
    fence: int
    attempt: int
    inputs: Mapping[str, Any]
    scope: Mapping[str, Any]
    lease_until: datetime
    time_limit: timedelta | None
    trace: str | None
    is_plain: bool  # its success can only make its children READY

    @property
    def key(self) -> StepKey:
        """Return the key of the step."""
        return self.run, self.n


@dataclass(frozen=True, slots=True)
class StepReport:
    """F5: the outcome of a claimed step. *artifacts* are the names that the attempt wrote."""

    run_id: str
    step_id: str
    fence: int
    outcome: StepReportKind
    outputs: Mapping[str, Any] = field(default_factory=dict)
    error: StepError | None = None
    artifacts: Sequence[str] = ()
    is_retryable: bool | None = None  # the opinion of the worker; the `retry` of the step has priority


@dataclass(frozen=True, slots=True)
class StepArtifact:
    """F6: an artifact as it is stored with its step."""

    name: str
    path: str
    uri: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that is being created."""

    run_id: str
    flow: str | None
    scope: Json
    digest: str
    fail_fast: bool
    open: int
    created_by: str
    parent: StepKey | None = None
    depth: int = 0
    scheduled_for: datetime | None = None
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class NewStep:
    """A step that is being created; its number *n* in the run counts from 0."""

    n: int
    step_id: str
    kind: str
    depends_on: Sequence[int]
    children: Sequence[int]
    needs_evaluation: bool
    is_plain: bool
    required: bool
    spec: str  # as JSON
    resolved_inputs: str | None = None  # as JSON
    map_n: int | None = None
    max_attempts: int | None = None
    time_limit: timedelta | None = None


class StepEnd(NamedTuple):
    """The end of a step, or its return to READY; *source* is its present status under *fence*."""

    run: int
    n: int
    fence: int
    source: StepStatus
    target: StepStatus
    outputs: Json | None = None
    error: Json | None = None
    reason: str | None = None
    due_at: datetime | None = None
    digest: str | None = None
    artifacts: str | None = None  # as JSON text: PostgreSQL would read a list in an array as a second dimension
    uncounted: int = 0  # attempts that do not count
    skips: int = 0  # F11: fences to skip, so that an old worker is rejected


class Prefetch(NamedTuple):
    """F4: a request to claim the steps that a report makes READY."""

    kinds: Sequence[str]
    capacity: int
    worker: str
    until: datetime


class EndedStep(NamedTuple):
    """A step that ended or returned to READY; *map_n* is the number of its map, if it is an item."""

    key: StepKey
    status: StepStatus
    map_n: int | None
    run_id: str
    name: str
    kind: str
    attempt: int
    reason: str | None = None
    error: Json | None = None


@dataclass(slots=True)
class RunChange:
    """A run whose status changed; *duration* is the time from its start to its end."""

    run: int
    run_id: str
    flow: str | None
    status: FlowRunStatus
    reason: str | None = None
    duration: timedelta | None = None


@dataclass(slots=True)
class StepSettlement:
    """The consequences of ended steps."""

    ended: list[EndedStep] = field(default_factory=list)
    prefetched: list[ClaimedStep] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)  # kinds
    to_evaluate: list[StepKey] = field(default_factory=list)
    started: list[RunChange] = field(default_factory=list)
    runs: list[RunChange] = field(default_factory=list)  # ended
    has_waiting: bool = False  # a new run waits for its flow's maxActiveRuns

    def add(self, more: "StepSettlement") -> None:
        """Add the consequences in *more*."""
        self.ended += more.ended
        self.prefetched += more.prefetched
        self.ready |= more.ready
        self.to_evaluate += more.to_evaluate
        self.started += more.started
        self.runs += more.runs
        self.has_waiting |= more.has_waiting


def make_run_not_found_error(run_id: str) -> NotFound:
    """Return the error for an unknown or deleted run."""
    return NotFound("RUN_NOT_FOUND", f"run {run_id} does not exist", hint="`penstock flow runs` lists runs")


def make_superseded_error(run_id: str, step_id: str, fence: int) -> Conflict:
    """F4: return the error for a worker that has lost its step."""
    message = f"step {step_id} of run {run_id} is not claimed under fence {fence}"
    hint = "stop working on this step: its lease expired, or it has ended"
    return Conflict("SUPERSEDED", message, hint=hint)


def make_step_not_found_error(run_id: str, step_id: str) -> NotFound:
    """Return the error for an unknown step."""
    hint = f"`penstock flow show {run_id}` lists its steps"
    return NotFound("STEP_NOT_FOUND", f"run {run_id} has no step {step_id}", hint=hint)
