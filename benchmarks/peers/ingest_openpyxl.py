"""A workbook into facts with openpyxl, read as its documentation says for large files."""

import sys
from pathlib import Path

import openpyxl  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.ingest_facts import FIRST_ROW, Numbered, measured, write_facts


def ingest(source: Path, folder: Path) -> int:
    """Every sheet's rows; a row's number is its number in the sheet."""
    book = openpyxl.load_workbook(source, read_only=True, data_only=True)
    return write_facts(_rows(book), folder)


def _rows(book: openpyxl.Workbook) -> Numbered:
    for sheet in book.worksheets:
        yield from enumerate(sheet.iter_rows(min_row=FIRST_ROW, max_col=6, values_only=True), start=FIRST_ROW)


if __name__ == "__main__":
    measured(ingest)
