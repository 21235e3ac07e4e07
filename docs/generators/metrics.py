"""The reference of metrics, from the objects that count."""

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


class Told(NamedTuple):
    """A metric as Prometheus knows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    about: str


def metrics() -> str:
    """Every metric there is."""
    return page(
        "Metrics",
        "Told by every role on `/actuator/prometheus`, in Prometheus' text format. Which role tells which, and what to "
        "make of them, is in [monitoring](../deploy/monitoring.md); beside these there are the client's own "
        "`process_…`. A histogram `name` has the series `name_bucket`, `name_sum` and `name_count`.",
        *(f"## {part}\n\n{_table(told)}" for part, told in all_metrics().items()),
    )


def _table(metrics: Iterable[Told]) -> str:
    rows = ((code(metric.name), metric.kind, ", ".join(map(code, metric.labels)), metric.about) for metric in metrics)
    return table(["metric", "kind", "labels", ""], rows)


def all_metrics() -> dict[str, list[Told]]:
    """All that is counted, by what counts it."""
    telemetry = Telemetry()
    HttpMetrics(telemetry)
    return {
        "Every role": list(_told(telemetry.registry)),
        "Tracking": _counted(TrackingMetrics),
        "Refdata, the way in": _counted(RefdataMetrics),
        "Refdata, the way out": _of_a_pod(),
        "Ingest": _counted(IngestMetrics),
        "Harvest": _counted(HarvestMetrics),
        "Flows": _counted(FlowMetrics),
    }


def _counted(part: Callable[[CollectorRegistry], object]) -> list[Told]:
    registry = CollectorRegistry()
    part(registry)
    return list(_told(registry))


def _of_a_pod() -> list[Told]:
    """With a memory of its own: much of it is looked up only when it is asked for."""
    registry = CollectorRegistry()
    with TemporaryDirectory() as folder:
        memory = MemoryWriter(Path(folder), limit=_MEMORY)
        PodMetrics(registry).show(memory, list, processes=1, patience=1)
        told = list(_told(registry))
        memory.close()
    return told


def _told(registry: CollectorRegistry) -> Iterator[Told]:
    collectors: Iterable[Any] = registry._collector_to_names  # noqa: SLF001 - nobody else tells labels without values
    for collector in collectors:
        if isinstance(collector, ProcessCollector):
            continue
        for family in collector.collect():
            named = collector if hasattr(collector, "_labelnames") else family
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield Told(name, family.type, tuple(named._labelnames), family.documentation)  # noqa: SLF001 - as above
