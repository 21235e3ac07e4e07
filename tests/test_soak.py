"""Every test that has a long form is a campaign of `make soak`, and the page of the campaigns keeps its rows."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import soak, soak_report
from tests.support.soak import DIVISOR, SETTINGS, SOAK, Campaign, divide_examples
from tests.support.soak_report import SoakReport, make_page, read_page

ROOT = Path(__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_unmarked(source: str) -> Iterator[str]:
    """Yield the tests of a module that ask for the number of their rounds and are not marked as campaigns."""
    tree = ast.parse(source)
    if not any(isinstance(node, ast.ImportFrom) and node.module == "tests.support.soak" for node in tree.body):
        return
    sized = {"examples", "model_examples", *(name for node in tree.body for name in _sized_names(node))}
    for node in tree.body:
        if isinstance(node, Function) and node.name.startswith("test_"):
            marks = {ast.unparse(decorator) for decorator in node.decorator_list}
            if _names(node) & sized and "pytest.mark.soak" not in marks:
                yield node.name


def _sized_names(node: ast.stmt) -> list[str]:
    """Return the constants that an assignment makes of a number of rounds."""
    if not isinstance(node, ast.Assign) or not _names(node.value) & {"examples", "model_examples"}:
        return []
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def _names(node: ast.AST) -> set[str]:
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


def test_every_test_with_a_long_form_is_a_campaign() -> None:
    """A long form that `make soak` does not select never runs."""
    files = sorted(ROOT.glob("**/test_*.py"))
    assert {file.name: found for file in files if (found := list(find_unmarked(file.read_text())))} == {}


def test_an_unmarked_long_form_is_found() -> None:
    """In a decorator, in the body, or by way of a constant."""
    source = """
from tests.support.soak import examples
ROUNDS = examples(1, soak=9)
@settings(max_examples=examples(1, soak=2))
def test_decorated(): ...
@pytest.mark.soak
def test_marked(): examples(1, soak=2)
async def test_body(): range(examples(1, soak=2))
def test_constant(): range(ROUNDS)
def test_model(): model_examples(1, soak=2)
def test_plain(): ...
"""
    assert list(find_unmarked(source)) == ["test_decorated", "test_body", "test_constant", "test_model"]


def test_a_run_tries_a_part_of_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them in `make test`, rounded up; the cases of a parametrised test share a function, divided once."""

    @settings(max_examples=7)
    @given(st.integers())
    def test(_number: int) -> None: ...

    monkeypatch.delenv(SOAK, raising=False)
    monkeypatch.setenv(DIVISOR, "2")
    for _case in range(2):
        divide_examples(SimpleNamespace(obj=test))  # type: ignore[arg-type]
    assert getattr(test, SETTINGS).max_examples == 4
    assert soak.model_examples(25, soak=1_000) == 13
    monkeypatch.setenv(SOAK, "1")
    assert soak.model_examples(25, soak=1_000) == 1_000


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "soak.md"
    monkeypatch.setattr(soak_report, "PAGE", file)
    monkeypatch.setattr(soak_report, "_commit", lambda: "abc")
    return file


class Terminal:
    """Take the place of pytest's terminal reporter."""

    def __init__(self) -> None:
        self.text = ""

    def write_line(self, line: str) -> None:
        self.text += line


def run(outcome: str, name: str, campaign: Campaign) -> SoakReport:
    """Return a report that has seen one campaign end."""
    report = SoakReport()
    figures = {"rounds": campaign.rounds, "faults": campaign.faults, "counts_items": campaign.counts_items}
    for when, properties in (("setup", []), ("call", []), ("teardown", [("campaign", figures)])):
        ended = outcome if when == "call" else "passed"
        report.pytest_runtest_logreport(
            pytest.TestReport(name, ("f", 1, ""), {}, ended, "what went wrong", when, [], 12.3, 0, 1, properties)  # type: ignore[arg-type]
        )
    return report


def test_a_piece_keeps_the_rows_of_the_others(page: Path) -> None:
    """`make soak ONLY=…` replaces the rows of its campaigns, and prints these alone."""
    for name, rounds in (("tests/a/test_x.py::test_one", 1), ("tests/a/test_x.py::test_two", 1_234)):
        terminal = Terminal()
        report = run("passed", name, Campaign(rounds, faults=3, counts_items=True))
        report.pytest_terminal_summary(terminal)  # type: ignore[arg-type]
    rows = read_page(page.read_text())
    assert list(rows) == ["a/test x: one", "a/test x: two"]
    assert rows["a/test x: two"] | {"date": ""} == {
        "campaign": "a/test x: two",
        "rounds": "1,234",
        "faults": "3",
        "lost": "0",
        "doubled": "0",
        "seconds": "12",
        "result": "passed",
        "commit": "abc",
        "date": "",
    }
    assert "one" not in terminal.text
    assert make_page(rows) == page.read_text()


def test_a_campaign_that_fails_claims_nothing(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was lost is in its failure; the page, written when the campaign ends, does not say that nothing was."""
    run("failed", "tests/a/test_x.py::test_one", Campaign(7, counts_items=True))
    assert "what went wrong" in capsys.readouterr().out
    row = read_page(page.read_text())["a/test x: one"]
    assert (row["result"], row["lost"], row["doubled"], row["rounds"]) == ("failed", "?", "?", "≤ 7")
