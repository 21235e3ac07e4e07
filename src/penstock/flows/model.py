"""The rules of flows, without I/O: the machines of runs and steps, and what becomes of a failure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from penstock.flows.contract import FlowRunStatus, StepReportKind, StepStatus
from penstock.kernel.errors import NotFound
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
        Transition("expand", (S.PENDING,), S.RUNNING),  # the engine's own kinds: they run without a worker
        Transition("succeed", (S.RUNNING,), S.SUCCEEDED),
        Transition("fail", (S.RUNNING, S.PENDING), S.FAILED),  # PENDING: its condition or inputs made no sense
        Transition("again", (S.RUNNING,), S.READY),
        Transition("skip", (S.PENDING, S.READY, S.RUNNING, S.FAILED, S.CANCELLED), S.SKIPPED),
        Transition("cancel", (S.PENDING, S.READY, S.RUNNING), S.CANCELLED),
        Transition("reopen", (S.FAILED, S.CANCELLED, S.SKIPPED), S.PENDING),
        Transition("reuse", (S.PENDING,), S.SUCCEEDED),  # F19: another run did it
    ],
    groups={
        "waiting": (S.PENDING, S.READY),
        "satisfied": (S.SUCCEEDED, S.SKIPPED),  # F8
        "ended": (S.SUCCEEDED, S.FAILED, S.SKIPPED, S.CANCELLED),
    },
)

Place = tuple[int, int]  # a run and a step's place in it
Json = Mapping[str, Any]

UPSTREAM_FAILED = "upstream_failed"  # F7: why steps not begun are cancelled
LEASE_EXPIRED = "LEASE_EXPIRED"  # F11


@dataclass(frozen=True, slots=True)
class StepError:
    """F5: why a step failed."""

    code: str
    message: str
    details: Any = None

    def as_dict(self) -> dict[str, Any]:
        """As it is kept and told."""
        return {"code": self.code, "message": self.message, "details": self.details}


@dataclass(frozen=True, slots=True)
class ClaimedStep:
    """F4: a step that is its worker's alone until the lease runs out; *inputs* are as they are to be used."""

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
    is_plain: bool  # nothing but its children's turn can follow from its success


@dataclass(frozen=True, slots=True)
class StepReport:
    """F5: what a worker says of a step it held under *fence*. The *artifacts* are names it wrote under its attempt."""

    run_id: str
    step_id: str
    fence: int
    said: StepReportKind
    outputs: Mapping[str, Any] = field(default_factory=dict)
    error: StepError | None = None
    artifacts: Sequence[str] = ()
    is_retryable: bool | None = None  # what the worker thinks of its error; the step's own policy comes first


@dataclass(frozen=True, slots=True)
class StepArtifact:
    """F6: an artifact as it is kept with its step."""

    name: str
    path: str
    uri: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to be."""

    run_id: str
    flow: str | None
    scope: Json
    digest: str
    fail_fast: bool
    open: int
    created_by: str
    parent: Place | None = None
    depth: int = 0
    scheduled_for: datetime | None = None
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class NewStep:
    """A step to be; places count from 0."""

    n: int
    step_id: str
    kind: str
    depends_on: Sequence[int]
    children: Sequence[int]
    is_looked_at: bool
    is_plain: bool
    required: bool
    spec: str  # as JSON
    given: str | None = None
    map_n: int | None = None
    max_attempts: int | None = None
    time_limit: timedelta | None = None


class StepEnd(NamedTuple):
    """How a step that stands at *source* under *fence* ends, or goes back to READY."""

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
    artifacts: str | None = None  # as JSON text: a list in an array would be taken for another dimension of it
    uncounted: int = 0  # attempts that were none
    skips: int = 0  # F11: fences that are passed over


class Prefetch(NamedTuple):
    """What a worker takes at once of the steps whose turn comes by its report."""

    kinds: Sequence[str]
    room: int
    worker: str
    until: datetime


class EndedStep(NamedTuple):
    """A step that ended, or went back to READY; *map_n* is the map it is an item of."""

    place: Place
    status: StepStatus
    map_n: int | None
    name: str
    kind: str


@dataclass(slots=True)
class StepSettlement:
    """What followed from some ends."""

    ended: list[EndedStep] = field(default_factory=list)
    handed: list[ClaimedStep] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)  # kinds
    looks: list[Place] = field(default_factory=list)
    runs: list[tuple[int, str, FlowRunStatus]] = field(default_factory=list)
    has_waiting: bool = False  # a run that was made waits to begin

    def add(self, more: "StepSettlement") -> None:
        """Know also what followed later."""
        self.ended += more.ended
        self.handed += more.handed
        self.ready |= more.ready
        self.looks += more.looks
        self.runs += more.runs
        self.has_waiting |= more.has_waiting


def no_run(run_id: str) -> NotFound:
    """What is said of a run nobody knows, or knows any more."""
    return NotFound("RUN_NOT_FOUND", f"there is no run {run_id}", hint="`penstock flow ls` lists them")


def no_step(run_id: str, step_id: str) -> NotFound:
    hint = f"`penstock flow show {run_id}` lists them"
    return NotFound("STEP_NOT_FOUND", f"run {run_id} has no step {step_id}", hint=hint)
