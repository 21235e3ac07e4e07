"""Prometheus metrics of harvest."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.harvest.contract import HarvestRunType


class HarvestMetrics:
    """Counters of the work of this process, and gauges of the state of feeds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def make_counter(name: str, description: str, labels: Sequence[str] = ("feed",)) -> Counter:
            return Counter(f"penstock_harvest_{name}", description, labels, registry=registry)

        self._pages = make_counter("pages", "Pages fetched and stored")
        self._records = make_counter("records", "Records fetched and stored, including repeated passes")
        self._rejects = make_counter("rejects", "Records that could not be stored or mapped")
        self._failures = make_counter(
            "failures", "Failures by error code: work items, consolidations", ("feed", "code")
        )
        self._consolidated = make_counter("consolidated_records", "Canonical records written")
        self._partitions = make_counter("partitions", "Ended partitions by status", ("feed", "status"))
        self._runs = make_counter("runs_completed", "Completed runs by kind: full or incremental", ("feed", "type"))
        self._watermark = Gauge(
            "penstock_harvest_watermark_seconds",
            "Watermark of a feed: the time up to which it is synchronised, as a Unix timestamp",
            ["feed"],
            registry=registry,
        )
        self._interval = Gauge(
            "penstock_harvest_interval_seconds", "Interval of the scheduled runs of a feed", ["feed"], registry=registry
        )
        self._alerts = Gauge(
            "penstock_harvest_alerts_undelivered", "Alerts that a channel has not accepted yet", registry=registry
        )

    def count_fetched(self, feed: str, pages: int, records: int, rejects: int) -> None:
        self._pages.labels(feed).inc(pages)
        self._records.labels(feed).inc(records)
        self._rejects.labels(feed).inc(rejects)

    def count_failure(self, feed: str, code: str) -> None:
        self._failures.labels(feed, code).inc()

    def count_consolidated(self, feed: str, records: int, rejects: int) -> None:
        self._consolidated.labels(feed).inc(records)
        self._rejects.labels(feed).inc(rejects)

    def count_partition(self, feed: str, status: str) -> None:
        self._partitions.labels(feed, status).inc()

    def count_completed_run(self, feed: str, run_type: HarvestRunType) -> None:
        self._runs.labels(feed, run_type.value).inc()

    def set_watermarks(self, watermarks: Mapping[str, datetime]) -> None:
        for feed, watermark in watermarks.items():
            self._watermark.labels(feed).set(watermark.timestamp())

    def set_intervals(self, feeds: Mapping[str, timedelta | None]) -> None:
        for feed, every in feeds.items():
            if every is not None:
                self._interval.labels(feed).set(every.total_seconds())

    def set_undelivered_alerts(self, alerts: int) -> None:
        self._alerts.set(alerts)
