"""The reference is what the code says, and leaves nothing out."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from docs.generators.configuration import below
from docs.generators.metrics import all_metrics
from docs.generators.pages import generated
from pydantic import BaseModel

from penstock.cli import main
from penstock.flows.definition.spec import FlowSpec
from penstock.ingest.supplier import Supplier
from penstock.settings import Settings

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@cache
def written() -> dict[str, str]:
    """What the code says now."""
    return generated()


@pytest.mark.full
def test_what_is_generated_is_up_to_date() -> None:
    """R27: the reference and the pictures are as the code has them, and nothing else is beside them."""
    files = [*(DOCS / "reference").iterdir(), *(DOCS / "images" / "machines").iterdir()]
    kept = {str(file.relative_to(DOCS)): file.read_text() for file in files}
    assert sorted(kept) == sorted(written())
    assert [place for place, text in written().items() if kept[place] != text] == [], "run `make reference`"


@pytest.mark.parametrize("model", [Settings, Supplier, FlowSpec])
def test_every_key_says_what_it_is_for(model: type[BaseModel]) -> None:
    """Every key has a description, every section a docstring, on whatever level."""
    assert [".".join(place) for place, description in _keys(model, ()) if not description] == []


def _keys(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str | None]]:
    for name, field in model.model_fields.items():
        place = (*path, field.alias or name)
        inner = list(below(field.annotation, place))
        for nested, path in inner:
            yield path, nested.__doc__
            yield from _keys(nested, path)
        if not inner:
            yield place, field.description


@pytest.mark.full
def test_every_command_is_documented() -> None:
    """The page of the command line has a heading for every command, and each of its options."""
    page = written()["reference/cli.md"]
    documented = dict(re.findall(r"^##+ (penstock .+)\n((?:(?!##).*\n)*)", page, re.MULTILINE))
    lost = [
        (name, option)
        for name, command in _leaves("penstock", typer.main.get_command(main.app))
        for param in command.params
        for option in param.opts
        if name not in documented or (option.startswith("-") and option not in documented[name])
    ]
    assert lost == []
    assert len(documented) > 70


def _leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    if not inner:
        yield name, command
    for word, command in inner.items():
        yield from _leaves(f"{name} {word}", command)


def test_every_code_is_documented() -> None:
    """Every code that the source raises is on the page of codes."""
    page = written()["reference/reason-codes.md"]
    raised = re.compile(r"raise [A-Z]\w+\(\s*\"([A-Z][A-Z_]+)\"")
    files = [file for file in (ROOT / "src" / "penstock").rglob("*.py") if "harvest/simulator" not in file.as_posix()]
    codes = {code for file in files for code in raised.findall(file.read_text())}
    assert len(codes) > 200
    assert sorted(code for code in codes if f"`{code}`" not in page) == []


def test_the_metrics_are_those_of_the_manual() -> None:
    """R26: the reference has just the metrics, and the labels, that running processes were seen to tell."""
    manual = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (DOCS / "deploy" / "monitoring.md").read_text(), re.MULTILINE)
    seen = {name: labels.replace("`", "").strip() for name, labels in manual if not name.startswith("process_")}
    documented = [metric for part in all_metrics().values() for metric in part]
    assert {metric.name: ", ".join(sorted(metric.labels)) for metric in documented} == seen
    assert all(metric.about for metric in documented)
