"""The rules of the pipeline, without I/O: what may move, why not, and why a row stands still."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from penstock.kernel.errors import Conflict, NotFound
from penstock.kernel.machine import StateMachine, Transition
from penstock.tracking.contract import Stage, StageReportAnswer, StageReportKind, StageStatus

FILE_STAGE = Stage.EVENT_INGEST  # moves a whole file at a time, and is never handed out: its producer begins it
QUEUES = tuple(stage for stage in Stage if stage is not FILE_STAGE)
TARGETS = {
    StageReportKind.DONE: StageStatus.DONE,
    StageReportKind.FAILED: StageStatus.FAILED,
    StageReportKind.RETRY: StageStatus.NEW,
    StageReportKind.RELEASE: StageStatus.NEW,
}


def _machine(stage: Stage) -> StateMachine[StageStatus]:
    return StateMachine(
        f"tracking.{stage}",
        StageStatus,
        initial=StageStatus.NEW,
        moves=[
            Transition("start", (StageStatus.NEW,), StageStatus.STARTED),
            Transition("done", (StageStatus.STARTED,), StageStatus.DONE),
            Transition("fail", (StageStatus.NEW, StageStatus.STARTED), StageStatus.FAILED),
            Transition("retry", (StageStatus.FAILED,), StageStatus.NEW),
        ],
    )


MACHINES: Mapping[Stage, StateMachine[StageStatus]] = {stage: _machine(stage) for stage in Stage}
MOVES = tuple(MACHINES[FILE_STAGE].moves)
STAGE_OF = {machine.name: stage for stage, machine in MACHINES.items()}


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One file and shard, with all that is known of it."""

    id: int
    filename: str
    shard: int
    status: Mapping[Stage, StageStatus]
    attempts: Mapping[Stage, int]
    created_at: datetime
    updated_at: datetime
    due_at: datetime
    fence: int
    worker: str | None
    lease_until: datetime | None
    moves: Sequence[int]

    @property
    def stage(self) -> Stage | None:
        """The first stage that is not done; None when all are."""
        return next((stage for stage in Stage if self.status[stage] is not StageStatus.DONE), None)


class RowKey(NamedTuple):
    """A row as its worker names it."""

    filename: str
    shard: int
    fence: int


class ClaimedRow(NamedTuple):
    """A row that is its worker's alone until the lease runs out."""

    filename: str
    shard: int
    fence: int
    attempt: int
    created_at: datetime
    lease_until: datetime


class WaitingRows(NamedTuple):
    """A row in a queue, and its place there."""

    filename: str
    shard: int
    created_at: datetime
    due_at: datetime
    id: int


class RowReport(NamedTuple):
    """What a worker says of a row it claimed."""

    filename: str
    shard: int
    fence: int
    said: StageReportKind
    error: str | None = None
    retry_after: timedelta | None = None


class RowReportResult(NamedTuple):
    """What became of a report, and where the row stands now; no status when there is no such row."""

    report: RowReport
    answer: StageReportAnswer
    status: StageStatus | None


@dataclass(frozen=True, slots=True)
class RowPosition:
    """Which rows are asked for; None leaves open."""

    stage: Stage | None = None
    status: StageStatus | None = None
    shard: int | None = None
    prefix: str = ""
    updated_since: datetime | None = None
    updated_before: datetime | None = None


@dataclass(frozen=True, slots=True)
class FailureSample:
    """Which failed rows are meant; None leaves open."""

    prefix: str = ""
    shards: Sequence[int] | None = None
    failed_since: datetime | None = None
    failed_before: datetime | None = None
    error_contains: str | None = None


@dataclass(frozen=True, slots=True)
class StagePause:
    """A stage in which nothing is handed out or started."""

    stage: Stage
    since: datetime
    actor: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class StageCount:
    """How many rows stand so in a stage; *shard* only for the last stage."""

    stage: Stage
    status: StageStatus
    is_ready: bool
    shard: int
    rows: int


@dataclass(frozen=True, slots=True)
class PipelineCounts:
    """How all rows stand at a moment."""

    at: datetime
    counts: Sequence[StageCount]
    pauses: Mapping[Stage, StagePause]
    oldest: Mapping[Stage, datetime | None]  # when the oldest row of each queue was created

    def rows(self, stage: Stage, status: StageStatus | None = None) -> int:
        """How many rows stand so in *stage*."""
        return sum(count.rows for count in self.counts if count.stage is stage and status in (None, count.status))

    def ready(self, stage: Stage) -> int:
        """How many could be claimed."""
        return sum(count.rows for count in self.counts if count.stage is stage and count.is_ready)


def stage_named(name: str) -> Stage:
    """T9: the stage of that name, or NotFound."""
    if name not in list(Stage):
        raise NotFound("UNKNOWN_STAGE", f"there is no stage {name!r}", hint=f"stages: {', '.join(Stage)}")
    return Stage(name)


def queue_named(name: str) -> Stage:
    """The stage of that name, if its rows are handed out one by one."""
    stage = stage_named(name)
    if stage is FILE_STAGE:
        raise Conflict(
            "STAGE_NOT_CLAIMABLE",
            f"{stage} moves a whole file at a time; its rows are not handed out",
            hint=f"use /stages/{stage}/start, done, fail and retry with the filename",
        )
    return stage


def refusal(
    row: ShardRow, stage: Stage, move: Transition[StageStatus], worker: str | None, pause: StagePause | None
) -> Conflict | None:
    """T8: why *row* may not move; None when nothing is against it, or it already was where it should go."""
    current = row.status[stage]
    named = f"{stage} of {row.filename}/{row.shard}"
    if current is move.target and (move.name != "start" or (worker is not None and worker == row.worker)):
        return None
    if current not in move.sources:
        return _impossible(row, stage, move, named)
    if move.name == "start" and stage.before and row.status[stage.before] is not StageStatus.DONE:
        return _too_early(row, stage, stage.before, named)
    if move.name == "start" and pause is not None:
        return Conflict(
            "STAGE_PAUSED",
            f"{stage} is paused since {pause.since:%Y-%m-%d %H:%M:%S} UTC by {pause.actor}{because(pause.reason)}",
            hint=f"POST /queues/{stage}/resume when it may go on",
            current=current.value,
        )
    if current is StageStatus.STARTED and worker is not None and row.worker not in (None, worker):
        return Conflict(
            "CLAIMED_BY_OTHER",
            f"{named} is held by {row.worker}, not by {worker}",
            hint="stop working on it: it was handed to somebody else",
            current=current.value,
            worker=row.worker,
        )
    return None


def changed_meanwhile(row: ShardRow, stage: Stage) -> Conflict:
    """Nothing is against the move any more, but it was when it was tried."""
    message = f"{stage} of {row.filename}/{row.shard} was kept from moving by what has changed meanwhile"
    return Conflict("CONCURRENT_CHANGE", message, hint="try again", current=row.status[stage].value)


def _impossible(row: ShardRow, stage: Stage, move: Transition[StageStatus], named: str) -> Conflict:
    current = row.status[stage]
    possible = [other.name for other in MACHINES[stage].moves.values() if current in other.sources]
    if move.name == "start" and current is StageStatus.STARTED:
        who = row.worker or "a worker that gave no name"
        hint = "take another row; only the same named worker may repeat its start"
        return Conflict(
            "ALREADY_STARTED",
            f"{named} was already started by {who}",
            hint=hint,
            current=current.value,
            worker=row.worker,
        )
    hint = f"possible now: {', '.join(possible)}" if possible else f"{current} is final"
    return Conflict("BAD_MOVE", f"{named} is {current}, {move.name} is not possible", hint=hint, current=current.value)


def _too_early(row: ShardRow, stage: Stage, before: Stage, named: str) -> Conflict:
    return Conflict(
        "STAGE_NOT_READY",
        f"{named} cannot start: {before} is {row.status[before]}",
        hint=f"wait until {before} is done; GET /files/{row.filename}/{row.shard}/why says what keeps it",
        current=row.status[stage].value,
        before={"stage": before.value, "status": row.status[before].value},
    )


def sealed(filename: str, shards: Sequence[int]) -> Conflict:
    """T1: no shard joins a file that is complete."""
    return Conflict(
        "FILE_SEALED",
        f"{filename} is complete: shards {', '.join(map(str, shards))} come too late",
        hint="register them under a new filename",
        current=StageStatus.DONE.value,
    )


def because(reason: str | None) -> str:
    """*reason* as the end of a sentence."""
    return f": {reason}" if reason else ""
