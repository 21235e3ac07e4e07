"""The log of runs: each event of a file once, with its level and its identifying fields."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.ingest.model import DeliveryResult, DeliveryStatus
from penstock.ingest.run.hooks import RunHooks, RunOutcome
from penstock.ingest.run.outcome_log import log_deliveries, log_outcome
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.tree import paths
from penstock.kernel.errors import Transient
from tests.ingest.harness import SUPPLIER, IngestHarness, snapshot
from tests.support.crash import Killed, call_at

ONE, TWO, THREE = (snapshot({"A": price, "B": 2}) for price in (1, 2, 3))
REJECTED = snapshot({"A": "none"})


def read_log(outcome: RunOutcome) -> list[dict[str, Any]]:
    """Return the entries for *outcome*, without the name of the supplier, which all of them have."""
    with capture_logs() as entries:
        log_outcome(outcome.as_dict())
    assert {entry.pop("supplier") for entry in entries} == {SUPPLIER}
    return [dict(entry) for entry in entries]


def read_run_id(outcome: RunOutcome) -> str:
    assert outcome.manifest is not None
    return outcome.manifest.run_id


def test_published_file_is_logged(harness: IngestHarness) -> None:
    """Log: a published file at INFO, with its run, its fence and its rows."""
    outcome = harness.run(snapshot({"A": 1, "B": 2, "C": "none"}))
    assert read_log(outcome) == [
        {
            "event": "file_published",
            "log_level": "info",
            "file": "price.csv",
            "run_id": read_run_id(outcome),
            "fence": 1,
            "good_rows": 2,
            "bad_rows": 1,
        }
    ]


def test_duplicates_and_skipped_files_are_logged(harness: IngestHarness) -> None:
    """Log: the files that are not processed at INFO, with the folder to which they were moved."""
    harness.publish(ONE)
    harness.drop(ONE, "again.csv")
    harness.drop(TWO, "older.csv")
    harness.drop(THREE, "newer.csv")
    entries = {entry["file"]: entry for entry in read_log(harness.run())}
    assert {file: (entry["event"], entry["log_level"]) for file, entry in entries.items()} == {
        "again.csv": ("file_duplicate", "info"),
        "older.csv": ("file_skipped", "info"),
        "newer.csv": ("file_published", "info"),
    }
    assert entries["again.csv"]["moved_to"] == f"{paths.make_duplicates_path(SUPPLIER)}/again.csv"
    assert entries["older.csv"]["moved_to"] == f"{paths.make_obsolete_path(SUPPLIER)}/older.csv"


def test_rejected_file_is_logged(harness: IngestHarness) -> None:
    """Log: a file in quarantine at WARNING, with code and reason."""
    outcome = harness.run(REJECTED)
    assert read_log(outcome) == [
        {
            "event": "file_rejected",
            "log_level": "warning",
            "file": "price.csv",
            "run_id": read_run_id(outcome),
            "code": "DQ_TOO_MANY_BAD_ROWS",
            "reason": "1 of 1 rows are bad: 100.00%",
            "moved_to": f"{paths.make_broken_path(SUPPLIER)}/price.csv",
        }
    ]


def test_failed_run_that_leaves_its_file_is_logged(harness: IngestHarness) -> None:
    """Log: a run that fails for a reason outside of its file at WARNING; the file is not rejected."""
    (harness.root / paths.make_config_path(SUPPLIER)).unlink()
    (entry,) = read_log(harness.run(ONE))
    assert (entry["event"], entry["log_level"], entry["code"]) == ("ingest_run_failed", "warning", "CONFIG_DQ_MISSING")
    assert (entry["file"], entry["moved_to"]) == ("price.csv", None)


def test_run_without_a_file_is_logged_for_debugging(harness: IngestHarness) -> None:
    """Log: a run that found no file at DEBUG only."""
    (entry,) = read_log(harness.run())
    assert (entry["event"], entry["log_level"], entry["reason"]) == (
        "ingest_run_skipped",
        "debug",
        "the inbox is empty",
    )


@pytest.mark.parametrize(
    ("step", "events"),
    [
        (PublishStep.PROCESSED, ["ingest_run_failed", "file_published"]),
        (PublishStep.SWITCHED, ["file_published", "ingest_run_skipped"]),
    ],
)
def test_killed_run_is_logged_by_the_next_run(harness: IngestHarness, step: PublishStep, events: list[str]) -> None:
    """Log: the end of a killed run is logged once, by the run that recovers it."""
    with pytest.raises(Killed):
        harness.run(ONE, hooks=RunHooks(on_step=call_at(step)))
    (killed,) = harness.tree.list_runs(SUPPLIER)
    first, second = read_log(harness.run())
    assert [first["event"], second["event"]] == events
    assert (first["run_id"], first.get("code")) == (killed, "INTERRUPTED" if step is PublishStep.PROCESSED else None)
    assert [entry["event"] for entry in read_log(harness.run())] == ["ingest_run_skipped"]


def test_file_that_cannot_be_archived_is_logged(harness: IngestHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log: a published file that cannot be moved at WARNING, beside its publication."""

    def refuse(*_: object) -> None:
        raise Transient("STORAGE_DOWN", "no space left")

    monkeypatch.setattr(harness.tree, "move", refuse)
    published, not_moved = read_log(harness.run(ONE))
    assert published["event"] == "file_published"
    assert (not_moved["event"], not_moved["log_level"]) == ("file_move_failed", "warning")
    assert (not_moved["file"], not_moved["error"]) == ("price.csv", "no space left")


@pytest.mark.parametrize(
    ("status", "event", "level"),
    [
        (DeliveryStatus.DELIVERED, "delivery_completed", "info"),
        (DeliveryStatus.REFUSED, "delivery_refused", "warning"),
        (DeliveryStatus.PENDING, "delivery_failed", "warning"),
    ],
)
def test_deliveries_are_logged(status: DeliveryStatus, event: str, level: str) -> None:
    """Log: a completed delivery at INFO, any other at WARNING with its error."""
    error = None if status is DeliveryStatus.DELIVERED else "it does not answer"
    result = DeliveryResult(status, "acme_run", None, error)
    with capture_logs() as entries:
        log_deliveries(SUPPLIER, {"webhook http://hook": result.as_dict()})
    (entry,) = entries
    assert (entry["event"], entry["log_level"], entry.get("error")) == (event, level, error)
    assert (entry["supplier"], entry["target"], entry["run_id"]) == (SUPPLIER, "webhook http://hook", "acme_run")
