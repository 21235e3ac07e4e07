"""The emitter parts good rows from bad ones."""

import json
from pathlib import Path

from penstock.ingest.contract import IngestReason
from penstock.ingest.transform.emit import RecordEmitter
from penstock.ingest.transform.gate import bind_columns
from tests.ingest.extraction import STOCK, make_supplier, open_sent_table


def test_the_emitter_parts_good_from_bad_and_refuses_nobody(tmp_path: Path) -> None:
    """I15: each row is a fact or bad with a reason; how many bad ones are too many is not its business."""
    table, config = open_sent_table(tmp_path), make_supplier(STOCK, max_bad_ratio=0.0)
    emitter = RecordEmitter("acme_20260213T194500Z_1a2b3c", "acme", config, bind_columns(table, config), table)
    (emitted,) = [emitter.emit(part) for batch in table.batches for part in emitter.prepare(batch)]
    assert [json.loads(line)["payload"]["sku"] for line in emitted.facts] == ["a"]
    assert emitted.reasons == {IngestReason.NOT_INTEGER.value: 1}
