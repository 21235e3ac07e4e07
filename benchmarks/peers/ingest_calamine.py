"""A workbook into facts with python-calamine, whose reader is in Rust; the mapping is the same Python as openpyxl's."""

import sys
from itertools import islice
from pathlib import Path

from python_calamine import CalamineWorkbook

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.ingest_facts import FIRST_ROW, Numbered, measured, write_facts


def ingest(source: Path, folder: Path) -> int:
    """Every sheet's rows; a row's number is its number in the sheet."""
    with CalamineWorkbook.from_path(str(source)) as book:
        return write_facts(_rows(book), folder)


def _rows(book: CalamineWorkbook) -> Numbered:
    for name in book.sheet_names:
        rows = book.get_sheet_by_name(name).iter_rows()  # one sheet in memory, made Python row by row
        yield from enumerate(islice(rows, FIRST_ROW - 1, None), start=FIRST_ROW)


if __name__ == "__main__":
    measured(ingest)
