"""The status of feeds: issues with their severity, problem and hint."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from penstock.harvest import status as harvest
from penstock.harvest.alerts import AlertSender
from penstock.harvest.api.queries import HarvestViews
from penstock.harvest.api.schemas import FeedView, HarvestRun
from penstock.harvest.config import AlertsSection
from penstock.kernel.status import StatusIssue
from tests.harvest.api_client import HarvestApiClient
from tests.harvest.stepper import FEED

NOW = datetime(2026, 11, 17, 3, 0, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


def feed(**changes: Any) -> FeedView:
    values = {"feed": "stones", "source": "rest", "url": "http://x", "watermark": NOW - HOUR, "every_seconds": 3600.0}
    rest = {"overlap_seconds": 600.0, "paused_until": None, "pending": 0, "last_run": None, "last_ended_run": None}
    return FeedView.model_construct(**{**values, **rest, **changes})


def run(state: str, **changes: Any) -> HarvestRun:
    values = {
        "run_id": UUID(int=7),
        "feed": "stones",
        "state": state,
        "requested_at": NOW,
        "started_at": NOW,
        "error": None,
    }
    return HarvestRun.model_construct(**{**values, **changes})


def ended(state: str, **changes: Any) -> dict[str, HarvestRun]:
    """Return a last run that has ended."""
    last = run(state, **changes)
    return {"last_run": last, "last_ended_run": last}


def issues(**changes: Any) -> list[StatusIssue]:
    return [*harvest._list_feed_issues(feed(**changes), NOW)]


RETRY = f"penstock harvest partitions {UUID(int=7)}; then penstock harvest retry {UUID(int=7)}"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"watermark": NOW - 3 * HOUR - 40 * MINUTE}, []),  # three runs, half an hour, and the overlap
        ({"watermark": NOW - 5 * HOUR, "every_seconds": None}, []),
        (
            {"watermark": NOW - 4 * HOUR},
            [("LATE", "synchronised up to 4 hours ago, although a run is due every 60 minutes")],
        ),
        ({"watermark": NOW - MINUTE, "every_seconds": 30.0, "overlap_seconds": 60.0}, []),
        (ended("completed"), []),
        (ended("failed", error="no disk"), [("BROKEN", "the last run failed: no disk")]),
        (ended("consolidation_skipped"), [("BROKEN", "the last run was not consolidated: partitions failed")]),
        (
            {"paused_until": NOW + 5 * MINUTE, "pause_reason": "429"},
            [("LATE", "no requests for 5 minutes: 429")],
        ),
    ],
)
def test_feed_issues(changes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    """H13: a failed run is BROKEN; a paused source and an old watermark are LATE."""
    assert [(issue.severity.value, issue.problem) for issue in issues(**changes)] == expected


@pytest.mark.parametrize(
    ("last", "hint"),
    [
        (run("failed"), RETRY),
        (run("consolidation_skipped"), RETRY),
        (run("failed", started_at=None), "fix the cause; penstock harvest run stones"),
    ],
)
def test_hint_for_a_failed_run(last: HarvestRun, hint: str) -> None:
    """H11: a run that was planned can be retried, a run that was not planned cannot."""
    assert [issue.hint for issue in issues(last_run=last, last_ended_run=last)] == [hint]


@pytest.mark.parametrize("state", ["planning", "created", "workers_running", "consolidating"])
def test_failed_run_is_reported_while_the_next_one_is_active(state: str) -> None:
    """H13: a feed that always fails is BROKEN at any time; the failed run cannot be retried during the next one."""
    [issue] = issues(last_run=run(state, run_id=UUID(int=8)), last_ended_run=run("failed", error="no disk"))
    assert (issue.severity.value, issue.problem) == (
        "BROKEN",
        "the last run failed: no disk; another run is active",
    )
    assert issue.hint == "penstock harvest show stones; penstock harvest alerts stones"
    assert issues(last_run=run(state, run_id=UUID(int=8)), last_ended_run=run("completed")) == []


def test_hint_for_an_old_watermark() -> None:
    """H13: the hint has commands that show the runs and the history of the watermark."""
    [issue] = issues(watermark=NOW - 4 * HOUR)
    assert issue.hint == "penstock harvest show stones; penstock harvest watermark stones"
    assert issue.since == NOW - 4 * HOUR


async def test_failed_run_stays_broken_in_the_report(api: HarvestApiClient) -> None:
    """H13: a failed run is reported while the next run is planned and fetched, until that run has completed."""
    views = HarvestViews(api.stepper.db, api.stepper.storage, api.stepper.section)
    await api.fail_run()
    await api.post(f"/feeds/{FEED}/runs")
    for _ in range(2):
        report = await harvest.report_status(views)
        assert report.summary == "1 feed: 1 active run, 0 records in last runs"
        [issue] = report.issues
        assert (issue.severity.value, issue.subject) == ("BROKEN", FEED)
        await api.stepper.drain("harvest.plans")
    await api.stepper.finish()
    report = await harvest.report_status(views)
    assert (report.summary, report.issues) == ("1 feed: 0 active runs, 120 records in last runs", [])


async def test_undelivered_alerts_are_reported(api: HarvestApiClient) -> None:
    """H12: an alert that a channel refuses is LATE while it is retried, and BROKEN when its delivery was given up."""
    db = api.stepper.db
    views = HarvestViews(db, api.stepper.storage, api.stepper.section)
    await api.fail_run()
    await db.execute("UPDATE run_metadata SET state = 'completed', completed_at = now()")
    refusing = AlertsSection.model_validate({"webhooks": [{"url": "http://127.0.0.1:1/hook"}]})
    assert (await harvest.report_status(views)).issues == []
    assert await AlertSender(db, refusing).send_due() == 1
    [issue] = (await harvest.report_status(views)).issues
    assert (issue.severity.value, issue.subject) == ("LATE", FEED)
    assert issue.problem.startswith("1 alert not delivered: webhook 1: ClientConnectorError")
    assert issue.hint == f"penstock harvest alerts {FEED}; check harvest.alerts in penstock.yaml"
    await db.execute("UPDATE harvest_alert SET is_settled = true")
    [issue] = (await harvest.report_status(views)).issues
    assert issue.severity.value == "BROKEN"
    assert issue.problem.startswith("the delivery of 1 alert was given up: webhook 1: ")
    await db.execute("UPDATE harvest_alert SET error = NULL")
    assert (await harvest.report_status(views)).issues == []
