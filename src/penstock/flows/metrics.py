"""F18: what flows tell of themselves in figures."""

from collections.abc import Sequence

import asyncpg
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.05, 0.25, 1, 5, 30, 120, 600, 3_600)


class FlowMetrics:
    """The figures of one process, and what the database tells of all."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._steps = Counter(
            "penstock_flow_steps", "Steps that workers of this process ended.", ["kind", "outcome"], registry=registry
        )
        self._seconds = Histogram(
            "penstock_flow_step_seconds", "How long they took.", ["kind"], buckets=_SECONDS, registry=registry
        )
        self._ready = Gauge("penstock_flow_steps_ready", "Steps that wait for a worker.", ["kind"], registry=registry)
        self._waits = Gauge(
            "penstock_flow_oldest_ready_step_seconds", "How long the oldest of them waits.", ["kind"], registry=registry
        )
        self._runs = Gauge("penstock_flow_runs_active", "Runs under way.", ["status"], registry=registry)
        self._known: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self._repaired = Counter("penstock_flow_runs_repaired", "Runs that stood astray.", registry=registry)

    def step_ended(self, kind: str, outcome: str, seconds: float) -> None:
        """A worker ended a step."""
        known = self._known.get((kind, outcome))
        if known is None:  # to look them up costs more than to count
            known = self._known[kind, outcome] = (self._steps.labels(kind, outcome), self._seconds.labels(kind))
        known[0].inc()
        known[1].observe(seconds)

    def repaired(self, count: int) -> None:
        """F3: runs were set right."""
        self._repaired.inc(count)

    def standing(self, ready: Sequence[asyncpg.Record], runs: Sequence[asyncpg.Record]) -> None:
        """How much waits, and for how long."""
        self._ready.clear()
        self._waits.clear()
        for kind, count, seconds in ready:
            self._ready.labels(kind).set(count)
            self._waits.labels(kind).set(seconds)
        self._runs.clear()
        for status, count in runs:
            self._runs.labels(status).set(count)
