"""Tests of tables with many columns, or with many or long rows: batches in memory are bounded."""

from pathlib import Path

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract import tables
from penstock.ingest.extract.files import open_tables
from penstock.ingest.extract.tables import CELLS, COLUMNS
from penstock.ingest.supplier import SupplierLimits, SupplierSource
from tests.ingest.extract.delimited_files import write_file
from tests.ingest.extraction import extract_file, make_supplier, read_refusal, read_tables


@pytest.mark.full
@pytest.mark.parametrize("stray", ["", '5" tire\n'])
@pytest.mark.parametrize("wide", [",", "x,"])
def test_a_wide_header_above_many_short_rows(file: Path, stray: str, wide: str) -> None:
    """I16, I19: a small file of millions of cells is read in small batches, by both parsers."""
    commas = "a" + "," * 500 + "b\n"
    text = "sku" + wide * 500 + "\n" + stray + "a\n" * 60_000 + (commas + "a\n" * 100) * 20
    [table] = open_tables(write_file(file, text), SupplierSource(), SupplierLimits())
    rows = 0
    for batch in table.batches:
        assert batch.frame.height * batch.frame.width <= CELLS + batch.frame.height
        assert batch.first_row == rows + 1
        rows += batch.frame.height
    assert rows == text.count("\n")
    extracted = extract_file(file, make_supplier({"sku": {"from": "sku" if wide == "," else 1}}))
    assert len(extracted.facts) + len(extracted.bad) == rows - 1
    assert {reason for _, reason in extracted.reasons} <= {"ROW_TOO_LONG"}


def test_too_many_columns(file: Path) -> None:
    """I19: a file with too many columns is rejected, and the message names the limit."""
    assert len(read_tables(write_file(file, "sku" + "," * (COLUMNS - 1) + "\na\n"))[""]) == 2
    refusal = read_refusal(write_file(file, "sku" + "," * COLUMNS + "\na\n"), code=FailureCode.FILE_TOO_LARGE)
    assert f"{COLUMNS:,} columns" in refusal


def test_long_rows(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I16: batches of long rows have fewer rows."""
    monkeypatch.setattr(tables, "_TEXT", 10_000)
    text = 'sku,name\nA,5" tire\n' + f"B,{'x' * 1000}\n" * 100
    [table] = open_tables(write_file(file, text), SupplierSource(), SupplierLimits())
    assert max(batch.frame.height for batch in table.batches) == 11
