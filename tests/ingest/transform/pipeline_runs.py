"""Runs of the whole pipeline in tests, and of the reference implementation in plain Python."""

import csv
import hashlib
import tempfile
from pathlib import Path
from typing import Any

from penstock.ingest.supplier import Supplier
from penstock.ingest.transform.pipeline import ProcessedFile, RunNames, process_file, settle_repeated_keys
from tests.ingest.transform import reference

NAMES = RunNames("brinex_20260213T194500Z_1a2b3c", "brinex")


def supplier_of(columns: dict[str, dict[str, Any]], **more: Any) -> Supplier:
    source = {"format": "csv", "encoding": "utf-8", "delimiter": ";", "header": 1, **more.pop("source", {})}
    quality = {"min_fact_count": 0, "max_bad_ratio": 1, "allow_empty_snapshot": True}
    return Supplier.model_validate({**quality, "source": source, "columns": columns, **more})


def assert_as_expected(rows: list[list[str]], supplier: Supplier) -> None:
    """Run *rows* through the pipeline and the reference; the files must be equal."""
    with tempfile.TemporaryDirectory() as folder:
        output = processed(rows, supplier, Path(folder))
        expected = reference.expect_files(rows, supplier, NAMES.run_id, NAMES.supplier)
        for lines, content in ((output.facts, expected.facts), (output.bad, expected.bad)):
            text = reference.encode_ndjson(content)
            assert lines.path.read_bytes().decode() == text.decode()
            assert (lines.artifact.sha256, lines.artifact.size) == (hashlib.sha256(text).hexdigest(), len(text))
        reasons: dict[str, int] = {}
        for bad in expected.bad:
            reasons[bad["reason_code"]] = reasons.get(bad["reason_code"], 0) + 1
        stats = output.stats
        assert (stats.good_rows, stats.bad_rows) == (len(expected.facts), len(expected.bad))
        assert (stats.blank_rows, stats.skipped_rows, stats.reasons) == (expected.blank, expected.skipped, reasons)


def processed(rows: list[list[str]], supplier: Supplier, folder: Path) -> ProcessedFile:
    file = folder / "list.csv"
    with file.open("w", encoding="utf-8", newline="") as content:
        csv.writer(content, delimiter=";", lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    return run_through(file, supplier, folder)


def run_through(file: Path, supplier: Supplier, folder: Path) -> ProcessedFile:
    output = ProcessedFile(folder)
    try:
        process_file(file, supplier, NAMES, output, lambda _rows, _part: None)
        settle_repeated_keys(output, supplier, NAMES, folder)
    finally:
        output.close()
    return output
