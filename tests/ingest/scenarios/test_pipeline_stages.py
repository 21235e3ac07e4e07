"""I15: the parts of §16, each by itself."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.ingest.contract import FailureCode, Reason
from penstock.ingest.extract.files import open_tables
from penstock.ingest.extract.tables import Table
from penstock.ingest.model import Failed, Stats
from penstock.ingest.run.quality import check_quality
from penstock.ingest.transform.emit import Emitter
from penstock.ingest.transform.gate import bind
from tests.ingest.extraction import STOCK, supplier, trimmed

EXTRACTOR = ["extract", *(f"extract.{name}" for name in ("delimited", "detect", "archives", "records", "workbook"))]
GATE, EMITTER, DQ = ["transform.gate"], ["transform.emit"], ["run.quality"]
RUN = [f"run.{name}" for name in ("run", "publish", "ledger", "store")]
TREE = [f"tree.{name}" for name in ("port", "folder", "bucket")]
INGESTION = ["transform.pipeline", *RUN, *TREE, "state.reader", "workspace"]
SENT = "sku,qty,price\na,1,2.50\nb,many,3.10\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("part", "others"),
    [
        (EXTRACTOR, GATE + EMITTER + DQ),
        (GATE, EXTRACTOR + EMITTER + DQ),
        (EMITTER, DQ),  # it is given tables and their headers
        (DQ, EXTRACTOR + GATE + EMITTER),
    ],
    ids=["extractor", "gate", "emitter", "dq"],
)
def test_a_part_knows_no_other(part: list[str], others: list[str]) -> None:
    """I15: loaded by itself it brings none that it does not work on, and nobody but the run knows where states are."""
    lines = [f"import penstock.ingest.{name}" for name in part] + ["import sys", "print(*sys.modules)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert {f"penstock.ingest.{name}" for name in part} <= loaded
    foreign = {f"penstock.ingest.{name}" for name in others + INGESTION}
    assert all(map(find_spec, foreign))
    assert loaded & foreign == set()


def test_the_extractor_reads_and_judges_nothing(tmp_path: Path) -> None:
    """I15: what stands in a cell comes out of it, be it a number or not."""
    (batch,) = sent(tmp_path).batches
    assert [trimmed(row) for row in batch.frame.rows()] == [line.split(",") for line in SENT.splitlines()]


def test_the_gate_refuses_before_a_row_is_read(tmp_path: Path) -> None:
    """I15: the header is enough to refuse a file; its rows are still to come."""
    table = sent(tmp_path)
    with pytest.raises(Failed) as refused:
        bind(table, supplier({**STOCK, "ean": {"from": "ean", "required": True}}))
    assert refused.value.code is FailureCode.COLUMNS_MISSING
    assert sum(batch.frame.height for batch in table.batches) == 3


def test_the_emitter_parts_good_from_bad_and_refuses_nobody(tmp_path: Path) -> None:
    """I15: each row is a fact or bad with a reason; how many bad ones are too many is not its business."""
    table, config = sent(tmp_path), supplier(STOCK, max_bad_ratio=0.0)
    emitter = Emitter("acme_20260213T194500Z_1a2b3c", "acme", config, bind(table, config), table)
    (emitted,) = [emitter.emit(part) for batch in table.batches for part in emitter.prepare(batch)]
    assert [json.loads(line)["payload"]["sku"] for line in emitted.facts] == ["a"]
    assert emitted.reasons == {Reason.NOT_INTEGER.value: 1}


def test_dq_judges_by_numbers_alone() -> None:
    """I15: how many were good and bad is all it is told."""
    stats = Stats()
    stats.count(None, 9, {Reason.NOT_INTEGER.value: 1})
    check_quality(stats, supplier(max_bad_ratio=0.1))
    with pytest.raises(Failed) as refused:
        check_quality(stats, supplier(max_bad_ratio=0.09))
    assert refused.value.code is FailureCode.DQ_TOO_MANY_BAD_ROWS


def sent(folder: Path) -> Table:
    file = folder / "stock.csv"
    file.write_text(SENT)
    config = supplier(STOCK)
    (table,) = open_tables(file, config.source, config.limits)
    return table
