"""The hints of `penstock status` are commands that exist, each on a line of its own."""

import ast
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.cli.main import app
from penstock.cli.suggestion import split_hint
from tests.pages import ROOT

SOURCE = ROOT / "src" / "penstock"
MODULES = [*sorted(SOURCE.glob("*/status.py")), SOURCE / "app" / "programs.py"]  # programs: the hints for dead letters


def texts(module: Path) -> Iterator[str]:
    """Yield the strings of *module*, with `x` for each value that is filled in."""
    nested: set[ast.AST] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.JoinedStr):
            nested.update(ast.walk(node))
            values = node.values
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in nested:
            yield node.value


def is_command(words: list[str]) -> bool:
    """Return true if `penstock` accepts *words*."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("penstock", ["--help"], resilient_parsing=True)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
    try:
        command.parse_args(context, words)
    except Exception:  # noqa: BLE001 - the parser has its own class of errors
        return False
    return not getattr(command, "commands", {})


@pytest.mark.parametrize("module", [module for module in MODULES if module.parent.name != "kernel"], ids=str)
def test_every_step_of_a_hint_is_text_or_a_command(module: Path) -> None:
    """T16: a step that names a command is nothing else, so that its line can be pasted; the command exists."""
    hints = [text for text in texts(module) if "penstock " in text and not text.startswith('"""')]
    steps = [step for hint in hints for step in split_hint(hint) if "penstock " in step and "`" not in step]
    assert steps or module.parent.name in ("cli", "overview")
    wrong = [step for step in steps if not is_command(shlex.split(step.removeprefix("penstock ").partition(" > ")[0]))]
    assert wrong == []
    assert [step for step in steps if not step.startswith("penstock ")] == []


def test_steps_get_the_address_of_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """T16: a suggested command works in any folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    hint = "fix the cause; then penstock flow retry r-1; penstock doctor"
    assert split_hint(hint, url="there:9000") == [
        "fix the cause",
        "penstock flow retry r-1 --url http://there:9000",
        "penstock doctor",
    ]
