"""The recipes of docs/howto hold: their commands, configurations, addresses and codes are those there are."""

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from penstock.flows.config import FlowsSection
from penstock.flows.definition.loader import load_file
from penstock.flows.kinds.registry import open_catalogue
from penstock.ingest.supplier import load_supplier
from penstock.settings import load_settings
from tests.pages import ROOT, outside_blocks
from tests.support.console import blocks_of, can_be_given, penstock_words, simple_commands, typed_in

pytestmark = pytest.mark.docs

HOWTO = sorted((ROOT / "docs" / "howto").glob("*.md"))
FEWEST, MOST = 5, 8
REFERENCE = "".join(file.read_text() for folder in ("", "reference") for file in (ROOT / "docs" / folder).glob("*.md"))
CHECKS = open_catalogue(FlowsSection()).input_checks
SUPPLIER = {"min_fact_count", "max_bad_ratio", "allow_empty_snapshot"}

pages = pytest.mark.parametrize("page", HOWTO, ids=lambda page: page.stem)


@pages
def test_every_recipe_answers_a_question(page: Path) -> None:
    """Five to eight on a page, each with an example."""
    title, *recipes = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    assert title.startswith("# How to: ")
    assert FEWEST <= len(recipes) <= MOST
    assert [recipe for recipe in recipes if not recipe.partition("\n")[0].endswith("?") or not blocks_of(recipe)] == []


@pages
def test_the_commands_of_the_text_can_be_given(page: Path) -> None:
    """Commands in the text between the examples are valid too."""
    prose = outside_blocks(page.read_text())
    for code in re.findall(r"`(penstock [^`]+)`", prose):
        for words in penstock_words(" ".join(code.split())):
            can_be_given(words)


@pages
def test_every_configuration_loads_as_what_it_is(page: Path, tmp_path: Path) -> None:
    """A flow is a flow, a supplier's file one, and all else is a penstock.yaml."""
    for block in blocks_of(page.read_text()):
        if block.language == "yaml":
            _load(block.text, tmp_path / "example.yaml")


def _load(text: str, file: Path) -> None:
    file.write_text(text)
    keys = set(YAML(typ="safe").load(text))
    if "steps" in keys:
        assert load_file(file, CHECKS).steps
    elif keys >= SUPPLIER:
        load_supplier(file)
    else:
        load_settings(file, {})


@pages
def test_every_request_can_be_made(page: Path) -> None:
    """What curl asks for is a route there is, and what it sends is JSON."""
    for block in blocks_of(page.read_text()):
        for typed in typed_in(block.text) if block.language == "console" else ():
            for words in simple_commands(typed.line.replace("\\\n", "")):
                if words[:1] == ["curl"]:
                    _check_request(words)


def _check_request(words: list[str]) -> None:
    (url,) = (word for word in words if word.startswith("http://"))
    assert any(route.fullmatch("/" + url.split("/", 3)[3]) for route in ROUTES), url
    if "-d" in words:
        json.loads(words[words.index("-d") + 1])


def _routes() -> list[re.Pattern[str]]:
    paths = re.findall(r"^\| `[A-Z]+ (/[^`]*)`", (ROOT / "docs" / "reference" / "api.md").read_text(), re.MULTILINE)
    return [re.compile(re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(path))) for path in paths]


ROUTES = _routes()


@pages
def test_every_code_is_one(page: Path) -> None:
    """A code that a guide names is documented; other tests compare that documentation with the source."""
    codes = re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", outside_blocks(page.read_text()))
    assert [code for code in codes if code not in REFERENCE] == []
