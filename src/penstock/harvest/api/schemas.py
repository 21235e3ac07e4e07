"""JSON schemas of the harvest API."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field, PlainSerializer

from penstock.harvest.contract import HarvestRunType
from penstock.kernel.http.schemas import Camel, CamelBody, MoveSchema, Text

Number = Annotated[Decimal, PlainSerializer(str, return_type=str)]  # as text: numbers in JSON lose digits


class RunRequestBody(CamelBody):
    """Request for a run."""

    full: bool = Field(False, description="Whether to fetch all records, even if the feed has a watermark.")


class HarvestActionRequest(CamelBody):
    """Reason of an action, which is stored with the run."""

    reason: Text = Field(min_length=1, max_length=1_000, description="Reason of the action.")


class RunStarted(Camel):
    """A run that is being planned."""

    run_id: UUID
    status_url: str


class RetriedPartitions(Camel):
    """Result of a retry."""

    partitions: list[str] = Field(description="Resumed partitions. Empty if the consolidation was resumed.")


class HarvestRun(Camel):
    """A run. `state` is the complete state; `status` is a less precise summary of it."""

    run_id: UUID
    feed: str
    run_type: HarvestRunType | None
    state: str
    status: str
    expected_workers: int | None
    completed_workers: int | None
    failed_workers: int | None
    watermark_before: datetime | None
    watermark_after: datetime | None
    upper_bound: datetime | None = Field(description="Later changes belong to the next run.")
    requested_by: str
    requested_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    duration_minutes: float | None
    trace_id: str
    counts: int = Field(description="Number of count requests to the source.")
    counted: int | None = Field(description="Number of records as counted by the source before the fetch.")
    records: int = Field(description="Number of records that the last passes have seen.")
    consolidated: int = Field(description="Number of canonical records written.")
    rejected: int = Field(description="Number of rejected records.")
    deleted: int | None = Field(description="Number of deleted records. Null for an incremental run.")
    pricing_version: int | None
    forced_by: str | None
    force_reason: str | None
    error: str | None


class HarvestRunList(Camel):
    runs: list[HarvestRun]
    next: str | None


class HarvestMove(MoveSchema, Camel):
    """A move of the run, or of one of its partitions."""

    machine: str
    subject: str


class HarvestRunDetails(HarvestRun):
    """A run with its heatmap, which proves that the partitions are complete, and with its history."""

    heatmap: dict[str, Any] | None
    history: list[HarvestMove]


class PartitionView(Camel):
    """A partition with its range and its progress."""

    partition_id: str
    kind: str
    lower_bound: int | None
    upper_bound: int | None
    counted: int
    next_offset: int
    completed: bool
    status: str
    scan: int = Field(description="Number of the current or last pass.")
    seen: int = Field(description="Number of distinct records of this pass.")
    rescues: int = Field(description="Number of messages that were sent again after a stall.")
    worker_id: str | None
    error: str | None
    started_at: datetime | None
    completed_at: datetime | None
    updated_at: datetime


class PartitionList(Camel):
    run_id: UUID
    partitions: list[PartitionView]


class WatermarkView(Camel):
    """H8: a watermark in the form of the blob."""

    last_updated_at: datetime
    last_run_id: UUID
    last_run_completed_at: datetime


class WatermarkList(Camel):
    feed: str
    current: WatermarkView | None
    blob: WatermarkView | None = Field(description="Copy on object storage.")
    blob_url: str
    history: list[WatermarkView]


class FeedView(Camel):
    """A feed and its state."""

    feed: str
    source: str
    url: str
    watermark: datetime | None
    every_seconds: float | None
    overlap_seconds: float = Field(description="Overlap of consecutive incremental runs, in seconds.")
    paused_until: datetime | None
    pause_reason: str | None
    pending: int = Field(description="Number of raw records that wait for consolidation.")
    last_run: HarvestRun | None = Field(description="The latest run, which may be active.")
    last_ended_run: HarvestRun | None = Field(description="The latest run that has ended: its state is the result.")
    next_run_at: datetime | None = Field(
        description="When the schedule starts the next run, at the earliest; null without `every`."
    )


class FeedList(Camel):
    feeds: list[FeedView]


class PricingRules(Camel):
    """A version of a feed's pricing rules."""

    version: int
    rules: Any
    created_at: datetime


class PricingResult(Camel):
    feed: str
    versions: list[PricingRules]


class HarvestAlert(Camel):
    """An alert and its delivery."""

    id: int
    run_id: UUID | None
    code: str
    severity: str
    message: str
    raised_at: datetime
    delivered_to: list[str] = Field(description="Channels that accepted the alert.")
    is_settled: bool = Field(description="Whether every channel accepted the alert, or its delivery was given up.")
    error: str | None


class HarvestAlertList(Camel):
    feed: str
    alerts: list[HarvestAlert]


class RejectedRecord(Camel):
    """A rejected record."""

    id: int
    key: str | None
    reason: str
    payload: str | None
    rejected_at: datetime


class RejectList(Camel):
    run_id: UUID
    rejects: list[RejectedRecord]
    next: str | None


class CanonicalRecord(Camel):
    """A record as it is served."""

    fields: dict[str, Any]
    cost: Number | None
    price: Number | None
    rule: str | None
    pricing_version: int
    run_id: UUID
    version: int
    changed_at: datetime
    deleted_at: datetime | None


class RecordView(Camel):
    """A record as the source sent it, and as it is served."""

    feed: str
    key: str
    payload: dict[str, Any]
    source_updated_at: datetime | None
    raw_version: int
    raw_changed_at: datetime
    seen_run: UUID
    seen_in: str
    is_deleted: bool
    is_pending: bool
    canonical: CanonicalRecord | None = None
