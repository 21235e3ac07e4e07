"""Extraction of a file in a test: its cells, its facts, or the reason for its refusal."""

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract.files import open_tables
from penstock.ingest.extract.tables import MALFORMED, SourceTable
from penstock.ingest.model import RunFailed, RunStats
from penstock.ingest.supplier import Supplier, SupplierLimits, SupplierSource
from penstock.ingest.transform.pipeline import ProcessedFile, RunNames, process_file

NAMES = RunNames("acme_20260213T194500Z_1a2b3c", "acme")
DQ = {"min_fact_count": 1, "max_bad_ratio": 0.1, "allow_empty_snapshot": False}
STOCK: dict[str, dict[str, Any]] = {
    "sku": {"from": "sku", "required": True},
    "qty": {"from": "qty", "type": "integer"},
    "price_minor": {"from": "price", "type": "money"},
}
Row = tuple[int, dict[str, Any]]
SENT = "sku,qty,price\na,1,2.50\nb,many,3.10\n"


@dataclass(frozen=True)
class Extracted:
    """Facts by their row numbers and payloads, bad rows by their row numbers and reasons."""

    facts: list[dict[str, Any]]
    bad: list[dict[str, Any]]
    stats: RunStats

    @property
    def rows(self) -> list[Row]:
        return [(fact["row_number"], fact["payload"]) for fact in self.facts]

    @property
    def reasons(self) -> list[tuple[int, str]]:
        return [(row["row_number"], row["reason_code"]) for row in self.bad]

    def of(self, category: str) -> list[Row]:
        return [(fact["row_number"], fact["payload"]) for fact in self.facts if fact.get("category_key") == category]


def make_supplier(columns: dict[str, Any] | None = None, **more: Any) -> Supplier:
    return Supplier.model_validate({**DQ, "columns": columns or {}, **more})


def extract_file(file: Path, config: Supplier | None = None) -> Extracted:
    """Return the facts and bad rows of *file*, as a run produces them."""
    with TemporaryDirectory() as folder, closing(ProcessedFile(Path(folder))) as processed:
        process_file(file, config or make_supplier(STOCK), NAMES, processed, lambda _rows, _part: None)
        processed.facts.flush()
        processed.bad.flush()
        facts, bad = (
            [json.loads(line) for line in lines.path.read_text().splitlines()]
            for lines in (processed.facts, processed.bad)
        )
        return Extracted(facts, bad, processed.stats)


def read_refusal(file: Path, config: Supplier | None = None, code: FailureCode = FailureCode.FILE_UNREADABLE) -> str:
    """Return the message and the hint of the refusal of *file*; the message names the file."""
    with pytest.raises(RunFailed) as caught:
        extract_file(file, config)
    failure = caught.value
    assert failure.code is code, failure.message
    assert file.name in failure.message
    assert failure.hint
    return f"{failure.message}\nhint: {failure.hint}"


def read_tables(file: Path, **source: Any) -> dict[str, list[list[str]]]:
    """Return the cells of each table, without the empty cells at the end of a row."""
    limits = SupplierLimits()
    return {
        table.name: [
            trim_row(row)
            for batch in table.batches
            for row in batch.frame.select(name for name in batch.frame.columns if name != MALFORMED).rows()
        ]
        for table in open_tables(file, SupplierSource.model_validate(source), limits)
    }


def trim_row(row: Any) -> list[str]:
    cells = list(row)
    while cells and not cells[-1]:
        cells.pop()
    return cells


def open_sent_table(folder: Path) -> SourceTable:
    file = folder / "stock.csv"
    file.write_text(SENT)
    config = make_supplier(STOCK)
    (table,) = open_tables(file, config.source, config.limits)
    return table
