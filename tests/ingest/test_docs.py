"""Tests that the documentation of ingest agrees with the code."""

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


def test_registry_has_exactly_the_codes() -> None:
    """I9: docs/etl/reason_codes.yaml is closed, and each code has a description."""
    registry = YAML(typ="safe").load(DOCS / "etl" / "reason_codes.yaml")
    assert list(registry["reason_codes"]) == [code.value for code in IngestReason]
    assert list(registry["failure_codes"]) == [code.value for code in FailureCode]
    assert all(len(description) > 20 for codes in registry.values() for description in codes.values())


def test_diagram_is_the_machine() -> None:
    """The diagram of docs/ingest.md is the state machine of the code."""
    assert drawn_in((DOCS / "ingest.md").read_text()) == [RUN]


def test_example_of_a_configuration_is_valid(tmp_path: Path) -> None:
    """I18: the example in docs/ingest.md is valid."""
    (block,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "ingest.md").read_text(), re.DOTALL)
    (tmp_path / "brinex.yaml").write_text(block)
    supplier, _ = load_supplier(tmp_path / "brinex.yaml")
    assert supplier.key == ["sku"]


@pytest.mark.parametrize(
    "section", [Supplier, SupplierColumn, SupplierSource, SheetSelection, PublishGuards, SupplierLimits]
)
def test_every_key_of_a_supplier_is_documented(section: type[BaseModel]) -> None:
    """I18: docs/ingest.md names every key."""
    page = (DOCS / "ingest.md").read_text()
    keys = [field.alias or name for name, field in section.model_fields.items()]
    assert [key for key in keys if not re.search(rf"[`.{{ ]{key}[`:.]|^{key}:", page, re.MULTILINE)] == []
