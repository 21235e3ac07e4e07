"""I13: what Prometheus sees of ingest."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.model import IngestAlert, SupplierStatus


class IngestMetrics:
    """Gauges set from the tree now and then, and a counter of runs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        supplier = ["supplier"]

        def gauge(name: str, about: str, labels: Sequence[str] = supplier) -> Gauge:
            return Gauge(f"penstock_ingest_{name}", about, labels, registry=registry)

        self._age = gauge("state_age_seconds", "Age of the current state")
        self._facts = gauge("state_facts", "Facts in the current state")
        self._inbox = gauge("inbox_files", "Files that wait in the inbox, unfinished ones not counted")
        self._broken = gauge("quarantined_files", "Files in quarantine that could not be published")
        self._fails = gauge("consecutive_failures", "Runs that failed since the last that passed")
        self._equal = gauge("unchanged_files", "Files in a row that were the same as the current one")
        self._alerts = gauge("alert", "1 when somebody should look", ["supplier", "alert"])
        self._runs = Counter(
            "penstock_ingest_runs", "Runs that ended", ["supplier", "status", "code"], registry=registry
        )

    def count(self, supplier: str, status: IngestRunStatus, code: str | None) -> None:
        self._runs.labels(supplier, status.value, code or "").inc()

    def show(self, standings: Sequence[SupplierStatus]) -> None:
        """Set the gauges to how suppliers stand; those that are gone are shown no longer."""
        for gauge in (self._age, self._facts, self._inbox, self._broken, self._fails, self._equal, self._alerts):
            gauge.clear()
        for standing in standings:
            name = standing.supplier
            if standing.age_seconds is not None:
                self._age.labels(name).set(standing.age_seconds)
                self._facts.labels(name).set(standing.facts or 0)
            self._inbox.labels(name).set(len(standing.inbox))
            self._broken.labels(name).set(standing.broken)
            self._fails.labels(name).set(standing.fails)
            self._equal.labels(name).set(standing.equal_shas)
            for alert in IngestAlert:
                self._alerts.labels(name, alert.value).set(alert in standing.alerts)
