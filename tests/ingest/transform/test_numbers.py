"""Tests of numbers as people write them, against the reference implementation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.ingest.extract import records, workbook
from penstock.ingest.supplier import SupplierColumn
from penstock.ingest.transform.values import read_column
from tests.ingest.transform import reference
from tests.ingest.transform.pipeline_runs import assert_as_expected, run_through, supplier_of

# Numbers as people write them, and texts that only look like some.
_whole = st.integers(0, 10**7).map(str) | st.integers(0, 2**70).map(str) | st.sampled_from(["", "0", "00", "007"])
_groups = st.builds(
    lambda head, tail, mark: mark.join([str(head), *(f"{part:03d}" for part in tail)]),
    st.integers(0, 1200),
    st.lists(st.integers(0, 999), max_size=3),
    st.sampled_from([",", ".", " ", "\u00a0", "\u202f", "'", "’"]),
)
_behind = st.builds(
    lambda mark, digits: mark + digits, st.sampled_from([".", ","]), st.text("0123456789", max_size=9)
) | st.sampled_from([".5", ",005", ".00499999999", ".0050", ",994999999999999", ".000000000000000000001"])
_numbers = st.builds(
    lambda *parts: "".join(parts),
    st.sampled_from(["", "", "", "-", "+", "−", "$", "руб ", "> ", ">=", "≥", "более ", "Больше", "more than ", "от."]),
    _whole | _groups,
    st.just("") | _behind,
    st.sampled_from(["", "", "", " ", "+", " ₽", "руб", " рублей", "\u00a0р.", "USD", "%", "e3", "-"]),
)
_parted = st.builds(
    lambda parts, mark, end: mark.join(parts) + end,
    st.lists(st.text("0123456789", min_size=1, max_size=4), min_size=2, max_size=4),
    st.sampled_from([" ", "\u00a0", "\u2009", "'", "  "]),
    st.sampled_from(["", ",5", ".50", ",500", " руб.", ".5 5"]),
)
_number_cells = (
    _numbers | _parted | st.text("0123456789.,-+ e'\u00a0\u202f−>≥р", max_size=12) | st.sampled_from(["", "-", "n/a"])
)
_bounds = st.none() | st.integers(-(10**4), 10**6)


@st.composite
def _number_columns(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["integer", "money", "decimal"]))
    scale = draw(st.integers(0, 9))
    return {
        "from": "cell",
        "type": kind,
        "required": draw(st.booleans()),
        "empty": draw(st.sampled_from([[], ["-", "n/a"]])),
        "default": draw(st.sampled_from([None, None, f"{7:.{scale}f}" if kind == "decimal" else 7])),
        "decimal": draw(st.sampled_from([None, ",", "."])),
        "scale": scale,
        "round": draw(st.booleans()),
        "at_least": kind == "integer" and draw(st.booleans()),
        "min": draw(_bounds),
        "max": draw(_bounds),
        "replace": draw(st.sampled_from([{}, {"%$": ""}, {"e3": "000", "р": ""}])),
        "extract": draw(st.sampled_from([None, None, None, "[0-9]+", "([0-9]+)[.,]"])),
        "max_length": draw(st.sampled_from([None, None, 5])),
        "fill_down": draw(st.booleans()),
    }


@settings(max_examples=200, deadline=None)
@given(_number_columns(), st.lists(_number_cells, min_size=1, max_size=40))
@example({"from": "cell", "type": "money", "round": True}, ["0.00499999999", "-0.005", "1,005", "1.0050"])
def test_numbers(column: dict[str, Any], cells: list[str]) -> None:
    """I18: a number has the value that people mean, or is bad; money is exact to the last digit."""
    supplier = supplier_of({"id": {"from": "id"}, "value": column}, keep_raw=True)
    assert_as_expected([["id", "cell"], *([str(number), cell] for number, cell in enumerate(cells))], supplier)


@pytest.mark.parametrize("kind", ["integer", "money", "decimal"])
@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("1 234", 1234),
        (" 1 234 ", 1234),
        ("12\u00a0345\u00a0678", 12345678),
        ("1\u2009234", 1234),
        ("1\u202f234", 1234),
        ("1'234", 1234),
        ("1’234", 1234),
        ("- 1 234", -1234),
        ("1 234 567 890 123", 1234567890123),
        ("12 345 678,00", 12345678),
        ("12 5", None),
        ("195 65", None),
        ("10 20 30", None),
        ("1 2345", None),
        ("1234 567", None),
        ("0 123", None),
        ("1  234", None),
        ("1 234 5", None),
        ("5,123 456", None),
        ("1'2", None),
        ("12\u00a05", None),
    ],
)
def test_blanks_separate_only_thousands(kind: str, cell: str, value: int | None) -> None:
    """I18: blanks are allowed only between groups of three digits; two numbers in a cell are bad."""
    column = SupplierColumn.model_validate({"from": "cell", "type": kind, "scale": 2})
    column_values = read_column(column, pl.Series([cell]), is_required=True)
    known = {"integer": value, "money": (value or 0) * 100, "decimal": f"{value}.00"}[kind]
    assert (column_values.value[0], column_values.is_bad[0]) == ((None, True) if value is None else (known, False))
    assert reference.read_value(column, cell, is_required=True)[0] == (None if value is None else known)


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("1 234,50 руб.", 123450),
        ("12 345 678,90", 1234567890),
        ("1 234.5", 123450),
        ("$ 1 234.5", 123450),
        ("5 5 ₽", None),
    ],
)
def test_money_with_blanks(cell: str, value: int | None) -> None:
    """I18: currencies and groups of thousands may be separated by blanks."""
    column = SupplierColumn.model_validate({"from": "cell", "type": "money"})
    assert read_column(column, pl.Series([cell]), is_required=True).value[0] == value
    assert reference.read_value(column, cell, is_required=True)[0] == value


NUMERIC: dict[str, dict[str, Any]] = {
    "price": {"from": "n", "type": "money", "decimal": ",", "round": True},
    "weight": {"from": "n", "type": "decimal", "scale": 3},
    "code": {"from": "n", "pattern": r"[0-9.]+", "max_length": 6},
    "size": {"from": "n", "type": "enum", "values": ["12.345", "1.5", "5"]},
    "below": {"from": "m", "type": "money", "decimal": ",", "round": True, "fill_down": True},
}


def _workbook(file: Path, rows: list[dict[str, Any]]) -> None:
    xlsxwriter = pytest.importorskip("xlsxwriter")
    with xlsxwriter.Workbook(file) as book:
        page = book.add_worksheet("one")
        for number, row in enumerate([{"n": "n", "m": "m"}, *rows]):
            page.write_row(number, 0, [row["n"], row.get("m", "")])


def _json(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text(json.dumps(rows))


def _ndjson(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize("write", [_workbook, _json, _ndjson])
def test_the_point_of_a_numeric_cell_is_decimal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, list[dict[str, Any]]], None]
) -> None:
    """I8, I18: a numeric cell keeps its value, whatever a point means in the texts of the supplier."""
    monkeypatch.setattr(records, "BATCH", 2)
    monkeypatch.setattr(workbook, "BATCH", 2)
    file = tmp_path / f"list.{'xlsx' if write is _workbook else write.__name__.strip('_')}"
    rows: list[dict[str, Any]] = [
        {"n": 12.345, "m": 12.345},
        {"n": 1.5},
        {"n": 5},
        {"n": "12.345", "m": "12.345"},
        {"n": "5"},
        {"n": 99.875},
    ]
    write(file, rows)
    supplier = supplier_of(NUMERIC, keep_raw=True, source={"format": "auto", "encoding": "auto", "delimiter": "auto"})
    output = run_through(file, supplier, tmp_path)
    facts = [json.loads(line)["payload"] for line in output.facts.path.read_text().splitlines()]
    bad = [json.loads(line) for line in output.bad.path.read_text().splitlines()]
    assert [tuple(fact[name] for name in NUMERIC) for fact in facts] == [
        (1235, "12.345", "12.345", "12.345", 1235),
        (150, "1.500", "1.5", "1.5", 1235),
        (500, "5.000", "5", "5", 1235),
        (500, "5.000", "5", "5", 1234500),
    ]
    # As a text it is ambiguous; the raw value of a number is its text.
    assert [(row["reason_code"], row["column"], row["raw_value"]) for row in bad] == [
        ("NOT_DECIMAL", "weight", "12.345"),
        ("NOT_IN_ENUM", "size", "99.875"),
    ]


def test_a_number_changed_by_replace_is_a_text(tmp_path: Path) -> None:
    """I18: a numeric cell that `replace` changes is read as a text."""
    file = tmp_path / "list.json"
    _json(file, [{"n": 12.345}])
    column = {"from": "n", "type": "money", "decimal": ".", "replace": {r"\.": ","}}
    output = run_through(file, supplier_of({"price": column}, source={"format": "json"}), tmp_path)
    assert json.loads(output.facts.path.read_text())["payload"] == {"price": 1234500}
