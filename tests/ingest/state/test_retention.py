"""What goes when, what is verified, and what somebody should look at."""

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

A_BIT = timedelta(minutes=5)


def swept(harness: IngestHarness, clock: ManualClock, *, is_dry: bool = False) -> RetentionResult:
    return delete_expired(harness.tree, IngestRetentionSection(), clock, "test", is_dry=is_dry)


def paths(found: RetentionResult) -> set[str]:
    return {one.path for one in found.expired}


def test_each_thing_goes_after_its_own_time(harness: IngestHarness, clock: ManualClock) -> None:
    """I12, §12.2, §13: not a moment before what the document says, and by name and reason; the current one never."""
    first = harness.publish(ONE)
    failed = harness.run(BROKEN).manifest
    harness.drop(ONE, "again.csv")
    harness.drop(THREE, "older.csv")
    second = harness.publish(TWO)
    assert failed is not None
    marks = {harness.read_json(f"{layout.ACCEPTED}/{name}")["run_id"]: name for name in harness.names(layout.ACCEPTED)}
    states, runs = layout.state(SUPPLIER, first), [layout.run(first), layout.run(failed.run_id)]
    files = [
        f"{layout.broken(SUPPLIER)}/price.csv",
        f"{layout.duplicates(SUPPLIER)}/again.csv",
        f"{layout.obsolete(SUPPLIER)}/older.csv",
        f"{layout.archive(SUPPLIER)}/price.csv",
        f"{layout.archive(SUPPLIER)}/price.csv.1",
    ]
    due = [
        (12 * HOUR, {states}, "replaced"),
        (7 * DAY, {f"{run}/diag" for run in runs}, "diagnostic files older than 7 days"),
        (30 * DAY, {*files, *runs}, "30 days"),
        (365 * DAY, {f"{layout.ACCEPTED}/{marks[first]}"}, "accepted more than 365 days"),
    ]
    passed = timedelta(0)
    for age, expected, why in due:
        clock.advance(age - A_BIT - passed)
        assert paths(swept(harness, clock)) == set()
        clock.advance(2 * A_BIT)
        passed = age + A_BIT
        found = swept(harness, clock)
        assert paths(found) == expected
        assert all(one.is_deleted and why in one.reason and one.size > 0 for one in found.expired)
        assert not any((harness.root / path).exists() for path in expected)
    assert harness.current() == second
    with open_state(harness.tree, SUPPLIER) as state:
        assert [fact["payload"]["price"] for fact in state] == [2, 2]
    assert harness.names(layout.run(second)) == [
        "bad.ndjson",
        "diag/started.json",
        "facts.ndjson",
        "manifest.json",
        "stats.json",
    ]
    assert len(harness.names(layout.ACCEPTED)) == 1
    assert [one for one in verify_suppliers(harness.tree, [SUPPLIER]) if one.problem] == []


def test_a_dry_run_tells_the_same_and_changes_nothing(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: what it tells is what then goes, for the same reasons and as many bytes."""
    harness.publish(ONE)
    harness.run(BROKEN)
    harness.publish(TWO)
    clock.advance(400 * DAY)
    before = harness.all_files()
    told = swept(harness, clock, is_dry=True)
    assert harness.all_files() == before
    assert not any(one.is_deleted for one in told.expired)
    done = swept(harness, clock)
    assert [ExpiredEntry(one.path, one.size, one.reason) for one in done.expired] == told.expired
    assert {one.path for one in done.expired if (harness.root / one.path).exists()} == set()
    assert swept(harness, clock).expired == []


def test_what_somebody_reads_stays(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: a state is not taken from a reader, however old; it goes when he has finished."""
    first = harness.publish(ONE)
    with open_state(harness.tree, SUPPLIER) as state:
        harness.publish(TWO)
        clock.advance(20 * HOUR)
        (kept,) = swept(harness, clock).expired
        assert (kept.path, kept.is_deleted) == (layout.state(SUPPLIER, first), False)
        assert "it is being read" in kept.reason
        assert [fact["payload"]["price"] for fact in state] == [1, 2]
    (gone,) = swept(harness, clock).expired
    assert (gone.path, gone.is_deleted) == (layout.state(SUPPLIER, first), True)


def test_a_state_is_kept_from_when_it_was_replaced(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: not from when it was made: who began to read just before the switch has the full time."""
    first = harness.publish(ONE)
    clock.advance(1000 * HOUR)
    assert not {path for path in paths(swept(harness, clock)) if "state_store" in path}
    second = harness.publish(TWO)  # at today's hour, by the machine's clock
    harness.publish(THREE)
    today = make_clock()
    today.advance(11 * HOUR)
    assert paths(swept(harness, today)) == set()
    today.advance(2 * HOUR)
    assert paths(swept(harness, today)) == {layout.state(SUPPLIER, one) for one in (first, second)}


def test_the_only_state_stays_whatever_its_age(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: with its run and its marker, so that its file is still known."""
    run_id = harness.publish(ONE)
    clock.advance(3650 * DAY)
    assert paths(swept(harness, clock)) == {f"{layout.archive(SUPPLIER)}/price.csv"}
    assert harness.current() == run_id
    assert harness.run(ONE).manifest is None
    assert len(harness.names(layout.duplicates(SUPPLIER))) == 1


def test_a_state_nobody_published_goes(harness: IngestHarness, clock: ManualClock) -> None:
    """I12, I16: what a run left that was killed before the switch, once that is noted."""
    harness.publish(ONE)
    orphan = run_killed(harness, TWO, PublishStep.SWITCHING)
    harness.publish(THREE)
    assert orphan in harness.tree.list_states(SUPPLIER)
    clock.advance(11 * HOUR)
    assert layout.state(SUPPLIER, orphan) not in paths(swept(harness, clock))
    clock.advance(2 * HOUR)
    found = {one.path: one.reason for one in swept(harness, clock).expired}
    assert "not published" in found[layout.state(SUPPLIER, orphan)]
    assert orphan not in harness.tree.list_states(SUPPLIER)


def test_a_busy_supplier_is_left_out(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: nothing is removed beside a run, and that is told; others are served."""
    harness.configure(KEYED, "globex")
    for supplier in (SUPPLIER, "globex"):
        harness.publish(ONE, supplier)
        harness.publish(TWO, supplier)
    clock.advance(13 * HOUR)
    with harness.tree.lock(SUPPLIER, "a run"):
        found = swept(harness, clock)
    assert found.busy == [SUPPLIER]
    assert {path.split("/")[3] for path in paths(found)} == {"globex"}


def test_one_damaged_supplier_does_not_stop_the_others(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: a state that is lost is for people to look at; what is too old elsewhere goes all the same."""
    harness.configure(KEYED, "globex")
    harness.publish(ONE)
    harness.publish(ONE, "globex")
    second = harness.publish(TWO, "globex")
    lose_state(harness)
    clock.advance(13 * HOUR)
    found = swept(harness, clock)
    assert (len(found.expired), found.damaged) == (1, [SUPPLIER])
    assert harness.tree.list_states("globex") == [second]
    assert len(harness.tree.list_states(SUPPLIER)) == 1
