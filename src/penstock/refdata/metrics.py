"""R26: the metrics of commands and of the backlog."""

from collections import Counter as Counts
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.refdata.contract import UpdateState
from penstock.refdata.model import CommandVerdict

_RESULTS = {UpdateState.COMMITTED: "committed", UpdateState.FAILED: "failed", UpdateState.PENDING: "staged"}


class RefdataMetrics:
    """Counters of commands and drift, and gauges of the backlog, which periodic tasks set."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._events = Counter(
            "penstock_refdata_events",
            "Processed commands by result: committed, failed, staged (a chunk of an incomplete snapshot), repeated.",
            ["result"],
            registry=registry,
        )
        for result in (*_RESULTS.values(), "repeated"):
            self._events.labels(result)
        self._lag = Gauge(
            "kafka_consumer_lag",
            "Number of messages of a topic that are not processed yet, on Kafka or PostgreSQL.",
            ["topic"],
            registry=registry,
        )
        self._pending = Gauge(
            "penstock_refdata_pending_oldest_seconds",
            "Age of the oldest PENDING update in seconds; 0 if there is none.",
            registry=registry,
        )
        self._drift = Counter(
            "penstock_refdata_drifts",
            "Changes of the value of driftCheckSql of a dictionary without a new version.",
            ["dict_code"],
            registry=registry,
        )
        self._outbox = Gauge(
            "penstock_refdata_outbox_messages",
            "Number of committed versions that are not announced to pods yet.",
            registry=registry,
        )

    def count_commands(self, verdicts: Iterable[CommandVerdict]) -> None:
        """Count the results of commands."""
        for result, number in Counts(
            "repeated" if verdict.is_repeated else _RESULTS[verdict.status] for verdict in verdicts
        ).items():
            self._events.labels(result).inc(number)

    def count_drift(self, dict_code: str) -> None:
        """Count a change of the tables of a dictionary without a new version."""
        self._drift.labels(dict_code).inc()

    def set_lag(self, topic: str, backlog: int) -> None:
        """Set the number of messages of *topic* that are not processed yet."""
        self._lag.labels(topic).set(backlog)

    def set_backlog(self, *, pending_seconds: float, outbox: int) -> None:
        """Set the age of the oldest pending update, and the number of versions that are not announced."""
        self._pending.set(max(pending_seconds, 0.0))
        self._outbox.set(outbox)
