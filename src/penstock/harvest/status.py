"""What is late or broken among feeds."""

from datetime import datetime, timedelta

from penstock.harvest.api.queries import HarvestViews
from penstock.harvest.api.schemas import FeedView
from penstock.harvest.contract import HarvestRunState, PlanState
from penstock.harvest.model import RUN
from penstock.kernel.status import PartReport, StatusIssue, broken_issue, late_issue, pluralize
from penstock.kernel.text import format_duration

_FAILED = (PlanState.FAILED, HarvestRunState.FAILED, HarvestRunState.CONSOLIDATION_SKIPPED)
_UNDER_WAY = (PlanState.PLANNING, PlanState.PLANNED, *RUN.groups["active"])
_LATE = timedelta(minutes=30)  # beyond three runs: one may fail and the next be under way


async def report_status(views: HarvestViews) -> PartReport:
    """How feeds stand, and what is wrong with some."""
    feeds = (await views.feeds()).feeds
    under_way = sum(1 for feed in feeds if feed.last_run and feed.last_run.state in _UNDER_WAY)
    records = sum(feed.last_run.records for feed in feeds if feed.last_run)
    summary = f"{pluralize(len(feeds), 'feed')}, {under_way:,} under way, {records:,} records in their last runs"
    now = views.now()
    return PartReport(summary, [issue for feed in feeds for issue in _of(feed, now)])


def _of(feed: FeedView, now: datetime) -> list[StatusIssue]:
    found = []
    run = feed.last_run
    if run is not None and run.state in _FAILED:
        how = "was not consolidated" if run.state == HarvestRunState.CONSOLIDATION_SKIPPED else "failed"
        what = f"its last run {how}: {run.error or 'partitions failed'}"
        hint = f"penstock harvest partitions {run.run_id}; then penstock harvest retry {run.run_id}"
        if run.started_at is None:  # one that never began is not taken up again
            hint = f"mend the cause, then penstock harvest run {run.feed}"
        found.append(broken_issue(feed.feed, what, hint, run.requested_at))
    if feed.paused_until is not None:
        what = f"its source is left alone for {format_duration(feed.paused_until - now)}: {feed.pause_reason}"
        found.append(late_issue(feed.feed, what, "it goes on by itself"))
    every, overlap = (timedelta(seconds=span or 0) for span in (feed.every_seconds, feed.overlap_seconds))
    if every and (known := feed.watermark) is not None and now - known - overlap > 3 * every + _LATE:
        what = f"known only up to {format_duration(now - known)} ago, and due every {format_duration(every)}"
        found.append(late_issue(feed.feed, what, f"penstock harvest show {feed.feed}", known))
    return found
