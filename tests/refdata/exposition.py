"""What a scrape of a process reads."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.refdata.harness import RefdataHarness

Samples = dict[tuple[str, ...], float]


def samples_of(harness: RefdataHarness) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples a scrape would read, by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(generate_latest(harness.platform.telemetry.registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def parsed(text: str, name: str) -> Samples:
    """The values of one metric, by those of its labels in the order of their names."""
    found = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples if sample.name == name
    ]
    return {tuple(one.labels[label] for label in sorted(one.labels)): one.value for one in found}
