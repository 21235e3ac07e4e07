"""R27: the dashboards: as declared, in a shape Grafana can show, readable by whoever is woken up."""

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from deploy.grafana.declared import DASHBOARDS, OVERVIEW
from deploy.grafana.panels import COMMON_LABELS, WIDTH

from tests.deploy.monitoring.delivered_queries import ROOT, filled
from tests.deploy.monitoring.promql import metrics_of
from tests.support.types import Json

FOLDER = ROOT / "deploy" / "grafana" / "dashboards"


@pytest.fixture(params=[dashboard.uid for dashboard in DASHBOARDS])
def document(request: pytest.FixtureRequest) -> Json:
    found: Json = json.loads((FOLDER / f"{request.param}.json").read_text())
    return found


def panels(document: Json) -> list[Json]:
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def test_the_files_are_what_is_declared(tmp_path: Path) -> None:
    """R27: whoever changes the declaration runs `scripts/dashboards`; nothing else is in the folder."""
    subprocess.run([sys.executable, ROOT / "scripts" / "dashboards", str(tmp_path)], check=True)
    written = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert {file.name: file.read_text() for file in FOLDER.iterdir()} == written


def test_panels_have_their_places(document: Json) -> None:
    """No two panels have one id, or lie upon each other, or beyond the edge."""
    places = [panel["gridPos"] for panel in document["panels"]]
    assert len({panel["id"] for panel in document["panels"]}) == len(places)
    assert all(place["x"] + place["w"] <= WIDTH for place in places)
    assert not [pair for pair in combinations(places, 2) if _overlap(*pair)]


def _overlap(one: Json, other: Json) -> bool:
    beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
    above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    return not (beside or above)


def test_the_first_row_tells_whether_anything_is_wrong(document: Json) -> None:
    """R27: at the top are figures with colours; below them is why."""
    assert (document["panels"][0]["type"], document["panels"][0]["title"]) == ("row", "Now")
    second_row = [panel["type"] for panel in document["panels"]].index("row", 1)
    first = document["panels"][1:second_row]
    assert {panel["type"] for panel in first} == {"stat"}
    assert all(len(panel["fieldConfig"]["defaults"]["thresholds"]["steps"]) > 1 for panel in first)
    assert len(document["panels"]) > second_row + 1


def test_every_panel_says_what_is_bad(document: Json) -> None:
    """R27: whoever sees it for the first time knows what to look for."""
    silent = [panel["title"] for panel in panels(document) if "Bad:" not in panel["description"]]
    assert silent == []
    titles = [(panel["title"], panel["type"]) for panel in panels(document)]
    assert len(set(titles)) == len(titles)


def test_queries_are_understood_and_narrowed(document: Json) -> None:
    """Each is PromQL of the data source that is chosen, and of the place that is chosen."""
    for panel in panels(document):
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            named = metrics_of(filled(target["expr"]))
            assert named
            assert target["expr"].count(COMMON_LABELS) >= len(named - {"ALERTS"}), target["expr"]


def test_variables_are_declared_and_used(document: Json) -> None:
    """What can be chosen makes a difference, and no query names what cannot."""
    known = {one["name"] for one in document["templating"]["list"]}
    text = json.dumps([document["panels"], document["links"]])
    assert [name for name in sorted(known) if f"${name}" not in text and f"${{{name}}}" not in text] == []
    unknown = {word for word in _words(text) if not word.startswith("__")} - known
    assert unknown == set()


def _words(text: str) -> set[str]:
    return {one or other for one, other in re.findall(r"\$(?:{(\w+)}|(\w+))", text)}


def test_links_lead_somewhere(document: Json) -> None:
    """From any dashboard to all others and to the runbook; from the overview to the part that is late or broken."""
    kinds = {link["type"]: link for link in document["links"]}
    assert set(kinds) == {"dashboards", "link"}
    assert set(kinds["dashboards"]["tags"]) <= set(document["tags"])
    known = {dashboard.uid for dashboard in DASHBOARDS}
    led = {link["url"].removeprefix("/d/").partition("?")[0] for panel in panels(document) for link in panel["links"]}
    assert led <= known
    if document["uid"] == OVERVIEW:
        assert led == known - {OVERVIEW}
