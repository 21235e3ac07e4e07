"""R26, R27: what rules, dashboards and the manual name is what running processes tell."""

import asyncio
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.monitoring import deployment
from tests.deploy.monitoring.delivered_queries import ROOT, DeliveredQuery, of_dashboards, of_rules, recorded
from tests.deploy.monitoring.promql import Use, groupings, metrics_of, uses
from tests.deploy.monitoring.scrape import PLACES, Exposition, scraped

MANUAL = ROOT / "docs" / "deploy" / "monitoring.md"
EVERY_ROLE = "every role"
# Exposed some seconds later, or only after an event: the test waits for these.
_LATE = {
    "api": ["penstock_tracking_queue_oldest_seconds"],
    "apply": ["kafka_consumer_lag"],
    "query": ["penstock_refdata_audits_total"],
    "ingest": ["penstock_ingest_runs_total", "penstock_ingest_state_age_seconds"],
    "harvest": ["penstock_harvest_partitions_total", "penstock_harvest_runs_completed_total"],
    "flows": ["penstock_flow_oldest_ready_step_seconds", "penstock_flow_steps_total"],
}


@dataclass(frozen=True)
class ExposedMetrics:
    """What all roles tell together, and which of them tell each metric."""

    together: Exposition
    roles: dict[str, set[str]]

    def labels(self) -> dict[str, str]:
        """The labels of each metric, as the manual writes them."""
        series = self.together.labels
        found = {name: series.get(f"{name}_count", series.get(name, set())) for name in sorted(self.together.families)}
        return {name: ", ".join(sorted(labels)) for name, labels in found.items()}


@pytest.fixture
def exposed(tmp_path: Path) -> Iterator[ExposedMetrics]:
    """Return the metrics of every role in its own process, after work and failures of each part."""
    with ExitStack() as stack:
        url = stack.enter_context(deployment.database())
        roles_deployment = deployment.Deployment(tmp_path, url, stack.enter_context(deployment.source()))
        apis = {name: role.api for name, role in roles_deployment.start_roles(stack).items()}
        deployment.fail_harvest(roles_deployment, apis["api"], apis["harvest"])
        deployment.trouble_pods(apis["api"], apis["query"], url)
        deployment.move(roles_deployment, apis["api"], apis["query"])
        for role, metrics in _LATE.items():
            deployment.shows(apis[role], *metrics)
        yield _told(apis, asyncio.run(deployment.drifted(url)))


def _told(apis: dict[str, str], more: str) -> ExposedMetrics:
    together, roles = Exposition(), dict[str, set[str]]()
    for role, api in apis.items():
        text = scraped(api)
        together.add(text)
        alone = Exposition()
        alone.add(text)
        for metric in alone.families:
            roles.setdefault(metric, set()).add(role)
    together.add(more)
    return ExposedMetrics(together, roles)


@pytest.mark.full
@pytest.mark.timeout(300)  # nine processes on a machine that may be busy
def test_every_metric_of_rules_and_panels_is_exposed(exposed: ExposedMetrics) -> None:
    """R27: a running Penstock exposes the metrics and labels of all rules and panels; the manual lists them."""
    found = exposed.together
    assert list(_wrong(found, [*of_rules(), *of_dashboards()])) == []
    manual = _table(MANUAL.read_text())
    assert {metric: labels for metric, (labels, _) in manual.items()} == exposed.labels()
    assert {
        metric: roles - exposed.roles[metric] for metric, (_, roles) in manual.items() if roles - exposed.roles[metric]
    } == {}


def test_an_unknown_metric_is_found() -> None:
    """R27: an unknown metric and unknown labels are reported with their position."""
    found = Exposition()
    found.add(
        '# TYPE a gauge\na{b="1"} 1\n# TYPE h histogram\nh_bucket{le="1",c="2"} 1\nh_sum{c="2"} 1\nh_count{c="2"} 1\n'
    )
    good = [
        'a{b="1"}',
        "sum by (b) (a)",
        "histogram_quantile(0.9, sum by (le, c) (rate(h_bucket[5m])))",
        "sum(up) by (role)",
    ]
    assert list(_wrong(found, [DeliveredQuery("here", query) for query in good])) == []
    bad = {
        "x": "here: no role exposes x",
        "h": "here: no role exposes h",
        'a{c="1"}': "here: a has no c",
        "sum by (z) (a)": "here: a has no z",
        "a * on (q) h_sum": "here: a, h_sum has no q",
        "absent(y)": "here: no role exposes y",
        "max_over_time(a[5m:1m]) > scalar(w)": "here: no role exposes w",
        'sum(a) / on () group_left (d) sum(h_count{c!="1"})': "here: a, h_count has no d",
    }
    assert {query: next(_wrong(found, [DeliveredQuery("here", query)])) for query in bad} == bad
    lost = DeliveredQuery("here", "sum by (b) (a)", frozenset({"instance"}))
    assert list(_wrong(found, [lost])) == ["here: instance is not in what it shows"]


def _wrong(found: Exposition, queries: Iterable[DeliveredQuery]) -> Iterator[str]:
    """What queries count on that is not so."""
    made = recorded()
    for query in queries:
        for use in uses(query.query):
            yield from (f"{query.place}: {wrong}" for wrong in _lacking(found, use, made))
        kept = groupings(query.query)
        known = {label for metric in metrics_of(query.query) for label in found.labels_of(metric) or ()} | PLACES
        for label in sorted(query.labels - (known if kept is None else kept)):
            yield f"{query.place}: {label} is not in what it shows"


def _lacking(found: Exposition, use: Use, made: frozenset[str]) -> Iterator[str]:
    named = sorted(use.metrics - made)
    unknown = [metric for metric in named if found.labels_of(metric) is None]
    yield from (f"no role exposes {metric}" for metric in unknown)
    if not unknown and named:
        known = {label for metric in named for label in found.labels_of(metric) or ()}
        yield from (f"{', '.join(named)} has no {label}" for label in sorted(use.labels - known))


def _table(text: str) -> dict[str, tuple[str, set[str]]]:
    """The metrics of the manual: their labels, and the roles that tell them."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \|", text, re.MULTILINE)
    return {metric: (labels.strip().replace("`", ""), _roles(roles.strip())) for metric, labels, roles in rows}


def _roles(exposed_by: str) -> set[str]:
    every, _, fewer = exposed_by.partition(" but ")
    return {*deployment.ROLES} - {fewer} if every == EVERY_ROLE else set(exposed_by.split(", "))
