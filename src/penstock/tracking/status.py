"""The status of tracking: counts of shards, and issues such as failed shards, delayed queues and pauses."""

from collections.abc import Iterator
from datetime import timedelta

from penstock.kernel.status import PartReport, StatusIssue, make_broken_issue, make_late_issue, pluralize
from penstock.kernel.text import format_duration
from penstock.tracking.contract import Stage, StageStatus
from penstock.tracking.model import FILE_STAGE, LAST_STAGE, OverdueRows, PipelineCounts, format_reason
from penstock.tracking.service import Tracking

WAITS_TOO_LONG = timedelta(minutes=10)  # a running worker claims a shard within seconds
EXPIRED_TOO_LONG = timedelta(minutes=1)  # the reaper runs every second
STARTED_TOO_LONG = timedelta(hours=24)  # only of starts without a lease, which never expire


async def report_status(tracking: Tracking) -> PartReport:
    """Return the number of shards by status, and the issues of each stage."""
    counts = await tracking.read_counts()
    overdue = await tracking.list_overdue(expired_for=EXPIRED_TOO_LONG, started_for=STARTED_TOO_LONG)
    rows = counts.sum_rows(FILE_STAGE)
    failed = sum(counts.sum_rows(stage, StageStatus.FAILED) for stage in Stage)
    started = sum(counts.sum_rows(stage, StageStatus.STARTED) for stage in Stage)
    done = counts.sum_rows(LAST_STAGE, StageStatus.DONE)
    summary = f"{pluralize(rows, 'shard')}: {done:,} done, {started:,} being processed, {failed:,} failed"
    issues = [issue for stage in Stage for issue in _list_stage_issues(stage, counts)]
    return PartReport(summary, [*issues, *(_make_overdue_issue(rows, counts) for rows in overdue)])


def _list_stage_issues(stage: Stage, counts: PipelineCounts) -> Iterator[StatusIssue]:
    if failed := counts.sum_rows(stage, StageStatus.FAILED):
        hint = f"penstock track ls --stage {stage} --status failed; then penstock track retry {stage} --all"
        yield make_broken_issue(stage, f"{pluralize(failed, 'shard')} failed", hint)
    pause = counts.pauses.get(stage)
    if pause is not None:
        duration = format_duration(counts.at - pause.since)
        problem = f"paused for {duration} by {pause.actor}{format_reason(pause.reason)}"
        yield make_late_issue(stage, problem, f"penstock track resume {stage}", pause.since)
    oldest = counts.oldest.get(stage)
    if oldest is not None and pause is None and counts.at - oldest > WAITS_TOO_LONG:
        waiting = pluralize(counts.count_ready(stage), "shard")
        problem = f"{waiting} waiting for a worker, the oldest was registered {format_duration(counts.at - oldest)} ago"
        yield make_late_issue(
            stage, problem, f"check that a {stage} daemon is running; penstock track queue {stage}", oldest
        )


def _make_overdue_issue(overdue: OverdueRows, counts: PipelineCounts) -> StatusIssue:
    stage, rows, age = overdue.stage, pluralize(overdue.rows, "shard"), format_duration(counts.at - overdue.since)
    hint = f"penstock track ls --stage {stage} --status started"
    if overdue.has_lease:
        problem = f"{rows} with an expired lease, the oldest for {age}: no server returns them to the queue"
        return make_broken_issue(
            stage, problem, f"{hint}; look for periodic_task_failed in the log of the server", overdue.since
        )
    problem = f"{rows} started without a lease, the oldest {age} ago: the worker may be dead"
    return make_late_issue(stage, problem, hint, overdue.since)
