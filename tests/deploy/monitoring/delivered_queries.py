"""The PromQL queries of the alert rules and dashboards, and the labels that their texts refer to."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from deploy.grafana.declared import DASHBOARDS
from deploy.grafana.panels import expand_query
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus" / "rules"
_IN_ANNOTATIONS = re.compile(r"\$labels\.(\w+)")
_IN_LEGENDS = re.compile(r"{{\s*(\w+)\s*}}")
_PERIOD = "5m"


@dataclass(frozen=True)
class DeliveredQuery:
    """A query, its position, and the labels that its texts use."""

    place: str
    query: str
    labels: frozenset[str] = frozenset()


def rules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return all rules with their files."""
    for file in sorted(RULES.glob("*.yaml")):
        for group in YAML(typ="safe").load(file.read_text())["groups"]:
            for rule in group["rules"]:
                yield file.name, rule


def of_rules() -> list[DeliveredQuery]:
    found = []
    for file, rule in rules():
        name = rule.get("alert") or rule["record"]
        words = " ".join(rule.get("annotations", {}).values())
        found.append(DeliveredQuery(f"{file}: {name}", rule["expr"], frozenset(_IN_ANNOTATIONS.findall(words))))
    return found


@cache
def recorded() -> frozenset[str]:
    """What the rules themselves make."""
    return frozenset(rule["record"] for _, rule in rules() if "record" in rule)


def of_dashboards() -> list[DeliveredQuery]:
    """As Grafana asks for all there is."""
    found = []
    for dashboard in DASHBOARDS:
        for panel, query in dashboard.queries():
            labels = frozenset(_IN_LEGENDS.findall(query.legend))
            found.append(DeliveredQuery(f"{dashboard.uid}: {panel.title}", filled(expand_query(query.expr)), labels))
    return found


def filled(query: str, period: str = _PERIOD) -> str:
    """The query as Grafana sends it with every variable at All."""
    return re.sub(r"\$(?!__)\w+", ".*", query.replace("$__rate_interval", period))
