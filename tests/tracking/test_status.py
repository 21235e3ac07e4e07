"""The status of tracking: each problem of the pipeline is an issue with a command for the operator."""

import re
import shlex
from datetime import timedelta

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.kernel.clock import ManualClock
from penstock.kernel.status import StatusIssue
from penstock.tracking import status
from penstock.tracking.contract import Stage, StageReportKind
from penstock.tracking.model import RowReport
from penstock.tracking.service import Tracking

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
INGEST, SPLITTER, *_ = Stage


@pytest.fixture
async def pipeline(tracking: Tracking) -> Tracking:
    """Return tracking with two shards that wait for the splitter; its status has no issues."""
    await tracking.register("f", [0, 1], worker=None, actor="test")
    await tracking.move(INGEST, "done", "f", actor="test")
    assert await list_issues(tracking) == []
    return tracking


async def list_issues(pipeline: Tracking) -> list[StatusIssue]:
    """Return the issues; check that each has a command that the command line understands."""
    issues = list((await status.report_status(pipeline)).issues)
    for issue in issues:
        commands = re.findall(r"penstock (track [^;]+)", issue.hint or "")
        assert commands, issue
        for command in commands:
            result = CliRunner().invoke(app, [*shlex.split(command), "--help"])
            assert result.exit_code == 0, (command, result.output)
    return issues


def show(issue: StatusIssue) -> tuple[str, str, str]:
    return issue.severity.value, issue.subject, issue.problem


async def test_delayed_queue_is_an_issue(pipeline: Tracking, clock: ManualClock) -> None:
    """Status: a queue whose oldest shard waits too long is late."""
    clock.advance(status.WAITS_TOO_LONG)
    assert await list_issues(pipeline) == []
    clock.advance(MINUTE)
    (issue,) = await list_issues(pipeline)
    what = "2 shards waiting for a worker, the oldest was registered 11 minutes ago"
    assert show(issue) == ("LATE", SPLITTER, what)
    assert f"penstock track queue {SPLITTER}" in (issue.hint or "")


async def test_forgotten_pause_is_an_issue(pipeline: Tracking, clock: ManualClock) -> None:
    """Status: a paused stage is late, with actor, reason and age of the pause; its queue is no second issue."""
    await pipeline.pause(SPLITTER, actor="ann", reason="a bad release")
    clock.advance(2 * HOUR)
    (issue,) = await list_issues(pipeline)
    assert show(issue) == ("LATE", SPLITTER, "paused for 2 hours by ann: a bad release")
    assert issue.hint == f"penstock track resume {SPLITTER}"
    await pipeline.resume(SPLITTER)
    assert "paused" not in str(await list_issues(pipeline))


async def test_failed_shards_are_an_issue(pipeline: Tracking) -> None:
    """Status: shards that failed for good are broken; the hint lists them and retries them."""
    (first, _) = await pipeline.claim(SPLITTER, "w", limit=2)
    await pipeline.report(SPLITTER, [RowReport(*first[:3], StageReportKind.FAILED, "bad line 3")])
    (issue,) = await list_issues(pipeline)
    assert show(issue) == ("BROKEN", SPLITTER, "1 shard failed")
    assert f"penstock track retry {SPLITTER} --all" in (issue.hint or "")


async def test_expired_leases_are_an_issue(pipeline: Tracking, clock: ManualClock) -> None:
    """Status: shards with an expired lease are broken if no server returns them to the queue."""
    await pipeline.claim(SPLITTER, "dead", limit=2, lease_for=MINUTE)
    clock.advance(MINUTE + status.EXPIRED_TOO_LONG)
    assert await list_issues(pipeline) == []
    clock.advance(MINUTE)
    (issue,) = await list_issues(pipeline)
    what = "2 shards with an expired lease, the oldest for 2 minutes: no server returns them to the queue"
    assert show(issue) == ("BROKEN", SPLITTER, what)
    await pipeline.reap()
    assert await list_issues(pipeline) == []


async def test_old_starts_without_a_lease_are_an_issue(pipeline: Tracking, clock: ManualClock) -> None:
    """Status: shards that were started without a lease a day ago are late, as their worker may be dead."""
    await pipeline.move(SPLITTER, "start", "f", 0, worker="w", actor="w")
    await pipeline.move(SPLITTER, "fail", "f", 1, actor="w")
    clock.advance(status.STARTED_TOO_LONG)
    assert len(await list_issues(pipeline)) == 1
    clock.advance(HOUR)
    issue = (await list_issues(pipeline))[-1]
    what = "1 shard started without a lease, the oldest 25 hours ago: the worker may be dead"
    assert show(issue) == ("LATE", SPLITTER, what)


async def test_summary_counts_the_shards(pipeline: Tracking) -> None:
    """Status: the summary has the number of shards that are done, being processed and failed."""
    await pipeline.claim(SPLITTER, "w", limit=1)
    summary = (await status.report_status(pipeline)).summary
    assert summary == "2 shards: 0 done, 1 being processed, 0 failed"
