"""The status of refdata: each problem is an issue with the next step for the operator."""

import asyncio
import re
import shlex
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.kernel.clock import ManualClock
from penstock.kernel.status import StatusIssue
from penstock.refdata import status
from penstock.refdata.dictionaries import statement_checks
from tests.refdata.harness import DOCUMENT, create_schemas, dictionaries, upsert
from tests.refdata.retention import RetentionHarness, opened_retention

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
DAY = timedelta(days=1)
NORWAY = upsert("NO", {"name": "Norway"})


@pytest.fixture
async def refdata(database_url: str, clock: ManualClock) -> AsyncIterator[RetentionHarness]:
    """Yield refdata with a dictionary that has a driftCheckSql and one that is read-only; its status has no issues."""
    await create_schemas(database_url)
    known = [{**section, "reloadOnEvent": "DELTA"} for section in dictionaries(DOCUMENT)]
    async with opened_retention(database_url, clock, dictionaries=known) as opened:
        await opened.harness.send("COUNTRY", NORWAY)
        await opened.harness.apply()
        await opened.harness.relay()
        await opened.upkeep.check_drift()
        assert await list_issues(opened) == []
        yield opened


async def list_issues(refdata: RetentionHarness) -> list[StatusIssue]:
    """Return the issues; check that each has a hint, and that the command line understands its commands."""
    refdata.clock.advance(statement_checks.VALID_FOR + timedelta(seconds=1))
    issues = list((await status.report_status(refdata.harness.refdata)).issues)
    for issue in issues:
        assert issue.hint, issue
        for command in re.findall(r"penstock ((?:dict|work) \w+)", issue.hint):
            result = CliRunner().invoke(app, [*shlex.split(command), "--help"])
            assert result.exit_code == 0, (command, result.output)
    return issues


def show(issue: StatusIssue) -> tuple[str, str, str]:
    return issue.severity.value, issue.subject, issue.problem


async def insert_update(refdata: RetentionHarness, state: str, code: str | None, age: timedelta) -> None:
    """Insert an update of the dictionary LOOSE."""
    await refdata.harness.db.execute(
        "INSERT INTO update_request (tenant_id, event_id, dict_code, status, error_code, created_at, updated_at)"
        " VALUES ('acme', $1, 'LOOSE', $2, $3, $4, $4)",
        uuid4(),
        state,
        code,
        refdata.clock.now() - age,
    )


async def test_a_late_update_is_an_issue(refdata: RetentionHarness) -> None:
    """Status: an update that is pending for too long is late."""
    await insert_update(refdata, "PENDING", None, status.PENDING_TOO_LONG + MINUTE)
    (issue,) = await list_issues(refdata)
    assert show(issue) == ("LATE", "apply", "1 update pending, the oldest for 3 minutes")


async def test_a_version_that_is_not_announced_is_an_issue(refdata: RetentionHarness) -> None:
    """Status: a committed version that the relay has not announced for too long is late."""
    await refdata.harness.db.execute(
        "INSERT INTO outbox_event"
        " (tenant_id, event_id, dict_code, version, payload, event_type, source, items, created_at)"
        " VALUES ('acme', $1, 'RATES', 1, '{}', 'DELTA', 'REST', 1, $2)",
        UUID(int=1),
        refdata.clock.now() - status.UNANNOUNCED_TOO_LONG - MINUTE,
    )
    (issue,) = await list_issues(refdata)
    assert show(issue) == ("LATE", "relay", "versions not announced to pods, the oldest for 2 minutes")


async def test_failed_updates_are_an_issue(refdata: RetentionHarness) -> None:
    """Status: a dictionary with updates that failed within a day is broken, with the code of the last one."""
    for code, age in (("SQL_ERROR", 2 * HOUR), ("STALE_REVISION", HOUR), ("SQL_ERROR", 2 * DAY)):
        await insert_update(refdata, "FAILED", code, age)
    (issue,) = await list_issues(refdata)
    assert show(issue) == ("BROKEN", "acme/LOOSE", "2 updates failed, the last 60 minutes ago: STALE_REVISION")
    assert issue.hint == "penstock dict updates acme"


@pytest.mark.parametrize(
    ("change", "subject", "error"),
    [
        ("DROP TABLE mdm_country CASCADE", "COUNTRY", 'loadSql: relation "mdm_country" does not exist'),
        (
            "ALTER TABLE mdm_country RENAME COLUMN updated_at_epoch TO changed",
            "COUNTRY",
            'upsertSql: column "updated_at_epoch" of relation "mdm_country" does not exist',
        ),
    ],
)
async def test_a_statement_that_fails_is_an_issue(
    refdata: RetentionHarness, change: str, subject: str, error: str
) -> None:
    """Status, R1: a dictionary whose SQL the database rejects is broken, with the error of the database."""
    await refdata.harness.db.execute(change)
    (issue,) = await list_issues(refdata)
    assert show(issue) == ("BROKEN", subject, f"SQL fails: {error}")
    assert "refdata.dictionaries" in (issue.hint or "")


async def test_a_missing_right_is_an_issue(refdata: RetentionHarness) -> None:
    """Status, R1: a loadSql that is valid but may not be executed is broken, for a tenant with data."""
    await refdata.harness.db.execute(
        """
        CREATE FUNCTION refused() RETURNS text LANGUAGE plpgsql IMMUTABLE AS
        $$ BEGIN RAISE EXCEPTION USING errcode = '42501', message = 'permission denied for table mdm_country'; END $$;
        ALTER TABLE mdm_country RENAME TO other;
        CREATE VIEW mdm_country AS SELECT * FROM other WHERE refused() = 'x'
        """
    )
    (issue,) = await list_issues(refdata)
    assert show(issue) == ("BROKEN", "acme/COUNTRY", "SQL fails: loadSql: permission denied for table mdm_country")


async def test_statements_are_checked_once_in_a_while(refdata: RetentionHarness) -> None:
    """Status: the statements are not checked again for each request, and a slow check does not delay the report."""
    checks = refdata.harness.refdata.statements
    assert await checks.find_broken() == []
    await refdata.harness.db.execute("DROP TABLE mdm_country CASCADE")
    assert await checks.find_broken() == []
    refdata.clock.advance(statement_checks.VALID_FOR + timedelta(seconds=1))
    assert [broken.subject for broken in await checks.find_broken()] == ["COUNTRY"]


async def test_a_locked_table_does_not_stop_the_report(
    refdata: RetentionHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status: a check that waits for a lock ends after a timeout, without an issue."""
    monkeypatch.setattr(statement_checks, "_TIMEOUT", 0.2)
    async with refdata.harness.db.transaction() as tx, asyncio.timeout(30):
        await tx.execute("LOCK TABLE mdm_country IN ACCESS EXCLUSIVE MODE")
        assert await list_issues(refdata) == []


async def drift(refdata: RetentionHarness, by: int = 1) -> None:
    """Change the table of COUNTRY without a new version, and run the drift check."""
    await refdata.harness.db.execute(f"UPDATE mdm_country SET updated_at_epoch = updated_at_epoch + {by}")
    await refdata.upkeep.check_drift()


async def send(refdata: RetentionHarness, *items: Any, event_type: str = "DELTA") -> None:
    """Apply and announce a command for COUNTRY, and run the drift check."""
    await refdata.harness.send("COUNTRY", *items, event_type=event_type)
    await refdata.harness.apply()
    await refdata.harness.relay()
    await refdata.upkeep.check_drift()


async def test_drift_is_an_issue_until_it_is_resolved(refdata: RetentionHarness) -> None:
    """Status, R5: tables that changed without a version are late until all items have a new version."""
    await drift(refdata)
    await drift(refdata)
    refdata.clock.advance(HOUR)
    (issue,) = await list_issues(refdata)
    problem = "tables changed 2 times without a new version, the last time 60 minutes ago: pods may have old items"
    assert show(issue) == ("LATE", "acme/COUNTRY", problem)
    assert "penstock dict import acme COUNTRY FILE" in (issue.hint or "")
    await send(refdata, upsert("SE", {"name": "Sweden"}))  # pods load only this item
    assert [show(issue)[:2] for issue in await list_issues(refdata)] == [("LATE", "acme/COUNTRY")]
    await send(refdata, NORWAY, event_type="SNAPSHOT")
    assert await list_issues(refdata) == []


async def test_reverted_drift_is_no_issue(refdata: RetentionHarness) -> None:
    """Status, R5: drift is resolved when the table has its old content again, and not reported after a day."""
    await drift(refdata)
    assert len(await list_issues(refdata)) == 1
    await drift(refdata, by=-1)
    assert await list_issues(refdata) == []
    await drift(refdata)
    refdata.clock.advance(status.DRIFTED_WITHIN)
    assert await list_issues(refdata) == []


async def test_summary_counts_the_dictionaries(refdata: RetentionHarness) -> None:
    """Status: the summary has the number of dictionaries with a version, of tenants and of pending updates."""
    await insert_update(refdata, "PENDING", None, MINUTE)
    summary = (await status.report_status(refdata.harness.refdata)).summary
    assert summary == "1 dictionary of 1 tenant, 1 update pending"
