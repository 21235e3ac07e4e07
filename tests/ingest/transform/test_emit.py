"""Tests of the emitter."""

import json
from pathlib import Path

from penstock.ingest.contract import IngestReason
from penstock.ingest.transform.emit import RecordEmitter
from penstock.ingest.transform.gate import bind_columns
from tests.ingest.extraction import STOCK, make_supplier, open_sent_table


def test_each_row_is_a_fact_or_a_bad_row(tmp_path: Path) -> None:
    """I15: each row is a fact or a bad row with a reason; the emitter does not check the share of bad rows."""
    table, config = open_sent_table(tmp_path), make_supplier(STOCK, max_bad_ratio=0.0)
    emitter = RecordEmitter("acme_20260213T194500Z_1a2b3c", "acme", config, bind_columns(table, config), table)
    (emitted,) = [emitter.emit(part) for batch in table.batches for part in emitter.prepare(batch)]
    assert [json.loads(line)["payload"]["sku"] for line in emitted.facts] == ["a"]
    assert emitted.reasons == {IngestReason.NOT_INTEGER.value: 1}
