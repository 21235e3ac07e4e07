"""Request and response bodies of the pipeline API."""

import re
from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from penstock.kernel.http.schemas import WHOLE, Body, Fence, Text, UtcTime
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


# No characters that a client or a proxy would interpret as another path.
_FILENAME = re.compile(r"(?!\.{1,2}$)[^/\x00-\x1f\x7f-\x9f]+")
Prefix = Annotated[Text, Field(max_length=NAME_LIMIT)]
Worker = Annotated[Text, Field(min_length=1, max_length=NAME_LIMIT)]
Reason = Annotated[Text, Field(max_length=10_000)]
ErrorText = Annotated[Text, Field(min_length=1, max_length=1_000)]
Shard = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1), WHOLE]
LeaseSeconds = Annotated[float, Field(ge=0.001, le=DELAY_LIMIT)]


def _check_filename(name: str) -> str:
    if not _FILENAME.fullmatch(name):
        raise ValueError("a filename must not contain a slash or a control character, and must not be `.` or `..`")
    return name


def _check_unique_shards(shards: list[int]) -> list[int]:
    if len(set(shards)) != len(shards):
        raise ValueError("a shard must not be listed twice")
    return shards


Filename = Annotated[
    str,
    Field(min_length=1, max_length=NAME_LIMIT, json_schema_extra={"pattern": f"^{_FILENAME.pattern}$"}),
    AfterValidator(_check_filename),
]
Shards = Annotated[
    list[Shard],
    Field(min_length=1, max_length=SHARDS_LIMIT, json_schema_extra={"uniqueItems": True}),
    AfterValidator(_check_unique_shards),
]


class RegisterRequest(Body):
    filename: Filename
    shards: Shards
    worker: Worker | None = Field(
        None, description="Producer of the file. Only it, or a caller without a name, may end event-ingest."
    )


class RegisterResult(BaseModel):
    filename: str
    shards: list[int]
    created: bool = Field(description="True if at least one shard is new.")


class FileMoveRequest(Body):
    filename: Filename
    worker: Worker | None = None
    error: Reason | None = Field(None, description="Reason of the move, stored in the history.")


class RowMoveRequest(FileMoveRequest):
    shard: Shard


class FileMoved(BaseModel):
    filename: str
    updated_rows: int = Field(description="Number of shards that have the target status now.")


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
    next: str | None = Field(description="Cursor of the next page; null on the last page.")


class QueueView(BaseModel):
    stage: Stage
    paused: bool
    paused_since: datetime | None = None
    paused_by: str | None = None
    reason: str | None = None
    ready: int = Field(description="Number of shards that wait for a worker.")
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
    by_shard: list[ShardCounts] = Field(description="Counts of mysql-sender, the last stage, by shard number.")


class StageClaimRequest(Body):
    worker: Worker
    limit: Annotated[int, Field(strict=True, ge=1, le=BATCH_LIMIT), WHOLE] = 1
    lease_seconds: LeaseSeconds | None = None
    wait_seconds: Annotated[float, Field(ge=0, le=WAIT_LIMIT)] = Field(
        0, description="Seconds to wait for a row if none is available; 0 returns at once."
    )


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
    paused: bool = Field(description="True if `items` is empty because the stage is paused.")


class StageReportRequest(Body):
    filename: Filename
    shard: Shard
    fence: Fence
    outcome: StageReportKind
    error: Reason | None = None
    retry_after_seconds: Annotated[float, Field(ge=0, le=DELAY_LIMIT)] | None = Field(
        None,
        description="Seconds until the row can be claimed again. Default: 5 after `retry`, 0 after `release`.",
    )


Reports = Annotated[list[StageReportRequest], Field(min_length=1, max_length=BATCH_LIMIT)]


class StageReportResult(BaseModel):
    filename: str
    shard: int
    fence: int
    result: StageReportAnswer
    status: StageStatus | None = Field(description="Status of the row now; null if the row does not exist.")


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
        None, description="Claimed rows to extend. Default: all rows of the stage that this worker has claimed."
    )


class StageHeartbeatResult(BaseModel):
    stage: Stage
    lease_until: datetime
    extended: list[LeasedRowView]
    lost: list[LeasedRowView] = Field(description="Rows whose lease this worker has lost; stop working on them.")


class RetryFilter(Body):
    filename_prefix: Prefix = ""
    shards: Shards | None = None
    failed_since: UtcTime | None = None
    failed_before: UtcTime | None = None
    error_contains: ErrorText | None = None
    limit: Annotated[int, Field(strict=True, ge=1, le=100_000), WHOLE] = 10_000
    worker: Worker | None = None


class RetriedRows(BaseModel):
    stage: Stage
    retried: int = Field(
        description="Number of rows reset to new (files, in event-ingest). If it equals `limit`, repeat the request."
    )


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
    source: StageStatus | None = Field(
        serialization_alias="from", description="Previous status; null for the registration."
    )
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
    stage: Stage | None = Field(description="First stage that is not done; null if all are done.")
    status: StageStatus
    why: str
    hint: str | None
