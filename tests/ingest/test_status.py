"""What of suppliers is found late or broken."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.ingest import status as ingest
from penstock.ingest.model import IngestAlert
from penstock.ingest.model import SupplierStatus as Supplier

NOW = datetime(2026, 11, 17, 3, 0, tzinfo=UTC)
FINE = Supplier("brinex", "run", 3, NOW, 60.0, 100, [], [], 0, 0, 0, {"run_id": "run", "status": "PASS"}, None, [], [])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"alerts": [IngestAlert.STATE_MISSING]}, [("BROKEN", "its published state is damaged or gone")]),
        (
            {"alerts": [IngestAlert.CONFIG_BROKEN], "config": "line 3"},
            [("BROKEN", "its configuration cannot be used: line 3")],
        ),
        ({"alerts": [IngestAlert.REPEATED_FAIL], "fails": 3}, [("BROKEN", "3 runs in a row failed")]),
        ({"alerts": [IngestAlert.STATE_OLD], "age_seconds": 90_000.0}, [("LATE", "its state is 25 hours old")]),
        ({"alerts": [IngestAlert.SAME_FILE_AGAIN], "equal_shas": 5}, [("LATE", "sends the same file, 5 times now")]),
        (
            {"alerts": [IngestAlert.UNDELIVERED], "undelivered": ["webhook: DOWN"]},
            [("LATE", "not delivered: webhook: DOWN")],
        ),
        (
            {"last": {"run_id": "r2", "status": "FAIL", "failure_code": "MAX_DROP", "finished_at": NOW.isoformat()}},
            [("BROKEN", "its last run failed: MAX_DROP; the state before it is served")],
        ),
    ],
)
def test_suppliers(changes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    """I13: every alert there is, and a run that failed."""
    told = ingest._of(replace(FINE, **changes))
    assert [(one.severity.value, one.problem) for one in told] == expected
    assert all(one.subject == "brinex" and one.hint and "{" not in one.hint for one in told)


def test_every_alert_of_suppliers_is_told() -> None:
    """I13: a new alert without words here would crash the look."""
    assert set(ingest._ALERTS) == set(IngestAlert)
