"""The status of flows: each problem is an issue with a command for the operator."""

import re
import shlex
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.flows import status
from penstock.flows.api.queries import FlowViews
from penstock.kernel.clock import ManualClock
from penstock.kernel.http.app import get_services
from penstock.kernel.status import StatusIssue
from tests.flows.harness import FlowsHarness, flows_harness

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
VALID = "name: nightly\nsteps:\n  load: {kind: work}\n"


@pytest.fixture
async def harness(database_url: str, tmp_path: Path, clock: ManualClock) -> AsyncIterator[FlowsHarness]:
    """A harness with a folder of one valid flow; its status has no issues."""
    folder = tmp_path / "my flows"
    folder.mkdir()
    (folder / "nightly.yaml").write_text(VALID)
    async with flows_harness(database_url, tmp_path, clock=clock, folder=folder) as opened:
        assert await list_issues(opened) == []
        yield opened


async def list_issues(harness: FlowsHarness) -> list[StatusIssue]:
    """Return the issues; check that each command of a hint is valid for the command line."""
    issues = list((await status.report_status(get_services(harness.app).get(FlowViews))).issues)
    for issue in issues:
        for command in re.findall(r"penstock ((?:flow|work) [^;]+)", issue.hint or ""):
            result = CliRunner().invoke(app, [*shlex.split(command), "--help"])
            assert result.exit_code == 0, (command, result.output)
    return issues


def show(issue: StatusIssue) -> tuple[str, str, str]:
    return issue.severity.value, issue.subject, issue.problem


async def test_waiting_steps_are_an_issue(harness: FlowsHarness, clock: ManualClock) -> None:
    """F18: steps of a kind that wait longer than the restart of a worker are late."""
    await harness.create({"a": {"kind": "work"}, "b": {"kind": "work"}, "c": {"kind": "other", "dependsOn": ["a"]}})
    clock.advance(status.WAITS_TOO_LONG)
    assert await list_issues(harness) == []
    clock.advance(MINUTE)
    (issue,) = await list_issues(harness)
    assert show(issue) == ("LATE", "work", "2 steps waiting for a worker, the oldest for 6 minutes")
    assert "penstock work flows --kinds work" in (issue.hint or "")


async def test_failed_runs_are_an_issue(harness: FlowsHarness, clock: ManualClock) -> None:
    """F18: runs that failed within a day are broken; of a sub-run only the parent run is reported."""
    for run_id in ("outer", *(f"inner-{number}" for number in range(8))):
        await harness.create({"a": {"kind": "work"}}, run_id)
    inner = "UPDATE flow_run SET parent_run = (SELECT id FROM flow_run WHERE run_id = 'outer'), parent_n = 0"
    await harness.engine.db.execute(f"{inner} WHERE run_id <> 'outer'")
    clock.advance(2 * DAY)
    for item in await harness.claim():
        await harness.report(item, "FAILED", error={"code": "NO", "message": "no"})
    (issue,) = await list_issues(harness)
    assert show(issue) == ("BROKEN", "outer", "run failed 0 seconds ago: step a failed")
    assert issue.hint == "penstock flow show outer; then penstock flow retry outer"
    clock.advance(DAY + MINUTE)
    assert await list_issues(harness) == []


async def test_invalid_flow_file_is_an_issue(harness: FlowsHarness, tmp_path: Path, clock: ManualClock) -> None:
    """F15: a flow file with an error is broken, with the line of the first error, until the file is fixed."""
    file = tmp_path / "my flows" / "nightly.yaml"
    file.write_text("name: nightly\nsteps:\n  load: {kynd: work}\n  report: {kynd: work}\n")
    clock.advance(MINUTE)
    (issue,) = await list_issues(harness)
    assert show(issue)[:2] == ("BROKEN", "nightly.yaml")
    assert issue.problem == f"{file}:3:3: steps.load.kind: is required (and 3 more errors)"
    assert "steps.load" in issue.problem
    assert "\n" not in issue.problem
    assert issue.hint == f"fix the file; penstock flow validate '{file}'"
    file.write_text(VALID)
    clock.advance(MINUTE)
    assert await list_issues(harness) == []


async def test_missing_folder_is_an_issue(harness: FlowsHarness, tmp_path: Path, clock: ManualClock) -> None:
    """F15: a folder of `flows.folder` that does not exist is broken."""
    folder = tmp_path / "my flows"
    folder.rename(tmp_path / "elsewhere")
    clock.advance(MINUTE)
    (issue,) = await list_issues(harness)
    assert show(issue) == ("BROKEN", "flows.folder", f"the folder {folder} of `flows.folder` does not exist")
    assert f"mkdir -p '{folder}'" in (issue.hint or "")
    folder.mkdir()
    clock.advance(MINUTE)
    assert await list_issues(harness) == []


async def test_summary_counts_runs_and_steps(harness: FlowsHarness) -> None:
    """F18: the summary has the number of active runs and of waiting steps."""
    await harness.create({"a": {"kind": "work"}, "b": {"kind": "work"}, "c": {"kind": "work", "dependsOn": ["a"]}})
    report = await status.report_status(get_services(harness.app).get(FlowViews))
    assert report.summary == "1 active run, 2 steps waiting for a worker"
