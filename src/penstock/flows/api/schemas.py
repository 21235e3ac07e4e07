"""What goes over the wire between the API of flows and people."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from penstock.flows.contract import NAME, FlowRunStatus, StepStatus
from penstock.flows.definition.spec import Name
from penstock.kernel.http.schemas import Camel, CamelBody, MoveSchema, Text

# Runs inside of steps are named after them: `nightly~load[3]`.
RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9_.~\[\]-]{0,1999}$"
STEP_ID = NAME[:-1] + r"(\[[0-9]{1,6}\])?$"


Worker = Annotated[Text, Field(min_length=1, max_length=255)]
Reason = Annotated[Text, Field(min_length=1, max_length=1_000)]
RunId = Annotated[str, Field(pattern=RUN_ID)]
StepId = Annotated[str, Field(pattern=STEP_ID)]


class FlowActionRequest(CamelBody):
    """Why somebody does what is kept with the run."""

    reason: Reason | None = None


class ResumeRequest(CamelBody):
    """F19: where a new run begins."""

    from_: Annotated[str, Field(alias="from", pattern=STEP_ID)]
    run_id: Name | None = Field(None, description="Of the new run.")


class RunCreated(Camel):
    run_id: str
    status: FlowRunStatus
    created: bool = Field(description="False when the same was asked for before.")
    url: str


class StepErrorView(Camel):
    """F5: why a step failed."""

    code: str
    message: str
    details: Any = None


class ArtifactView(Camel):
    """F6: what a step left."""

    name: str
    uri: str
    sha256: str
    size: int


class StepView(Camel):
    """F1: a step as it stands."""

    status: StepStatus
    kind: str
    depends_on: list[str]
    required: bool
    inputs: dict[str, Any] = Field(description="With all references filled in, once it has had its turn.")
    outputs: dict[str, Any] | None
    error: StepErrorView | None
    reason: str | None = Field(description="Why it was skipped, cancelled, or is tried again.")
    attempts: int
    max_attempts: int | None
    fence: int
    worker: str | None
    lease_until: datetime | None
    due_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    artifacts: list[ArtifactView]
    map: str | None = Field(description="F14: the map it is an item of.")


class FlowRunHead(Camel):
    """A run without its steps."""

    run_id: str
    flow: str | None
    status: FlowRunStatus
    reason: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    created_by: str
    scheduled_for: datetime | None
    parent_run_id: str | None = Field(description="F14: the run this one is the inside of, and the step there.")
    parent_step_id: str | None


class FlowRunList(Camel):
    runs: list[FlowRunHead]
    next: str | None


class FlowRun(FlowRunHead):
    """F1: a run as it stands."""

    scope: dict[str, Any]
    fail_fast: bool
    counts: dict[str, int] = Field(description="How many steps stand how.")
    steps: dict[str, StepView] | None = Field(None, description="Null when they were not asked for.")


class RunCancelled(Camel):
    run_id: str
    status: FlowRunStatus


class RetriedSteps(Camel):
    run_id: str
    steps: list[str] = Field(description="What is tried again, and what was cancelled because of it.")


class StepState(Camel):
    run_id: str
    step_id: str
    status: StepStatus


class StepExplanationView(StepState):
    """F18: why a step is where it is, and what would move it."""

    why: str
    hint: str | None


class FlowMove(MoveSchema, Camel):
    """F18: a move of a run, or of one of its steps."""

    run_id: str
    step_id: str | None


class FlowHistory(Camel):
    run_id: str
    moves: list[FlowMove]
    next: str | None


class LogLine(Camel):
    """F18: a line of a step's log."""

    at: datetime
    attempt: int
    fence: int
    level: str
    message: str


class LogPage(Camel):
    run_id: str
    step_id: str
    lines: list[LogLine]
    next: str | None


class RunLogLine(LogLine):
    """F18: a line of the log of a run, with its step."""

    step_id: str


class RunLogPage(Camel):
    run_id: str
    lines: list[RunLogLine]
    next: str | None


class ScheduleView(Camel):
    """F16: when a flow runs by itself."""

    cron: str
    timezone: str
    overlap: bool
    catch_up: str
    paused: bool
    next: list[datetime]
    last_run: str | None
    note: str | None = Field(description="Why the last time passed without a run.")


class LatestRun(Camel):
    """The latest run of a flow."""

    run_id: str
    status: FlowRunStatus
    created_at: datetime
    finished_at: datetime | None


class FlowHead(Camel):
    name: str
    description: str
    steps: int
    max_active_runs: int | None
    schedule: ScheduleView | None
    latest_run: LatestRun | None = Field(description="The latest run, however it was started.")


class FlowList(Camel):
    flows: list[FlowHead]
    errors: dict[str, str] = Field(description="Files that cannot be used as they are, and why.")


class FlowView(FlowHead):
    """F15: a flow by its name."""

    spec: dict[str, Any]
    mermaid: str
