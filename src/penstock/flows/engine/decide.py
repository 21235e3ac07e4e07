"""F5, F7, F10, F11: what a report, or a lost lease, does to a step. Pure."""

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import orjson

from penstock.flows.contract import MUTABLE_OUTPUTS, FlowRunStatus, StepReportAnswer, StepReportKind, StepStatus
from penstock.flows.definition.spec import RetryPolicy
from penstock.flows.model import LEASE_EXPIRED, StepEnd, StepError, StepReport
from penstock.flows.store import error_document
from penstock.kernel.tasks.backoff import compute_delay

CANCELLED_REASON = "the run was ended"
_LATER = timedelta(seconds=2)


def digest(report: StepReport) -> str:
    """The same for the same report, whatever it says of what may change later."""
    outputs = {name: value for name, value in report.outputs.items() if name not in MUTABLE_OUTPUTS}
    told = [report.outcome, outputs, error_document(report.error), sorted(report.artifacts)]
    return hashlib.sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS)).hexdigest()


def is_held(row: asyncpg.Record, fence: int) -> bool:
    """Whether the step is still its worker's."""
    return row["status"] == StepStatus.RUNNING and row["fence"] == fence and row["lease_until"] is not None


def answered(row: asyncpg.Record, report: StepReport) -> StepReportAnswer:
    """What is said of a report on a step that is no longer held."""
    if row["fence"] == report.fence and row["sealed"] is not None:
        return StepReportAnswer.UNCHANGED if row["sealed"]["digest"] == digest(report) else StepReportAnswer.CONFLICT
    if row["said_fence"] == report.fence:
        return StepReportAnswer.UNCHANGED if row["said_digest"] == digest(report) else StepReportAnswer.CONFLICT
    return StepReportAnswer.SUPERSEDED


def decided(row: asyncpg.Record, report: StepReport, now: datetime) -> StepEnd | StepReportAnswer:
    """F5: how a step that is held ends."""
    match report.outcome:
        case StepReportKind.SUCCEEDED:
            return _end(row, StepStatus.SUCCEEDED, report)
        case StepReportKind.FAILED:
            return _failed(row, report, now)
        case StepReportKind.CANCELLED if is_to_stop(row):
            return _end(row, StepStatus.CANCELLED, report, reason=CANCELLED_REASON)
        case (
            StepReportKind.CANCELLED | StepReportKind.RELEASED
        ):  # who stopped for a run that goes on again gives its step back
            if is_over(row):
                return _end(row, StepStatus.CANCELLED, report, reason=CANCELLED_REASON)
            return _given_back(row, report, now)


def _given_back(row: asyncpg.Record, report: StepReport, now: datetime) -> StepEnd:
    """Handed out again as if never claimed; a little later, when something it needs is away."""
    error = report.error
    reason = f"{error.code}: {error.message}" if error else "given back"
    due = now + (_LATER if error else timedelta(0))
    return _end(row, StepStatus.READY, report, reason=reason, due_at=due, uncounted=1)


def expired(row: asyncpg.Record, now: datetime, max_lost: int) -> StepEnd:
    """F11: READY again under a new fence; FAILED when it has been tried often enough; nothing in a run that ended."""
    if is_over(row):
        return _end(row, StepStatus.CANCELLED, reason=CANCELLED_REASON, skips=1)
    message = f"the lease of {row['worker']} ran out, attempt {row['attempts']}"
    if row["attempts"] >= (row["max_attempts"] or max_lost):
        error = StepError(LEASE_EXPIRED, message)
        return _end(row, _given_up(row), error=error_document(error), reason=message, skips=1)
    return _end(row, StepStatus.READY, reason=message, due_at=now, skips=1)


def given_up(row: asyncpg.Record, error: StepError) -> StepEnd:
    """A step that cannot be done: FAILED, or SKIPPED where nobody needs it."""
    return _end(row, _given_up(row), error=error_document(error), reason=_why_given_up(row))


def is_to_stop(row: asyncpg.Record) -> bool:
    """F7, F9: whether a step under way is told to stop."""
    is_ended = row["run_status"] == FlowRunStatus.CANCELLED or (
        row["run_status"] == FlowRunStatus.FAILED and row["fail_fast"]
    )
    return is_ended or _map_has_ended(row)


def is_over(row: asyncpg.Record) -> bool:
    """Whether a step under way may end, but is not begun again."""
    return row["run_status"] != FlowRunStatus.RUNNING or _map_has_ended(row)


def _map_has_ended(row: asyncpg.Record) -> bool:
    return row["map_n"] is not None and row["map_status"] != StepStatus.RUNNING


def is_worth_another(retry: Mapping[str, Any] | None, report: StepReport) -> bool:
    """F10: whether the error is one that is tried again: the step's own word comes before the worker's."""
    policy = RetryPolicy.model_validate(retry or {})
    code = report.error.code if report.error else ""
    if policy.retryable is not None:
        return code in policy.retryable
    return code not in policy.final and report.is_retryable is not False


def wait_after(retry: Mapping[str, Any] | None, attempt: int) -> timedelta:
    """F10: how long until the next attempt."""
    policy = RetryPolicy.model_validate(retry or {})
    if not policy.backoff:
        return timedelta(0)
    return compute_delay(attempt, first=policy.backoff, limit=max(policy.backoff, policy.max_backoff))


def _failed(row: asyncpg.Record, report: StepReport, now: datetime) -> StepEnd:
    retry = row["spec"].get("retry")
    is_left = row["attempts"] < (row["max_attempts"] or 1) and not is_over(row)
    if is_left and is_worth_another(retry, report):
        error = report.error
        reason = f"{error.code}: {error.message}" if error else None
        due = now + wait_after(retry, row["attempts"])
        return _end(row, StepStatus.READY, report, reason=reason, due_at=due)
    return _end(row, _given_up(row), report, reason=_why_given_up(row))


def _why_given_up(row: asyncpg.Record) -> str | None:
    return None if row["required"] else "failed, and not required"


def _given_up(row: asyncpg.Record) -> StepStatus:
    return StepStatus.FAILED if row["required"] else StepStatus.SKIPPED


def _end(row: asyncpg.Record, target: StepStatus, report: StepReport | None = None, **more: Any) -> StepEnd:
    told: dict[str, Any] = {}
    if report is not None:
        told["digest"], told["error"] = digest(report), error_document(report.error)
        if target is not StepStatus.READY:
            told["outputs"] = dict(report.outputs)
    return StepEnd(row["run"], row["n"], row["fence"], StepStatus(row["status"]), target, **(told | more))
