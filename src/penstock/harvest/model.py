"""Harvest without I/O: ranges, windows, pages, and the state machines of runs and partitions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from penstock.harvest.contract import HarvestRunState, PartitionState, PlanState
from penstock.kernel.errors import NotFound
from penstock.kernel.machine import StateMachine, Transition

RUN = StateMachine(
    "harvest.run",
    HarvestRunState,
    initial=HarvestRunState.CREATED,
    moves=[
        Transition("begin", (HarvestRunState.CREATED,), HarvestRunState.WORKERS_RUNNING),
        Transition("trigger", (HarvestRunState.WORKERS_RUNNING,), HarvestRunState.CONSOLIDATING),
        Transition("skip", (HarvestRunState.WORKERS_RUNNING,), HarvestRunState.CONSOLIDATION_SKIPPED),
        Transition(
            "retry", (HarvestRunState.CONSOLIDATION_SKIPPED, HarvestRunState.FAILED), HarvestRunState.WORKERS_RUNNING
        ),
        Transition(
            "force", (HarvestRunState.CONSOLIDATION_SKIPPED, HarvestRunState.FAILED), HarvestRunState.CONSOLIDATING
        ),
        Transition("resume", (HarvestRunState.FAILED,), HarvestRunState.CONSOLIDATING),
        Transition("complete", (HarvestRunState.CONSOLIDATING,), HarvestRunState.COMPLETED),
        Transition("fail", (HarvestRunState.CONSOLIDATING,), HarvestRunState.FAILED),
    ],
    groups={
        "active": (HarvestRunState.CREATED, HarvestRunState.WORKERS_RUNNING, HarvestRunState.CONSOLIDATING),
        "fetching": (HarvestRunState.CREATED, HarvestRunState.WORKERS_RUNNING),
    },
)

PARTITION = StateMachine(
    "harvest.partition",
    PartitionState,
    initial=PartitionState.RUNNING,
    moves=[
        Transition("complete", (PartitionState.RUNNING,), PartitionState.COMPLETED),
        Transition("fail", (PartitionState.RUNNING,), PartitionState.FAILED),
        Transition("retry", (PartitionState.FAILED,), PartitionState.RUNNING),
    ],
)

PLAN = StateMachine(
    "harvest.plan",
    PlanState,
    initial=PlanState.PLANNING,
    moves=[
        Transition("plan", (PlanState.PLANNING,), PlanState.PLANNED),
        Transition("fail", (PlanState.PLANNING,), PlanState.FAILED),
    ],
)

MACHINES: Mapping[str, StateMachine[Any]] = {"run": RUN, "partition": PARTITION, "plan": PLAN}


class PartitionKind(StrEnum):
    """Kind of a partition: all records, a range of values, or the records without a value."""

    ALL = "all"
    RANGE = "range"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """H3: the records with *lower* <= partition field < *upper*, in minor units; None: unbounded.

    The kind NULL selects the records without a value, the kind ALL all records, with a value or without.
    """

    kind: PartitionKind = PartitionKind.RANGE
    lower: int | None = None
    upper: int | None = None

    def __str__(self) -> str:
        if self.kind is not PartitionKind.RANGE:
            return self.kind.value
        lower = "" if self.lower is None else self.lower
        return f"[{lower}, {'' if self.upper is None else self.upper})"


EVERYTHING = PartitionRange(PartitionKind.ALL)
WITHOUT_VALUE = PartitionRange(PartitionKind.NULL)


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """H9: changes in (*after*, *upto*]; None: unbounded."""

    after: datetime | None = None
    upto: datetime | None = None


ALWAYS = TimeWindow()


@dataclass(frozen=True, slots=True)
class PagePosition:
    """Start of a page in a partition: the number of records before it, and the cursor of a source with cursors."""

    offset: int = 0
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class RecordPage:
    """Records as the source sent them, each the JSON text of an object; *next* is None on the last page."""

    records: Sequence[bytes]
    next: PagePosition | None


@dataclass(frozen=True, slots=True)
class PlannedPartition:
    """A planned partition, with the number of its records as the source counts them."""

    range: PartitionRange
    count: int


@dataclass(frozen=True, slots=True)
class Heatmap:
    """H3: the partitions of a source, and the proof that no record is missing: *total* is the sum of the parts."""

    parts: Sequence[PlannedPartition]
    total: int
    counts: int  # count requests to the source
    rounds: int  # attempts until the sum of the parts was the total

    @property
    def sum(self) -> int:
        return sum(part.count for part in self.parts)


def compute_watermark(upper_bound: datetime, overlap: timedelta, before: datetime | None) -> datetime:
    """H9: return the watermark after a completed run. It is never earlier than *before*."""
    after = upper_bound - overlap
    return after if before is None else max(before, after)


def make_run_not_found_error(run_id: UUID) -> NotFound:
    """Return the error for a run that does not exist."""
    return NotFound(
        "RUN_NOT_FOUND",
        f"there is no run {run_id}",
        hint="`penstock harvest ls` lists the feeds, `penstock harvest show FEED` their runs",
    )
