"""Tests of the gate."""

from pathlib import Path

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import RunFailed
from penstock.ingest.transform.gate import bind_columns
from tests.ingest.extraction import STOCK, make_supplier, open_sent_table


def test_the_gate_rejects_before_a_row_is_read(tmp_path: Path) -> None:
    """I15: a file is rejected by its header, before its rows are read."""
    table = open_sent_table(tmp_path)
    with pytest.raises(RunFailed) as refused:
        bind_columns(table, make_supplier({**STOCK, "ean": {"from": "ean", "required": True}}))
    assert refused.value.code is FailureCode.COLUMNS_MISSING
    assert sum(batch.frame.height for batch in table.batches) == 3
