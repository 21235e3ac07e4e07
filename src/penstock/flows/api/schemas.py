"""Requests and responses of the API of flows for operators."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from penstock.flows.contract import NAME, FlowRunStatus, StepStatus
from penstock.flows.definition.spec import Name
from penstock.kernel.http.schemas import Camel, CamelBody, MoveSchema, Text

# The id of a sub-run contains the id of its step: `nightly~load[3]`.
RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9_.~\[\]-]{0,1999}$"
STEP_ID = NAME[:-1] + r"(\[[0-9]{1,6}\])?$"


Worker = Annotated[Text, Field(min_length=1, max_length=255)]
Reason = Annotated[Text, Field(min_length=1, max_length=1_000)]
RunId = Annotated[str, Field(pattern=RUN_ID)]
StepId = Annotated[str, Field(pattern=STEP_ID)]


class FlowActionRequest(CamelBody):
    """An action of an operator, with a reason for the history."""

    reason: Reason | None = Field(None, description="Reason of the action; stored in the history of the run.")


class ResumeRequest(CamelBody):
    """F19: a request for a run that starts at a step."""

    from_: Annotated[str, Field(alias="from", pattern=STEP_ID, description="First step to execute again.")]
    run_id: Name | None = Field(None, description="Id of the new run. Default: a new id.")


class RunCreated(Camel):
    run_id: str
    status: FlowRunStatus
    created: bool = Field(description="False if the run existed already.")
    url: str


class StepErrorView(Camel):
    """F5: the error of a failed step."""

    code: str
    message: str
    details: Any = None


class ArtifactView(Camel):
    """F6: a published artifact of a step."""

    name: str
    uri: str
    sha256: str
    size: int


class StepView(Camel):
    """F1: the state of a step."""

    status: StepStatus
    kind: str
    depends_on: list[str]
    required: bool
    inputs: dict[str, Any] = Field(description="Inputs; references are resolved when the step becomes READY.")
    outputs: dict[str, Any] | None
    error: StepErrorView | None
    reason: str | None = Field(description="Reason why the step was skipped, cancelled or retried.")
    attempts: int
    max_attempts: int | None
    fence: int
    worker: str | None
    lease_until: datetime | None
    due_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    artifacts: list[ArtifactView]
    map: str | None = Field(description="F14: id of the map, if the step is an item of a map.")


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
    parent_run_id: str | None = Field(description="F14: id of the parent run, if this is a sub-run.")
    parent_step_id: str | None = Field(description="F14: step of the parent run that this run belongs to.")


class FlowRunList(Camel):
    runs: list[FlowRunHead]
    next: str | None


class FlowRun(FlowRunHead):
    """F1: the state of a run."""

    scope: dict[str, Any]
    fail_fast: bool
    counts: dict[str, int] = Field(description="Number of steps by status.")
    steps: dict[str, StepView] | None = Field(None, description="Steps by id; null with `steps=false`.")


class RunCancelled(Camel):
    run_id: str
    status: FlowRunStatus


class RetriedSteps(Camel):
    run_id: str
    steps: list[str] = Field(description="Ids of the retried steps, and of the cancelled steps that depend on them.")


class StepState(Camel):
    run_id: str
    step_id: str
    status: StepStatus


class StepExplanationView(StepState):
    """F18: an explanation of the status of a step, and a hint how to change it."""

    why: str
    hint: str | None


class FlowMove(MoveSchema, Camel):
    """F18: a move of a run or of a step."""

    run_id: str
    step_id: str | None


class FlowHistory(Camel):
    run_id: str
    moves: list[FlowMove]
    next: str | None


class LogLine(Camel):
    """F18: a log line of a step."""

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
    """F18: a log line of a run, with its step."""

    step_id: str


class RunLogPage(Camel):
    run_id: str
    lines: list[RunLogLine]
    next: str | None


class ScheduleView(Camel):
    """F16: the schedule of a flow and its state."""

    cron: str
    timezone: str
    overlap: bool
    catch_up: str
    paused: bool
    next: list[datetime]
    last_run: str | None
    note: str | None = Field(description="Reason why the last time of the schedule got no run.")


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
    latest_run: LatestRun | None = Field(description="Latest run, scheduled or not.")


class FlowList(Camel):
    flows: list[FlowHead]
    errors: dict[str, str] = Field(description="Errors of flow files, by path.")


class FlowView(FlowHead):
    """F15: a flow with its definition."""

    spec: dict[str, Any]
    mermaid: str
