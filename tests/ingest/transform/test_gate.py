"""The gate judges a file by its header."""

from pathlib import Path

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import RunFailed
from penstock.ingest.transform.gate import bind_columns
from tests.ingest.extraction import STOCK, make_supplier, open_sent_table


def test_the_gate_refuses_before_a_row_is_read(tmp_path: Path) -> None:
    """I15: the header is enough to refuse a file; its rows are still to come."""
    table = open_sent_table(tmp_path)
    with pytest.raises(RunFailed) as refused:
        bind_columns(table, make_supplier({**STOCK, "ean": {"from": "ean", "required": True}}))
    assert refused.value.code is FailureCode.COLUMNS_MISSING
    assert sum(batch.frame.height for batch in table.batches) == 3
