"""T16: why a row is where it is, in words."""

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from penstock.kernel.text import format_duration
from penstock.tracking.contract import Stage, StageStatus
from penstock.tracking.model import FILE_STAGE, ShardRow, StagePause, because

AHEAD_LIMIT = 1000  # nobody counts further


class RowFailure(NamedTuple):
    """When and why a row failed."""

    at: datetime
    error: str | None


@dataclass(frozen=True, slots=True)
class RowExplanation:
    """T16: why a row is where it is, in words, and what would move it."""

    stage: Stage | None
    status: StageStatus | None
    why: str
    hint: str | None


def explain(
    row: ShardRow, now: datetime, *, pause: StagePause | None, ahead: int, busy: int, failure: RowFailure | None
) -> RowExplanation:
    """*ahead* rows of its queue come first, *busy* rows of its stage are under way, *failure* is how it failed."""
    stage = row.stage
    if stage is None:
        return RowExplanation(
            None, None, f"all stages are done, the last one since {format_duration(now - row.updated_at)}", None
        )
    status = row.status[stage]
    if status is StageStatus.FAILED:
        at, error = failure or RowFailure(row.updated_at, None)  # forgotten, when its history is
        why = f"{stage} failed {format_duration(now - at)} ago{because(error)}"
        return RowExplanation(stage, status, why, f"mend the cause, then POST /stages/{stage}/retry")
    if status is StageStatus.STARTED:
        return RowExplanation(stage, status, *_under_way(row, stage, now))
    return RowExplanation(stage, status, *_waiting(row, stage, now, pause, ahead, busy, failure and failure.error))


def _under_way(row: ShardRow, stage: Stage, now: datetime) -> tuple[str, str | None]:
    who = row.worker or "a worker that gave no name"
    began = f"{stage} was started by {who} {format_duration(now - row.updated_at)} ago"
    if stage is FILE_STAGE:
        return f"the file is not complete yet: {began}", f"its producer says /stages/{stage}/done or fail"
    if row.lease_until is None or row.lease_until.tzinfo is None:  # infinity, as asyncpg reads it
        hint = f"if that worker is gone, POST /stages/{stage}/fail and then retry"
        return f"{began}, without a lease: it is waited for however long it takes", hint
    attempt = f"attempt {row.attempts[stage]}"
    if row.lease_until < now:
        return (
            f"{began} ({attempt}), and its lease ran out {format_duration(now - row.lease_until)} ago",
            "it is soon taken back",
        )
    return f"{began} ({attempt}), and is held for another {format_duration(row.lease_until - now)}", None


def _waiting(
    row: ShardRow, stage: Stage, now: datetime, pause: StagePause | None, ahead: int, busy: int, error: str | None
) -> tuple[str, str | None]:
    if pause is not None:
        why = f"{stage} was paused {format_duration(now - pause.since)} ago by {pause.actor}{because(pause.reason)}"
        return why, f"POST /queues/{stage}/resume when it may go on"
    if stage is FILE_STAGE:
        return "the file failed and was set back; its producer has not begun again", f"POST /stages/{stage}/start"
    tried = f"attempt {row.attempts[stage]} did not succeed" if row.attempts[stage] else "it was given back"
    if row.due_at > now:
        return f"{stage} is tried again in {format_duration(row.due_at - now)}; {tried}{because(error)}", None
    waits = f"it has waited for a worker of {stage} for {format_duration(now - row.updated_at)}"
    queue = f"{_several(ahead, AHEAD_LIMIT)} before it in the queue, {_several(busy)} under way"
    hint = None if busy else f"nobody works on this stage: is a {stage} daemon running, and does it reach this server?"
    before = f"; {tried}{because(error)}" if row.attempts[stage] else ""
    return f"{waits}; {queue}{before}", hint


def _several(number: int, limit: int | None = None) -> str:
    if limit is not None and number >= limit:
        return f"{limit} rows or more are"
    return "1 row is" if number == 1 else f"{number or 'no'} rows are"
