"""The status of ingest: each problem of a supplier is an issue with a command for the operator."""

import asyncio
import re
import shlex
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.ingest import status
from penstock.ingest.api.queries import IngestViews
from penstock.ingest.model import IngestAlert, SupplierStatus
from penstock.ingest.run import ledger
from penstock.ingest.state.supplier_status import ABANDONED_AFTER
from penstock.ingest.tree import paths
from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.status import StatusIssue
from penstock.settings import Settings
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, snapshot

ONE, TWO = snapshot({"A": 1, "B": 2}), snapshot({"A": 2, "B": 2})
REJECTED = snapshot({"A": "none", "B": "none"})
DAY = timedelta(days=1)


@pytest.fixture
def views(db: Database, clock: ManualClock, harness: IngestHarness, configured: Settings) -> IngestViews:
    """Return the data of a supplier with a published state; its status has no issues."""
    harness.publish(ONE)
    db.clock = clock
    return IngestViews(db, harness.tree, configured.ingest)


async def read_issue(views: IngestViews) -> StatusIssue:
    """Return the only issue; check that each command of its hint exists."""
    (issue,) = (await status.report_status(views)).issues
    commands = re.findall(r"penstock (ingest [^;>]+)", issue.hint or "")
    assert commands or (issue.hint or "").startswith(("mv ", "rmdir ")), issue
    for command in commands:
        result = CliRunner().invoke(app, [*shlex.split(command), "--help"])
        assert result.exit_code == 0, (command, result.output)
    return issue


def show(issue: StatusIssue) -> tuple[str, str, str]:
    return issue.severity.value, issue.subject, issue.problem


async def test_published_supplier_has_no_issues(views: IngestViews, harness: IngestHarness) -> None:
    """Status: a supplier with a published state has no issues, and is counted."""
    harness.drop(TWO)
    report = await status.report_status(views)
    assert (report.summary, list(report.issues)) == ("1 supplier, 1 published, 1 file in inboxes", [])


async def test_missing_state_is_an_issue(views: IngestViews, harness: IngestHarness, tmp_path: Path) -> None:
    """Status: a missing state is broken; the hint names the root, so that it works in any folder."""
    folder = harness.root / paths.make_state_path(SUPPLIER, harness.current() or "")
    folder.chmod(0o755)
    shutil.rmtree(folder)
    issue = await read_issue(views)
    assert show(issue) == ("BROKEN", SUPPLIER, "the published state is missing or damaged")
    assert (issue.hint or "").startswith(f"penstock ingest verify {SUPPLIER} --root {harness.root};")


async def test_invalid_configuration_is_an_issue(views: IngestViews, harness: IngestHarness) -> None:
    """Status: an invalid configuration is broken, with its first error, the number of the others and waiting files."""
    file = harness.put(
        paths.make_config_path(SUPPLIER), b"min_fact_count: many\nmax_bad_ratio: 7\nallow_empty_snapshot: false\n"
    )
    harness.drop(TWO)
    issue = await read_issue(views)
    assert (issue.severity.value, issue.subject) == ("BROKEN", SUPPLIER)
    assert issue.problem.startswith("the configuration is invalid: ")
    assert "min_fact_count" in issue.problem
    assert issue.problem.endswith("; 1 file waiting in the inbox")
    assert issue.hint == f"fix {file}; then penstock ingest show {SUPPLIER}"


async def test_inbox_without_a_configuration_is_an_issue(views: IngestViews, harness: IngestHarness) -> None:
    """Status: an inbox without a configuration is broken if files wait; the hint proposes a configuration."""
    file = harness.put(f"{paths.make_inbox_path('newcomer')}/my prices.csv", ONE)
    config = harness.root / paths.make_config_path("newcomer")
    issue = await read_issue(views)
    problem = f"an inbox without a configuration: {config} is missing; 1 file waiting in the inbox"
    assert show(issue) == ("BROKEN", "newcomer", problem)
    assert issue.hint == f"penstock ingest inspect '{file}' > {config}; then review that file"
    file.unlink()
    issue = await read_issue(views)
    assert show(issue) == ("LATE", "newcomer", f"an inbox without a configuration: {config} is missing")
    assert (issue.hint or "").startswith(f"rmdir {file.parent};")


async def test_failed_run_is_an_issue(views: IngestViews, harness: IngestHarness) -> None:
    """Status: a failed run is broken until a run passes; the hint has the id of the run."""
    for number in (1, 2):
        harness.run(REJECTED + b"C,%d\n" % number)
        issue = await read_issue(views)
        runs = "the last run" if number == 1 else "the last 2 runs"
        problem = f"{runs} failed: DQ_TOO_MANY_BAD_ROWS; the state before is served"
        assert show(issue) == ("BROKEN", SUPPLIER, problem)
        last = ledger.load(harness.tree, SUPPLIER).last_run or {}
        assert issue.hint == f"penstock ingest quarantine ls {SUPPLIER}; penstock ingest bad-rows {last['run_id']}"
    harness.publish(TWO)
    assert (await status.report_status(views)).issues == []


async def test_old_state_is_an_issue(views: IngestViews, clock: ManualClock) -> None:
    """Status: a state older than ingest.alerts.state_age is late, with its age and the waiting files."""
    clock.advance(3 * DAY + timedelta(hours=1))
    issue = await read_issue(views)
    assert show(issue) == ("LATE", SUPPLIER, "the published state is 3 days old; 0 files in the inbox")


async def test_unchanged_files_are_an_issue(views: IngestViews, harness: IngestHarness) -> None:
    """Status: a supplier that sends the same file again and again is late."""
    for _ in range(5):
        harness.run(ONE)
    issue = await read_issue(views)
    assert show(issue) == ("LATE", SUPPLIER, "the last 5 files had the same content as the published file")


async def test_failed_delivery_is_an_issue(views: IngestViews, harness: IngestHarness) -> None:
    """Status: targets that have not received the state are late, with the number and the error codes."""
    harness.configure({**KEYED, "targets": [{"webhook": {"url": "http://127.0.0.1:1"}}]})
    (supplier,) = await views.list_suppliers()
    assert IngestAlert.UNDELIVERED not in supplier.alerts
    delivery = b'{"target": "webhook http://127.0.0.1:1", "result": {"code": "WEBHOOK_DOWN"}}'
    harness.put(paths.make_run_path(supplier.run_id or "", "deliveries/x.json"), delivery)
    issue = await read_issue(views)
    problem = "the published state has not reached 1 target: webhook http://127.0.0.1:1: WEBHOOK_DOWN"
    assert show(issue) == ("LATE", SUPPLIER, problem)


async def test_ignored_entries_of_an_inbox_are_an_issue(
    views: IngestViews, harness: IngestHarness, clock: ManualClock
) -> None:
    """Status: folders, links and abandoned uploads in an inbox are late, with their numbers, and the hint moves one."""
    inbox = harness.root / paths.make_inbox_path(SUPPLIER)
    (inbox / "old prices").mkdir()
    (inbox / "old prices" / "price.csv").write_bytes(TWO)
    (inbox / "older").mkdir()
    (inbox / "price.csv").symlink_to("/etc/hosts")
    (inbox / "upload.part").write_bytes(TWO)
    issue = await read_issue(views)
    problem = (
        "3 entries (folder: 2, symbolic link: 1), e.g. old prices, in the inbox: "
        "runs ignore everything but complete files"
    )
    assert show(issue) == ("LATE", SUPPLIER, problem)
    assert issue.hint == f"mv -i '{inbox}/old prices' /tmp/"
    clock.advance(ABANDONED_AFTER + timedelta(minutes=1))
    assert "4 entries (folder: 2, symbolic link: 1, unfinished file: 1)" in (await read_issue(views)).problem


async def test_hint_for_an_ignored_entry_moves_it(views: IngestViews, harness: IngestHarness, tmp_path: Path) -> None:
    """Status: after the command of the hint the issue has ended, and the file of the supplier is still in the inbox."""
    inbox = harness.root / paths.make_inbox_path(SUPPLIER)
    (inbox / "it's old").mkdir()
    harness.drop(TWO)
    command = ((await read_issue(views)).hint or "").removesuffix("/tmp/") + shlex.quote(str(tmp_path))
    process = await asyncio.create_subprocess_shell(command, cwd="/")
    assert await process.wait() == 0
    assert (await status.report_status(views)).issues == []
    assert [entry.name for entry in inbox.iterdir()] == ["price.csv"]


async def test_entries_beside_the_inboxes_are_an_issue(views: IngestViews, harness: IngestHarness) -> None:
    """Status: files and folders that belong to no supplier are late."""
    inboxes = harness.root / paths.INBOX
    (inboxes / "acme corp").mkdir()
    (inboxes / "price.csv").write_bytes(TWO)
    (inboxes / ".gitkeep").touch()
    issue = await read_issue(views)
    problem = (
        "2 entries (file outside of the inbox of a supplier: 1, folder whose name is not valid for a supplier: 1), "
        "e.g. acme corp, beside the inboxes: no supplier reads them"
    )
    assert show(issue) == ("LATE", "inbox", problem)
    assert issue.hint == f"mv -i '{inboxes}/acme corp' /tmp/"


@pytest.mark.parametrize("alert", list(IngestAlert))
def test_every_alert_is_an_issue(harness: IngestHarness, alert: IngestAlert) -> None:
    """I13: every alert of a supplier is an issue with a hint."""
    supplier = SupplierStatus(
        SUPPLIER, None, None, None, None, None, [], "/inbox", [], [], 0, 3, 0, None, "/c.yaml", True, "x", [], [alert]
    )
    (issue,) = status.list_issues(supplier)
    assert issue.hint
