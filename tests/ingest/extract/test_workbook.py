"""Tests of workbooks in all formats."""

from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import pytest
import xlsxwriter  # type: ignore[import-untyped]
import xlwt  # type: ignore[import-untyped]

from penstock.ingest.contract import FailureCode
from tests.ingest.extract.workbooks import Sheets, ods, write_ods_xml, xlsb
from tests.ingest.extraction import STOCK, extract_file, make_supplier, read_refusal, read_tables

pytestmark = pytest.mark.server  # a workbook is read in a process of its own

A = {"sku": "A", "qty": 1, "price_minor": 1050}
B = {"sku": "B", "qty": 2, "price_minor": 700}
HEADER = ["sku", "qty", "price"]
ROWS: list[list[Any]] = [HEADER, ["A", 1, 10.5], ["B", 2, 7]]


def xlsx(file: Path, sheets: Sheets) -> Path:
    with xlsxwriter.Workbook(file) as book:
        for name, rows in sheets.items():
            sheet = book.add_worksheet(name)
            for number, row in enumerate(rows):
                sheet.write_row(number, 0, row)
    return file


def xls(file: Path, sheets: Sheets) -> Path:
    book = xlwt.Workbook()
    for name, rows in sheets.items():
        sheet = book.add_sheet(name)
        for number, row in enumerate(rows):
            for column, cell in enumerate(row):
                sheet.write(number, column, cell)
    book.save(str(file))
    return file


FORMATS = ("dd.mm.yyyy", "dd.mm.yyyy hh:mm", "hh:mm:ss", "[h]:mm:ss", "0%", '#,##0.00 "₽"', "0000")
MOMENT = datetime(2026, 2, 1, 10, 20, 30)  # noqa: DTZ001 - a sheet knows of no zones
WRITERS = {"xlsx": xlsx, "xls": xls, "xlsb": xlsb, "ods": ods}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_workbook(tmp_path: Path, kind: str) -> None:
    """I17: every format gives the same facts, with a category for each sheet and the row numbers of the sheet."""
    sheets: Sheets = {
        "Tyres": ROWS,
        "Rims": [["Price list"], [], HEADER, ["C", 3, 0.01], [None, None, None], ["00D", "", True]],
    }
    columns = {**STOCK, "price_minor": {"from": "price", "empty": ["true"], "type": "money"}}
    extracted = extract_file(WRITERS[kind](tmp_path / f"price.{kind}", sheets), make_supplier(columns))
    assert extracted.of("Tyres") == [(2, A), (3, B)]
    assert extracted.of("Rims") == [
        (4, {"sku": "C", "qty": 3, "price_minor": 1}),
        (6, {"sku": "00D", "qty": None, "price_minor": None}),
    ]
    assert extracted.stats.categories["Tyres"] == {"good_rows": 2, "bad_rows": 0}


@pytest.mark.parametrize("kind", WRITERS)
def test_the_name_of_a_file_is_not_used(tmp_path: Path, kind: str) -> None:
    """I17: a workbook is detected by its content."""
    assert extract_file(WRITERS[kind](tmp_path / "price.csv", {"s": ROWS})).of("s") == [(2, A), (3, B)]


def test_a_configured_format_is_required(tmp_path: Path) -> None:
    """I6: a CSV file is rejected if XLSX is configured."""
    file = tmp_path / "price.xlsx"
    file.write_text("sku,qty,price\nA,1,1\n")
    refusal = read_refusal(file, make_supplier(STOCK, source={"format": "xlsx"}), FailureCode.FORMAT_UNKNOWN)
    assert "is csv, but `source.format` is xlsx" in refusal


def test_cells_are_read_as_a_person_reads_them(tmp_path: Path) -> None:
    """I17: dates are ISO 8601, numbers have all digits, formulas are values, and a cell with an error is empty."""
    file = tmp_path / "cells.xlsx"
    with xlsxwriter.Workbook(file) as book:
        sheet = book.add_worksheet("s")
        form = {name: book.add_format({"num_format": name}) for name in FORMATS}
        cells: list[tuple[str, Any, Any, str]] = [
            ("a date", date(2026, 2, 1), form["dd.mm.yyyy"], "2026-02-01"),
            ("a moment", MOMENT, form["dd.mm.yyyy hh:mm"], "2026-02-01T10:20:30"),
            (
                "a moment in thirds",
                MOMENT.replace(minute=10, second=0),
                form["dd.mm.yyyy hh:mm"],
                "2026-02-01T10:10:00",
            ),
            ("a time", time(9, 5), form["hh:mm:ss"], "09:05:00"),
            ("a span", timedelta(hours=26), form["[h]:mm:ss"], "1 day, 2:00:00"),
            ("a share", 0.15, form["0%"], "0.15"),
            ("money", 1234.5, form['#,##0.00 "₽"'], "1234.5"),
            ("a padded number", 42, form["0000"], "42"),
            ("whole", 7.0, None, "7"),
            ("arithmetic", 0.1 + 0.2, None, "0.3"),
            ("small", 1.5e-7, None, "0.00000015"),
            ("large", 1e20, None, "100000000000000000000"),
            ("a long code", 4607012345678, None, "4607012345678"),
            ("below zero", -2.5, None, "-2.5"),
            ("true", True, None, "true"),
            ("a code", "00123", None, "00123"),
            ("a number as text", "1 234,50", None, "1 234,50"),
        ]
        for row, (name, value, how, _) in enumerate(cells):
            sheet.write_string(row, 0, name)
            write = sheet.write_string if isinstance(value, str) else sheet.write
            write(row, 1, value, *([how] if how else []))
        formulas = [("=1+2", 3, "3"), ('="a"&"b"', "ab", "ab"), ("=1/0", "#DIV/0!", ""), ("=1=1", True, "true")]
        for row, (formula, value, _) in enumerate(formulas, start=len(cells)):
            sheet.write_string(row, 0, formula)
            sheet.write_formula(row, 1, formula, None, value)
    expected = [(name, text) for name, _, _, text in cells] + [(name, text) for name, _, text in formulas]
    assert [(*row, "")[:2] for row in read_tables(file)["s"]] == expected


def test_dates_of_old_workbooks(tmp_path: Path) -> None:
    """I17: XLS stores dates as days since 1900; they are read as dates."""
    book = xlwt.Workbook()
    sheet = book.add_sheet("s")
    sheet.write(0, 0, MOMENT, xlwt.easyxf(num_format_str="dd.mm.yyyy hh:mm"))
    sheet.write(0, 1, date(2026, 2, 1), xlwt.easyxf(num_format_str="dd.mm.yyyy"))
    book.save(str(tmp_path / "old.xls"))
    assert read_tables(tmp_path / "old.xls")["s"] == [["2026-02-01T10:20:30", "2026-02-01"]]


def test_merged_cells(tmp_path: Path) -> None:
    """I17: a merged header names all columns below it, and with `fill_down` a merged cell applies to all its rows."""
    file = tmp_path / "merged.xlsx"
    with xlsxwriter.Workbook(file) as book:
        sheet = book.add_worksheet("s")
        sheet.merge_range("A1:A2", "Brand")
        sheet.merge_range("B1:C1", "Price")
        sheet.write_row("B2", ["retail", "wholesale"])
        sheet.merge_range("A3:A4", "Nokian")
        sheet.write_row("B3", [10.5, 7])
        sheet.write_row("B4", [11, 8])
        sheet.write_row("A5", ["Pirelli", 12, 9])
    columns = {
        "brand": {"from": "Brand", "fill_down": True},
        "retail": {"from": "Price / retail", "type": "money"},
        "bulk": {"from": "Price / wholesale", "type": "money"},
    }
    assert extract_file(file, make_supplier(columns, source={"header_rows": 2})).rows == [
        (3, {"brand": "Nokian", "retail": 1050, "bulk": 700}),
        (4, {"brand": "Nokian", "retail": 1100, "bulk": 800}),
        (5, {"brand": "Pirelli", "retail": 1200, "bulk": 900}),
    ]


@pytest.mark.parametrize("kind", WRITERS)
def test_empty_rows_and_columns_before_the_table(tmp_path: Path, kind: str) -> None:
    """I8, §9: row and column numbers are those of the sheet."""
    rows: list[list[Any]] = [[], [], *([None, None, *row] for row in ROWS)]
    file = WRITERS[kind](tmp_path / "shifted.bin", {"s": rows})
    assert extract_file(file).rows == [(4, A), (5, B)]
    by_number = make_supplier({"sku": {"from": 3}}, source={"header": 3})
    assert extract_file(file, by_number).rows == [(4, {"sku": "A"}), (5, {"sku": "B"})]


@pytest.mark.parametrize("kind", WRITERS)
def test_empty_sheets_are_no_tables(tmp_path: Path, kind: str) -> None:
    """I17: empty sheets are ignored."""
    extracted = extract_file(WRITERS[kind](tmp_path / "price.bin", {"Sheet0": [], "s": ROWS, "Sheet2": []}))
    assert extracted.of("s") == [(2, A), (3, B)]
    assert list(extracted.stats.categories) == ["s"]


@pytest.mark.parametrize("kind", WRITERS)
def test_an_empty_workbook(tmp_path: Path, kind: str) -> None:
    """I6: a workbook without data is empty, like an empty file."""
    read_refusal(WRITERS[kind](tmp_path / "price.bin", {"Sheet1": [], "Sheet2": []}), code=FailureCode.FILE_EMPTY)


def test_hidden_sheets_are_read_if_configured(tmp_path: Path) -> None:
    """I17: hidden sheets are not read unless `source.sheets.only` names them."""
    file = tmp_path / "price.xlsx"
    with xlsxwriter.Workbook(file) as book:
        for name in ("seen", "hidden", "very hidden"):
            sheet = book.add_worksheet(name)
            for number, row in enumerate(ROWS):
                sheet.write_row(number, 0, row)
            if name == "hidden":
                sheet.hide()
            if name == "very hidden":
                sheet.very_hidden()
    assert list(read_tables(file)) == ["seen"]
    assert list(read_tables(file, sheets={"only": ["hidden", "very hidden"]})) == ["hidden", "very hidden"]
    config = make_supplier(STOCK, source={"sheets": {"only": ["missing"]}})
    assert "'missing'" in read_refusal(file, config)


def test_forty_sheets(tmp_path: Path) -> None:
    """I17: each sheet is a category, by name or by number; sheets can be skipped."""
    sheets: Sheets = {f"Sheet {n}": [HEADER, [f"A{n}", n, 1]] for n in range(1, 41)}
    file = xlsx(tmp_path / "forty.xlsx", sheets)
    extracted = extract_file(file, make_supplier(STOCK, source={"sheets": {"category": "number", "skip": ["Sheet 2"]}}))
    assert [fact["category_key"] for fact in extracted.facts] == [f"sheet{n}" for n in range(1, 41) if n != 2]
    assert extracted.of("sheet14") == [(2, {"sku": "A14", "qty": 14, "price_minor": 100})]


def test_a_sheet_that_lacks_a_column(tmp_path: Path) -> None:
    """I6: the message names the sheet, and the hint the setting that skips it."""
    file = xlsx(tmp_path / "price.xlsx", {"Tyres": ROWS, "Terms": [["Delivery", "Time"], ["yes", "3 days"]]})
    assert "'Terms'" in read_refusal(file, code=FailureCode.COLUMNS_MISSING)
    assert extract_file(file, make_supplier(STOCK, source={"sheets": {"skip": ["Terms"]}})).rows == [(2, A), (3, B)]


def test_repeated_cells_of_ods(tmp_path: Path) -> None:
    """I17: repeated cells of ODS are expanded, except for blank cells at the end."""
    cell = '<table:table-cell office:value-type="string"{}><text:p>{}</text:p></table:table-cell>'
    repeat = ' table:number-columns-repeated="2"'
    tables_xml = (
        '<table:table table:name="s">'
        f"<table:table-row>{cell.format('', 'a')}{cell.format('', 'b')}{cell.format('', 'c')}</table:table-row>"
        '<table:table-row table:number-rows-repeated="3">'
        f"{cell.format(repeat, 'x')}{cell.format('', 'y')}</table:table-row>"
        '<table:table-row table:number-rows-repeated="1048000"><table:table-cell table:number-columns-repeated="1024"/>'
        "</table:table-row></table:table>"
    )
    found = read_tables(write_ods_xml(tmp_path / "repeated.ods", tables_xml))["s"]
    assert found == [["a", "b", "c"], *[["x", "x", "y"]] * 3]
