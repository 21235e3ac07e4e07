"""Harvest without I/O: ranges and windows, pages, and where runs and partitions stand."""

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
    """What a partition holds of the source."""

    ALL = "all"
    RANGE = "range"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """H3: the records whose partition field is at least *lower* and below *upper*, in minor units; None: unbounded.

    `Range(Kind.NULL)` are those without a value, `Range(Kind.ALL)` is everything, with a value or without.
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
    """H9: what changed after *after* and not after *upto*; None: unbounded."""

    after: datetime | None = None
    upto: datetime | None = None


ALWAYS = TimeWindow()


@dataclass(frozen=True, slots=True)
class PagePosition:
    """Where in a partition the next page begins: how many records come before it, or what the source calls it."""

    offset: int = 0
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class RecordPage:
    """Records as the source told them, each the JSON text of an object; *next* is None at the end."""

    records: Sequence[bytes]
    next: PagePosition | None


@dataclass(frozen=True, slots=True)
class PlannedPartition:
    """A partition to be, and how many records the source counted in it."""

    range: PartitionRange
    count: int


@dataclass(frozen=True, slots=True)
class Heatmap:
    """H3: how a source was cut, and the proof that nothing is missing: *total* is the sum of the parts."""

    parts: Sequence[PlannedPartition]
    total: int
    counts: int  # how often the source was asked
    rounds: int  # how often the parts were counted until their sum was the total

    @property
    def sum(self) -> int:
        return sum(part.count for part in self.parts)


def watermark(upper_bound: datetime, overlap: timedelta, before: datetime | None) -> datetime:
    """H9: up to when a completed run knows everything; it never goes back."""
    reached = upper_bound - overlap
    return reached if before is None else max(before, reached)


def no_run(run_id: UUID) -> NotFound:
    """What is said of a run nobody knows."""
    return NotFound("RUN_NOT_FOUND", f"there is no run {run_id}", hint="`penstock harvest ls` lists them")
