"""Names of suppliers in runs."""

from pathlib import Path

import pytest

from penstock.ingest.run.run import Ingestion
from penstock.kernel.errors import Invalid
from tests.ingest.supplier_harness import SupplierHarness


@pytest.fixture
def harness(tmp_path: Path) -> SupplierHarness:
    return SupplierHarness(tmp_path)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "a\\b", "a b", "a\n", "-a", "ä", "a" * 65, "a.b", "a\0"]
)
def test_invalid_name_of_a_supplier_is_refused(harness: SupplierHarness, name: str) -> None:
    """I5: a name that could lead to another folder is not a valid name of a supplier."""
    with pytest.raises(Invalid, match="is not a valid name of a supplier"):
        Ingestion(harness.tree, "test").run(name)
