"""I13: the Prometheus metrics of ingest."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.model import IngestAlert, SupplierStatus


class IngestMetrics:
    """Gauges per supplier, updated periodically from the tree, and a counter of runs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        supplier = ["supplier"]

        def make_gauge(name: str, description: str, labels: Sequence[str] = supplier) -> Gauge:
            return Gauge(f"penstock_ingest_{name}", description, labels, registry=registry)

        self._age = make_gauge("state_age_seconds", "Age of the published state in seconds")
        self._facts = make_gauge("state_facts", "Facts in the published state")
        self._inbox = make_gauge("inbox_files", "Files waiting in the inbox, without unfinished uploads")
        self._ignored = make_gauge(
            "inbox_ignored_entries", "Entries of the inbox that runs ignore, e.g. folders and links"
        )
        self._broken = make_gauge("quarantined_files", "Files in quarantine because their run failed")
        self._fails = make_gauge("consecutive_failures", "Failed runs since the last run that passed")
        self._unchanged = make_gauge("unchanged_files", "Files in a row that were equal to the published file")
        self._alerts = make_gauge("alert", "1 if the alert is active for the supplier, else 0", ["supplier", "alert"])
        self._runs = Counter(
            "penstock_ingest_runs",
            "Runs that ended, by status and failure code",
            ["supplier", "status", "code"],
            registry=registry,
        )

    def count_run(self, supplier: str, status: IngestRunStatus, code: str | None) -> None:
        """Count a run that ended."""
        self._runs.labels(supplier, status.value, code or "").inc()

    def update(self, suppliers: Sequence[SupplierStatus]) -> None:
        """Set the gauges to the status of *suppliers*, and remove those of suppliers that no longer exist."""
        gauges = (self._age, self._facts, self._inbox, self._ignored, self._broken, self._fails, self._unchanged)
        for gauge in (*gauges, self._alerts):
            gauge.clear()
        for supplier in suppliers:
            name = supplier.supplier
            if supplier.age_seconds is not None:
                self._age.labels(name).set(supplier.age_seconds)
                self._facts.labels(name).set(supplier.facts or 0)
            self._inbox.labels(name).set(len(supplier.inbox))
            self._ignored.labels(name).set(len(supplier.ignored))
            self._broken.labels(name).set(supplier.broken)
            self._fails.labels(name).set(supplier.failed_runs)
            self._unchanged.labels(name).set(supplier.unchanged_files)
            for alert in IngestAlert:
                self._alerts.labels(name, alert.value).set(alert in supplier.alerts)
