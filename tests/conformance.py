"""The clauses, the tests that verify them, and the page that joins both."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
CLAUSES = ROOT / "docs" / "clauses.yaml"
PAGE = ROOT / "docs" / "conformance.md"
SHOWN = 4
FEW = 3  # a file that names more is about none of them

_NAMED = r"[A-Z]\d+(?:[–-][A-Z]\d+)?|§\d+(?:\.\d+)*"  # a clause, several in a row, or a place in a founding document
_LEAD = re.compile(rf"((?:{_NAMED})(?:, (?:{_NAMED}))*): ")
_FULL = "pytest.mark.full"
_CLAUSE = re.compile(r"([A-Z])(\d+)\b")
_INTRO = """# Conformance: guarantees and their tests

Every guarantee of Penstock is a clause with a stable id. A test that verifies a clause names it at the start of its
docstring. This page lists each clause with the tests to read first: those that verify only this clause. `make
conformance` generates it from [clauses.yaml](clauses.yaml) and the tests; a test fails if a clause has no test.
""".splitlines()

Parts = Mapping[str, Mapping[str, str]]  # the clauses of each part by id


@dataclass(frozen=True)
class Test:
    """A test and the clauses it names, as it names them; *file* is named after its place below the root."""

    __test__ = False  # to pytest it is none

    file: str
    name: str
    nth: int  # of those in its file that name the same first, and as many
    clauses: tuple[str, ...]
    of_file: tuple[str, ...]  # what the file says it is about
    is_full: bool = False  # runs in `make test-all` only


def read_clauses(file: Path = CLAUSES) -> Parts:
    """Return all clauses by part, in their order."""
    parts: Parts = YAML(typ="safe").load(file)
    return parts


def read_tests(root: Path = ROOT) -> list[Test]:
    """Return every test below *root*, by file and in the order of the source."""
    return [test for file in sorted(root.glob("tests/**/test_*.py")) for test in _tests_of(file, root)]


def named(docstring: str | None) -> tuple[str, ...]:
    """Return the clauses at the start of *docstring*, with ranges expanded; ValueError if they are ambiguous."""
    text = docstring or ""
    lead = _LEAD.match(text)
    if lead is None and _CLAUSE.match(text):
        raise ValueError(f"a colon ends the clauses a docstring names, and a comma parts them: {text}")
    return tuple(clause for word in lead[1].split(", ") for clause in _spelled_out(word)) if lead else ()


def without_a_test(parts: Parts, tests: Iterable[Test]) -> list[str]:
    """Return the clauses that no test of `make test` names."""
    kept = {clause for test in tests if not test.is_full for clause in test.clauses}
    return [clause for clauses in parts.values() for clause in clauses if clause not in kept]


def not_in_the_list(parts: Parts, tests: Sequence[Test]) -> list[str]:
    """Return the clauses that tests name and no part has, each with its test."""
    known = {clause for clauses in parts.values() for clause in clauses}
    return [f"{clause} in {test.file}::{test.name}" for test in tests for clause in test.clauses if clause not in known]


def out_of_order(parts: Parts) -> list[str]:
    """Return the parts whose clauses are not numbered 1, 2, 3 and so on."""
    return [part for part, clauses in parts.items() if list(clauses) != _numbered(next(iter(clauses)), len(clauses))]


def page(parts: Parts, tests: Sequence[Test]) -> str:
    """Return the text of docs/conformance.md."""
    keeping = {part: sum(1 for test in tests if clauses.keys() & set(test.clauses)) for part, clauses in parts.items()}
    total = sum(1 for test in tests if test.clauses)
    lines = [
        *_INTRO,
        "",
        "| part | clauses | tests |",
        "|---|---:|---:|",
        *(f"| [{part}](#{part}) | {len(clauses)} | {keeping[part]} |" for part, clauses in parts.items()),
        f"| all | {sum(map(len, parts.values()))} | {total} |",
    ]
    for part, clauses in parts.items():
        lines += ["", f"## {part}", "", f"How it works: [{part}.md]({part}.md).", ""]
        lines += ["| clause | guarantee | tests |", "|---|---|---|"]
        lines += [f"| {clause} | {text} | {_cell(clause, part, tests)} |" for clause, text in clauses.items()]
    return "\n".join(lines) + "\n"


def _tests_of(file: Path, root: Path) -> Iterator[Test]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    of_file = named(ast.get_docstring(tree))
    marks = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    before: Counter[tuple[str, int]] = Counter()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            clauses = named(ast.get_docstring(node))
            alike = ("".join(clauses[:1]), len(clauses))
            before[alike] += 1
            is_full = _FULL in map(ast.unparse, node.decorator_list) or any(
                _FULL in ast.unparse(mark) for mark in marks
            )
            yield Test(str(file.relative_to(root)), node.name, before[alike], clauses, of_file, is_full)


class ClauseCheck:
    """A pytest plugin: fail a whole run in which no test of some clause has passed, be it that all were skipped."""

    def __init__(self) -> None:
        self._passed: set[tuple[str, str]] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            file, name = report.nodeid.partition("[")[0].split("::", 1)
            self._passed.add((file, name))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._unkept = without_a_test(
            read_clauses(), (test for test in read_tests() if (test.file, test.name) in self._passed)
        )
        if self._unkept and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._unkept:
            terminalreporter.write_line(f"no test of these clauses has passed: {', '.join(self._unkept)}", red=True)


def _spelled_out(word: str) -> list[str]:
    ends = _CLAUSE.findall(word)
    if len(ends) < 2:
        return [letter + number for letter, number in ends]
    (letter, first), (other, last) = ends
    if letter != other or int(first) >= int(last):
        raise ValueError(f"no range of clauses: {word}")
    return [f"{letter}{number}" for number in range(int(first), int(last) + 1)]


def _numbered(first: str, count: int) -> list[str]:
    return [f"{first[0]}{number}" for number in range(1, count + 1)]


def _cell(clause: str, part: str, tests: Sequence[Test]) -> str:
    keeping = sorted((test for test in tests if clause in test.clauses), key=lambda test: _rank(test, clause, part))
    links = ", ".join(f"[{test.name}](../{test.file})" for test in keeping[:SHOWN])
    return links if len(keeping) <= SHOWN else f"{links} and {len(keeping) - SHOWN} more"


def _rank(test: Test, clause: str, part: str) -> tuple[object, ...]:
    """The most telling come first: about this clause, in a file about it, of its part as a whole, one of each file."""
    return (
        test.clauses[0] != clause,
        len(test.clauses),
        clause not in test.of_file[:FEW],
        not test.file.startswith(f"tests/{part}/"),
        test.file.count("/"),
        test.nth,
        test.file,
        test.name,
    )
