"""Generate the reference of metrics from the objects that export them."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from docs.generators.text import code, page, table
from prometheus_client import CollectorRegistry, ProcessCollector

from penstock.flows.metrics import FlowMetrics
from penstock.harvest.metrics import HarvestMetrics
from penstock.ingest.metrics import IngestMetrics
from penstock.kernel.http.middleware import HttpMetrics
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.metrics import RefdataMetrics
from penstock.refdata.pod.load.metrics import PodMetrics
from penstock.refdata.pod.memory.writer import MemoryWriter
from penstock.tracking.metrics import TrackingMetrics

_MEMORY = 1_000_000


class MetricDescription(NamedTuple):
    """A metric as Prometheus sees it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    about: str


def metrics() -> str:
    """Return the page with every metric."""
    return page(
        "Metrics",
        "Every role exports metrics at `/metrics` and `/actuator/prometheus` in the text format of Prometheus. "
        "[Monitoring](../deploy/monitoring.md) lists which role exports which metric. The metrics `process_…` of the "
        "client "
        "library are exported in addition. A histogram `name` has the series `name_bucket`, `name_sum` and "
        "`name_count`.",
        *(f"## {part}\n\n{_table(metrics)}" for part, metrics in all_metrics().items()),
    )


def _table(metrics: Iterable[MetricDescription]) -> str:
    rows = ((code(metric.name), metric.kind, ", ".join(map(code, metric.labels)), metric.about) for metric in metrics)
    return table(["metric", "type", "labels", "description"], rows)


def all_metrics() -> dict[str, list[MetricDescription]]:
    """Return all metrics by part."""
    telemetry = Telemetry()
    HttpMetrics(telemetry)
    return {
        "Every role": list(_read_metrics(telemetry.registry)),
        "Tracking": _counted(TrackingMetrics),
        "Refdata: writing": _counted(RefdataMetrics),
        "Refdata: reading": _of_a_pod(),
        "Ingest": _counted(IngestMetrics),
        "Harvest": _counted(HarvestMetrics),
        "Flows": _counted(FlowMetrics),
    }


def _counted(part: Callable[[CollectorRegistry], object]) -> list[MetricDescription]:
    registry = CollectorRegistry()
    part(registry)
    return list(_read_metrics(registry))


def _of_a_pod() -> list[MetricDescription]:
    """Return the metrics of a pod; many are read from the shared memory when they are exported, so create one."""
    registry = CollectorRegistry()
    with TemporaryDirectory() as folder:
        memory = MemoryWriter(Path(folder), limit=_MEMORY)
        PodMetrics(registry).show(memory, list, processes=1, stale_after=1)
        metrics = list(_read_metrics(registry))
        memory.close()
    return metrics


def _read_metrics(registry: CollectorRegistry) -> Iterator[MetricDescription]:
    collectors: Iterable[Any] = registry._collector_to_names  # noqa: SLF001 - the only source of labels without values
    for collector in collectors:
        if isinstance(collector, ProcessCollector):
            continue
        for family in collector.collect():
            named = collector if hasattr(collector, "_labelnames") else family
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield MetricDescription(name, family.type, tuple(named._labelnames), family.documentation)  # noqa: SLF001 - as above
