"""The capacity guide says what was measured, and the SRE checklist names what there is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from benchmarks.__main__ import GROUPS

from benchmarks import capacity_docs
from penstock.cli.main import app

ROOT = Path(__file__).parents[2]
CHECKLIST = ROOT / "docs" / "deploy" / "sre-checklist.md"
REPORT = json.loads(capacity_docs.FIGURES.read_text())
PAGE = capacity_docs.PAGE.read_text()


def test_the_tables_are_what_was_measured() -> None:
    """R27: every table of the guide, and its example, is what the file of figures gives."""
    assert capacity_docs.render(PAGE, REPORT) == PAGE


def test_every_figure_is_in_a_table() -> None:
    """R27: nothing that was measured is left out, and each kind of figure has its place."""
    assert {figure["name"].partition(": ")[0] for figure in REPORT["figures"]} == {*capacity_docs.SECTIONS}


@pytest.mark.parametrize("section", capacity_docs.SECTIONS)
def test_every_table_names_the_command_that_measures_it(section: str) -> None:
    """R27: every figure can be measured again: the command selects exactly the rows of the table."""
    (block,) = re.findall(rf"<!-- figures: {section} -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    (group, only) = re.findall(r"`python -m benchmarks (\S+) --only (\S+)`", block)[0]
    chosen = [figure["name"] for figure in REPORT["figures"] if only in figure["name"]]
    assert group in GROUPS
    assert {name.split(": ")[1] for name in chosen} == set(re.findall(r"^\| ([^|]+?) \|", block, re.MULTILINE)[2:])
    assert all(name.startswith(f"{section}: ") for name in chosen)


@pytest.mark.parametrize("page", [capacity_docs.PAGE, CHECKLIST], ids=lambda page: page.stem)
def test_commands_that_are_named_exist(page: Path) -> None:
    """R27: what the pages tell to run, of the program and of make, is there."""
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", " ".join(_code(text)))) <= targets
    for words in re.findall(r"\bpenstock ([a-z][a-z -]*)", "\n".join(_code(text))):
        assert _is_command(words.split()), words


def _code(text: str) -> list[str]:
    """Return the text in backticks and in terminal blocks."""
    block = r"```console\n(.*?)```"
    return [*re.findall(block, text, re.DOTALL), *re.findall(r"`([^`]+)`", re.sub(block, "", text, flags=re.DOTALL))]


def _is_command(words: list[str]) -> bool:
    """Whether the words begin with a command that can be run."""
    found: Any = typer.main.get_command(app)
    for word in words:
        if not hasattr(found, "commands"):
            break
        if word not in found.commands:
            return False
        found = found.commands[word]
    return not hasattr(found, "commands")
