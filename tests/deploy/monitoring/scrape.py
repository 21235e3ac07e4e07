"""What a running Penstock tells Prometheus."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

# What Prometheus itself makes, and the labels it gives to every series by where it found it.
BY_PROMETHEUS: Mapping[str, frozenset[str]] = {
    "up": frozenset(),
    "ALERTS": frozenset({"alertname", "alertstate", "severity"}),
}
PLACES = frozenset({"job", "role", "instance", "namespace", "pod"})


@dataclass
class Exposition:
    """Series by name with the labels they were seen with, and families with their meaning."""

    labels: dict[str, set[str]] = field(default_factory=dict)
    families: dict[str, str] = field(default_factory=dict)

    def add(self, text: str) -> None:
        for family in text_string_to_metric_families(text):
            self.families[f"{family.name}_total" if family.type == "counter" else family.name] = family.documentation
            for sample in family.samples:
                self.labels.setdefault(sample.name, set()).update(sample.labels)

    def labels_of(self, metric: str) -> set[str] | None:
        """Return all labels that a query may name; None for unknown metrics."""
        known = BY_PROMETHEUS.get(metric, self.labels.get(metric))
        return None if known is None else {*known, *PLACES}


def scraped(api: str) -> str:
    with urlopen(f"{api}/actuator/prometheus", timeout=30) as answer:
        text: str = answer.read().decode()
    return text
