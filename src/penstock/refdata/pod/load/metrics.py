"""R26: the metrics of a pod."""

from collections.abc import Callable, Iterable, Iterator
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.refdata.pod.load.dictionary_state import DictionaryState
from penstock.refdata.pod.memory.shared_counters import PodCounter
from penstock.refdata.pod.memory.writer import MemoryWriter

_STATUSES = {
    PodCounter.OK: "2xx",
    PodCounter.NOT_MODIFIED: "304",
    PodCounter.CLIENT_ERROR: "4xx",
    PodCounter.NOT_FOUND: "404",
    PodCounter.CONFLICT: "409",
    PodCounter.SERVER_ERROR: "5xx",
}
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60)


class PodMetrics:
    """Counters of loads; the other metrics are read from the memory when they are exported."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.duration = Histogram(
            "cache_reload_duration_seconds",
            "Duration of a load, from its start until readers see it.",
            ["dict_code", "kind"],
            registry=registry,
            buckets=_BUCKETS,
        )
        self.freshness = Histogram(
            "penstock_refdata_freshness_seconds",
            "Age of a version when readers first see it, measured from just before its commit.",
            ["dict_code"],
            registry=registry,
            buckets=_BUCKETS,
        )
        self.errors = Counter(
            "cache_reload_errors",
            "Failed loads of a dictionary, by error code.",
            ["dict_code", "code"],
            registry=registry,
        )
        self.fallbacks = Counter(
            "postgres_fallback_reads",
            "Reads that were answered from PostgreSQL because memory did not have the version.",
            ["dict_code"],
            registry=registry,
        )
        self.stream_lag = Gauge(
            "redis_stream_lag",
            "Invalidations in the Redis stream that the slowest pod has not received yet.",
            registry=registry,
        )
        self.resets = Counter(
            "penstock_refdata_history_resets",
            "Times the primary lost versions that this pod had loaded, for example after a restore from a backup.",
            ["dict_code"],
            registry=registry,
        )
        self.audits = Counter(
            "penstock_refdata_audits",
            "Comparisons of all items with the primary, by result: match, mismatch, failed.",
            ["dict_code", "result"],
            registry=registry,
        )

    def show(
        self, memory: MemoryWriter, states: Callable[[], Iterable[DictionaryState]], processes: int, stale_after: float
    ) -> None:
        """Export metrics of *memory* and of the dictionaries, read at each export."""
        self._registry.register(_PodCollector(memory, states, processes, stale_after))


class _PodCollector(Collector):
    def __init__(
        self, memory: MemoryWriter, states: Callable[[], Iterable[DictionaryState]], processes: int, stale_after: float
    ) -> None:
        self._memory = memory
        self._states = states
        self._processes = processes
        self._stale_after = stale_after

    def collect(self) -> Iterator[Metric]:
        yield self._measure_lags()
        yield self._count_items()
        yield _make_gauge(
            "penstock_refdata_memory_bytes", "Memory used by all dictionaries of the pod.", self._memory.used
        )
        yield _make_gauge(
            "penstock_refdata_memory_limit_bytes",
            "Largest memory that the dictionaries of the pod may use: refdata.query.memoryLimitMb.",
            self._memory.limit,
        )
        yield _make_gauge(
            "penstock_refdata_data_age_seconds",
            "Age of the oldest data in memory: seconds since PostgreSQL was last reached; 0 while it is reachable.",
            self._measure_age(),
        )
        counts = [self._memory.counters.get_process_counters(process) for process in range(self._processes)]
        total = {counter: sum(cells[counter] for cells in counts) for counter in PodCounter}
        yield _make_gauge("penstock_query_connections", "Open connections of clients.", total[PodCounter.CONNECTIONS])
        requests = CounterMetricFamily("penstock_query_requests", "Answered requests, by status.", labels=["status"])
        for counter, status in _STATUSES.items():
            requests.add_metric([status], total[counter])
        yield requests
        waits = CounterMetricFamily("penstock_query_barrier_waits", "Reads of a version that was not loaded yet.")
        waits.add_metric([], total[PodCounter.BARRIER_WAITS])
        yield waits

    def _measure_age(self) -> float:
        stale = [header.stale_since for header in self._memory.get_headers().values() if header.stale_since]
        oldest = monotonic() - min(stale) if stale else 0.0
        return max(self._memory.counters.measure_primary_unseen(self._stale_after), oldest)

    def _measure_lags(self) -> Metric:
        """Return the lag of each dictionary, the largest of its tenants: a series per tenant could be too many."""
        lags: dict[str, int] = {}
        for state in self._states():
            code = state.target.dict_code
            lags[code] = max(lags.get(code, 0), state.lag)
        family = GaugeMetricFamily(
            "dict_version_lag",
            "Versions that are committed but not loaded, by dictionary: the largest lag of its tenants.",
            labels=["dict_code"],
        )
        for code, lag in lags.items():
            family.add_metric([code], lag)
        return family

    def _count_items(self) -> Metric:
        items: dict[str, int] = {}
        for target, header in self._memory.get_headers().items():
            items[target.dict_code] = items.get(target.dict_code, 0) + header.items
        family = GaugeMetricFamily(
            "penstock_refdata_items", "Items in memory, by dictionary, of all tenants.", labels=["dict_code"]
        )
        for code, count in items.items():
            family.add_metric([code], count)
        return family


def _make_gauge(name: str, description: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, description)
    family.add_metric([], value)
    return family
