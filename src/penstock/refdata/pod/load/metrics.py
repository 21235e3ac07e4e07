"""R26: what Prometheus sees of a pod."""

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
    """Loads as they happen; what can be looked up is looked up when it is asked for."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.duration = Histogram(
            "cache_reload_duration_seconds",
            "From the beginning of a load to the swap",
            ["dict_code", "kind"],
            registry=registry,
            buckets=_BUCKETS,
        )
        self.freshness = Histogram(
            "penstock_refdata_freshness_seconds",
            "From when a version is made, just before it commits, to the swap that shows it",
            ["dict_code"],
            registry=registry,
            buckets=_BUCKETS,
        )
        self.errors = Counter("cache_reload_errors", "Loads that failed", ["dict_code", "code"], registry=registry)
        self.fallbacks = Counter(
            "postgres_fallback_reads", "Reads answered from the primary", ["dict_code"], registry=registry
        )
        self.stream_lag = Gauge(
            "redis_stream_lag", "Invalidations the slowest pod has yet to be handed", registry=registry
        )
        self.resets = Counter(
            "penstock_refdata_history_resets",
            "Times the primary had another past than this pod: it was restored from a backup",
            ["dict_code"],
            registry=registry,
        )
        self.audits = Counter(
            "penstock_refdata_audits", "Comparisons with the primary", ["dict_code", "result"], registry=registry
        )

    def show(
        self, memory: MemoryWriter, holdings: Callable[[], Iterable[DictionaryState]], processes: int, patience: float
    ) -> None:
        """Let the exposition tell of *memory* and *holdings* as they are then."""
        self._registry.register(_CachedReading(memory, holdings, processes, patience))


class _CachedReading(Collector):
    def __init__(
        self, memory: MemoryWriter, holdings: Callable[[], Iterable[DictionaryState]], processes: int, patience: float
    ) -> None:
        self._memory = memory
        self._holdings = holdings
        self._processes = processes
        self._patience = patience

    def collect(self) -> Iterator[Metric]:
        yield self._lags()
        yield self._items()
        yield _gauge("penstock_refdata_memory_bytes", "Memory taken by all dictionaries", self._memory.used)
        yield _gauge("penstock_refdata_memory_limit_bytes", "Memory they may take", self._memory.limit)
        yield _gauge(
            "penstock_refdata_data_age_seconds", "How long ago the primary was last seen, 0 while it is", self._age()
        )
        counts = [self._memory.state.counters(process) for process in range(self._processes)]
        total = {count: sum(one[count] for one in counts) for count in PodCounter}
        yield _gauge("penstock_query_connections", "Connections that are open", total[PodCounter.CONNECTIONS])
        requests = CounterMetricFamily("penstock_query_requests", "Requests answered, by status", labels=["status"])
        for count, status in _STATUSES.items():
            requests.add_metric([status], total[count])
        yield requests
        waits = CounterMetricFamily("penstock_query_barrier_waits", "Reads that named a version not yet held")
        waits.add_metric([], total[PodCounter.BARRIER_WAITS])
        yield waits

    def _age(self) -> float:
        stale = [shelf.stale_since for shelf in self._memory.shelves().values() if shelf.stale_since]
        oldest = monotonic() - min(stale) if stale else 0.0
        return max(self._memory.state.unseen_for(self._patience), oldest)

    def _lags(self) -> Metric:
        """By dictionary, the worst of its tenants: there may be many."""
        lags: dict[str, int] = {}
        for holding in self._holdings():
            code = holding.target.dict_code
            lags[code] = max(lags.get(code, 0), holding.lag)
        family = GaugeMetricFamily("dict_version_lag", "Versions a pod is behind the primary", labels=["dict_code"])
        for code, lag in lags.items():
            family.add_metric([code], lag)
        return family

    def _items(self) -> Metric:
        items: dict[str, int] = {}
        for target, shelf in self._memory.shelves().items():
            items[target.dict_code] = items.get(target.dict_code, 0) + shelf.items
        family = GaugeMetricFamily("penstock_refdata_items", "Items held, of all tenants", labels=["dict_code"])
        for code, count in items.items():
            family.add_metric([code], count)
        return family


def _gauge(name: str, about: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, about)
    family.add_metric([], value)
    return family
