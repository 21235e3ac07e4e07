"""What of feeds is found late or broken."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from penstock.harvest import status as harvest
from penstock.harvest.api.schemas import FeedView, HarvestRun

NOW = datetime(2026, 11, 17, 3, 0, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


def feed(**changes: Any) -> FeedView:
    fine = {"feed": "stones", "source": "rest", "url": "http://x", "watermark": NOW - HOUR, "every_seconds": 3600.0}
    more = {"overlap_seconds": 600.0, "paused_until": None, "pending": 0, "last_run": None}
    return FeedView.model_construct(**{**fine, **more, **changes})


def run(state: str, **more: Any) -> HarvestRun:
    told = {
        "run_id": UUID(int=7),
        "feed": "stones",
        "state": state,
        "requested_at": NOW,
        "started_at": NOW,
        "error": None,
    }
    return HarvestRun.model_construct(**{**told, **more})


RETRY = f"penstock harvest partitions {UUID(int=7)}; then penstock harvest retry {UUID(int=7)}"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"watermark": NOW - 3 * HOUR - 40 * MINUTE}, []),  # three runs, half an hour, and the overlap
        ({"watermark": NOW - 5 * HOUR, "every_seconds": None}, []),
        ({"watermark": NOW - 4 * HOUR}, [("LATE", "known only up to 4 hours ago, and due every 60 minutes")]),
        ({"watermark": NOW - MINUTE, "every_seconds": 30.0, "overlap_seconds": 60.0}, []),
        ({"last_run": run("completed")}, []),
        ({"last_run": run("failed", error="no disk")}, [("BROKEN", "its last run failed: no disk")]),
        (
            {"last_run": run("consolidation_skipped")},
            [("BROKEN", "its last run was not consolidated: partitions failed")],
        ),
        (
            {"paused_until": NOW + 5 * MINUTE, "pause_reason": "429"},
            [("LATE", "its source is left alone for 5 minutes: 429")],
        ),
    ],
)
def test_feeds(changes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    """H13: a source that is left alone, and a watermark that stands, are late."""
    assert [(one.severity.value, one.problem) for one in harvest._of(feed(**changes), NOW)] == expected


@pytest.mark.parametrize(
    ("last", "hint"),
    [
        (run("failed"), RETRY),
        (run("consolidation_skipped"), RETRY),
        (run("failed", started_at=None), "mend the cause, then penstock harvest run stones"),
    ],
)
def test_the_next_step_of_a_run_that_failed(last: HarvestRun, hint: str) -> None:
    """H11: one that never began cannot be retried."""
    assert [one.hint for one in harvest._of(feed(last_run=last), NOW)] == [hint]
