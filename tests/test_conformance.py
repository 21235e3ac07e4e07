"""Every clause has a test, and docs/conformance.md says which."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance import (
    PAGE,
    ROOT,
    Parts,
    Test,
    named,
    not_in_the_list,
    out_of_order,
    page,
    read_clauses,
    read_tests,
    without_a_test,
)

PARTS: Parts = {"tracking": {"T1": "One thing.", "T2": "Another."}, "flows": {"F1": "A third."}}


def kept(name: str, *clauses: str, file: str = "tests/tracking/test_it.py", nth: int = 1) -> Test:
    return Test(file, name, nth, clauses, ())


def test_every_clause_has_a_test() -> None:
    """What is promised is tried."""
    assert without_a_test(read_clauses(), read_tests()) == []


def test_no_test_names_a_clause_that_is_not_in_the_list() -> None:
    """A name means something, and is not misspelt."""
    assert not_in_the_list(read_clauses(), read_tests()) == []


def test_clauses_are_numbered_without_a_gap() -> None:
    """A clause is not forgotten, nor does it go quietly."""
    assert out_of_order(read_clauses()) == []


def test_the_page_is_what_the_tests_say(tmp_path: Path) -> None:
    """The page is generated: `make conformance`."""
    subprocess.run([sys.executable, ROOT / "scripts" / "conformance", tmp_path / "page"], check=True, timeout=60)
    assert PAGE.read_text() == (tmp_path / "page").read_text(), "out of date: run `make conformance`"


def test_a_clause_without_a_test_is_found() -> None:
    """A clause that is named beside another counts; a clause without a test is reported."""
    assert without_a_test(PARTS, [kept("test_a", "F1", "T1")]) == ["T2"]
    assert without_a_test(PARTS, [kept("test_a", "F1", "T1"), kept("test_b", "T2")]) == []


def test_a_clause_that_only_make_test_all_tries_is_found() -> None:
    """`make test` alone tries every promise."""
    rare = Test("tests/tracking/test_it.py", "test_b", 1, ("T2",), (), is_full=True)
    assert without_a_test(PARTS, [kept("test_a", "F1", "T1"), rare]) == ["T2"]


def test_an_unknown_clause_is_found() -> None:
    """With who names it."""
    assert not_in_the_list(PARTS, [kept("test_a", "T1"), kept("test_b", "T2", "T3")]) == [
        "T3 in tests/tracking/test_it.py::test_b"
    ]


@pytest.mark.parametrize("clauses", [["T1", "T3"], ["T2", "T3"], ["T1", "F2"], ["T2", "T1"]])
def test_a_gap_is_found(clauses: list[str]) -> None:
    """In the middle or at the beginning; a clause of another part; another order."""
    assert out_of_order({"tracking": dict.fromkeys(clauses, "It is so.")}) == ["tracking"]


@pytest.mark.parametrize(
    ("docstring", "clauses"),
    [
        ("T13: a worker with an expired lease is notified.", ["T13"]),
        ("R11, R13: of two at once one counts: the first.", ["R11", "R13"]),
        ("F1–F3, F14: over a range.", ["F1", "F2", "F3", "F14"]),
        ("I10-I12: with another dash.", ["I10", "I11", "I12"]),
        ("I12, §12.2, §13: beside the places of a document.", ["I12"]),
        ("§10, I8: behind one.", ["I8"]),
        ("§15: of a document alone.", []),
        ("It names none, though T1: comes later.", []),
        ("UTF8: is no clause.", []),
        (None, []),
    ],
)
def test_a_docstring_names_clauses(docstring: str | None, clauses: list[str]) -> None:
    """At its beginning, up to the colon; a range is each of them."""
    assert named(docstring) == tuple(clauses)


@pytest.mark.parametrize(
    "docstring", ["T1 is so.", "T1 T2: both.", "T1.", "T1, and T2: both.", "T3–T1: all.", "T1–F3: all."]
)
def test_a_malformed_clause_is_an_error(docstring: str) -> None:
    """An unknown clause would count for nothing without a notice."""
    with pytest.raises(ValueError, match="T1"):
        named(docstring)


def test_tests_are_found(tmp_path: Path) -> None:
    """Functions that pytest calls, of every folder; what they use is none."""
    file = tmp_path / "tests" / "deep" / "test_it.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        '"""T2: the file."""\n'
        '@pytest.mark.full\ndef test_one() -> None:\n    """T1: one."""\n'
        'async def test_two() -> None:\n    """T1, T2: two."""\n'
        "def test_three() -> None: ...\n"
        'def test_four() -> None:\n    """T1: four."""\n'
        '@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.full)])\n'
        'def test_five(a: int) -> None:\n    """T1: five; one of its cases runs in `make test`."""\n'
        'def harness() -> None:\n    """T3: no test."""\n'
    )
    (file.parent / "rig.py").write_text(file.read_text())
    where = "tests/deep/test_it.py"
    assert read_tests(tmp_path) == [
        Test(where, "test_one", 1, ("T1",), ("T2",), is_full=True),
        Test(where, "test_two", 1, ("T1", "T2"), ("T2",)),
        Test(where, "test_three", 1, (), ("T2",)),
        Test(where, "test_four", 2, ("T1",), ("T2",)),
        Test(where, "test_five", 3, ("T1",), ("T2",)),
    ]


def test_the_most_telling_tests_come_first() -> None:
    """About this clause alone, of its part as a whole, one of each file; then how many more there are."""
    tests = [
        kept("test_beside", "F1", "T1"),
        kept("test_also", "T1", "T2"),
        kept("test_elsewhere", "T1", file="tests/kernel/test_it.py"),
        kept("test_deep", "T1", file="tests/tracking/deep/test_it.py"),
        kept("test_first", "T1"),
        kept("test_second", "T1", nth=2),
        kept("test_other_file", "T1", file="tests/tracking/test_other.py"),
    ]
    (row,) = (line for line in page(PARTS, tests).splitlines() if line.startswith("| T1 "))
    assert row == (
        "| T1 | One thing. | [test_first](../tests/tracking/test_it.py), "
        "[test_other_file](../tests/tracking/test_other.py), [test_second](../tests/tracking/test_it.py), "
        "[test_deep](../tests/tracking/deep/test_it.py) and 3 more |"
    )
