"""What others may know of harvest: the names of its states, and the messages it sends itself."""

from datetime import datetime
from enum import StrEnum
from typing import Literal, TypeVar
from uuid import UUID

import msgspec

from penstock.kernel.errors import Invalid

PREFIX = "/api/v1/harvest"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # of a feed
PLANS = "harvest.plans"
WORK_ITEMS = "harvest.work-items"
WORK_DONE = "harvest.work-done"
CONSOLIDATIONS = "harvest.consolidations"
M = TypeVar("M", bound="PlanMessage | WorkMessage | WorkDoneMessage | ConsolidateMessage")


class HarvestRunType(StrEnum):
    """H2: all there is, or what changed since the watermark."""

    FULL = "full"
    INCREMENTAL = "incremental"


class HarvestRunState(StrEnum):
    """Where a run stands."""

    CREATED = "created"
    WORKERS_RUNNING = "workers_running"
    CONSOLIDATION_SKIPPED = "consolidation_skipped"
    CONSOLIDATING = "consolidating"
    COMPLETED = "completed"
    FAILED = "failed"


class PartitionState(StrEnum):
    """Where the work on a partition stands; one nobody has begun has no row yet."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


class PlanState(StrEnum):
    """Where a run stands before it is one: while its source is counted."""

    PLANNING = "planning"
    PLANNED = "planned"
    FAILED = "failed"


def read(value: bytes, kind: type[M]) -> M:
    """A message of ours; Invalid BAD_MESSAGE when it is none, and then it is set aside."""
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.DecodeError as error:
        raise Invalid("BAD_MESSAGE", f"no {kind.__name__}: {error}") from error


class PlanMessage(msgspec.Struct, frozen=True, rename="camel"):
    """Count the source of *feed*, and cut it into the partitions of a run."""

    run_id: UUID
    feed: str
    trace_id: str
    type: Literal["PLAN"] = "PLAN"


class WorkMessage(msgspec.Struct, frozen=True, rename="camel"):
    """H4: go on with a partition at *offset*, in its *scan*-th pass."""

    run_id: UUID
    partition_id: str
    offset: int
    trace_id: str
    scan: int = 1
    type: Literal["WORK_ITEM"] = "WORK_ITEM"


class WorkDoneMessage(msgspec.Struct, frozen=True, rename="camel"):
    """H5: a partition has ended, and how."""

    run_id: UUID
    feed: str
    partition_id: str
    status: PartitionState
    records_processed: int
    at: datetime
    trace_id: str
    error: str | None = None
    type: Literal["WORK_DONE"] = "WORK_DONE"


class ConsolidateMessage(msgspec.Struct, frozen=True, rename="camel"):
    """H7: all partitions are there: make canonical records of the raw ones."""

    run_id: UUID
    trace_id: str
    force: bool = False
    type: Literal["CONSOLIDATE"] = "CONSOLIDATE"
