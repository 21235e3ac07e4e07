"""What the API says of harvest."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field, PlainSerializer

from penstock.harvest.contract import HarvestRunType
from penstock.kernel.http.schemas import Camel, CamelBody, MoveSchema, Text

Number = Annotated[Decimal, PlainSerializer(str, return_type=str)]  # as text: JSON's numbers lose digits


class RunRequestBody(CamelBody):
    """How a run is asked for."""

    full: bool = Field(False, description="Take all there is, even where there is a watermark.")


class HarvestActionRequest(CamelBody):
    """Why somebody does what is kept with the run."""

    reason: Text = Field(min_length=1, max_length=1_000)


class RunStarted(Camel):
    """202: a run is being planned."""

    run_id: UUID
    status_url: str


class RetriedPartitions(Camel):
    """What is worked on again; no partition: consolidation."""

    partitions: list[str]


class HarvestRun(Camel):
    """A run. `status` is as the founding document computes it, `state` is all there is to know."""

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
    upper_bound: datetime | None = Field(description="What changed after it is the next run's.")
    requested_by: str
    requested_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    duration_minutes: float | None
    trace_id: str
    counts: int = Field(description="How often the source was asked for a count.")
    counted: int | None = Field(description="Records the source counted before work began.")
    records: int = Field(description="Records seen until now.")
    consolidated: int
    rejected: int
    deleted: int | None
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
    """A run with the proof of its heatmap and its history."""

    heatmap: dict[str, Any] | None
    history: list[HarvestMove]


class PartitionView(Camel):
    """A partition: what it holds, and how far it is."""

    partition_id: str
    kind: str
    lower_bound: int | None
    upper_bound: int | None
    counted: int
    next_offset: int
    completed: bool
    status: str
    scan: int = Field(description="The pass under way, or the last one.")
    seen: int = Field(description="Records of this pass.")
    rescues: int
    worker_id: str | None
    error: str | None
    started_at: datetime | None
    completed_at: datetime | None
    updated_at: datetime


class PartitionList(Camel):
    run_id: UUID
    partitions: list[PartitionView]


class WatermarkView(Camel):
    """H8: as the blob tells it."""

    last_updated_at: datetime
    last_run_id: UUID
    last_run_completed_at: datetime


class WatermarkList(Camel):
    feed: str
    current: WatermarkView | None
    blob: WatermarkView | None = Field(description="The copy on object storage.")
    blob_url: str
    history: list[WatermarkView]


class FeedView(Camel):
    """A feed, and where it stands."""

    feed: str
    source: str
    url: str
    watermark: datetime | None
    every_seconds: float | None
    overlap_seconds: float = Field(description="How far the watermark stays behind what was asked for.")
    paused_until: datetime | None
    pause_reason: str | None
    pending: int = Field(description="Raw records that are not consolidated.")
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
    """Something somebody had to be told of."""

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
    """A record that was set aside."""

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
    """Where one record is: as the source told it, and as it is served."""

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
