"""F18: metrics of flows."""

from collections.abc import Sequence

import asyncpg
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.05, 0.25, 1, 5, 30, 120, 600, 3_600)


class FlowMetrics:
    """The metrics of one process, and gauges of the database."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._steps = Counter(
            "penstock_flow_steps",
            "Attempts at steps that workers of this process ended, by outcome.",
            ["kind", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "penstock_flow_step_seconds",
            "Duration of attempts at steps in seconds.",
            ["kind"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._ready = Gauge(
            "penstock_flow_steps_ready", "READY steps that wait for a worker.", ["kind"], registry=registry
        )
        self._waits = Gauge(
            "penstock_flow_oldest_ready_step_seconds",
            "Waiting time of the oldest READY step in seconds.",
            ["kind"],
            registry=registry,
        )
        self._runs = Gauge(
            "penstock_flow_runs_active", "Active runs by status: PENDING or RUNNING.", ["status"], registry=registry
        )
        self._labelled: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self._repaired = Counter(
            "penstock_flow_runs_repaired",
            "Runs that were inconsistent and were repaired.",
            registry=registry,
        )

    def count_step(self, kind: str, outcome: str, seconds: float) -> None:
        """Count an attempt at a step that a worker ended."""
        labelled = self._labelled.get((kind, outcome))
        if labelled is None:  # cached, because the lookup of labels costs more than the increment
            labelled = (self._steps.labels(kind, outcome), self._seconds.labels(kind))
            self._labelled[kind, outcome] = labelled
        labelled[0].inc()
        labelled[1].observe(seconds)

    def count_repaired(self, count: int) -> None:
        """F3: count repaired runs."""
        self._repaired.inc(count)

    def set_gauges(self, ready: Sequence[asyncpg.Record], runs: Sequence[asyncpg.Record]) -> None:
        """Set the gauges of READY steps and of active runs."""
        self._ready.clear()
        self._waits.clear()
        for kind, count, seconds in ready:
            self._ready.labels(kind).set(count)
            self._waits.labels(kind).set(seconds)
        self._runs.clear()
        for status, count in runs:
            self._runs.labels(status).set(count)
