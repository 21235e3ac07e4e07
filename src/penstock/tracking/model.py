"""The rules of the pipeline, without I/O: the moves of a row, and the errors of a refused move."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from penstock.kernel.errors import Conflict, NotFound
from penstock.kernel.machine import StateMachine, Transition
from penstock.tracking.contract import Stage, StageReportAnswer, StageReportKind, StageStatus

FILE_STAGE = Stage.EVENT_INGEST  # moves a whole file at a time; started by the producer and never claimed
LAST_STAGE = Stage.MYSQL_SENDER  # a file is complete when all its shards are done here
QUEUES = tuple(stage for stage in Stage if stage is not FILE_STAGE)
TARGETS = {
    StageReportKind.DONE: StageStatus.DONE,
    StageReportKind.FAILED: StageStatus.FAILED,
    StageReportKind.RETRY: StageStatus.NEW,
    StageReportKind.RELEASE: StageStatus.NEW,
}


def _make_machine(stage: Stage) -> StateMachine[StageStatus]:
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


MACHINES: Mapping[Stage, StateMachine[StageStatus]] = {stage: _make_machine(stage) for stage in Stage}
MOVES = tuple(MACHINES[FILE_STAGE].moves)
STAGES_BY_MACHINE = {machine.name: stage for stage, machine in MACHINES.items()}


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A shard of a file, as stored."""

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
        """Return the first stage that is not done; None if all are done."""
        return next((stage for stage in Stage if self.status[stage] is not StageStatus.DONE), None)


class RowKey(NamedTuple):
    """A claimed row, identified by file, shard and fence."""

    filename: str
    shard: int
    fence: int


class ClaimedRow(NamedTuple):
    """A row that belongs to one worker until its lease expires."""

    filename: str
    shard: int
    fence: int
    attempt: int
    created_at: datetime
    lease_until: datetime


class ReapedRow(NamedTuple):
    """A row whose lease expired, and its new status."""

    filename: str
    shard: int
    status: StageStatus


class WaitingRow(NamedTuple):
    """A row in a queue, with its position (`due_at`, `id`)."""

    filename: str
    shard: int
    created_at: datetime
    due_at: datetime
    id: int


class RowReport(NamedTuple):
    """The report of a worker about a row it claimed."""

    filename: str
    shard: int
    fence: int
    outcome: StageReportKind
    error: str | None = None
    retry_after: timedelta | None = None


class RowReportResult(NamedTuple):
    """The answer to a report, and the status of the row; no status if the row does not exist."""

    report: RowReport
    answer: StageReportAnswer
    status: StageStatus | None


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Conditions on rows for a listing; a condition of None matches all rows."""

    stage: Stage | None = None
    status: StageStatus | None = None
    shard: int | None = None
    prefix: str = ""
    updated_since: datetime | None = None
    updated_before: datetime | None = None


@dataclass(frozen=True, slots=True)
class FailureFilter:
    """Conditions on failed rows for a bulk retry; a condition of None matches all rows."""

    prefix: str = ""
    shards: Sequence[int] | None = None
    failed_since: datetime | None = None
    failed_before: datetime | None = None
    error_contains: str | None = None


@dataclass(frozen=True, slots=True)
class StagePause:
    """The pause of a stage: no row is claimed or started."""

    stage: Stage
    since: datetime
    actor: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class StageCount:
    """The number of rows with a status in a stage; *shard* is set for the last stage only."""

    stage: Stage
    status: StageStatus
    is_ready: bool
    shard: int
    rows: int


@dataclass(frozen=True, slots=True)
class OverdueRows:
    """Started rows of a stage that should have ended: expired leases, or old starts without a lease."""

    stage: Stage
    has_lease: bool
    rows: int
    since: datetime  # the end of the oldest lease, or the oldest start


@dataclass(frozen=True, slots=True)
class PipelineCounts:
    """A consistent snapshot of all counts, pauses and queue ages."""

    at: datetime
    counts: Sequence[StageCount]
    pauses: Mapping[Stage, StagePause]
    oldest: Mapping[Stage, datetime | None]  # when the oldest row of each queue was registered

    def sum_rows(self, stage: Stage, status: StageStatus | None = None) -> int:
        """Return the number of rows with *status* in *stage*; all rows without a status."""
        return sum(count.rows for count in self.counts if count.stage is stage and status in (None, count.status))

    def count_ready(self, stage: Stage) -> int:
        """Return the number of rows that a worker of *stage* could claim."""
        return sum(count.rows for count in self.counts if count.stage is stage and count.is_ready)


def parse_stage(name: str) -> Stage:
    """T9: return the stage called *name*, or raise NotFound."""
    if name not in list(Stage):
        raise NotFound("UNKNOWN_STAGE", f"there is no stage {name!r}", hint=f"stages: {', '.join(Stage)}")
    return Stage(name)


def parse_queue(name: str) -> Stage:
    """Return the stage called *name* if workers claim its rows; raise Conflict for event-ingest."""
    stage = parse_stage(name)
    if stage is FILE_STAGE:
        raise Conflict(
            "STAGE_NOT_CLAIMABLE",
            f"rows of {stage} cannot be claimed: the stage moves all shards of a file together",
            hint=f"use POST /stages/{stage}/start, done, fail or retry with the filename",
        )
    return stage


def find_conflict(
    row: ShardRow, stage: Stage, move: Transition[StageStatus], worker: str | None, pause: StagePause | None
) -> Conflict | None:
    """T8: return the error that forbids *move*; None if it is allowed, or *row* already has the target status."""
    current = row.status[stage]
    name = f"{stage} of {row.filename}/{row.shard}"
    if current is move.target and (move.name != "start" or (worker is not None and worker == row.worker)):
        return None
    if current not in move.sources:
        return _make_move_error(row, stage, move, name)
    if move.name == "start" and stage.before and row.status[stage.before] is not StageStatus.DONE:
        return _make_not_ready_error(row, stage, stage.before, name)
    if move.name == "start" and pause is not None:
        return Conflict(
            "STAGE_PAUSED",
            f"{stage} has been paused since {pause.since:%Y-%m-%d %H:%M:%S} UTC by {pause.actor}"
            f"{format_reason(pause.reason)}",
            hint=f"to end the pause, run `penstock track resume {stage}` (POST /queues/{stage}/resume)",
            current=current.value,
        )
    if current is StageStatus.STARTED and worker is not None and row.worker not in (None, worker):
        return Conflict(
            "CLAIMED_BY_OTHER",
            f"{name} is claimed by {row.worker}, not by {worker}",
            hint="stop working on this row; the other worker is processing it",
            current=current.value,
            worker=row.worker,
        )
    return None


def make_concurrent_change_error(row: ShardRow, stage: Stage) -> Conflict:
    """Return the error of a move that was refused, although the row would allow it now."""
    message = f"{stage} of {row.filename}/{row.shard} was changed by a concurrent request"
    return Conflict("CONCURRENT_CHANGE", message, hint="repeat the request", current=row.status[stage].value)


def _make_move_error(row: ShardRow, stage: Stage, move: Transition[StageStatus], name: str) -> Conflict:
    current = row.status[stage]
    possible = [other.name for other in MACHINES[stage].moves.values() if current in other.sources]
    if move.name == "start" and current is StageStatus.STARTED:
        worker = row.worker or "an unnamed worker"
        return Conflict(
            "ALREADY_STARTED",
            f"{name} was already started by {worker}",
            hint="take another row; only the worker that started this one may repeat the start",
            current=current.value,
            worker=row.worker,
        )
    hint = f"possible now: {', '.join(possible)}" if possible else f"{current} is a final status"
    return Conflict("BAD_MOVE", f"{name} is {current}, {move.name} is not possible", hint=hint, current=current.value)


def _make_not_ready_error(row: ShardRow, stage: Stage, before: Stage, name: str) -> Conflict:
    return Conflict(
        "STAGE_NOT_READY",
        f"{name} cannot start: {before} is {row.status[before]}",
        hint=f"wait until {before} is done; GET /files/{row.filename}/{row.shard}/why explains the delay",
        current=row.status[stage].value,
        before={"stage": before.value, "status": row.status[before].value},
    )


def make_file_sealed_error(filename: str, shards: Sequence[int]) -> Conflict:
    """T1: return the error of shards that are registered after event-ingest of their file is done."""
    return Conflict(
        "FILE_SEALED",
        f"{filename} is complete (event-ingest is done); it cannot get the new shards {', '.join(map(str, shards))}",
        hint="register the new shards under another filename",
        current=StageStatus.DONE.value,
    )


def format_reason(reason: str | None) -> str:
    """Return *reason* as the end of a sentence: `: reason`, or nothing."""
    return f": {reason}" if reason else ""
