"""T17: Prometheus metrics of tracking."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.tracking.contract import Stage, StageStatus
from penstock.tracking.model import QUEUES, StageCount, StagePause


class TrackingMetrics:
    """Gauges that are read from the database periodically, and a counter of expired leases."""

    def __init__(self, registry: CollectorRegistry) -> None:
        stage = ["stage"]
        self._rows = Gauge(
            "penstock_tracking_rows",
            "Number of tracked shards by stage and status, read from the database",
            [*stage, "status"],
            registry=registry,
        )
        self._ready = Gauge(
            "penstock_tracking_queue_rows",
            "Number of tracked shards that wait for a worker, by stage",
            stage,
            registry=registry,
        )
        self._oldest = Gauge(
            "penstock_tracking_queue_oldest_seconds",
            "Time in seconds since the registration of the oldest shard in the queue of a stage "
            "(of its first 10,000); 0 for an empty queue",
            stage,
            registry=registry,
        )
        self._paused = Gauge("penstock_tracking_paused", "1 if the stage is paused, else 0", stage, registry=registry)
        self._expiries = Counter(
            "penstock_tracking_lease_expiries",
            "Number of leases that expired before their worker reported, by stage",
            stage,
            registry=registry,
        )
        for queue in QUEUES:
            self._expiries.labels(queue.value)

    def count_expiries(self, stage: Stage, number: int) -> None:
        """Count *number* expired leases of *stage*."""
        self._expiries.labels(stage.value).inc(number)

    def update(
        self,
        counts: Sequence[StageCount],
        oldest: Mapping[Stage, datetime | None],
        pauses: Mapping[Stage, StagePause],
        now: datetime,
    ) -> None:
        """Set the gauges to the values read from the database."""
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
