"""For whom a run is made."""

from pathlib import Path

import pytest

from penstock.kernel.errors import Invalid
from tests.ingest.supplier_harness import SupplierHarness


@pytest.fixture
def harness(tmp_path: Path) -> SupplierHarness:
    return SupplierHarness(tmp_path)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "a\\b", "a b", "a\n", "-a", "ä", "a" * 65, "a.b", "a\0"]
)
def test_a_name_that_could_lead_elsewhere_is_no_supplier(harness: SupplierHarness, name: str) -> None:
    """I5: no path comes from outside."""
    from penstock.ingest.run.run import Ingestion

    with pytest.raises(Invalid, match="cannot name a supplier"):
        Ingestion(harness.tree, "test").run(name)
