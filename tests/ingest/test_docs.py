"""The documents of ingest say what the code does."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

from penstock.ingest.contract import FailureCode, IngestReason
from penstock.ingest.model import RUN
from penstock.ingest.supplier import (
    PublishGuards,
    SheetSelection,
    Supplier,
    SupplierColumn,
    SupplierLimits,
    SupplierSource,
    load_supplier,
)
from tests.pages import drawn_in

pytestmark = pytest.mark.docs

DOCS = Path(__file__).parents[2] / "docs"


def test_the_registry_holds_exactly_the_codes_there_are() -> None:
    """I9: docs/etl/reason_codes.yaml is closed, and each code is explained."""
    registry = YAML(typ="safe").load(DOCS / "etl" / "reason_codes.yaml")
    assert list(registry["reason_codes"]) == [code.value for code in IngestReason]
    assert list(registry["failure_codes"]) == [code.value for code in FailureCode]
    assert all(len(about) > 20 for part in registry.values() for about in part.values())


def test_the_diagram_is_the_machine() -> None:
    """What docs/ingest.md draws is what the code declares."""
    assert drawn_in((DOCS / "ingest.md").read_text()) == [RUN]


def test_the_example_of_a_configuration_loads(tmp_path: Path) -> None:
    """I18: it is valid as it stands."""
    (block,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "ingest.md").read_text(), re.DOTALL)
    (tmp_path / "brinex.yaml").write_text(block)
    supplier, _ = load_supplier(tmp_path / "brinex.yaml")
    assert supplier.key == ["sku"]


@pytest.mark.parametrize(
    "section", [Supplier, SupplierColumn, SupplierSource, SheetSelection, PublishGuards, SupplierLimits]
)
def test_every_key_of_a_supplier_is_documented(section: type[BaseModel]) -> None:
    """I18: docs/ingest.md names each key there is."""
    page = (DOCS / "ingest.md").read_text()
    keys = [field.alias or name for name, field in section.model_fields.items()]
    assert [key for key in keys if not re.search(rf"[`.{{ ]{key}[`:.]|^{key}:", page, re.MULTILINE)] == []
