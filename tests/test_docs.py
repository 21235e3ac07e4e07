"""What the documents say is so."""

import re
from pathlib import Path

import pytest
from docs.generators.diagram import draw
from docs.generators.machines import MACHINES as DRAWN

from penstock.refdata.config import RefdataSection
from penstock.refdata.model import UPDATE
from penstock.settings import load_settings
from penstock.tracking.contract import Stage
from penstock.tracking.model import MACHINES
from tests.pages import PAGES, ROOT, anchors_of, drawn_in, links_of
from tests.support.console import can_be_given, commands_of

pytestmark = pytest.mark.docs

UUID = "7ef99bd5-ee13-431b-97dc-acc98839b450"
FILLED_IN = {"EVENT_ID": UUID, "RUN": UUID, "SHARD": "0"}  # what runbooks leave to the reader


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page is a file of the repository, and after a `#` a heading of it."""
    lost = []
    for link in links_of(page):
        target, _, anchor = link.partition("#")
        place = page.parent / target if target else page
        if not place.exists() or (anchor and anchor not in anchors_of(place)):
            lost.append(link)
    assert lost == []


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_line_can_be_given(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `penstock …` that a page types is a command, with options it knows and values it takes."""
    monkeypatch.chdir(ROOT)
    for words in commands_of(page.read_text()):
        can_be_given([FILLED_IN.get(word, word) for word in words])


@pytest.mark.parametrize("stage", Stage)
def test_the_diagram_of_tracking_is_the_machines(stage: Stage) -> None:
    """T8: what docs/tracking.md draws is what the code declares."""
    (drawn,) = drawn_in((ROOT / "docs" / "tracking.md").read_text())
    assert draw(MACHINES[stage], "stage") == draw(drawn, "stage")


def test_the_diagram_of_refdata_is_the_machine() -> None:
    """R7: what docs/refdata.md draws is what the code declares."""
    assert drawn_in((ROOT / "docs" / "refdata.md").read_text()) == [UPDATE]


def test_the_concepts_show_every_machine() -> None:
    """docs/concepts.md has the picture of each, once."""
    shown = drawn_in((ROOT / "docs" / "concepts.md").read_text())
    assert sorted(machine.name for machine in shown) == sorted(alike[0].name for alike in DRAWN.values())


@pytest.mark.parametrize(("page", "examples"), [("refdata.md", 2), ("pods.md", 1)])
def test_refdatas_configuration_is_valid(tmp_path: Path, page: str, examples: int) -> None:
    """R1: the examples in the documents load as they stand."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    for block in blocks:
        (tmp_path / "penstock.yaml").write_text(block)
        assert load_settings(tmp_path / "penstock.yaml", {}).refdata != RefdataSection()
    assert len(blocks) == examples
