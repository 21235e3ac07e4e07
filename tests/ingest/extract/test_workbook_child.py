"""Tests of damaged and malicious workbooks, which affect only the child process that reads them."""

import random
import resource
import struct
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import xlsxwriter  # type: ignore[import-untyped]

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract import workbook, workbook_child
from penstock.ingest.extract.files import open_tables
from penstock.ingest.extract.tables import BATCH, CELLS, HEAD
from penstock.ingest.model import RunFailed
from penstock.ingest.supplier import SupplierLimits, SupplierSource
from tests.ingest.extract.test_workbook import ROWS, WRITERS, A, B
from tests.ingest.extract.workbooks import write_ods_xml, zipped
from tests.ingest.extraction import STOCK, extract_file, make_supplier, read_refusal

pytestmark = pytest.mark.server  # a workbook is read in a process of its own

SMALL = {"workbook_memory": 400_000_000, "workbook_seconds": 20}
CELL = '<table:table-cell office:value-type="string"><text:p>x</text:p></table:table-cell>'


def write_xlsx(file: Path, sheet: str) -> Path:
    """Write an XLSX whose only sheet is this XML."""
    with xlsxwriter.Workbook(file) as book:
        book.add_worksheet("s")
    with zipfile.ZipFile(file) as archive:
        parts: dict[str, bytes | str] = {name: archive.read(name) for name in archive.namelist()}
    space = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    return zipped(file, {**parts, "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{space}">{sheet}</worksheet>'})


def row_of(number: int, *cells: str) -> str:
    inner = "".join(
        f'<c r="{chr(65 + place)}{number}" t="inlineStr"><is><t>{cell}</t></is></c>' for place, cell in enumerate(cells)
    )
    return f'<row r="{number}">{inner}</row>'


def test_a_sheet_that_claims_a_million_rows(tmp_path: Path) -> None:
    """I19: the declared size of a sheet is not used, only its rows."""
    rows = row_of(1, "sku", "qty", "price") + "".join(row_of(n, f"A{n}", "1", "2") for n in range(2, 12))
    file = write_xlsx(tmp_path / "claims.xlsx", f'<dimension ref="A1:XFD1048576"/><sheetData>{rows}</sheetData>')
    extracted = extract_file(file, make_supplier(STOCK, limits=SMALL))
    assert [(number, payload["sku"]) for number, payload in extracted.rows] == [(n, f"A{n}") for n in range(2, 12)]


def test_cells_in_opposite_corners(tmp_path: Path) -> None:
    """I19: a sheet of seventeen billion cells is rejected as too large, in time."""
    corner = '<row r="1048576"><c r="XFD1048576"><v>1</v></c></row>'
    file = write_xlsx(tmp_path / "corners.xlsx", f"<sheetData>{row_of(1, 'sku', 'qty', 'price')}{corner}</sheetData>")
    message = read_refusal(file, make_supplier(STOCK, limits=SMALL), FailureCode.FILE_TOO_LARGE)
    assert "400 MB" in message


@pytest.mark.full
def test_a_cell_a_million_rows_down(tmp_path: Path) -> None:
    """I19: a narrow sheet with a stray cell in its last row is read."""
    rows = row_of(1, "sku", "qty", "price") + row_of(2, "A", "1", "10.50") + row_of(1048576, "B", "2", "7")
    file = write_xlsx(tmp_path / "stray.xlsx", f"<sheetData>{rows}</sheetData>")
    extracted = extract_file(file, make_supplier(STOCK))
    assert extracted.rows == [(2, A), (1048576, B)]
    assert extracted.stats.blank_rows == 1048576 - 3


@pytest.mark.parametrize("columns", [1, 1024])
def test_repeated_rows_of_ods(tmp_path: Path, columns: int) -> None:
    """I19: a small ODS that repeats rows to a billion cells is rejected as too large."""
    wide = CELL.replace("<table:table-cell", f'<table:table-cell table:number-columns-repeated="{columns}"')
    table = f'<table:table table:name="s"><table:table-row table:number-rows-repeated="1048576">{wide}</table:table-row></table:table>'  # noqa: E501
    file = write_ods_xml(tmp_path / "million.ods", table * (1 if columns > 1 else 3))
    if columns > 1:
        read_refusal(file, make_supplier(STOCK, limits=SMALL), FailureCode.FILE_TOO_LARGE)
    else:
        read_refusal(file, make_supplier(STOCK, limits=SMALL), FailureCode.COLUMNS_MISSING)


@pytest.mark.full
def test_a_workbook_with_an_excessive_size(tmp_path: Path) -> None:
    """I19: the limits of unpacking apply to XLSX like to other archives."""
    file = write_xlsx(tmp_path / "bomb.xlsx", f"<sheetData>{row_of(1, 'x' * 120_000_000)}</sheetData>")
    assert file.stat().st_size < 1_000_000
    read_refusal(
        file, make_supplier(STOCK, limits={**SMALL, "workbook_memory": 100_000_000}), FailureCode.FILE_TOO_LARGE
    )


def test_a_workbook_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I19: the time for reading a workbook is limited."""
    monkeypatch.setattr(workbook, "Timer", lambda _seconds, end: Timer(0, end))
    file = WRITERS["xlsx"](tmp_path / "slow.xlsx", {"s": ROWS * 10_000})
    message = read_refusal(file, make_supplier(STOCK, limits={"workbook_seconds": 7}), FailureCode.FILE_TOO_LARGE)
    assert "7 s" in message


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("part", [0.1, 0.5, 0.95])
def test_a_workbook_that_was_cut(tmp_path: Path, kind: str, part: float) -> None:
    """I6: a truncated workbook is rejected, and nothing of it is published."""
    file = WRITERS[kind](tmp_path / f"cut.{kind}", {"s": ROWS * 100})
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * part)])
    read_refusal(file)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_workbook_with_wrong_bytes(tmp_path: Path, kind: str) -> None:
    """I6: a damaged workbook gives tables or a rejection; a crash of the reader does not affect the process."""
    file = WRITERS[kind](tmp_path / f"damaged.{kind}", {"s": ROWS})
    content, chance = file.read_bytes(), random.Random(7)
    for _ in range(12):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 10, 100))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        file.write_bytes(damaged)
        with suppress(RunFailed):
            extract_file(file, make_supplier(limits=SMALL))


def ole(*names: str) -> bytes:
    """Return a compound file, like that of an encrypted workbook, with empty streams of these names."""
    head = struct.pack(
        "<8s16sHHHHH6sIIIIIIIIII", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", bytes(16), 0x3E, 3, 0xFFFE, 9, 6, bytes(6),
        0, 1, 1, 0, 4096, 0xFFFFFFFE, 0, 0xFFFFFFFE, 0, 0,
    )  # fmt: skip
    head += b"\xff" * (512 - len(head))
    fat = struct.pack("<II", 0xFFFFFFFD, 0xFFFFFFFE) + b"\xff" * 504
    entries = b"".join(_ole_entry(name, place) for place, name in enumerate(["Root Entry", *names]))
    return head + fat + entries.ljust(512, b"\0")


def _ole_entry(name: str, place: int) -> bytes:
    text = name.encode("utf-16-le") + b"\0\0"
    kind, child = (5, 1) if place == 0 else (2, 0xFFFFFFFF)
    sides = (0xFFFFFFFF, place + 1 if place == 1 else 0xFFFFFFFF)
    start = 0xFFFFFFFE
    return struct.pack("<64sHBBIII36sIQ", text, len(text), kind, 1, *sides, child, bytes(36), start, 0)


def test_a_workbook_with_a_password(tmp_path: Path) -> None:
    """I6: an encrypted XLSX, which is a compound file, is rejected."""
    file = tmp_path / "secret.xlsx"
    file.write_bytes(ole("EncryptionInfo", "EncryptedPackage"))
    assert "password" in read_refusal(file).lower()


def test_a_document_that_is_no_workbook(tmp_path: Path) -> None:
    """I6: a text document with the name of a workbook is rejected as a document."""
    parts: dict[str, dict[str, Any]] = {
        "letter.xlsx": {"[Content_Types].xml": "<Types/>", "word/document.xml": "<w/>"},
        "letter.ods": {"mimetype": "application/vnd.oasis.opendocument.text", "content.xml": "<w/>"},
    }
    for name, contents in parts.items():
        assert "not a workbook" in read_refusal(zipped(tmp_path / name, contents), code=FailureCode.FORMAT_UNKNOWN)


def test_the_reader_ends_with_the_file(tmp_path: Path) -> None:
    """I19: a caller that stops within a workbook leaves no child process."""
    file = WRITERS["xlsx"](tmp_path / "price.xlsx", {f"s{n}": ROWS for n in range(5)})
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
    tables = open_tables(file, SupplierSource(), SupplierLimits())
    next(tables)
    tables.close()  # type: ignore[attr-defined]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt > before  # a child is counted when it was waited for


class Wide:
    """A sheet in the form of the reader library."""

    start, width = (0, 2), 3_000

    def iter_rows(self) -> Iterator[list[str]]:
        return iter([[""] * self.width] * 500)


def test_a_wide_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    """I16, I19: batches of wide sheets have fewer rows, but the first contains all rows searched for the header."""
    sheet: Any = Wide()
    sent = list(workbook_child._read_batches(sheet, BATCH))
    assert [(batch["first_row"], len(batch["columns"][0])) for batch in sent] == [(1, HEAD), (201, HEAD), (401, 100)]
    assert len(sent[0]["columns"]) == 3_002
    monkeypatch.setattr(Wide, "width", 1_000)
    assert len(next(workbook_child._read_batches(sheet, BATCH))["columns"][0]) == min(500, CELLS // 1_002)
