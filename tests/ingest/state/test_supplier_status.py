"""The status of a supplier: alerts, waiting files, and metrics."""

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


def read_status(harness: IngestHarness, clock: ManualClock, supplier: str = SUPPLIER) -> SupplierStatus:
    return read_supplier_status(harness.tree, supplier, AlertSection(), clock.now())


def test_old_state(harness: IngestHarness, clock: ManualClock) -> None:
    """I13, §14: STATE_OLD by the limit of the configuration, or of the supplier."""
    assert read_status(harness, clock).alerts == []  # no state is published yet
    harness.publish(ONE)
    clock.advance(2 * DAY - HOUR)
    assert read_status(harness, clock).alerts == []
    clock.advance(2 * HOUR)
    assert read_status(harness, clock).alerts == [IngestAlert.STATE_OLD]
    harness.configure({**KEYED, "max_state_age_hours": 100})
    assert read_status(harness, clock).alerts == []
    harness.configure({**KEYED, "max_state_age_hours": 1})
    assert read_status(harness, clock).alerts == [IngestAlert.STATE_OLD]


def test_unchanged_files(harness: IngestHarness, clock: ManualClock) -> None:
    """I13, §14: SAME_FILE_AGAIN after a number of equal files in a row; a publication ends it."""
    harness.publish(ONE)
    harness.publish(TWO)
    harness.run(ONE)  # a duplicate, but not of the published file
    for number in range(1, 6):
        assert IngestAlert.SAME_FILE_AGAIN not in read_status(harness, clock).alerts
        harness.run(TWO)
        assert read_status(harness, clock).unchanged_files == number
    assert read_status(harness, clock).alerts == [IngestAlert.SAME_FILE_AGAIN]
    harness.publish(THREE)
    assert (read_status(harness, clock).unchanged_files, read_status(harness, clock).alerts) == (0, [])


def test_failed_runs(harness: IngestHarness, clock: ManualClock) -> None:
    """I13, §14: REPEATED_FAIL from the third failed run until a run passes; the status has the last failure."""
    harness.publish(ONE)
    for number in range(3):
        assert IngestAlert.REPEATED_FAIL not in read_status(harness, clock).alerts
        harness.run(snapshot({"A": "none", "B": number}))
    status = read_status(harness, clock)
    assert (status.failed_runs, status.broken, status.alerts) == (3, 3, [IngestAlert.REPEATED_FAIL])
    assert status.last_run is not None
    assert (status.last_run["status"], status.last_run["failure_code"]) == ("FAIL", "DQ_TOO_MANY_BAD_ROWS")
    harness.publish(TWO)
    assert (read_status(harness, clock).failed_runs, read_status(harness, clock).alerts) == (0, [])


def test_killed_runs_are_failures(harness: IngestHarness, clock: ManualClock) -> None:
    """I13, I16: a file that kills every run activates REPEATED_FAIL."""
    for number in range(3):
        run_killed(harness, snapshot({"A": 1, "B": number}), PublishStep.PROCESSED)
    (harness.root / layout.make_inbox_path(SUPPLIER) / "price.csv").unlink()
    outcome: RunOutcome = harness.run()
    assert outcome.manifest is None
    assert IngestAlert.REPEATED_FAIL in read_status(harness, clock).alerts


@pytest.mark.parametrize("config", [b"min_fact_count: [", b"min_fact_count: 1\n", b"\xff\xfe", None])
def test_invalid_configuration(harness: IngestHarness, clock: ManualClock, config: bytes | None) -> None:
    """I13, I18: CONFIG_BROKEN for an invalid and for a missing configuration; the published state stays."""
    run_id = harness.publish(ONE)
    file = harness.root / layout.make_config_path(SUPPLIER)
    file.unlink() if config is None else file.write_bytes(config)
    status = read_status(harness, clock)
    assert (status.alerts, status.run_id) == ([IngestAlert.CONFIG_BROKEN], run_id)
    assert status.config_error


@pytest.mark.parametrize("lost", ["all", layout.POINTER, layout.MANIFEST, layout.STATS])
def test_lost_state(harness: IngestHarness, clock: ManualClock, lost: str) -> None:
    """I13: STATE_MISSING if the link leads nowhere, or a file of the state is missing."""
    run_id = harness.publish(ONE)
    if lost == "all":
        lose_state(harness)
    else:
        folder = harness.root / layout.make_state_path(SUPPLIER, run_id)
        folder.chmod(0o755)
        (folder / lost).unlink()
    assert read_status(harness, clock).alerts == [IngestAlert.STATE_MISSING]


def test_waiting_files(harness: IngestHarness, clock: ManualClock) -> None:
    """I13: files in the inbox, without unfinished ones; an inbox alone makes a supplier."""
    harness.drop(ONE, "a.csv")
    harness.drop(ONE, "b.csv.tmp")
    harness.put(f"{layout.make_inbox_path('newcomer')}/x.csv", ONE)
    status = read_status(harness, clock)
    assert (status.inbox, status.unfinished, status.run_id) == (["a.csv"], ["b.csv.tmp"], None)
    assert read_status(harness, clock, "newcomer").alerts == [IngestAlert.CONFIG_BROKEN]


def read_samples(metrics: IngestMetrics, registry: CollectorRegistry, *suppliers: SupplierStatus) -> dict[str, float]:
    """Return the samples of Prometheus by name and labels."""
    metrics.update(suppliers)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {"/".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


def test_metrics_are_those_of_the_status(harness: IngestHarness, clock: ManualClock) -> None:
    """I13: gauges per supplier and alert; a supplier that is deleted has no gauges."""
    harness.publish(ONE)
    harness.run(BROKEN)
    harness.drop(TWO)
    harness.put(layout.make_config_path("globex"), b"nonsense: true")
    clock.advance(50 * HOUR)
    registry = CollectorRegistry()
    metrics = IngestMetrics(registry)
    metrics.count_run(SUPPLIER, IngestRunStatus.FAIL, "FILE_EMPTY")
    both = [read_status(harness, clock), read_status(harness, clock, "globex")]
    samples = read_samples(metrics, registry, *both)
    expected = {
        "state_facts": 2,
        "inbox_files": 1,
        "inbox_ignored_entries": 0,
        "quarantined_files": 1,
        "consecutive_failures": 1,
        "unchanged_files": 0,
    }
    assert {name: samples[f"penstock_ingest_{name}/{SUPPLIER}"] for name in expected} == expected
    assert samples[f"penstock_ingest_state_age_seconds/{SUPPLIER}"] == both[0].age_seconds
    for supplier in both:
        alerts = {alert: samples[f"penstock_ingest_alert/{supplier.supplier}/{alert.value}"] for alert in IngestAlert}
        assert alerts == {alert: float(alert in supplier.alerts) for alert in IngestAlert}
    assert both[0].alerts == [IngestAlert.STATE_OLD]
    assert "penstock_ingest_state_facts/globex" not in samples
    later = read_samples(metrics, registry, both[0])
    assert [name for name in later if "globex" in name] == []
    assert later["penstock_ingest_runs_total/acme/FAIL/FILE_EMPTY"] == 1
