"""R26: what Prometheus sees of the way in."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.refdata.contract import Status
from penstock.refdata.model import Verdict


class RefdataMetrics:
    """Events as they are judged, and gauges set now and then."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._events = Counter(
            "penstock_refdata_events", "Commands judged, by what became of them", ["result"], registry=registry
        )
        for result in ("committed", "failed", "staged", "repeated"):
            self._events.labels(result)
        self._lag = Gauge(
            "kafka_consumer_lag", "Messages of a topic that are not settled yet", ["topic"], registry=registry
        )
        self._pending = Gauge(
            "penstock_refdata_pending_oldest_seconds",
            "Age of the oldest update under way, 0 when none is",
            registry=registry,
        )
        self._outbox = Gauge(
            "penstock_refdata_outbox_waiting", "Versions committed that are not announced yet", registry=registry
        )

    def count(self, verdict: Verdict) -> None:
        names = {Status.COMMITTED: "committed", Status.FAILED: "failed", Status.PENDING: "staged"}
        self._events.labels("repeated" if verdict.is_repeated else names[verdict.status]).inc()

    def show(self, topic: str, *, backlog: int, pending: float, outbox: int) -> None:
        self._lag.labels(topic).set(backlog)
        self._pending.set(max(pending, 0.0))
        self._outbox.set(outbox)
