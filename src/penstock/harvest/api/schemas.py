"""What the API says of harvest."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field, PlainSerializer

from penstock.harvest.contract import RunType
from penstock.kernel.http.schemas import Camel, CamelBody, Moved, Text

Number = Annotated[Decimal, PlainSerializer(str, return_type=str)]  # as text: JSON's numbers lose digits


class Wanted(CamelBody):
    """How a run is asked for."""

    full: bool = Field(False, description="Take all there is, even where there is a watermark.")


class Because(CamelBody):
    """Why somebody does what is kept with the run."""

    reason: Text = Field(min_length=1, max_length=1_000)


class Started(Camel):
    """202: a run is being planned."""

    run_id: UUID
    status_url: str


class Retried(Camel):
    """What is worked on again; no partition: consolidation."""

    partitions: list[str]


class Run(Camel):
    """A run. `status` is as the founding document computes it, `state` is all there is to know."""

    run_id: UUID
    feed: str
    run_type: RunType | None
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
    forced_because: str | None
    error: str | None


class Runs(Camel):
    runs: list[Run]
    next: str | None


class Noted(Moved, Camel):
    """A move of the run, or of one of its partitions."""

    machine: str
    subject: str


class OneRun(Run):
    """A run with the proof of its heatmap and its history."""

    heatmap: dict[str, Any] | None
    history: list[Noted]


class Partition(Camel):
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


class Partitions(Camel):
    run_id: UUID
    partitions: list[Partition]


class Watermark(Camel):
    """H8: as the blob tells it."""

    last_updated_at: datetime
    last_run_id: UUID
    last_run_completed_at: datetime


class Watermarks(Camel):
    feed: str
    current: Watermark | None
    blob: Watermark | None = Field(description="The copy on object storage.")
    blob_url: str
    history: list[Watermark]


class Feed(Camel):
    """A feed, and where it stands."""

    feed: str
    source: str
    url: str
    watermark: datetime | None
    every_seconds: float | None
    overlap_seconds: float = Field(description="How far the watermark stays behind what was asked for.")
    paused_until: datetime | None
    paused_because: str | None
    pending: int = Field(description="Raw records that are not consolidated.")
    last_run: Run | None


class Feeds(Camel):
    feeds: list[Feed]


class Rules(Camel):
    """A version of a feed's pricing rules."""

    version: int
    rules: Any
    created_at: datetime


class Pricing(Camel):
    feed: str
    versions: list[Rules]


class Alert(Camel):
    """Something somebody had to be told of."""

    id: int
    run_id: UUID | None
    code: str
    severity: str
    message: str
    raised_at: datetime
    told: list[str]
    is_told: bool
    error: str | None


class Alerts(Camel):
    feed: str
    alerts: list[Alert]


class Rejected(Camel):
    """A record that was set aside."""

    id: int
    key: str | None
    reason: str
    payload: str | None
    rejected_at: datetime


class Rejects(Camel):
    run_id: UUID
    rejects: list[Rejected]
    next: str | None


class Canonical(Camel):
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


class Record(Camel):
    """Where one record is: as the source told it, and as it is served."""

    feed: str
    key: str
    payload: dict[str, Any]
    source_updated_at: datetime | None
    raw_version: int
    raw_changed_at: datetime
    seen_run: UUID
    seen_in: str
    is_gone: bool
    is_pending: bool
    canonical: Canonical | None = None
