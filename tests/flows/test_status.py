"""What of flows is found late or broken."""

from datetime import timedelta
from pathlib import Path

from penstock.flows import status as flows
from penstock.flows.api.queries import FlowViews
from penstock.kernel.clock import ManualClock
from penstock.kernel.http.app import services_of
from tests.flows.harness import flows_harness
from tests.support.status import issue_tuples

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


async def test_steps_nobody_takes(database_url: str, tmp_path: Path, clock: ManualClock) -> None:
    """F18: late when they wait longer than a worker takes to come back, by kind."""
    async with flows_harness(database_url, tmp_path, clock=clock) as harness:
        views = services_of(harness.app).get(FlowViews)
        await harness.create({"a": {"kind": "work"}, "b": {"kind": "work"}, "c": {"kind": "other", "dependsOn": ["a"]}})
        clock.advance(flows.WAITS_TOO_LONG)
        report = await flows.report_status(views)
        assert (report.summary, issue_tuples(report)) == ("1 run under way, 2 steps wait", [])
        clock.advance(MINUTE)
        told = issue_tuples(await flows.report_status(views))
        assert told == [("LATE", "work", "2 steps waiting for a worker, the oldest for 6 minutes")]


async def test_runs_that_failed(database_url: str, tmp_path: Path, clock: ManualClock) -> None:
    """F18: by when they failed, not when they were made; runs within another leave room for it."""
    async with flows_harness(database_url, tmp_path, clock=clock) as harness:
        views = services_of(harness.app).get(FlowViews)
        for run_id in ("outer", *(f"inner-{number}" for number in range(8))):
            await harness.create({"a": {"kind": "work"}}, run_id)
        within = "UPDATE flow_run SET parent_run = (SELECT id FROM flow_run WHERE run_id = 'outer'), parent_n = 0"
        await views._db.execute(f"{within} WHERE run_id <> 'outer'")
        clock.advance(timedelta(days=2))
        for item in await harness.claim():
            await harness.report(item, "FAILED", error={"code": "NO", "message": "no"})
        told = [one for one in issue_tuples(await flows.report_status(views)) if one[0] == "BROKEN"]
        assert [subject for _, subject, _ in told] == ["outer"]
        clock.advance(timedelta(days=1, minutes=1))
        assert [one for one in issue_tuples(await flows.report_status(views)) if one[0] == "BROKEN"] == []
