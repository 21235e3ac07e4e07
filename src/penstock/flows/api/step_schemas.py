"""F17: what goes over the wire between the API of flows and workers."""

from datetime import datetime
from typing import Annotated, Any, Self

import orjson
from pydantic import AfterValidator, Field, model_validator

from penstock.flows.api.schemas import RunId, StepId, Worker
from penstock.flows.contract import (
    ARTIFACT_LIMIT,
    ARTIFACT_NAME_LIMIT,
    BATCH_LIMIT,
    CODE,
    DOCUMENT_LIMIT,
    LEASE_LIMIT,
    LOG_LIMIT,
    WAIT_LIMIT,
    HeartbeatState,
    StepReportAnswer,
    StepReportKind,
    StepStatus,
)
from penstock.flows.definition.json_values import plain
from penstock.flows.definition.spec import Name
from penstock.kernel.http.schemas import WHOLE, Camel, CamelBody, Fence, Text
from penstock.kernel.storage import is_object_path

LeaseSeconds = Annotated[float, Field(ge=0.001, le=LEASE_LIMIT)]


def _small(document: Any) -> Any:
    size = len(orjson.dumps(document))
    if size > DOCUMENT_LIMIT:
        raise ValueError(f"it has {size} bytes as JSON, at most {DOCUMENT_LIMIT}: write an artifact")
    return document


def _artifact(name: str) -> str:
    if not is_object_path(name):
        raise ValueError("the name of an artifact is a relative path such as report.md or charts/1h.svg")
    return name


Document = Annotated[dict[str, Any], AfterValidator(plain), AfterValidator(_small)]
Details = Annotated[Any, AfterValidator(plain), AfterValidator(_small)]
ArtifactName = Annotated[str, Field(min_length=1, max_length=ARTIFACT_NAME_LIMIT), AfterValidator(_artifact)]


class NewLogLine(CamelBody):
    level: Annotated[str, Field(pattern="^[A-Za-z]{1,16}$")] = "info"
    message: Annotated[str, Field(max_length=100_000)] = Field(description="Long ones are cut.")


class NewLogLines(CamelBody):
    fence: Fence
    lines: Annotated[list[NewLogLine], Field(min_length=1, max_length=LOG_LIMIT)]


class AttemptRecord(Camel):
    """What was kept with an attempt."""

    lines: int


class WrittenArtifact(Camel):
    """F6: what was kept under an attempt; it is an artifact once the report that names it counts."""

    name: str
    size: int
    sha256: str


class StepClaimRequest(CamelBody):
    worker: Worker
    kinds: Annotated[list[Name], Field(min_length=1, max_length=100)]
    limit: Annotated[int, Field(strict=True, ge=1, le=BATCH_LIMIT), WHOLE] = 1
    lease_seconds: LeaseSeconds | None = None
    wait_seconds: Annotated[float, Field(ge=0, le=WAIT_LIMIT)] = Field(0, description="How long to wait for a step.")


class ClaimedStepView(Camel):
    """F4: a step that is its worker's alone until the lease runs out."""

    run_id: str
    step_id: str
    kind: str
    fence: int
    attempt: int
    inputs: dict[str, Any]
    scope: dict[str, Any]
    lease_until: datetime
    timeout_seconds: float | None
    trace: str | None = Field(description="The `traceparent` the step belongs to.")


class StepClaimResponse(Camel):
    items: list[ClaimedStepView]


class StepLease(CamelBody):
    run_id: RunId
    step_id: StepId
    fence: Fence


class StepHeartbeatRequest(CamelBody):
    items: Annotated[list[StepLease], Field(max_length=BATCH_LIMIT)]
    lease_seconds: LeaseSeconds | None = None


class StepHeartbeatResult(Camel):
    run_id: str
    step_id: str
    fence: int
    state: HeartbeatState


class StepHeartbeatResponse(Camel):
    items: list[StepHeartbeatResult]


class StepErrorBody(CamelBody):
    code: Annotated[str, Field(pattern=CODE)]
    message: Annotated[Text, Field(max_length=10_000)]
    details: Details = None


class StepOutcomeBase(CamelBody):
    """F5: how a step ended."""

    fence: Fence
    status: StepReportKind
    outputs: Document = Field(default_factory=dict)
    error: StepErrorBody | None = Field(
        None, description="Why it failed; or what is away, when it is given back for that."
    )
    artifacts: Annotated[list[ArtifactName], Field(max_length=ARTIFACT_LIMIT)] = Field(
        default_factory=list, description="Names written under this attempt."
    )
    retryable: bool | None = Field(
        None, description="What the worker thinks of its error; the step's `retry` goes before."
    )

    @model_validator(mode="after")
    def _fails_with_an_error(self) -> Self:
        if self.status is not StepReportKind.RELEASED and (self.status is StepReportKind.FAILED) != (
            self.error is not None
        ):
            raise ValueError("a step that FAILED has an `error`, one that SUCCEEDED or was CANCELLED has none")
        return self


class StepOutcome(StepOutcomeBase):
    """The same, of a step that is named."""

    worker: Worker | None = None


class StepReportItem(StepOutcomeBase):
    run_id: RunId
    step_id: StepId


class StepReportRequest(CamelBody):
    worker: Worker | None = None
    items: Annotated[list[StepReportItem], Field(min_length=1, max_length=BATCH_LIMIT)]

    @model_validator(mode="after")
    def _of_each_step_once(self) -> Self:
        if len({(item.run_id, item.step_id) for item in self.items}) < len(self.items):
            raise ValueError("one report for each step")
        return self


class StepReportResult(Camel):
    """What became of a report."""

    run_id: str
    step_id: str
    fence: int
    result: StepReportAnswer
    status: StepStatus | None = Field(description="Where the step stands now; null when there is none.")


class StepReportResponse(Camel):
    items: list[StepReportResult]
