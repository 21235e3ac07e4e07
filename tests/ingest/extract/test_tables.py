"""Tables of many columns, and of many or long rows: how much of them is held at once."""

from pathlib import Path

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract import tables
from penstock.ingest.extract.files import open_tables
from penstock.ingest.extract.tables import CELLS, COLUMNS
from penstock.ingest.supplier import SupplierLimits, SupplierSource
from tests.ingest.extract.delimited_files import written
from tests.ingest.extraction import made, read_tables, refused, supplier


@pytest.mark.full
@pytest.mark.parametrize("stray", ["", '5" tire\n'])
@pytest.mark.parametrize("wide", [",", "x,"])
def test_a_wide_header_above_many_short_rows(file: Path, stray: str, wide: str) -> None:
    """I16, I19: few bytes that mean millions of cells are never held as such, on either path."""
    commas = "a" + "," * 500 + "b\n"
    text = "sku" + wide * 500 + "\n" + stray + "a\n" * 60_000 + (commas + "a\n" * 100) * 20
    [table] = open_tables(written(file, text), SupplierSource(), SupplierLimits())
    rows = 0
    for batch in table.batches:
        assert batch.frame.height * batch.frame.width <= CELLS + batch.frame.height
        assert batch.first_row == rows + 1
        rows += batch.frame.height
    assert rows == text.count("\n")
    found = made(file, supplier({"sku": {"from": "sku" if wide == "," else 1}}))
    assert len(found.facts) + len(found.bad) == rows - 1
    assert {reason for _, reason in found.reasons} <= {"ROW_TOO_LONG"}


def test_more_columns_than_any_table_has(file: Path) -> None:
    """I19: a file of nothing but delimiters is refused, and says how many are too many."""
    assert len(read_tables(written(file, "sku" + "," * (COLUMNS - 1) + "\na\n"))[""]) == 2
    said = refused(written(file, "sku" + "," * COLUMNS + "\na\n"), code=FailureCode.FILE_TOO_LARGE)
    assert f"{COLUMNS:,} columns" in said


def test_cells_of_many_rows_that_are_long(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I16: of long rows fewer are held at once."""
    monkeypatch.setattr(tables, "_TEXT", 10_000)
    text = 'sku,name\nA,5" tire\n' + f"B,{'x' * 1000}\n" * 100
    [table] = open_tables(written(file, text), SupplierSource(), SupplierLimits())
    assert max(batch.frame.height for batch in table.batches) == 11
