"""The status of harvest: active runs, and issues such as failed runs, pauses, old watermarks and undelivered alerts."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from penstock.harvest.api.queries import DeliveryProblem, HarvestViews
from penstock.harvest.api.schemas import FeedView, HarvestRun
from penstock.harvest.contract import HarvestRunState, PlanState
from penstock.harvest.model import RUN
from penstock.kernel.status import PartReport, StatusIssue, make_broken_issue, make_late_issue, pluralize
from penstock.kernel.text import format_duration

_FAILED = (PlanState.FAILED, HarvestRunState.FAILED, HarvestRunState.CONSOLIDATION_SKIPPED)
_ACTIVE = (PlanState.PLANNING, PlanState.PLANNED, *RUN.groups["active"])
_TOLERATED_RUNS = 3  # one scheduled run may fail while the next one is active
_TOLERATED_DELAY = timedelta(minutes=30)


async def report_status(views: HarvestViews) -> PartReport:
    """Return the number of feeds, active runs and records, and the issues of each feed."""
    feeds, now = (await views.list_feeds()).feeds, views.read_clock()
    runs = [feed.last_run for feed in feeds if feed.last_run]
    active = sum(run.state in _ACTIVE for run in runs)
    records = sum(run.records for run in runs)
    summary = f"{pluralize(len(feeds), 'feed')}: {pluralize(active, 'active run')}, {records:,} records in last runs"
    issues = [issue for feed in feeds for issue in _list_feed_issues(feed, now)]
    return PartReport(summary, [*issues, *map(_make_delivery_issue, await views.list_delivery_problems())])


def _list_feed_issues(feed: FeedView, now: datetime) -> Iterator[StatusIssue]:
    run = feed.last_ended_run
    if run is not None and run.state in _FAILED:
        yield _make_failed_run_issue(feed, run)
    if feed.paused_until is not None:
        problem = f"no requests for {format_duration(feed.paused_until - now)}: {feed.pause_reason}"
        yield make_late_issue(feed.feed, problem, f"requests resume automatically; penstock harvest show {feed.feed}")
    if feed.every_seconds and feed.watermark is not None:
        every, overlap = timedelta(seconds=feed.every_seconds), timedelta(seconds=feed.overlap_seconds)
        if now - feed.watermark - overlap > _TOLERATED_RUNS * every + _TOLERATED_DELAY:
            yield _make_watermark_issue(feed, feed.watermark, now - feed.watermark, every)


def _make_failed_run_issue(feed: FeedView, run: HarvestRun) -> StatusIssue:
    """Return the issue of the last ended run, with the commands that are possible in its state."""
    name, last = feed.feed, feed.last_run
    outcome = "was not consolidated" if run.state == HarvestRunState.CONSOLIDATION_SKIPPED else "failed"
    problem = f"the last run {outcome}: {run.error or 'partitions failed'}"
    if last is not None and last.run_id != run.run_id:  # a later run replaces it, so it cannot be retried
        problem += "; another run is active"
        hint = f"penstock harvest show {name}; penstock harvest alerts {name}"
    elif run.started_at is None:  # only a planned run can be retried
        hint = f"fix the cause; penstock harvest run {name}"
    else:
        hint = f"penstock harvest partitions {run.run_id}; then penstock harvest retry {run.run_id}"
    return make_broken_issue(name, problem, hint, run.requested_at)


def _make_watermark_issue(feed: FeedView, watermark: datetime, age: timedelta, every: timedelta) -> StatusIssue:
    problem = f"synchronised up to {format_duration(age)} ago, although a run is due every {format_duration(every)}"
    hint = f"penstock harvest show {feed.feed}; penstock harvest watermark {feed.feed}"
    return make_late_issue(feed.feed, problem, hint, watermark)


def _make_delivery_issue(problem: DeliveryProblem) -> StatusIssue:
    alerts, hint = pluralize(problem.alerts, "alert"), f"penstock harvest alerts {problem.feed}"
    if problem.is_settled:
        return make_broken_issue(
            problem.feed, f"the delivery of {alerts} was given up: {problem.error}", hint, problem.since
        )
    hint += "; check harvest.alerts in penstock.yaml"
    return make_late_issue(problem.feed, f"{alerts} not delivered: {problem.error}", hint, problem.since)
