"""R26: what Prometheus sees of the way in."""

from collections import Counter as Counts
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.refdata.contract import UpdateState
from penstock.refdata.model import CommandVerdict

_RESULTS = {UpdateState.COMMITTED: "committed", UpdateState.FAILED: "failed", UpdateState.PENDING: "staged"}


class RefdataMetrics:
    """Events as they are judged, and gauges set now and then."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._events = Counter(
            "penstock_refdata_events", "Commands judged, by what became of them", ["result"], registry=registry
        )
        for result in (*_RESULTS.values(), "repeated"):
            self._events.labels(result)
        self._lag = Gauge(
            "kafka_consumer_lag", "Messages of a topic that are not settled yet", ["topic"], registry=registry
        )
        self._pending = Gauge(
            "penstock_refdata_pending_oldest_seconds",
            "Age of the oldest update under way, 0 when none is",
            registry=registry,
        )
        self._drift = Counter(
            "penstock_refdata_drifts",
            "Changes of a dictionary's tables that came not through us",
            ["dict_code"],
            registry=registry,
        )
        self._outbox = Gauge(
            "penstock_refdata_outbox_messages", "Versions committed that are not announced yet", registry=registry
        )

    def count(self, verdicts: Iterable[CommandVerdict]) -> None:
        for result, number in Counts(
            "repeated" if verdict.is_repeated else _RESULTS[verdict.status] for verdict in verdicts
        ).items():
            self._events.labels(result).inc(number)

    def count_drift(self, dict_code: str) -> None:
        self._drift.labels(dict_code).inc()

    def show_lag(self, topic: str, backlog: int) -> None:
        self._lag.labels(topic).set(backlog)

    def show(self, *, pending: float, outbox: int) -> None:
        self._pending.set(max(pending, 0.0))
        self._outbox.set(outbox)
