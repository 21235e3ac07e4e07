"""I8, I18: files through the whole pipeline, against a plain Python that does the same a cell at a time."""

import csv
import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import rfc8785
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract import delimited, records, workbook
from penstock.ingest.model import Failed
from penstock.ingest.supplier import Column, Supplier
from penstock.ingest.transform import emit, key_index
from penstock.ingest.transform import ndjson as lines
from penstock.ingest.transform.pipeline import Names, Processed, process, settle_repeated
from penstock.ingest.transform.values import typed
from tests.ingest.transform import reference

NAMES = Names("brinex_20260213T194500Z_1a2b3c", "brinex")
EVERYTHING: dict[str, dict[str, Any]] = {
    "sku": {"from": "sku", "required": True, "pattern": "[A-Z]{3}-[0-9]+", "max_length": 9},
    "name": {"from": "name", "replace": {"  +": " ", "^n/a$": ""}, "empty": ["-", "—"]},
    "brand": {"from": "brand", "case": "upper", "fill_down": True},
    "size": {"from": "name", "extract": r"R([0-9]{2})", "type": "integer", "min": 13, "max": 22},
    "qty": {"from": "qty", "type": "integer", "at_least": True, "default": 0},
    "price_minor": {"from": "price", "type": "money", "required": True, "min": 0},
    "weight": {"from": "weight", "type": "decimal", "scale": 3, "round": True, "decimal": ",", "max": 1000},
    "made": {"from": "made", "type": "date", "formats": ["%d.%m.%Y", "%d/%m/%y"]},
    "seen": {"from": "seen", "type": "datetime", "formats": ["%d.%m.%Y %H:%M"]},
    "season": {"from": "season", "type": "enum", "values": {"Зима": 1, "лето ": 2}, "default": 0},
    "used": {"from": "used", "type": "enum", "values": {"yes": True, "no": False}},
    "ключ": {"from": "colour", "type": "enum", "values": ["Red", "blue"]},
}
HEADER = ["sku", "name", "brand", "qty", "price", "weight", "made", "seen", "season", "used", "colour"]
GOOD = [
    [
        "NOK-1",
        'Tyre "x"; R13',
        "Nokian",
        "5",
        "1 234,50",
        "9,5",
        "01.02.2025",
        "01.02.2025 10:20",
        "зима",
        "Yes",
        "red",
    ],
    ["NOK-2", " Шина  R14 ", "", ">10", "90", "0,0005", "2025-03-04", "2025-03-04", "ЛЕТО", "no", "BLUE"],
    ["NOK-3", "😀\n\t R15", "Pirelli", "10+", "$1,234.5", "1.234", "5/6/25", "2025-03-04T05:06:07", "", "", ""],
    ["NOK-4", "- R16", "", "", "12.345.678,00 руб.", "12,3456", "2025-03-04T10:00", "2025-03-04 05:06", "", "", ""],
    ["NOK-5", "R22", "", "больше 30", "0", "", "", "", "", "", ""],
    ["NOK-6", "-", "ß", "-0", "99999999999999,99 р", "1000", "", "", "", "", ""],
    ["NOK-7", "n/a", "x", "1 000", "1'000,5", "999,9994", "", "", "", "", ""],
]
BAD = [
    ["", "R13", "", "1", "1", "", "", "", "", "", ""],  # no key
    ["nok-1", "R13", "", "1", "1", "", "", "", "", "", ""],
    ["NOK-123456", "R13", "", "1", "1", "", "", "", "", "", ""],
    ["NOK-8", "no size", "", "1", "1", "", "", "", "", "", ""],
    ["NOK-8", "R99", "", "1", "1", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "many", "1", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1,5", "1", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "9007199254740992", "1", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "1,234", "", "", "", "", "", ""],  # one, or a thousand?
    ["NOK-8", "R13", "", "1", "0,001", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "-1", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "1", "1000,0005", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "1", "heavy", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "1", "", "31.02.2025", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "1", "", "01.02.25", "", "", "", ""],  # not the year 25
    ["NOK-8", "R13", "", "1", "1", "", "", "noon", "", "", ""],
    ["NOK-8", "R13", "", "1", "1", "", "", "", "осень", "", ""],
    ["NOK-8", "R13", "", "1", "1", "", "", "", "", "maybe", ""],
    ["NOK-8", "R13", "", "1", "1", "", "", "", "", "", "green"],
    ["NOK-8", "R13" + "x" * 300, "", "one\n\"'\x01", "1", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "1", "", "", "", "", "", "", "torn"],
]
OTHERS = [[""], ["", " ", "\t"], ["", "", "", "", "", "", "", "", "", "", "", " "], ["Total", "R13"], ["", "Total:"]]
REPEATED = [["NOK-2", "R17", "", "1", "1"], ["NOK-1", "R18", "", "2", "2"], ["NOK-1", "R18", "", "2", "2"]]


def supplier_of(columns: dict[str, dict[str, Any]], **more: Any) -> Supplier:
    source = {"format": "csv", "encoding": "utf-8", "delimiter": ";", "header": 1, **more.pop("source", {})}
    quality = {"min_fact_count": 0, "max_bad_ratio": 1, "allow_empty_snapshot": True}
    return Supplier.model_validate({**quality, "source": source, "columns": columns, **more})


def assert_as_expected(rows: list[list[str]], supplier: Supplier) -> None:
    """*rows* through the pipeline and through the reference; the files must be the same."""
    with tempfile.TemporaryDirectory() as folder:
        made = processed(rows, supplier, Path(folder))
        wanted = reference.expected(rows, supplier, NAMES.run_id, NAMES.supplier)
        for lines, content in ((made.facts, wanted.facts), (made.bad, wanted.bad)):
            text = reference.ndjson(content)
            assert lines.path.read_bytes().decode() == text.decode()
            assert (lines.artifact.sha256, lines.artifact.size) == (hashlib.sha256(text).hexdigest(), len(text))
        reasons: dict[str, int] = {}
        for bad in wanted.bad:
            reasons[bad["reason_code"]] = reasons.get(bad["reason_code"], 0) + 1
        stats = made.stats
        assert (stats.good_rows, stats.bad_rows) == (len(wanted.facts), len(wanted.bad))
        assert (stats.blank_rows, stats.skipped_rows, stats.reasons) == (wanted.blank, wanted.skipped, reasons)


def processed(rows: list[list[str]], supplier: Supplier, folder: Path) -> Processed:
    file = folder / "list.csv"
    with file.open("w", encoding="utf-8", newline="") as content:
        csv.writer(content, delimiter=";", lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    return run_through(file, supplier, folder)


def run_through(file: Path, supplier: Supplier, folder: Path) -> Processed:
    made = Processed(folder)
    try:
        process(file, supplier, NAMES, made, lambda _rows, _part: None)
        settle_repeated(made, supplier, NAMES, folder)
    finally:
        made.close()
    return made


@pytest.mark.parametrize("keep_raw", [False, True])
@pytest.mark.parametrize("duplicate_keys", ["first", "last", "keep"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_every_type_option_and_kind_of_bad_row(
    monkeypatch: pytest.MonkeyPatch, duplicate_keys: str, *, is_cut: bool, keep_raw: bool
) -> None:
    """I8, I18: facts, bad rows and statistics are what the reference says, however the file is cut into batches."""
    if is_cut:
        monkeypatch.setattr(delimited, "PIECE", 1000)
        monkeypatch.setattr(emit, "ROWS", 5)
        monkeypatch.setattr(key_index, "PART", 4)
    more = {"key": ["sku"], "duplicate_keys": duplicate_keys, "keep_raw": keep_raw}
    supplier = supplier_of(EVERYTHING, **more, source={"skip_rows": ["^Total"]})
    assert_as_expected([HEADER, *GOOD, *OTHERS, *BAD, *GOOD[:3], *OTHERS, *REPEATED], supplier)


def test_a_repeated_key_fails_a_run_that_wants_none() -> None:
    """I18: `duplicate_keys: fail` refuses a file whose keys repeat."""
    supplier = supplier_of(EVERYTHING, key=["sku"], duplicate_keys="fail")
    with tempfile.TemporaryDirectory() as folder, pytest.raises(Failed) as failed:
        processed([HEADER, *GOOD, GOOD[0]], supplier, Path(folder))
    assert failed.value.code == FailureCode.DQ_DUPLICATE_KEYS


@given(st.lists(st.lists(st.sampled_from(["", " ", "a", "b", "Total"]), min_size=1, max_size=4), max_size=12))
def test_rows_of_any_shape(rows: list[list[str]]) -> None:
    """I18: blank, skipped, short, torn and filled rows in any order."""
    columns: dict[str, dict[str, Any]] = {
        "x": {"from": "x", "fill_down": True},
        "y": {"from": "y", "required": True},
        "z": {"from": "z"},
    }
    supplier = supplier_of(columns, keep_raw=True, source={"skip_rows": ["^Total$"]})
    assert_as_expected([["x", "y", "z"], *rows], supplier)


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
    """I18: a number is what people mean by it, or bad; money is never off by the last digit."""
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
def test_blanks_part_thousands_and_nothing_else(kind: str, cell: str, value: int | None) -> None:
    """I18: blanks inside a number are right between groups of three; two numbers in a cell are none."""
    column = Column.model_validate({"from": "cell", "type": kind, "scale": 2})
    made = typed(column, pl.Series([cell]), is_required=True)
    known = {"integer": value, "money": (value or 0) * 100, "decimal": f"{value}.00"}[kind]
    assert (made.value[0], made.is_bad[0]) == ((None, True) if value is None else (known, False))
    assert reference.value_of(column, cell, is_required=True)[0] == (None if value is None else known)


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
    """I18: a currency may stand apart, thousands may be parted by blanks."""
    column = Column.model_validate({"from": "cell", "type": "money"})
    assert typed(column, pl.Series([cell]), is_required=True).value[0] == value
    assert reference.value_of(column, cell, is_required=True)[0] == value


FIGURES: dict[str, dict[str, Any]] = {
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
def test_the_point_of_a_number_is_no_mark_of_thousands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, list[dict[str, Any]]], None]
) -> None:
    """I8, I18: what is a number in the file stays that number, whatever its supplier's texts mean by a point."""
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
    supplier = supplier_of(FIGURES, keep_raw=True, source={"format": "auto", "encoding": "auto", "delimiter": "auto"})
    made = run_through(file, supplier, tmp_path)
    facts = [json.loads(line)["payload"] for line in made.facts.path.read_text().splitlines()]
    bad = [json.loads(line) for line in made.bad.path.read_text().splitlines()]
    assert [tuple(fact[name] for name in FIGURES) for fact in facts] == [
        (1235, "12.345", "12.345", "12.345", 1235),
        (150, "1.500", "1.5", "1.5", 1235),
        (500, "5.000", "5", "5", 1235),
        (500, "5.000", "5", "5", 1234500),
    ]
    # As a text it could be two weights; and of a number it is told what stood there.
    assert [(one["reason_code"], one["column"], one["raw_value"]) for one in bad] == [
        ("NOT_DECIMAL", "weight", "12.345"),
        ("NOT_IN_ENUM", "size", "99.875"),
    ]


def test_who_replaces_in_a_number_has_a_text(tmp_path: Path) -> None:
    """I18: a number in which something is replaced is read as the text that makes."""
    file = tmp_path / "list.json"
    _json(file, [{"n": 12.345}])
    column = {"from": "n", "type": "money", "decimal": ".", "replace": {r"\.": ","}}
    made = run_through(file, supplier_of({"price": column}, source={"format": "json"}), tmp_path)
    assert json.loads(made.facts.path.read_text())["payload"] == {"price": 1234500}


_dates = st.dates().map(lambda day: day.strftime("%d.%m.%Y")) | st.builds(
    "{:02d}.{:02d}.{:04d}".format, st.integers(0, 40), st.integers(0, 13), st.integers(0, 9999)
)
_moments = st.builds(
    lambda moment, end: moment.replace(microsecond=0).isoformat() + end,
    st.datetimes(),
    st.sampled_from(["", "", "Z", ".000", ".999999Z", "+03:00", "-0000", "z"]),
) | st.datetimes().map(lambda moment: moment.strftime("%d.%m.%Y %I:%M %p"))
_day_cells = (
    _dates | _moments | st.dates().map(str) | st.sampled_from(["", "2025-02-30", "2025-02-28 noon", "01/31/2025"])
)
_forms = st.lists(
    st.sampled_from(["%d.%m.%Y", "%m/%d/%Y", "%Y-%m-%dT%H:%M:%S", "%d.%m.%Y %I:%M %p", "%Y-%m-%dT%T", "%d.%m.%Y %R"]),
    unique=True,
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["date", "datetime"]), _forms, st.lists(_day_cells, min_size=1, max_size=20))
def test_dates(kind: str, forms: list[str], cells: list[str]) -> None:
    """I18: the first format that fits tells the day; a day that is none is bad."""
    column = {"from": "cell", "type": kind, "formats": forms, "required": True}
    supplier = supplier_of({"id": {"from": "id"}, "value": column}, keep_raw=True)
    assert_as_expected([["id", "cell"], *([str(number), cell] for number, cell in enumerate(cells))], supplier)


@pytest.mark.parametrize(
    ("form", "cell", "value"),
    [
        ("%d.%m.%Y %I:%M %p", "04.03.2025 09:34 PM", "2025-03-04T21:34:00"),
        ("%d.%m.%Y %l:%M %P", "04.03.2025 9:34 pm", "2025-03-04T21:34:00"),
        ("%d.%m.%Y %R", "04.03.2025 21:34", "2025-03-04T21:34:00"),
        ("%d.%m.%Y %T", "04.03.2025 21:34:56", "2025-03-04T21:34:56"),
        ("%d.%m.%Y %X", "04.03.2025 21:34:56", "2025-03-04T21:34:56"),
        ("%c", "Tue Mar  4 21:34:56 2025", "2025-03-04T21:34:56"),
        ("%s", "1741124096", "2025-03-04T21:34:56"),
        ("%d.%m.%Y", "04.03.2025", "2025-03-04T00:00:00"),
        (None, "2025-03-04T21:34:56.789", "2025-03-04T21:34:56"),
        (None, "2025-03-04 21:34:56.999999Z", "2025-03-04T21:34:56"),
        (None, "2025-03-04T21:34Z", "2025-03-04T21:34:00"),
        (None, "2025-03-04T21:34:56Z", "2025-03-04T21:34:56"),
        (None, "2025-03-04T21:34:56+03:00", None),
        (None, "2025-03-04T21:34:56+00:00", None),
        (None, "2025-03-04T21:34.5", None),
        (None, "2025-03-04Z", None),
    ],
)
def test_a_moment_keeps_its_time(form: str | None, cell: str, value: str | None) -> None:
    """I18: however a format spells the time, it is kept, to the second; a time of another zone is bad."""
    column = {"from": "cell", "type": "datetime", "formats": [form] if form else []}
    made = typed(Column.model_validate(column), pl.Series([cell]), is_required=True)
    assert (made.value[0], made.is_bad[0]) == (value, value is None)
    as_date = typed(Column.model_validate({**column, "type": "date"}), pl.Series([cell]), is_required=True)
    assert as_date.value[0] == "2025-03-04" or value is None


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("%Y-%m-%dT%H:%M:%S%z", "%z is a time zone"),
        ("%d.%m.%Y %H:%M %Z", "%Z is a time zone"),
        ("%d.%m.%Y %H:%M %:z", "%:z is a time zone"),
        ("%+", "%+ is a time zone"),
        ("%d.%m.%Y %Q", "reads no date"),
        ("%d.%m.%Y %", "reads no date"),
        ("%d.%m", "reads no date"),
        ("%H:%M", "reads no date"),
        ("%d.%m.%Y %I:%M", "reads no date"),
        ("%d.%m.%Y %H", "reads no date"),
        ("dd.mm.yyyy", "reads no date"),
        ("", "reads no date"),
    ],
)
def test_a_format_that_reads_no_date_is_refused(form: str, said: str) -> None:
    """I18: when the configuration is read, not when the file is; time zones are never converted unasked."""
    with pytest.raises(ValidationError, match=re.escape(said)):
        Column.model_validate({"from": "cell", "type": "datetime", "formats": ["%d.%m.%Y", form]})


@pytest.mark.parametrize("form", ["%d.%m.%y", "%Y%m%d", "%e %b %Y", "%-d/%-m/%Y", "%%%d.%m.%Y г.", "%D %r", "%j %Y"])
def test_a_format_that_reads_what_it_writes_is_right(form: str) -> None:
    """I18: whatever strftime writes a whole date with."""
    assert Column.model_validate({"from": "cell", "type": "date", "formats": [form]}).formats == [form]


_words = st.text("abБб \t-\u00a0", max_size=6)


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "type": st.just("string"),
            "required": st.booleans(),
            "empty": st.sampled_from([[], ["-"], ["a", "б"]]),
            "default": st.sampled_from([None, "none"]),
            "case": st.sampled_from([None, "upper", "lower"]),
            "replace": st.sampled_from([{}, {"^$": "a"}, {"[ -]+": " ", "b": ""}]),
            "extract": st.sampled_from([None, "[ab]+", "a(.*)", "(?:a|b) +"]),
            "pattern": st.sampled_from([None, "[ab]*", "a|b", ".*"]),
            "max_length": st.sampled_from([None, 3]),
            "fill_down": st.booleans(),
        }
    )
    | st.fixed_dictionaries(
        {
            "type": st.just("enum"),
            "required": st.booleans(),
            "default": st.none(),
            "values": st.sampled_from([["a", "б", "a b"], {"A": 1, "ab": 2}, {"a": True, "b": False}]),
        }
    ),
    st.lists(_words, min_size=1, max_size=20),
)
def test_texts_and_enums(column: dict[str, Any], cells: list[str]) -> None:
    """I18: texts are trimmed, replaced, extracted, cased and checked in that order."""
    supplier = supplier_of({"id": {"from": "id"}, "value": {"from": "cell", **column}}, keep_raw=True)
    assert_as_expected([["id", "cell"], *([str(number), cell] for number, cell in enumerate(cells))], supplier)


# A file with a NUL in it is no text, and refused.
_any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(_any_text.filter(bool), _any_text, min_size=1, max_size=6),
    st.lists(st.integers(-(2**53) + 1, 2**53 - 1), min_size=1, max_size=1),
)
@example({"\U0001f600": "a", "\uffee": "b", 'quo"te': "\x01\x1f\x7f", "\u2028": '\\/"\b\f\n\r\t'}, [0])
def test_a_row_id_is_the_hash_of_canonical_json(texts: dict[str, str], numbers: list[int]) -> None:
    """I8: row_id is the sha256 of what RFC 8785 makes of the payload, whatever is in it."""
    payload: dict[str, Any] = {name: reference.stripped(text) or None for name, text in texts.items()}
    payload |= {f"number {place}": number for place, number in enumerate(numbers)}
    columns = {name: {"from": f"c{place}"} for place, name in enumerate(texts)}
    columns |= {f"number {place}": {"from": f"n{place}", "type": "integer"} for place in range(len(numbers))}
    # A file of little more than control characters is no text, so there is some.
    header = [*(str(column["from"]) for column in columns.values()), "text" * 10_000]
    with tempfile.TemporaryDirectory() as folder:
        made = processed([header, [*texts.values(), *map(str, numbers)]], supplier_of(columns), Path(folder))
        line = made.facts.path.read_bytes()
    canonical = rfc8785.dumps(payload)
    assert line.endswith(b',"row_number":2,"payload":' + canonical + b"}\n")
    assert f'"row_id":"{hashlib.sha256(canonical).hexdigest()}"'.encode() in line


@given(st.lists(st.integers(0, 60), max_size=300), st.booleans())
def test_repeated_keys_are_found_in_parts(keys: list[int], keeps_last: bool) -> None:
    """I18, I19: an index of many parts finds the repeated keys that one of one part finds."""
    step = -1 if keeps_last else 1
    kept = set({key: place for place, key in [*enumerate(keys)][::-step]}.values())
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_index, "PART", 10)
        made = key_index.Index(Path(folder) / "index")
        for begun in range(0, len(keys), 7):
            numbers = pl.DataFrame({"key": keys[begun : begun + 7]}, schema={"key": pl.UInt64})
            made.add(numbers.select(pl.col("key").hash(seed).alias(name) for seed, name in enumerate("abr")))
        found = key_index.repeated(made, keeps_last=keeps_last)
    assert found.to_list() == [place for place in range(len(keys)) if place not in kept]


_facts = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=40)


@given(_facts, _facts, st.booleans())
def test_repeated_facts_are_compared_with_their_number(
    before: list[tuple[int, int]], after: list[tuple[int, int]], is_keyed: bool
) -> None:
    """I21: equal facts pair off first, in any order, then those with the same key; the rest came or went."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_index, "PART", 10)
        old, new = (_indexed(Path(folder) / name, facts, is_keyed) for name, facts in (("old", before), ("new", after)))
        found = key_index.difference(old, new)
    same = Counter(before) & Counter(after)
    gone, come = (Counter(facts) - same for facts in (before, after))
    keys = [Counter(key for key, _ in facts.elements()) for facts in (gone, come)]
    changed = (keys[0] & keys[1]).total() if is_keyed else 0
    counts = [sum(map(len, places)) for places in (found.added, found.removed, found.changed)]
    assert [*counts, found.unchanged] == [come.total() - changed, gone.total() - changed, changed, same.total()]
    told = Counter(after[place] for place in key_index.together([*found.added, *found.changed]))
    assert (told, Counter(before[place] for place in key_index.together(found.removed)) - gone) == (come, Counter())


def _indexed(folder: Path, facts: list[tuple[int, int]], is_keyed: bool) -> key_index.Index:
    made = key_index.Index(folder)
    for begun in range(0, len(facts), 7):
        rows = pl.DataFrame(
            facts[begun : begun + 7], schema={"key": pl.String, "content": pl.String}, orient="row", strict=False
        )
        made.add(
            rows.select(lines.hashes([pl.col("key")] if is_keyed else [], pl.concat_str("key", pl.lit(" "), "content")))
        )
    return made


@given(*(st.lists(st.text("a1\x1f", max_size=4), min_size=3, max_size=3) for _ in range(2)))
@example(["a\x1f", "b", ""], ["a", "\x1fb", ""])
def test_keys_of_different_fields_differ(one: list[str], other: list[str]) -> None:
    """I18, I19: whatever stands in the fields of a key, other fields make another key."""
    keys = pl.DataFrame([one, other], schema=["x", "y", "z"], orient="row")
    made = keys.select(lines.hashes([pl.col("x"), pl.col("y"), pl.col("z")], pl.lit("")))
    assert (made.row(0) == made.row(1)) == (one == other)


def test_a_column_knows_its_options() -> None:
    """I18: who adds an option to a column also adds it here."""
    tried = {"source", "type", "required", "empty", "default", "case", "replace", "extract", "pattern", "values"}
    tried |= {"formats", "decimal", "scale", "round", "at_least", "min", "max", "max_length", "fill_down"}
    assert set(Column.model_fields) == tried
