"""Harvest without I/O: ranges and windows, pages, and where runs and partitions stand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from penstock.harvest.contract import PartitionState, PlanState, RunState
from penstock.kernel.errors import NotFound
from penstock.kernel.machine import Machine, Move

RUN = Machine(
    "harvest.run",
    RunState,
    initial=RunState.CREATED,
    moves=[
        Move("begin", (RunState.CREATED,), RunState.WORKERS_RUNNING),
        Move("trigger", (RunState.WORKERS_RUNNING,), RunState.CONSOLIDATING),
        Move("skip", (RunState.WORKERS_RUNNING,), RunState.CONSOLIDATION_SKIPPED),
        Move("retry", (RunState.CONSOLIDATION_SKIPPED, RunState.FAILED), RunState.WORKERS_RUNNING),
        Move("force", (RunState.CONSOLIDATION_SKIPPED, RunState.FAILED), RunState.CONSOLIDATING),
        Move("resume", (RunState.FAILED,), RunState.CONSOLIDATING),
        Move("complete", (RunState.CONSOLIDATING,), RunState.COMPLETED),
        Move("fail", (RunState.CONSOLIDATING,), RunState.FAILED),
    ],
    groups={
        "active": (RunState.CREATED, RunState.WORKERS_RUNNING, RunState.CONSOLIDATING),
        "fetching": (RunState.CREATED, RunState.WORKERS_RUNNING),
    },
)

PARTITION = Machine(
    "harvest.partition",
    PartitionState,
    initial=PartitionState.RUNNING,
    moves=[
        Move("complete", (PartitionState.RUNNING,), PartitionState.COMPLETED),
        Move("fail", (PartitionState.RUNNING,), PartitionState.FAILED),
        Move("retry", (PartitionState.FAILED,), PartitionState.RUNNING),
    ],
)

PLAN = Machine(
    "harvest.plan",
    PlanState,
    initial=PlanState.PLANNING,
    moves=[
        Move("plan", (PlanState.PLANNING,), PlanState.PLANNED),
        Move("fail", (PlanState.PLANNING,), PlanState.FAILED),
    ],
)

MACHINES: Mapping[str, Machine[Any]] = {"run": RUN, "partition": PARTITION, "plan": PLAN}


class Kind(StrEnum):
    """What a partition holds of the source."""

    ALL = "all"
    RANGE = "range"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class Range:
    """H3: the records whose partition field is at least *lower* and below *upper*, in minor units; None: unbounded.

    `Range(Kind.NULL)` are those without a value, `Range(Kind.ALL)` is everything, with a value or without.
    """

    kind: Kind = Kind.RANGE
    lower: int | None = None
    upper: int | None = None

    def __str__(self) -> str:
        if self.kind is not Kind.RANGE:
            return self.kind.value
        lower = "" if self.lower is None else self.lower
        return f"[{lower}, {'' if self.upper is None else self.upper})"


EVERYTHING = Range(Kind.ALL)
WITHOUT_VALUE = Range(Kind.NULL)


@dataclass(frozen=True, slots=True)
class Window:
    """H9: what changed after *after* and not after *upto*; None: unbounded."""

    after: datetime | None = None
    upto: datetime | None = None


ALWAYS = Window()


@dataclass(frozen=True, slots=True)
class Position:
    """Where in a partition the next page begins: how many records come before it, or what the source calls it."""

    offset: int = 0
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Records as the source told them, each the JSON text of an object; *next* is None at the end."""

    records: Sequence[bytes]
    next: Position | None


@dataclass(frozen=True, slots=True)
class Part:
    """A partition to be, and how many records the source counted in it."""

    range: Range
    count: int


@dataclass(frozen=True, slots=True)
class Heatmap:
    """H3: how a source was cut, and the proof that nothing is missing: *total* is the sum of the parts."""

    parts: Sequence[Part]
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
    return NotFound("RUN_NOT_FOUND", f"there is no run {run_id}", hint="`penstock harvest status` lists them")
