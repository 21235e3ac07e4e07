"""What goes when, what is verified, and what somebody should look at."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.ingest.config import AlertSection, RetentionSection
from penstock.ingest.contract import Status
from penstock.ingest.metrics import IngestMetrics
from penstock.ingest.model import Alert, Standing
from penstock.ingest.run.hooks import Hooks, Outcome
from penstock.ingest.run.publish import Step
from penstock.ingest.state.reader import open_state
from penstock.ingest.state.retention import Old, Swept, sweep
from penstock.ingest.state.supplier_status import standing
from penstock.ingest.state.verify import verify
from penstock.ingest.tree import paths as layout
from penstock.kernel.clock import ManualClock
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, clock_of_today, snapshot
from tests.support.crash import Killed, call_at

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
A_BIT = timedelta(minutes=5)
ONE, TWO, THREE, BROKEN = (snapshot({"A": price, "B": 2}) for price in (1, 2, 3, "none"))


@pytest.fixture
def clock() -> ManualClock:
    return clock_of_today()


@pytest.fixture
def harness(tmp_path: Path) -> IngestHarness:
    return IngestHarness(tmp_path / "root", {**KEYED, "max_bad_ratio": 0.1})


def swept(harness: IngestHarness, clock: ManualClock, *, is_dry: bool = False) -> Swept:
    return sweep(harness.tree, RetentionSection(), clock, "test", is_dry=is_dry)


def paths(found: Swept) -> set[str]:
    return {one.path for one in found.found}


def run_killed(harness: IngestHarness, content: bytes, step: Step) -> str:
    """A run that does not come back from *step*; its id."""
    before = set(harness.tree.runs(SUPPLIER))
    with pytest.raises(Killed):
        harness.run(content, hooks=Hooks(on_step=call_at(step)))
    (run_id,) = set(harness.tree.runs(SUPPLIER)) - before
    return run_id


def test_each_thing_goes_after_its_own_time(harness: IngestHarness, clock: ManualClock) -> None:
    """I12, §12.2, §13: not a moment before what the document says, and by name and reason; the current one never."""
    first = harness.publish(ONE)
    failed = harness.run(BROKEN).manifest
    harness.drop(ONE, "again.csv")
    harness.drop(THREE, "older.csv")
    second = harness.publish(TWO)
    assert failed is not None
    marks = {harness.told(f"{layout.ACCEPTED}/{one}")["run_id"]: one for one in harness.names(layout.ACCEPTED)}
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
        (7 * DAY, {f"{one}/diag" for one in runs}, "kept for 7 days"),
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
        assert all(one.is_gone and why in one.why and one.size > 0 for one in found.found)
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
    assert [one for one in verify(harness.tree, [SUPPLIER]) if one.problem] == []


def test_a_dry_run_tells_the_same_and_changes_nothing(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: what it tells is what then goes, for the same reasons and as many bytes."""
    harness.publish(ONE)
    harness.run(BROKEN)
    harness.publish(TWO)
    clock.advance(400 * DAY)
    before = harness.all_files()
    told = swept(harness, clock, is_dry=True)
    assert harness.all_files() == before
    assert not any(one.is_gone for one in told.found)
    done = swept(harness, clock)
    assert [Old(one.path, one.size, one.why) for one in done.found] == told.found
    assert {one.path for one in done.found if (harness.root / one.path).exists()} == set()
    assert swept(harness, clock).found == []


def test_what_somebody_reads_stays(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: a state is not taken from a reader, however old; it goes when he has finished."""
    first = harness.publish(ONE)
    with open_state(harness.tree, SUPPLIER) as state:
        harness.publish(TWO)
        clock.advance(20 * HOUR)
        (kept,) = swept(harness, clock).found
        assert (kept.path, kept.is_gone) == (layout.state(SUPPLIER, first), False)
        assert "somebody reads it" in kept.why
        assert [fact["payload"]["price"] for fact in state] == [1, 2]
    (gone,) = swept(harness, clock).found
    assert (gone.path, gone.is_gone) == (layout.state(SUPPLIER, first), True)


def test_a_state_is_kept_from_when_it_was_replaced(harness: IngestHarness, clock: ManualClock) -> None:
    """I12: not from when it was made: who began to read just before the switch has the full time."""
    first = harness.publish(ONE)
    clock.advance(1000 * HOUR)
    assert not {one for one in paths(swept(harness, clock)) if "state_store" in one}
    second = harness.publish(TWO)  # at today's hour, by the machine's clock
    harness.publish(THREE)
    today = clock_of_today()
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
    orphan = run_killed(harness, TWO, Step.SWITCHING)
    harness.publish(THREE)
    assert orphan in harness.tree.states(SUPPLIER)
    clock.advance(11 * HOUR)
    assert layout.state(SUPPLIER, orphan) not in paths(swept(harness, clock))
    clock.advance(2 * HOUR)
    found = {one.path: one.why for one in swept(harness, clock).found}
    assert "never published" in found[layout.state(SUPPLIER, orphan)]
    assert orphan not in harness.tree.states(SUPPLIER)


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
    assert (len(found.found), found.damaged) == (1, [SUPPLIER])
    assert harness.tree.states("globex") == [second]
    assert len(harness.tree.states(SUPPLIER)) == 1


def lose_state(harness: IngestHarness) -> None:
    """The link leads nowhere: somebody removed what it points to, or restored half a backup."""
    link = harness.root / layout.CURRENT / SUPPLIER
    link.unlink()
    link.symlink_to(f"../../state_store/{SUPPLIER}/{SUPPLIER}_20200101T000000Z_000000")


def problems(harness: IngestHarness) -> dict[str, str]:
    return {one.path: one.problem for one in verify(harness.tree, harness.tree.suppliers()) if one.problem}


def changed(harness: IngestHarness, path: str, change: Callable[[bytes], bytes]) -> None:
    file = harness.root / path
    content = file.read_bytes()
    file.parent.chmod(0o755)
    file.unlink()  # facts have two names: each is damaged alone
    file.write_bytes(change(content))


def one_byte(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


@pytest.mark.parametrize("name", [layout.FACTS, layout.BAD, layout.STATS])
def test_verify_finds_a_changed_byte(harness: IngestHarness, name: str) -> None:
    """I24: in whatever a manifest names; all else is told to be right."""
    harness.configure(KEYED)
    harness.run(snapshot({"A": 1, "B": "none"}))
    failed = harness.run(snapshot({"A": "none", "B": "none"})).manifest
    assert failed is not None
    run_id = harness.current() or ""
    assert problems(harness) == {}
    for damaged in {run_id, failed.run_id if name != layout.FACTS else run_id}:
        changed(harness, layout.run(damaged, name), one_byte)
        assert "sha256" in problems(harness)[layout.run(damaged, name)]
    (harness.root / layout.run(run_id, name)).write_bytes(b"short")
    assert "it has 5 bytes, not" in problems(harness)[layout.run(run_id, name)]
    (harness.root / layout.run(run_id, name)).unlink()
    assert problems(harness)[layout.run(run_id, name)] == "it is not there"


def test_verify_finds_what_became_of_a_state(harness: IngestHarness) -> None:
    """I24: facts changed or gone, a pointer gone, a marker gone, a link to nowhere; each by its name."""
    run_id = harness.publish(ONE)
    state = layout.state(SUPPLIER, run_id)
    changed(harness, f"{state}/{layout.FACTS}", one_byte)
    assert "sha256" in problems(harness)[f"{state}/{layout.FACTS}"]
    (harness.root / state / layout.FACTS).unlink()
    assert problems(harness) == {f"{state}/{layout.FACTS}": "it is not there"}
    (mark,) = harness.names(layout.ACCEPTED)
    (harness.root / layout.ACCEPTED / mark).unlink()
    assert f"{layout.ACCEPTED}/{mark}" in problems(harness)
    (harness.root / state / layout.POINTER).unlink()
    assert set(problems(harness)) == {state, f"{layout.CURRENT}/{SUPPLIER}"}
    lose_state(harness)
    assert "is not there" in problems(harness)[f"{layout.CURRENT}/{SUPPLIER}"]


@pytest.mark.parametrize("rubbish", [b"", b"{", b"[]", b'{"other": 1}'])
def test_verify_tells_of_documents_that_are_none(harness: IngestHarness, rubbish: bytes) -> None:
    """I24: a manifest or pointer that makes no sense is a problem by its name, never an end of the check."""
    first = harness.publish(ONE)
    second = harness.publish(TWO)
    third = harness.publish(THREE)
    damaged = [
        layout.run(first, layout.MANIFEST),
        layout.state(SUPPLIER, second, layout.POINTER),
        layout.state(SUPPLIER, third, layout.MANIFEST),
    ]
    for path in damaged:
        changed(harness, path, lambda _content: rubbish)
    assert set(problems(harness)) == set(damaged)


def test_verify_tells_of_a_run_that_was_killed(harness: IngestHarness) -> None:
    """I24, I16: it has no manifest until the next run notes it."""
    run_id = run_killed(harness, ONE, Step.PROCESSED)
    assert "the next run notes" in problems(harness)[layout.run(run_id)]
    assert harness.run().is_pass
    assert problems(harness) == {}


def stands(harness: IngestHarness, clock: ManualClock, supplier: str = SUPPLIER) -> Standing:
    return standing(harness.tree, supplier, AlertSection(), clock.now())


def test_an_old_state_is_told(harness: IngestHarness, clock: ManualClock) -> None:
    """I13, §14: by the limit of all, or by the supplier's own."""
    assert stands(harness, clock).alerts == []  # nothing is published: there is nothing to be old
    harness.publish(ONE)
    clock.advance(2 * DAY - HOUR)
    assert stands(harness, clock).alerts == []
    clock.advance(2 * HOUR)
    assert stands(harness, clock).alerts == [Alert.STATE_OLD]
    harness.configure({**KEYED, "max_state_age_hours": 100})
    assert stands(harness, clock).alerts == []
    harness.configure({**KEYED, "max_state_age_hours": 1})
    assert stands(harness, clock).alerts == [Alert.STATE_OLD]


def test_the_same_file_again_and_again(harness: IngestHarness, clock: ManualClock) -> None:
    """I13, §14: so many equal files in a row; another one that is published ends it."""
    harness.publish(ONE)
    harness.publish(TWO)
    harness.run(ONE)  # known, but not the current one
    for number in range(1, 6):
        assert Alert.SAME_FILE_AGAIN not in stands(harness, clock).alerts
        harness.run(TWO)
        assert stands(harness, clock).equal_shas == number
    assert stands(harness, clock).alerts == [Alert.SAME_FILE_AGAIN]
    harness.publish(THREE)
    assert (stands(harness, clock).equal_shas, stands(harness, clock).alerts) == (0, [])


def test_failures_in_a_row(harness: IngestHarness, clock: ManualClock) -> None:
    """I13, §14: the third is told of, until one passes; what failed last is there to see."""
    harness.publish(ONE)
    for number in range(3):
        assert Alert.REPEATED_FAIL not in stands(harness, clock).alerts
        harness.run(snapshot({"A": "none", "B": number}))
    found = stands(harness, clock)
    assert (found.fails, found.broken, found.alerts) == (3, 3, [Alert.REPEATED_FAIL])
    assert found.last is not None
    assert (found.last["status"], found.last["failure_code"]) == ("FAIL", "DQ_TOO_MANY_BAD_ROWS")
    harness.publish(TWO)
    assert (stands(harness, clock).fails, stands(harness, clock).alerts) == (0, [])


def test_runs_that_are_killed_are_failures_too(harness: IngestHarness, clock: ManualClock) -> None:
    """I13, I16: a file that kills every run is told of."""
    for number in range(3):
        run_killed(harness, snapshot({"A": 1, "B": number}), Step.PROCESSED)
    (harness.root / layout.inbox(SUPPLIER) / "price.csv").unlink()
    outcome: Outcome = harness.run()
    assert outcome.manifest is None
    assert Alert.REPEATED_FAIL in stands(harness, clock).alerts


@pytest.mark.parametrize("config", [b"min_fact_count: [", b"min_fact_count: 1\n", b"\xff\xfe", None])
def test_a_broken_configuration_is_told(harness: IngestHarness, clock: ManualClock, config: bytes | None) -> None:
    """I13, I18: one that cannot be used, and none at all; beside it the state is as it was."""
    run_id = harness.publish(ONE)
    file = harness.root / layout.config(SUPPLIER)
    file.unlink() if config is None else file.write_bytes(config)
    found = stands(harness, clock)
    assert (found.alerts, found.run_id) == ([Alert.CONFIG_BROKEN], run_id)
    assert found.config


@pytest.mark.parametrize("lost", ["all", layout.POINTER, layout.MANIFEST, layout.STATS])
def test_a_lost_state_is_told(harness: IngestHarness, clock: ManualClock, lost: str) -> None:
    """I13: the link leads nowhere, or to something that is no state."""
    run_id = harness.publish(ONE)
    if lost == "all":
        lose_state(harness)
    else:
        folder = harness.root / layout.state(SUPPLIER, run_id)
        folder.chmod(0o755)
        (folder / lost).unlink()
    assert stands(harness, clock).alerts == [Alert.STATE_LOST]


def test_what_waits_is_told(harness: IngestHarness, clock: ManualClock) -> None:
    """I13: files in the inbox, unfinished ones apart; who has only an inbox is a supplier too."""
    harness.drop(ONE, "a.csv")
    harness.drop(ONE, "b.csv.tmp")
    harness.put(f"{layout.inbox('newcomer')}/x.csv", ONE)
    found = stands(harness, clock)
    assert (found.inbox, found.unfinished, found.run_id) == (["a.csv"], ["b.csv.tmp"], None)
    assert stands(harness, clock, "newcomer").alerts == [Alert.CONFIG_BROKEN]


def shown(metrics: IngestMetrics, registry: CollectorRegistry, *standings: Standing) -> dict[str, float]:
    """What Prometheus sees, by name and labels."""
    metrics.show(standings)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {"/".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


def test_metrics_show_the_same_and_forget_who_is_gone(harness: IngestHarness, clock: ManualClock) -> None:
    """I13: gauges per supplier and an alert each, 0 or 1; a supplier that is gone is not shown for ever."""
    harness.publish(ONE)
    harness.run(BROKEN)
    harness.drop(TWO)
    harness.put(layout.config("globex"), b"nonsense: true")
    clock.advance(50 * HOUR)
    registry = CollectorRegistry()
    metrics = IngestMetrics(registry)
    metrics.count(SUPPLIER, Status.FAIL, "FILE_EMPTY")
    both = [stands(harness, clock), stands(harness, clock, "globex")]
    seen = shown(metrics, registry, *both)
    expected = {"state_facts": 2, "inbox_files": 1, "broken_files": 1, "consecutive_fails": 1, "equal_shas": 0}
    assert {name: seen[f"penstock_ingest_{name}/{SUPPLIER}"] for name in expected} == expected
    assert seen[f"penstock_ingest_state_age_seconds/{SUPPLIER}"] == both[0].age_seconds
    for one in both:
        alerts = {alert: seen[f"penstock_ingest_alert/{one.supplier}/{alert.value}"] for alert in Alert}
        assert alerts == {alert: float(alert in one.alerts) for alert in Alert}
    assert both[0].alerts == [Alert.STATE_OLD]
    assert "penstock_ingest_state_facts/globex" not in seen
    later = shown(metrics, registry, both[0])
    assert [name for name in later if "globex" in name] == []
    assert later["penstock_ingest_runs_total/acme/FAIL/FILE_EMPTY"] == 1
