"""T17: what Prometheus sees of the pipeline."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.tracking.contract import Stage, StageStatus
from penstock.tracking.model import QUEUES, StageCount, StagePause


class TrackingMetrics:
    """Gauges set from the database now and then, and a counter of leases that ran out."""

    def __init__(self, registry: CollectorRegistry) -> None:
        stage = ["stage"]
        self._rows = Gauge("penstock_tracking_rows", "Rows, by stage and status", [*stage, "status"], registry=registry)
        self._ready = Gauge("penstock_tracking_queue_rows", "Rows that wait for a worker", stage, registry=registry)
        self._oldest = Gauge(
            "penstock_tracking_queue_oldest_seconds",
            "Age of the oldest of the first 10,000 rows that wait, 0 when none does",
            stage,
            registry=registry,
        )
        self._paused = Gauge("penstock_tracking_paused", "1 when the stage is paused", stage, registry=registry)
        self._expiries = Counter(
            "penstock_tracking_lease_expiries", "Leases that ran out and were taken back", stage, registry=registry
        )
        for queue in QUEUES:
            self._expiries.labels(queue.value)

    def count_expiries(self, stage: Stage, number: int) -> None:
        self._expiries.labels(stage.value).inc(number)

    def show(
        self,
        counts: Sequence[StageCount],
        oldest: Mapping[Stage, datetime | None],
        pauses: Mapping[Stage, StagePause],
        now: datetime,
    ) -> None:
        """Set the gauges to what the database tells."""
        for stage in Stage:
            self._paused.labels(stage.value).set(stage in pauses)
            for status in StageStatus:
                rows = sum(count.rows for count in counts if count.stage is stage and count.status is status)
                self._rows.labels(stage.value, status.value).set(rows)
        for stage, created_at in oldest.items():
            waiting = sum(count.rows for count in counts if count.stage is stage and count.is_ready)
            self._ready.labels(stage.value).set(waiting)
            age = (now - created_at).total_seconds() if created_at else 0.0
            self._oldest.labels(stage.value).set(max(age, 0.0))
