"""What is late or broken among files and shards."""

from datetime import timedelta

from penstock.kernel.status import PartReport, StatusIssue, broken_issue, late_issue, pluralize
from penstock.kernel.text import format_duration
from penstock.tracking.contract import Stage, StageStatus
from penstock.tracking.model import FILE_STAGE, PipelineCounts, because
from penstock.tracking.service import Tracking

WAITS_TOO_LONG = timedelta(minutes=10)  # what a stage hands on is claimed within seconds when anybody claims


async def report_status(tracking: Tracking) -> PartReport:
    """How files and shards stand, and what is wrong with some."""
    standing = await tracking.standing()
    rows = standing.rows(FILE_STAGE)
    failed = sum(standing.rows(stage, StageStatus.FAILED) for stage in Stage)
    under_way = sum(standing.rows(stage, StageStatus.STARTED) for stage in Stage)
    done = standing.rows(list(Stage)[-1], StageStatus.DONE)
    summary = f"{pluralize(rows, 'shard')}: {done:,} done, {under_way:,} under way, {failed:,} failed"
    return PartReport(summary, [issue for stage in Stage for issue in _of(stage, standing)])


def _of(stage: Stage, standing: PipelineCounts) -> list[StatusIssue]:
    found = []
    if failed := standing.rows(stage, StageStatus.FAILED):
        hint = f"penstock track status --stage {stage} --status failed; then penstock track retry {stage} --all"
        found.append(broken_issue(stage, f"{pluralize(failed, 'shard')} failed", hint))
    if pause := standing.pauses.get(stage):
        since = f"paused for {format_duration(standing.at - pause.since)} by {pause.actor}{because(pause.reason)}"
        found.append(late_issue(stage, since, f"penstock track resume {stage}", pause.since))
    oldest = standing.oldest.get(stage)
    if oldest is not None and pause is None and standing.at - oldest > WAITS_TOO_LONG:
        waiting_for = format_duration(standing.at - oldest)
        waits = f"{pluralize(standing.ready(stage), 'shard')} waiting, the oldest for {waiting_for}"
        hint = f"is a {stage} daemon running? penstock track queue {stage}; penstock track why FILE SHARD"
        found.append(late_issue(stage, waits, hint, oldest))
    return found
