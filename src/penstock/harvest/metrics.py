"""What Prometheus sees of harvest."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.harvest.contract import HarvestRunType


class HarvestMetrics:
    """Counters of what workers do, and gauges of where feeds stand."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, about: str, labels: Sequence[str] = ("feed",)) -> Counter:
            return Counter(f"penstock_harvest_{name}", about, labels, registry=registry)

        self._pages = counter("pages", "Pages fetched and kept")
        self._records = counter("records", "Records fetched and kept, each time they are")
        self._rejects = counter("rejects", "Records that could not be kept or mapped")
        self._failures = counter("failures", "What went wrong", ("feed", "code"))
        self._consolidated = counter("consolidated_records", "Canonical records made")
        self._partitions = counter("partitions", "Partitions that ended", ("feed", "status"))
        self._runs = counter("runs_completed", "Runs completed", ("feed", "type"))
        self._watermark = Gauge(
            "penstock_harvest_watermark_seconds", "Up to when a feed is known", ["feed"], registry=registry
        )
        self._every = Gauge(
            "penstock_harvest_interval_seconds", "How often a run of a feed is due", ["feed"], registry=registry
        )
        self._alerts = Gauge(
            "penstock_harvest_alerts_undelivered", "Alerts nobody could be told of yet", registry=registry
        )

    def fetched(self, feed: str, pages: int, records: int, rejects: int) -> None:
        self._pages.labels(feed).inc(pages)
        self._records.labels(feed).inc(records)
        self._rejects.labels(feed).inc(rejects)

    def failed(self, feed: str, code: str) -> None:
        self._failures.labels(feed, code).inc()

    def consolidated(self, feed: str, records: int, rejects: int) -> None:
        self._consolidated.labels(feed).inc(records)
        self._rejects.labels(feed).inc(rejects)

    def partition_ended(self, feed: str, status: str) -> None:
        self._partitions.labels(feed, status).inc()

    def completed(self, feed: str, run_type: HarvestRunType) -> None:
        self._runs.labels(feed, run_type.value).inc()

    def known_up_to(self, watermarks: Mapping[str, datetime]) -> None:
        for feed, watermark in watermarks.items():
            self._watermark.labels(feed).set(watermark.timestamp())

    def due_every(self, feeds: Mapping[str, timedelta | None]) -> None:
        for feed, every in feeds.items():
            if every is not None:
                self._every.labels(feed).set(every.total_seconds())

    def untold(self, alerts: int) -> None:
        self._alerts.set(alerts)
