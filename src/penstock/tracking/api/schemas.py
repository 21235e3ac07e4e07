"""What goes over the wire: the bodies of the pipeline API, as its document and clients know them."""

import re
from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from penstock.kernel.http.schemas import WHOLE, Body, Fence, Moment, Text
from penstock.tracking.contract import (
    BATCH_LIMIT,
    DELAY_LIMIT,
    NAME_LIMIT,
    WAIT_LIMIT,
    Stage,
    StageReportAnswer,
    StageReportKind,
    StageStatus,
)

SHARDS_LIMIT = 10_000


# Nothing a client or a proxy would read as another address.
_FILENAME = re.compile(r"(?!\.{1,2}$)[^/\x00-\x1f\x7f-\x9f]+")
Prefix = Annotated[Text, Field(max_length=NAME_LIMIT)]
Worker = Annotated[Text, Field(min_length=1, max_length=NAME_LIMIT)]
Reason = Annotated[Text, Field(max_length=10_000)]
Piece = Annotated[Text, Field(min_length=1, max_length=1_000)]
Shard = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1), WHOLE]
LeaseSeconds = Annotated[float, Field(ge=0.001, le=DELAY_LIMIT)]


def _filename(name: str) -> str:
    if not _FILENAME.fullmatch(name):
        raise ValueError("a filename has no slash and no control characters, and is not `.` or `..`")
    return name


def _all_different(shards: list[int]) -> list[int]:
    if len(set(shards)) != len(shards):
        raise ValueError("each shard only once")
    return shards


Filename = Annotated[
    str,
    Field(min_length=1, max_length=NAME_LIMIT, json_schema_extra={"pattern": f"^{_FILENAME.pattern}$"}),
    AfterValidator(_filename),
]
Shards = Annotated[
    list[Shard],
    Field(min_length=1, max_length=SHARDS_LIMIT, json_schema_extra={"uniqueItems": True}),
    AfterValidator(_all_different),
]


class RegisterRequest(Body):
    filename: Filename
    shards: Shards
    worker: Worker | None = Field(None, description="Who produces the file; may then repeat its `start`.")


class RegisterResult(BaseModel):
    filename: str
    shards: list[int]
    created: bool = Field(description="Whether any row is new.")


class FileMoveRequest(Body):
    filename: Filename
    worker: Worker | None = None
    error: Reason | None = Field(None, description="Why, for the history.")


class RowMoveRequest(FileMoveRequest):
    shard: Shard


class FileMoved(BaseModel):
    filename: str
    updated_rows: int = Field(description="Rows that now stand so.")


class RowMoved(BaseModel):
    filename: str
    shard: int
    stage: Stage
    status: StageStatus


class QueueItem(BaseModel):
    filename: str
    shard: int
    created_at: datetime


class QueuePage(BaseModel):
    stage: Stage
    items: list[QueueItem]
    next: str | None = Field(description="The cursor of the next page; null on the last one.")


class QueueView(BaseModel):
    stage: Stage
    paused: bool
    paused_since: datetime | None = None
    paused_by: str | None = None
    reason: str | None = None
    ready: int = Field(description="Rows that wait for a worker.")
    started: int
    failed: int


class QueueList(BaseModel):
    queues: list[QueueView]


class ShardStatus(BaseModel):
    shard: int
    event_ingest_status: StageStatus
    shard_splitter_status: StageStatus
    shard_worker_status: StageStatus
    mysql_sender_status: StageStatus
    updated_at: datetime


class FileStatus(BaseModel):
    filename: str
    shards: list[ShardStatus]


class FilePage(BaseModel):
    files: list[FileStatus]
    next: str | None


class StatusCounts(BaseModel):
    new: int = 0
    started: int = 0
    done: int = 0
    failed: int = 0


class StageCounts(BaseModel):
    event_ingest: StatusCounts
    shard_splitter: StatusCounts
    shard_worker: StatusCounts
    mysql_sender: StatusCounts


class ShardCounts(BaseModel):
    shard: int
    total: int
    done: int
    failed: int


class TrackingSummary(BaseModel):
    total: int
    by_stage: StageCounts
    by_shard: list[ShardCounts] = Field(description="By mysql-sender, the last stage.")


class StageClaimRequest(Body):
    worker: Worker
    limit: Annotated[int, Field(strict=True, ge=1, le=BATCH_LIMIT), WHOLE] = 1
    lease_seconds: LeaseSeconds | None = None
    wait_seconds: Annotated[float, Field(ge=0, le=WAIT_LIMIT)] = Field(0, description="How long to wait for a row.")


class ClaimedRowView(BaseModel):
    filename: str
    shard: int
    fence: int
    attempt: int
    created_at: datetime
    lease_until: datetime


class StageClaimResponse(BaseModel):
    stage: Stage
    worker: str
    items: list[ClaimedRowView]
    paused: bool = Field(description="Whether nothing came because the stage is paused.")


class StageReportRequest(Body):
    filename: Filename
    shard: Shard
    fence: Fence
    outcome: StageReportKind
    error: Reason | None = None
    retry_after_seconds: Annotated[float, Field(ge=0, le=DELAY_LIMIT)] | None = Field(
        None,
        description="When to hand it out again: after a `retry` else in 5 seconds, after a `release` else at once.",
    )


Reports = Annotated[list[StageReportRequest], Field(min_length=1, max_length=BATCH_LIMIT)]


class StageReportResult(BaseModel):
    filename: str
    shard: int
    fence: int
    result: StageReportAnswer
    status: StageStatus | None = Field(description="Where the row stands now; null when there is no such row.")


class StageReportResponse(BaseModel):
    stage: Stage
    results: list[StageReportResult]


class LeasedRowView(Body):
    filename: Filename
    shard: Shard
    fence: Fence


class StageHeartbeatRequest(Body):
    worker: Worker
    lease_seconds: LeaseSeconds | None = None
    items: Annotated[list[LeasedRowView], Field(max_length=BATCH_LIMIT)] | None = Field(
        None, description="What to hold on to; without it, all this worker holds of the stage."
    )


class StageHeartbeatResult(BaseModel):
    stage: Stage
    lease_until: datetime
    extended: list[LeasedRowView]
    lost: list[LeasedRowView] = Field(description="No longer held: stop working on these.")


class RetryFilter(Body):
    filename_prefix: Prefix = ""
    shards: Shards | None = None
    failed_since: Moment | None = None
    failed_before: Moment | None = None
    error_contains: Piece | None = None
    limit: Annotated[int, Field(strict=True, ge=1, le=100_000), WHOLE] = 10_000
    worker: Worker | None = None


class RetriedRows(BaseModel):
    stage: Stage
    retried: int = Field(description="Rows set back; files, in event-ingest. Repeat until it is below the limit.")


class PauseRequest(Body):
    reason: Reason | None = None
    worker: Worker | None = None


class PauseState(BaseModel):
    stage: Stage
    paused: bool
    since: datetime | None = None
    by: str | None = None
    reason: str | None = None


class TrackingEvent(BaseModel):
    filename: str
    shard: int
    stage: Stage
    source: StageStatus | None = Field(serialization_alias="from", description="Null when the row came into being.")
    target: StageStatus = Field(serialization_alias="to")
    actor: str
    at: datetime
    reason: str | None
    fence: int | None


class TrackingHistory(BaseModel):
    filename: str
    moves: list[TrackingEvent]
    next: str | None


class RowExplanationView(BaseModel):
    filename: str
    shard: int
    stage: Stage | None = Field(description="The first stage that is not done; null when all are.")
    status: StageStatus
    why: str
    hint: str | None
