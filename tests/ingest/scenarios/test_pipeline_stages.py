"""I15: the independence of the parts of §16."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ingest.extraction import SENT, open_sent_table, trim_row

EXTRACTOR = ["extract", *(f"extract.{name}" for name in ("delimited", "detect", "archives", "records", "workbook"))]
GATE, EMITTER, DQ = ["transform.gate"], ["transform.emit"], ["run.quality"]
RUN = [f"run.{name}" for name in ("run", "publish", "ledger", "store")]
TREE = [f"tree.{name}" for name in ("port", "folder", "bucket")]
INGESTION = ["transform.pipeline", *RUN, *TREE, "state.reader", "workspace"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("part", "others"),
    [
        (EXTRACTOR, GATE + EMITTER + DQ),
        (GATE, EXTRACTOR + EMITTER + DQ),
        (EMITTER, DQ),  # its input is tables and their headers
        (DQ, EXTRACTOR + GATE + EMITTER),
    ],
    ids=["extractor", "gate", "emitter", "dq"],
)
def test_part_imports_no_other(part: list[str], others: list[str]) -> None:
    """I15: importing a part does not import the parts that it must not know, nor the location of states."""
    lines = [f"import penstock.ingest.{name}" for name in part] + ["import sys", "print(*sys.modules)"]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True)
    loaded = set(result.stdout.split())
    assert {f"penstock.ingest.{name}" for name in part} <= loaded
    foreign = {f"penstock.ingest.{name}" for name in others + INGESTION}
    assert all(map(find_spec, foreign))
    assert loaded & foreign == set()


def test_extractor_reads_text_without_checks(tmp_path: Path) -> None:
    """I15: the extractor returns the text of each cell, whether it fits the type of the column or not."""
    (batch,) = open_sent_table(tmp_path).batches
    assert [trim_row(row) for row in batch.frame.rows()] == [line.split(",") for line in SENT.splitlines()]
