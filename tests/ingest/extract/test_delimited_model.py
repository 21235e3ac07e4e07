"""Tests with random tables: a table that the csv module writes in any dialect is read back with the same cells."""

import csv
import io
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.ingest.extract import delimited
from penstock.ingest.extract.files import open_tables
from penstock.ingest.model import RunFailed
from penstock.ingest.supplier import SupplierLimits, SupplierSource
from tests.ingest.extraction import trim_row

# Without U+FEFF, which is a byte order mark, and without the characters that end the lines of these files.
CELLS = st.text(st.sampled_from("ab\",;|\t '\n\r1.Яж€😀\x0c\u2028#\\"), max_size=8)
WIDTH = 4
TABLES = st.lists(st.lists(CELLS, min_size=1, max_size=WIDTH), min_size=1, max_size=25)
DIALECTS = st.fixed_dictionaries(
    {
        "delimiter": st.sampled_from(",;\t|"),
        "quoting": st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
        "lineterminator": st.sampled_from(["\n", "\r\n"]),
    }
)
FEW = st.sampled_from([1, 12, 40, 1 << 19])
ENCODINGS = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])


def read(
    content: bytes, piece: int, *, by_rows: bool, cells: int = 1 << 19, **source: Any
) -> list[tuple[int, list[str]]]:
    """Return the rows with their numbers, read in pieces of *piece* bytes and *cells* cells by either parser."""
    paths: Any = {"_is_well_formed": lambda *_: False} if by_rows else {}
    with (
        TemporaryDirectory() as folder,
        patch.multiple(delimited, PIECE=piece, BATCH=3, CELLS=cells, **paths),
    ):
        file = Path(folder) / "any.csv"
        file.write_bytes(content)
        [table] = open_tables(file, SupplierSource.model_validate({"format": "csv", **source}), SupplierLimits())
        return [
            (batch.first_row + place, trim_row(row))
            for batch in table.batches
            for place, row in enumerate(batch.frame.rows())
        ]


@given(TABLES, DIALECTS, ENCODINGS, st.integers(1, 40), FEW)
@example(
    [["a", "b"], ["\r", ""], ["x\r\ny", '"']], {"delimiter": ",", "quoting": 0, "lineterminator": "\r\n"}, "utf-8", 1, 1
)
@settings(max_examples=150)
def test_written_cells_are_read_by_both_parsers(
    table: list[list[str]], dialect: dict[str, Any], encoding: str, piece: int, cells: int
) -> None:
    """I17: both parsers return the same cells in the same rows, for any size of the pieces."""
    if dialect["lineterminator"] == "\n" and dialect["quoting"] == csv.QUOTE_MINIMAL:
        table = [[cell.replace("\r", "") for cell in row] for row in table]  # of which Python's writer takes no care
    out = io.StringIO(newline="")
    csv.writer(out, **dialect).writerows([["start", "of", "it"], *table])
    content = out.getvalue().encode(encoding)
    source: dict[str, Any] = {"delimiter": dialect["delimiter"], "encoding": encoding.removesuffix("-sig")}
    columnar = read(content, piece, by_rows=False, cells=cells, **source)
    expected = [trim_row(row) for row in [["start", "of", "it"], *table]]
    assert columnar == list(enumerate(expected, start=1))
    assert read(content, piece, by_rows=True, cells=cells, **source) == columnar


@given(st.lists(CELLS, min_size=1, max_size=25), st.integers(1, 40))
@settings(max_examples=60)
def test_without_quotes_lines_are_rows(lines: list[str], piece: int) -> None:
    """I17: without quotes, only line ends and delimiters have a meaning."""
    rows_of_text = ["start", *(line.replace("\n", "").replace("\r", "") for line in lines)]
    source: dict[str, Any] = {"delimiter": ",", "quote": "", "encoding": "utf-8"}
    found = read("".join(f"{line}\n" for line in rows_of_text).encode(), piece, by_rows=False, **source)
    assert found == [(n, trim_row(line.split(","))) for n, line in enumerate(rows_of_text, start=1)]


@given(st.text(st.sampled_from('ab",\n\r'), max_size=60), st.integers(1, 40), FEW)
@settings(max_examples=150)
def test_quotes_anywhere(text: str, piece: int, cells: int) -> None:
    """I17: with quotes at any positions, the size of the pieces does not change the result."""

    def outcome(size: int, cells: int) -> Any:
        try:
            content = f"start,of\n{text}".encode()
            rows = read(content, size, by_rows=False, cells=cells, delimiter=",", encoding="utf-8")
            # A return at the edge of a cell is a blank there, and goes with the others when the cell is read.
            return [(number, trim_row(cell.strip("\r") for cell in row)) for number, row in rows]
        except RunFailed as failed:
            return failed.code

    assert outcome(piece, cells) == outcome(1 << 20, 1 << 19)
