"""The deletion of expired files: retention times, reasons, and files that must stay."""

from datetime import timedelta

from penstock.ingest.config import IngestRetentionSection
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.state.reader import open_state
from penstock.ingest.state.retention import ExpiredEntry, RetentionResult, delete_expired
from penstock.ingest.state.verify import verify_suppliers
from penstock.ingest.tree import paths as layout
from penstock.kernel.clock import ManualClock
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, make_clock
from tests.ingest.state.damage import BROKEN, DAY, HOUR, ONE, THREE, TWO, lose_state, run_killed

MARGIN = timedelta(minutes=5)


def delete_old(harness: IngestHarness, clock: ManualClock, *, is_dry: bool = False) -> RetentionResult:
    return delete_expired(harness.tree, IngestRetentionSection(), clock, "test", is_dry=is_dry)


def list_paths(result: RetentionResult) -> set[str]:
    return {entry.path for entry in result.expired}


def test_each_kind_of_file_has_its_retention(harness: IngestHarness, clock: ManualClock) -> None:
    """I12, §12.2, §13: each kind of file is deleted after its retention, with the reason; the published state stays."""
    first = harness.publish(ONE)
    failed = harness.run(BROKEN).manifest
    harness.drop(ONE, "again.csv")
    harness.drop(THREE, "older.csv")
    second = harness.publish(TWO)
    assert failed is not None
    markers = {
        harness.read_json(f"{layout.ACCEPTED}/{name}")["run_id"]: name for name in harness.names(layout.ACCEPTED)
    }
    states, runs = (
        layout.make_state_path(SUPPLIER, first),
        [layout.make_run_path(first), layout.make_run_path(failed.run_id)],
    )
    files = [
        f"{layout.make_broken_path(SUPPLIER)}/price.csv",
        f"{layout.make_duplicates_path(SUPPLIER)}/again.csv",
        f"{layout.make_obsolete_path(SUPPLIER)}/older.csv",
        f"{layout.make_archive_path(SUPPLIER)}/price.csv",
        f"{layout.make_archive_path(SUPPLIER)}/price.csv.1",
    ]
    due = [
        (12 * HOUR, {states}, "replaced"),
        (7 * DAY, {f"{run}/diag" for run in runs}, "diagnostic files older than 7 days"),
        (30 * DAY, {*files, *runs}, "30 days"),
        (365 * DAY, {f"{layout.ACCEPTED}/{markers[first]}"}, "accepted more than 365 days"),
    ]
    elapsed = timedelta(0)
    for age, expected, reason in due:
        clock.advance(age - MARGIN - elapsed)
        assert list_paths(delete_old(harness, clock)) == set()
        clock.advance(2 * MARGIN)
        elapsed = age + MARGIN
        result = delete_old(harness, clock)
        assert list_paths(result) == expected
        assert all(entry.is_deleted and reason in entry.reason and entry.size > 0 for entry in result.expired)
        assert not any((harness.root / path).exists() for path in expected)
    assert harness.current() == second
    with open_state(harness.tree, SUPPLIER) as state:
        assert [fact["payload"]["price"] for fact in state] == [2, 2]
    assert harness.names(layout.make_run_path(second)) == [
        "bad.ndjson",
        "diag/started.json",
        "facts.ndjson",
        "manifest.json",
        "stats.json",
    ]
    assert len(harness.names(layout.ACCEPTED)) == 1
    assert [check for check in verify_suppliers(harness.tree, [SUPPLIER]) if check.problem] == []


def test_dry_run_reports_the_same_and_changes_nothing(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: a dry run reports the paths, reasons and sizes that the next run deletes."""
    harness.publish(ONE)
    harness.run(BROKEN)
    harness.publish(TWO)
    clock.advance(400 * DAY)
    before = harness.all_files()
    reported = delete_old(harness, clock, is_dry=True)
    assert harness.all_files() == before
    assert not any(entry.is_deleted for entry in reported.expired)
    deleted = delete_old(harness, clock)
    assert [ExpiredEntry(entry.path, entry.size, entry.reason) for entry in deleted.expired] == reported.expired
    assert {entry.path for entry in deleted.expired if (harness.root / entry.path).exists()} == set()
    assert delete_old(harness, clock).expired == []


def test_state_that_is_read_stays(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: an expired state is retained while it is read, and deleted afterwards."""
    first = harness.publish(ONE)
    with open_state(harness.tree, SUPPLIER) as state:
        harness.publish(TWO)
        clock.advance(20 * HOUR)
        (retained,) = delete_old(harness, clock).expired
        assert (retained.path, retained.is_deleted) == (layout.make_state_path(SUPPLIER, first), False)
        assert "it is being read" in retained.reason
        assert [fact["payload"]["price"] for fact in state] == [1, 2]
    (deleted,) = delete_old(harness, clock).expired
    assert (deleted.path, deleted.is_deleted) == (layout.make_state_path(SUPPLIER, first), True)


def test_retention_of_a_state_starts_with_its_replacement(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: a reader that opens a state just before its replacement has the full retention time."""
    first = harness.publish(ONE)
    clock.advance(1000 * HOUR)
    assert not {path for path in list_paths(delete_old(harness, clock)) if "state_store" in path}
    second = harness.publish(TWO)  # by the clock of the machine
    harness.publish(THREE)
    today = make_clock()
    today.advance(11 * HOUR)
    assert list_paths(delete_old(harness, today)) == set()
    today.advance(2 * HOUR)
    assert list_paths(delete_old(harness, today)) == {
        layout.make_state_path(SUPPLIER, run_id) for run_id in (first, second)
    }


def test_published_state_never_expires(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: the published state stays with its run and its marker, so that its file is still a duplicate."""
    run_id = harness.publish(ONE)
    clock.advance(3650 * DAY)
    assert list_paths(delete_old(harness, clock)) == {f"{layout.make_archive_path(SUPPLIER)}/price.csv"}
    assert harness.current() == run_id
    assert harness.run(ONE).manifest is None
    assert len(harness.names(layout.make_duplicates_path(SUPPLIER))) == 1


def test_state_that_was_never_published_expires(harness: IngestHarness, clock: ManualClock) -> None:
    """I12, I16: the state of a run that was killed before the switch is deleted."""
    harness.publish(ONE)
    orphan = run_killed(harness, TWO, PublishStep.SWITCHING)
    harness.publish(THREE)
    assert orphan in harness.tree.list_states(SUPPLIER)
    clock.advance(11 * HOUR)
    assert layout.make_state_path(SUPPLIER, orphan) not in list_paths(delete_old(harness, clock))
    clock.advance(2 * HOUR)
    reasons = {entry.path: entry.reason for entry in delete_old(harness, clock).expired}
    assert "not published" in reasons[layout.make_state_path(SUPPLIER, orphan)]
    assert orphan not in harness.tree.list_states(SUPPLIER)


def test_busy_supplier_is_skipped(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: a supplier with an active run is skipped and reported; the others are served."""
    harness.configure(KEYED, "globex")
    for supplier in (SUPPLIER, "globex"):
        harness.publish(ONE, supplier)
        harness.publish(TWO, supplier)
    clock.advance(13 * HOUR)
    with harness.tree.lock(SUPPLIER, "a run"):
        result = delete_old(harness, clock)
    assert result.busy == [SUPPLIER]
    assert {path.split("/")[3] for path in list_paths(result)} == {"globex"}


def test_damaged_supplier_is_skipped(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: a supplier with a damaged state is skipped and reported; the others are served."""
    harness.configure(KEYED, "globex")
    harness.publish(ONE)
    harness.publish(ONE, "globex")
    second = harness.publish(TWO, "globex")
    lose_state(harness)
    clock.advance(13 * HOUR)
    result = delete_old(harness, clock)
    assert (len(result.expired), result.damaged) == (1, [SUPPLIER])
    assert harness.tree.list_states("globex") == [second]
    assert len(harness.tree.list_states(SUPPLIER)) == 1
