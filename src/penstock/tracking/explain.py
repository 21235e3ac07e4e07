"""T16: explain in words why a row has its present status, and how to move it."""

import shlex
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from penstock.kernel.text import format_duration
from penstock.tracking.contract import Stage, StageStatus
from penstock.tracking.model import FILE_STAGE, ShardRow, StagePause, format_reason

AHEAD_LIMIT = 1000  # rows ahead in the queue are counted up to here


class RowFailure(NamedTuple):
    """The time and the error of a failure."""

    at: datetime
    error: str | None


@dataclass(frozen=True, slots=True)
class RowExplanation:
    """T16: the reason for the status of a row, and a hint how to move it."""

    stage: Stage | None
    status: StageStatus | None
    why: str
    hint: str | None


def explain_row(
    row: ShardRow, now: datetime, *, pause: StagePause | None, ahead: int, started: int, failure: RowFailure | None
) -> RowExplanation:
    """Explain the status of *row* in its present stage.

    *ahead* rows of its queue come first, *started* rows of its stage are being processed, and *failure* is its last
    failure in the stage.
    """
    stage = row.stage
    if stage is None:
        return RowExplanation(
            None, None, f"all stages are done; the last one ended {format_duration(now - row.updated_at)} ago", None
        )
    status = row.status[stage]
    if status is StageStatus.FAILED:
        at, error = failure or RowFailure(row.updated_at, None)  # the history may have expired
        why = f"{stage} failed {format_duration(now - at)} ago{format_reason(error)}"
        return RowExplanation(stage, status, why, f"fix the cause, then {_retry(row, stage)}")
    if status is StageStatus.STARTED:
        return RowExplanation(stage, status, *_explain_started(row, stage, now))
    error = failure.error if failure else None
    return RowExplanation(stage, status, *_explain_new(row, stage, now, pause, ahead, started, error))


def _explain_started(row: ShardRow, stage: Stage, now: datetime) -> tuple[str, str | None]:
    worker = row.worker or "an unnamed worker"
    start = f"{stage} was started by {worker} {format_duration(now - row.updated_at)} ago"
    if stage is FILE_STAGE:
        return f"the file is not complete yet: {start}", f"its producer must send POST /stages/{stage}/done or fail"
    if row.lease_until is None or row.lease_until.tzinfo is None:  # infinity, as asyncpg reads it
        hint = f"if that worker is dead, send POST /stages/{stage}/fail, then {_retry(row, stage)}"
        return f"{start}, without a lease: it never expires", hint
    attempt = f"attempt {row.attempts[stage]}"
    if row.lease_until < now:
        expired = f"{start} ({attempt}); its lease expired {format_duration(now - row.lease_until)} ago"
        return expired, "the server returns it to the queue within seconds; if not, check `penstock status`"
    return f"{start} ({attempt}); its lease expires in {format_duration(row.lease_until - now)}", None


def _explain_new(
    row: ShardRow, stage: Stage, now: datetime, pause: StagePause | None, ahead: int, started: int, error: str | None
) -> tuple[str, str | None]:
    if pause is not None:
        why = (
            f"{stage} was paused {format_duration(now - pause.since)} ago by {pause.actor}{format_reason(pause.reason)}"
        )
        return why, f"to end the pause, run `penstock track resume {stage}` (POST /queues/{stage}/resume)"
    if stage is FILE_STAGE:
        why = f"{stage} failed and was reset to new; its producer has not started again"
        return why, f"its producer must send POST /stages/{stage}/start"
    last = f"attempt {row.attempts[stage]} did not succeed" if row.attempts[stage] else "its worker released it"
    if row.due_at > now:
        return f"{stage} will be retried in {format_duration(row.due_at - now)}; {last}{format_reason(error)}", None
    wait = f"waiting for a worker of {stage} for {format_duration(now - row.updated_at)}"
    queue = f"{_count(ahead, AHEAD_LIMIT)} ahead of it in the queue, {_count(started)} being processed"
    failed = f"; {last}{format_reason(error)}" if row.attempts[stage] else ""
    return f"{wait}; {queue}{failed}", None if started else _NO_WORKER.format(stage=stage)


_NO_WORKER = (
    "no row of this stage is being processed: check that a {stage} daemon is running and reaches this server; "
    "`penstock track queue` shows all queues"
)


def _retry(row: ShardRow, stage: Stage) -> str:
    """Return the instruction to retry *row*: the command, and the route."""
    shard = "" if stage is FILE_STAGE else f" {row.shard}"
    command = f"penstock track retry {stage} {shlex.quote(row.filename)}{shard}"
    return f"run `{command}` (POST /stages/{stage}/retry)"


def _count(number: int, limit: int | None = None) -> str:
    if limit is not None and number >= limit:
        return f"{limit} or more rows are"
    return "1 row is" if number == 1 else f"{number or 'no'} rows are"
