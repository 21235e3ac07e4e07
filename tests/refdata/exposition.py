"""The metrics of a process, as a scrape reads them."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.refdata.harness import RefdataHarness

Samples = dict[tuple[str, ...], float]


def samples_of(harness: RefdataHarness) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the samples of a scrape by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(generate_latest(harness.platform.telemetry.registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def parsed(text: str, name: str) -> Samples:
    """Return the values of one metric by its label values, in the order of the label names."""
    found = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples if sample.name == name
    ]
    return {tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value for sample in found}
