"""The public contract of harvest: names of states, and the messages between its workers."""

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
    """H2: kind of a run: all records, or the changes since the watermark."""

    FULL = "full"
    INCREMENTAL = "incremental"


class HarvestRunState(StrEnum):
    """State of a run."""

    CREATED = "created"
    WORKERS_RUNNING = "workers_running"
    CONSOLIDATION_SKIPPED = "consolidation_skipped"
    CONSOLIDATING = "consolidating"
    COMPLETED = "completed"
    FAILED = "failed"


class PartitionState(StrEnum):
    """State of the work on a partition. A partition that no worker has started has no row yet."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


class PlanState(StrEnum):
    """State of a requested run, whose source is being counted."""

    PLANNING = "planning"
    PLANNED = "planned"
    FAILED = "failed"


def decode_message(value: bytes, kind: type[M]) -> M:
    """Return the message; raise Invalid BAD_MESSAGE if it has another form, which makes it a dead letter."""
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.DecodeError as error:
        raise Invalid("BAD_MESSAGE", f"the message is not a {kind.__name__}: {error}") from error


class PlanMessage(msgspec.Struct, frozen=True, rename="camel"):
    """Command to count the source of *feed* and to divide a run into partitions."""

    run_id: UUID
    feed: str
    trace_id: str
    type: Literal["PLAN"] = "PLAN"


class WorkMessage(msgspec.Struct, frozen=True, rename="camel"):
    """H4: command to continue a partition at *offset* of its pass number *scan*."""

    run_id: UUID
    partition_id: str
    offset: int
    trace_id: str
    scan: int = 1
    type: Literal["WORK_ITEM"] = "WORK_ITEM"


class WorkDoneMessage(msgspec.Struct, frozen=True, rename="camel"):
    """H5: event: a partition has ended."""

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
    """H7: command to make canonical records of the raw records of a run."""

    run_id: UUID
    trace_id: str
    force: bool = False
    type: Literal["CONSOLIDATE"] = "CONSOLIDATE"
