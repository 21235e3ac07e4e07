"""F17: requests and responses of the API of flows for workers."""

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
from penstock.flows.definition.json_values import to_json
from penstock.flows.definition.spec import Name
from penstock.kernel.http.schemas import WHOLE, Camel, CamelBody, Fence, Text
from penstock.kernel.storage import is_object_path

LeaseSeconds = Annotated[float, Field(ge=0.001, le=LEASE_LIMIT)]


def _check_size(document: Any) -> Any:
    size = len(orjson.dumps(document))
    if size > DOCUMENT_LIMIT:
        raise ValueError(f"it has {size} bytes as JSON; the limit is {DOCUMENT_LIMIT}: write an artifact instead")
    return document


def _check_artifact_name(name: str) -> str:
    if not is_object_path(name):
        raise ValueError("the name of an artifact must be a relative path, e.g. report.md or charts/1h.svg")
    return name


Document = Annotated[dict[str, Any], AfterValidator(to_json), AfterValidator(_check_size)]
Details = Annotated[Any, AfterValidator(to_json), AfterValidator(_check_size)]
ArtifactName = Annotated[str, Field(min_length=1, max_length=ARTIFACT_NAME_LIMIT), AfterValidator(_check_artifact_name)]


class NewLogLine(CamelBody):
    level: Annotated[str, Field(pattern="^[A-Za-z]{1,16}$")] = "info"
    message: Annotated[str, Field(max_length=100_000)] = Field(description="Message; a long message is cut.")


class NewLogLines(CamelBody):
    fence: Fence
    lines: Annotated[list[NewLogLine], Field(min_length=1, max_length=LOG_LIMIT)]


class AttemptRecord(Camel):
    """The result of stored log lines."""

    lines: int = Field(description="Number of stored lines.")


class WrittenArtifact(Camel):
    """F6: an artifact of an attempt; it is published when a report that names it is accepted."""

    name: str
    size: int
    sha256: str


class StepClaimRequest(CamelBody):
    worker: Worker
    kinds: Annotated[list[Name], Field(min_length=1, max_length=100)]
    limit: Annotated[int, Field(strict=True, ge=1, le=BATCH_LIMIT), WHOLE] = 1
    lease_seconds: LeaseSeconds | None = None
    wait_seconds: Annotated[float, Field(ge=0, le=WAIT_LIMIT)] = Field(
        0, description="Maximum time to wait for a step, in seconds."
    )


class ClaimedStepView(Camel):
    """F4: a step that one worker owns until its lease expires."""

    run_id: str
    step_id: str
    kind: str
    fence: int
    attempt: int
    inputs: dict[str, Any]
    scope: dict[str, Any]
    lease_until: datetime
    timeout_seconds: float | None
    trace: str | None = Field(description="W3C `traceparent` of the trace that the step belongs to.")


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
    """F5: the outcome of a step."""

    fence: Fence
    status: StepReportKind
    outputs: Document = Field(default_factory=dict)
    error: StepErrorBody | None = Field(None, description="Error of a FAILED step, or the reason of RELEASED.")
    artifacts: Annotated[list[ArtifactName], Field(max_length=ARTIFACT_LIMIT)] = Field(
        default_factory=list, description="Names of artifacts that this attempt wrote."
    )
    retryable: bool | None = Field(
        None, description="Whether the worker expects a retry to succeed; the `retry` of the step has priority."
    )

    @model_validator(mode="after")
    def _check_error(self) -> Self:
        if self.status is not StepReportKind.RELEASED and (self.status is StepReportKind.FAILED) != (
            self.error is not None
        ):
            raise ValueError(
                "`error` is required if the status is FAILED, and not allowed if it is SUCCEEDED or CANCELLED"
            )
        return self


class StepOutcome(StepOutcomeBase):
    """F5: the outcome of the step in the path."""

    worker: Worker | None = None


class StepReportItem(StepOutcomeBase):
    run_id: RunId
    step_id: StepId


class StepReportRequest(CamelBody):
    worker: Worker | None = None
    items: Annotated[list[StepReportItem], Field(min_length=1, max_length=BATCH_LIMIT)]

    @model_validator(mode="after")
    def _check_unique(self) -> Self:
        if len({(item.run_id, item.step_id) for item in self.items}) < len(self.items):
            raise ValueError("only one report per step is allowed in a request")
        return self


class StepReportResult(Camel):
    """F5: the result of a report."""

    run_id: str
    step_id: str
    fence: int
    result: StepReportAnswer
    status: StepStatus | None = Field(description="Present status of the step; null if it does not exist.")


class StepReportResponse(Camel):
    items: list[StepReportResult]
