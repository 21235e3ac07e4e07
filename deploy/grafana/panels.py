"""Dashboards as rows of panels with queries, and their conversion to the JSON of Grafana."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
SCHEMA = 41  # of Grafana 11.6 and 12; Grafana migrates older schemas itself
WIDTH = 24
TAG = "penstock"
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
# The labels that every query filters by; `metric{@}` and `metric{@,label="…"}` are abbreviations.
COMMON_LABELS = 'job="penstock",namespace=~"$namespace",role=~"$role",instance=~"$instance"'
_GOOD, _WARN, _BAD = "green", "orange", "red"


@dataclass(frozen=True)
class Query:
    """One series or one number of a panel."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel; *about* describes the value and what a bad value looks like."""

    title: str
    about: str
    queries: Sequence[Query]
    unit: str = "short"
    width: int = 12
    height: int = 8
    kind: str = "timeseries"
    warn: float | None = None
    bad: float | None = None
    good_from: float | None = None  # smaller values are bad
    empty: str = "nothing yet"
    to: str | None = None  # uid of the dashboard that a click opens


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Variable:
    """A filter of a dashboard: the values of one label."""

    name: str
    label: str
    of: str


@dataclass(frozen=True)
class Dashboard:
    """One dashboard; *uid* is part of links and must not change."""

    uid: str
    title: str
    about: str
    rows: Sequence[Row]
    variables: Sequence[Variable] = ()
    since: str = "now-3h"
    refresh: str = "30s"

    def document(self) -> Json:
        """Return the JSON document of Grafana."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.about,
            "tags": [TAG],
            "schemaVersion": SCHEMA,
            "editable": True,
            "graphTooltip": 1,  # one crosshair over all panels, to compare times
            "time": {"from": self.since, "to": "now"},
            "timezone": "browser",
            "refresh": self.refresh,
            "links": [
                {**_LINK, "title": "Penstock", "type": "dashboards", "tags": [TAG], "asDropdown": True},
                {**_LINK, "title": "Runbook", "type": "link", "url": "${runbook}", "targetBlank": True, "icon": "doc"},
            ],
            "templating": {
                "list": [_DATASOURCES, _RUNBOOK, *map(_variable, (*_COMMON_VARIABLES, *self.variables))],
            },
            "annotations": {"list": [_RESTARTS]},
            "panels": list(self._panels()),
        }

    def queries(self) -> Iterator[tuple[Panel, Query]]:
        for row in self.rows:
            for panel in row.panels:
                for query in panel.queries:
                    yield panel, query

    def _panels(self) -> Iterator[Json]:
        number, top = 1, 0
        for row in self.rows:
            position = {"h": 1, "w": WIDTH, "x": 0, "y": top}
            header = {"id": number, "type": "row", "title": row.title}
            yield {**header, "collapsed": False, "gridPos": position, "panels": []}
            number, top, left, tallest = number + 1, top + 1, 0, 0
            for panel in row.panels:
                if left + panel.width > WIDTH:
                    left, top, tallest = 0, top + tallest, 0
                position = {"h": panel.height, "w": panel.width, "x": left, "y": top}
                yield {"id": number, "gridPos": position, **_panel(panel)}
                number, left, tallest = number + 1, left + panel.width, max(tallest, panel.height)
            top += tallest


def expand_query(expr: str) -> str:
    """Return *expr* with the abbreviation `{@` replaced by the common labels."""
    return expr.replace("{@", "{" + COMMON_LABELS)


def stat(title: str, about: str, expr: str, unit: str = "short", **more: Any) -> Panel:
    """Return a panel with one coloured number."""
    given = {"width": 4, "height": 4, **more}
    return Panel(title, about, [Query(expr)], unit, kind="stat", **given)


def graph(title: str, about: str, *queries: tuple[str, str], unit: str = "short", **more: Any) -> Panel:
    """Return a panel with lines over time."""
    return Panel(title, about, [Query(expr, legend) for expr, legend in queries], unit, **more)


def table(title: str, about: str, expr: str, **more: Any) -> Panel:
    """Return a panel with one row per current series."""
    return Panel(title, about, [Query(expr)], kind="table", **{"width": WIDTH, "height": 6, **more})


_COMMON_VARIABLES = (
    Variable("namespace", "Namespace", "penstock_build_info"),
    Variable("role", "Role", "penstock_build_info"),
    Variable("instance", "Instance", "penstock_build_info"),
)
_LINK: Json = {"icon": "external link", "includeVars": True, "keepTime": True, "tags": [], "targetBlank": False}
_LINK |= {"tooltip": "", "asDropdown": False, "url": ""}
_DATASOURCES: Json = {
    "name": "datasource",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
    "refresh": 1,
    "hide": 0,
    "multi": False,
    "includeAll": False,
    "current": {},
    "options": [],
    "regex": "",
}
# The address of your copy of the runbook. Alerts use the same paths.
_RUNBOOK: Json = {
    "name": "runbook",
    "type": "constant",
    "query": "docs/runbook/README.md",
    "hide": 2,
    "skipUrlSync": True,
    "current": {"selected": False, "text": "docs/runbook/README.md", "value": "docs/runbook/README.md"},
    "options": [],
}
_RESTARTS: Json = {
    "name": "Starts",
    "datasource": DATASOURCE,
    "enable": True,
    "hide": False,
    "iconColor": "blue",
    "expr": expand_query("changes(process_start_time_seconds{@}[2m]) > 0"),
    "step": "60s",
    "titleFormat": "started",
    "textFormat": "{{role}} {{instance}}",
}


def _variable(variable: Variable) -> Json:
    query = f"label_values({variable.of},{variable.name})"
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",  # also matches a missing label
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
        "regex": "",
    }


def _panel(panel: Panel) -> Json:
    links = [{"title": "Why", "url": f"/d/{panel.to}?${{__url_time_range}}"}] if panel.to else []
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
        "links": links,
        "targets": [_target(panel, number, query) for number, query in enumerate(panel.queries)],
        **({"transformations": _TABULAR} if panel.kind == "table" else {}),
    }


def _target(panel: Panel, number: int, query: Query) -> Json:
    is_instant = panel.kind != "timeseries"
    return {
        "refId": chr(ord("A") + number),
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": expand_query(query.expr),
        "legendFormat": query.legend or "__auto",
        "instant": is_instant,
        "range": not is_instant,
        "format": "table" if panel.kind == "table" else "time_series",
    }


def _defaults(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit, "noValue": panel.empty, "thresholds": _thresholds(panel), "mappings": []}
    if panel.kind == "stat":
        return {**defaults, "color": {"mode": "thresholds"}}
    if panel.kind == "table":
        return {**defaults, "custom": {"align": "auto", "filterable": True}}
    has_limits = panel.warn is not None or panel.bad is not None
    custom = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False, "axisSoftMin": 0}
    custom |= {"thresholdsStyle": {"mode": "line" if has_limits else "off"}}
    return {**defaults, "color": {"mode": "palette-classic"}, "custom": custom}


def _thresholds(panel: Panel) -> Json:
    if panel.good_from is not None:
        steps = [(None, _BAD), (panel.good_from, _GOOD)]
    else:
        steps = [(None, _GOOD), (panel.warn, _WARN), (panel.bad, _BAD)]
        steps = [steps[0], *(step for step in steps[1:] if step[0] is not None)]
    return {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in steps]}


_TABULAR: list[Json] = [
    {
        "id": "organize",
        "options": {"excludeByName": {"Time": True, "Value": True, "__name__": True, "alertstate": True}},
    }
]
_OPTIONS: dict[str, Json] = {
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "auto",
    },
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "table": {"showHeader": True, "cellHeight": "sm", "footer": {"show": False}},
}
