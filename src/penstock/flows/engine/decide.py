"""F5, F7, F10, F11: the effect of a report, or of an expired lease, on a step. Pure."""

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import orjson

from penstock.flows.contract import MUTABLE_OUTPUTS, FlowRunStatus, StepReportAnswer, StepReportKind, StepStatus
from penstock.flows.definition.spec import RetryPolicy
from penstock.flows.model import LEASE_EXPIRED, StepEnd, StepError, StepReport
from penstock.flows.store import encode_error
from penstock.kernel.tasks.backoff import compute_delay

CANCELLED_REASON = "the run has ended"
_RELEASE_DELAY = timedelta(seconds=2)


def compute_digest(report: StepReport) -> str:
    """Return the digest of a report, without the outputs that may change later."""
    outputs = {name: value for name, value in report.outputs.items() if name not in MUTABLE_OUTPUTS}
    content = [report.outcome, outputs, encode_error(report.error), sorted(report.artifacts)]
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def is_claimed(row: asyncpg.Record, fence: int) -> bool:
    """Return whether a worker has claimed the step with *fence*."""
    return row["status"] == StepStatus.RUNNING and row["fence"] == fence and row["lease_until"] is not None


def answer_late_report(row: asyncpg.Record, report: StepReport) -> StepReportAnswer:
    """Return the answer to a report on a step that is no longer claimed."""
    if row["fence"] == report.fence and row["sealed"] is not None:
        return _compare(row["sealed"]["digest"], report)
    if row["reported_fence"] == report.fence:
        return _compare(row["reported_digest"], report)
    return StepReportAnswer.SUPERSEDED


def _compare(digest: str, report: StepReport) -> StepReportAnswer:
    return StepReportAnswer.UNCHANGED if digest == compute_digest(report) else StepReportAnswer.CONFLICT


def decide_end(row: asyncpg.Record, report: StepReport, now: datetime) -> StepEnd | StepReportAnswer:
    """F5: return how a report ends a claimed step."""
    match report.outcome:
        case StepReportKind.SUCCEEDED:
            return _make_end(row, StepStatus.SUCCEEDED, report)
        case StepReportKind.FAILED:
            return _decide_failure(row, report, now)
        case StepReportKind.CANCELLED if must_stop(row):
            return _make_end(row, StepStatus.CANCELLED, report, reason=CANCELLED_REASON)
        case StepReportKind.CANCELLED | StepReportKind.RELEASED:
            # A worker that stopped although the run continues (it was reopened) releases its step.
            if is_over(row):
                return _make_end(row, StepStatus.CANCELLED, report, reason=CANCELLED_REASON)
            return _release(row, report, now)


def _release(row: asyncpg.Record, report: StepReport, now: datetime) -> StepEnd:
    """Return the step to READY as if never claimed; after a delay if it needs something unavailable."""
    error = report.error
    reason = f"{error.code}: {error.message}" if error else "released by the worker"
    due = now + (_RELEASE_DELAY if error else timedelta(0))
    return _make_end(row, StepStatus.READY, report, reason=reason, due_at=due, uncounted=1)


def decide_expiry(row: asyncpg.Record, now: datetime, max_lost: int) -> StepEnd:
    """F11: return the end of a step with an expired lease.

    READY under a new fence; FAILED after the last attempt; CANCELLED in a run that has ended.
    """
    if is_over(row):
        return _make_end(row, StepStatus.CANCELLED, reason=CANCELLED_REASON, skips=1)
    message = f"the lease of worker {row['worker']} expired on attempt {row['attempts']}"
    if row["attempts"] >= (row["max_attempts"] or max_lost):
        error = StepError(LEASE_EXPIRED, message)
        return _make_end(row, _choose_failed_status(row), error=encode_error(error), reason=message, skips=1)
    return _make_end(row, StepStatus.READY, reason=message, due_at=now, skips=1)


def make_failure(row: asyncpg.Record, error: StepError) -> StepEnd:
    """Return the end of a step with a final error: FAILED, or SKIPPED if it is not required."""
    return _make_end(row, _choose_failed_status(row), error=encode_error(error), reason=_choose_failed_reason(row))


def must_stop(row: asyncpg.Record) -> bool:
    """F7, F9: return whether the worker of a running step must stop."""
    is_ended = row["run_status"] == FlowRunStatus.CANCELLED or (
        row["run_status"] == FlowRunStatus.FAILED and row["fail_fast"]
    )
    return is_ended or _has_map_ended(row)


def is_over(row: asyncpg.Record) -> bool:
    """Return whether a running step may end, but must not be started again."""
    return row["run_status"] != FlowRunStatus.RUNNING or _has_map_ended(row)


def _has_map_ended(row: asyncpg.Record) -> bool:
    return row["map_n"] is not None and row["map_status"] != StepStatus.RUNNING


def is_retryable(retry: Mapping[str, Any] | None, report: StepReport) -> bool:
    """F10: return whether the error is retried: the policy of the step has priority over the worker's opinion."""
    policy = RetryPolicy.model_validate(retry or {})
    code = report.error.code if report.error else ""
    if policy.retryable is not None:
        return code in policy.retryable
    return code not in policy.final and report.is_retryable is not False


def compute_retry_delay(retry: Mapping[str, Any] | None, attempt: int) -> timedelta:
    """F10: return the time until the next attempt."""
    policy = RetryPolicy.model_validate(retry or {})
    if not policy.backoff:
        return timedelta(0)
    return compute_delay(attempt, first=policy.backoff, limit=max(policy.backoff, policy.max_backoff))


def _decide_failure(row: asyncpg.Record, report: StepReport, now: datetime) -> StepEnd:
    retry = row["spec"].get("retry")
    has_attempts = row["attempts"] < (row["max_attempts"] or 1) and not is_over(row)
    if has_attempts and is_retryable(retry, report):
        error = report.error
        reason = f"{error.code}: {error.message}" if error else None
        due = now + compute_retry_delay(retry, row["attempts"])
        return _make_end(row, StepStatus.READY, report, reason=reason, due_at=due)
    return _make_end(row, _choose_failed_status(row), report, reason=_choose_failed_reason(row))


def _choose_failed_reason(row: asyncpg.Record) -> str | None:
    return None if row["required"] else "failed, and not required"


def _choose_failed_status(row: asyncpg.Record) -> StepStatus:
    return StepStatus.FAILED if row["required"] else StepStatus.SKIPPED


def _make_end(row: asyncpg.Record, target: StepStatus, report: StepReport | None = None, **more: Any) -> StepEnd:
    fields: dict[str, Any] = {}
    if report is not None:
        fields["digest"], fields["error"] = compute_digest(report), encode_error(report.error)
        if target is not StepStatus.READY:
            fields["outputs"] = dict(report.outputs)
    return StepEnd(row["run"], row["n"], row["fence"], StepStatus(row["status"]), target, **(fields | more))
