"""What somebody should look at: old states, failures in a row, files that wait."""

import pytest
from prometheus_client import CollectorRegistry

from penstock.ingest.config import AlertSection
from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.metrics import IngestMetrics
from penstock.ingest.model import IngestAlert, SupplierStatus
from penstock.ingest.run.hooks import RunOutcome
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.state.supplier_status import read_supplier_status
from penstock.ingest.tree import paths as layout
from penstock.kernel.clock import ManualClock
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, snapshot
from tests.ingest.state.damage import BROKEN, DAY, HOUR, ONE, THREE, TWO, lose_state, run_killed


def stands(harness: IngestHarness, clock: ManualClock, supplier: str = SUPPLIER) -> SupplierStatus:
    return read_supplier_status(harness.tree, supplier, AlertSection(), clock.now())


def test_an_old_state_is_told(harness: IngestHarness, clock: ManualClock) -> None:
    """I13, §14: by the limit of all, or by the supplier's own."""
    assert stands(harness, clock).alerts == []  # nothing is published: there is nothing to be old
    harness.publish(ONE)
    clock.advance(2 * DAY - HOUR)
    assert stands(harness, clock).alerts == []
    clock.advance(2 * HOUR)
    assert stands(harness, clock).alerts == [IngestAlert.STATE_OLD]
    harness.configure({**KEYED, "max_state_age_hours": 100})
    assert stands(harness, clock).alerts == []
    harness.configure({**KEYED, "max_state_age_hours": 1})
    assert stands(harness, clock).alerts == [IngestAlert.STATE_OLD]


def test_the_same_file_again_and_again(harness: IngestHarness, clock: ManualClock) -> None:
    """I13, §14: so many equal files in a row; another one that is published ends it."""
    harness.publish(ONE)
    harness.publish(TWO)
    harness.run(ONE)  # known, but not the current one
    for number in range(1, 6):
        assert IngestAlert.SAME_FILE_AGAIN not in stands(harness, clock).alerts
        harness.run(TWO)
        assert stands(harness, clock).unchanged_files == number
    assert stands(harness, clock).alerts == [IngestAlert.SAME_FILE_AGAIN]
    harness.publish(THREE)
    assert (stands(harness, clock).unchanged_files, stands(harness, clock).alerts) == (0, [])


def test_failures_in_a_row(harness: IngestHarness, clock: ManualClock) -> None:
    """I13, §14: the third is told of, until one passes; what failed last is there to see."""
    harness.publish(ONE)
    for number in range(3):
        assert IngestAlert.REPEATED_FAIL not in stands(harness, clock).alerts
        harness.run(snapshot({"A": "none", "B": number}))
    found = stands(harness, clock)
    assert (found.failed_runs, found.broken, found.alerts) == (3, 3, [IngestAlert.REPEATED_FAIL])
    assert found.last_run is not None
    assert (found.last_run["status"], found.last_run["failure_code"]) == ("FAIL", "DQ_TOO_MANY_BAD_ROWS")
    harness.publish(TWO)
    assert (stands(harness, clock).failed_runs, stands(harness, clock).alerts) == (0, [])


def test_runs_that_are_killed_are_failures_too(harness: IngestHarness, clock: ManualClock) -> None:
    """I13, I16: a file that kills every run is told of."""
    for number in range(3):
        run_killed(harness, snapshot({"A": 1, "B": number}), PublishStep.PROCESSED)
    (harness.root / layout.inbox(SUPPLIER) / "price.csv").unlink()
    outcome: RunOutcome = harness.run()
    assert outcome.manifest is None
    assert IngestAlert.REPEATED_FAIL in stands(harness, clock).alerts


@pytest.mark.parametrize("config", [b"min_fact_count: [", b"min_fact_count: 1\n", b"\xff\xfe", None])
def test_a_broken_configuration_is_told(harness: IngestHarness, clock: ManualClock, config: bytes | None) -> None:
    """I13, I18: one that cannot be used, and none at all; beside it the state is as it was."""
    run_id = harness.publish(ONE)
    file = harness.root / layout.config(SUPPLIER)
    file.unlink() if config is None else file.write_bytes(config)
    found = stands(harness, clock)
    assert (found.alerts, found.run_id) == ([IngestAlert.CONFIG_BROKEN], run_id)
    assert found.config_error


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
    assert stands(harness, clock).alerts == [IngestAlert.STATE_MISSING]


def test_what_waits_is_told(harness: IngestHarness, clock: ManualClock) -> None:
    """I13: files in the inbox, unfinished ones apart; who has only an inbox is a supplier too."""
    harness.drop(ONE, "a.csv")
    harness.drop(ONE, "b.csv.tmp")
    harness.put(f"{layout.inbox('newcomer')}/x.csv", ONE)
    found = stands(harness, clock)
    assert (found.inbox, found.unfinished, found.run_id) == (["a.csv"], ["b.csv.tmp"], None)
    assert stands(harness, clock, "newcomer").alerts == [IngestAlert.CONFIG_BROKEN]


def shown(metrics: IngestMetrics, registry: CollectorRegistry, *standings: SupplierStatus) -> dict[str, float]:
    """What Prometheus sees, by name and labels."""
    metrics.update(standings)
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
    metrics.count_run(SUPPLIER, IngestRunStatus.FAIL, "FILE_EMPTY")
    both = [stands(harness, clock), stands(harness, clock, "globex")]
    seen = shown(metrics, registry, *both)
    expected = {
        "state_facts": 2,
        "inbox_files": 1,
        "quarantined_files": 1,
        "consecutive_failures": 1,
        "unchanged_files": 0,
    }
    assert {name: seen[f"penstock_ingest_{name}/{SUPPLIER}"] for name in expected} == expected
    assert seen[f"penstock_ingest_state_age_seconds/{SUPPLIER}"] == both[0].age_seconds
    for one in both:
        alerts = {alert: seen[f"penstock_ingest_alert/{one.supplier}/{alert.value}"] for alert in IngestAlert}
        assert alerts == {alert: float(alert in one.alerts) for alert in IngestAlert}
    assert both[0].alerts == [IngestAlert.STATE_OLD]
    assert "penstock_ingest_state_facts/globex" not in seen
    later = shown(metrics, registry, both[0])
    assert [name for name in later if "globex" in name] == []
    assert later["penstock_ingest_runs_total/acme/FAIL/FILE_EMPTY"] == 1
