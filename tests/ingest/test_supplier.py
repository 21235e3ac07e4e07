"""Tests of the configuration of columns and targets."""

import re

import pytest
from pydantic import ValidationError

from penstock.ingest.model import RunFailed
from penstock.ingest.supplier import SupplierColumn, load_supplier
from penstock.ingest.tree import paths
from tests.ingest.harness import SUPPLIER, IngestHarness, set_targets

FLOW, OTHER_FLOW = "after-prices", "also-after-prices"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("%Y-%m-%dT%H:%M:%S%z", "%z is a time zone"),
        ("%d.%m.%Y %H:%M %Z", "%Z is a time zone"),
        ("%d.%m.%Y %H:%M %:z", "%:z is a time zone"),
        ("%+", "%+ is a time zone"),
        ("%d.%m.%Y %Q", "cannot read a date"),
        ("%d.%m.%Y %", "cannot read a date"),
        ("%d.%m", "cannot read a date"),
        ("%H:%M", "cannot read a date"),
        ("%d.%m.%Y %I:%M", "cannot read a date"),
        ("%d.%m.%Y %H", "cannot read a date"),
        ("dd.mm.yyyy", "cannot read a date"),
        ("", "cannot read a date"),
    ],
)
def test_a_format_that_cannot_read_a_date_is_rejected(form: str, message: str) -> None:
    """I18: a wrong format is rejected when the configuration is loaded; time zones are rejected, not converted."""
    with pytest.raises(ValidationError, match=re.escape(message)):
        SupplierColumn.model_validate({"from": "cell", "type": "datetime", "formats": ["%d.%m.%Y", form]})


@pytest.mark.parametrize("form", ["%d.%m.%y", "%Y%m%d", "%e %b %Y", "%-d/%-m/%Y", "%%%d.%m.%Y г.", "%D %r", "%j %Y"])
def test_a_reversible_format_is_accepted(form: str) -> None:
    """I18: every notation with which strftime writes a complete date is accepted."""
    assert SupplierColumn.model_validate({"from": "cell", "type": "date", "formats": [form]}).formats == [form]


def test_options_of_a_column_are_listed_here() -> None:
    """I18: a new option of a column has to be added to this test."""
    tried = {"source", "type", "required", "empty", "default", "case", "replace", "extract", "pattern", "values"}
    tried |= {"formats", "decimal", "scale", "round", "at_least", "min", "max", "max_length", "fill_down"}
    assert set(SupplierColumn.model_fields) == tried


def test_a_target_has_exactly_one_kind(harness: IngestHarness) -> None:
    """I23: a target without a kind, or with two, is an error of the configuration."""
    for wrong in ({}, {"flow": {"name": FLOW}, "webhook": {"url": "http://127.0.0.1:1/gone"}}):
        set_targets(harness, wrong)
        with pytest.raises(RunFailed, match="must have exactly one of `dictionary`, `flow` and `webhook`"):
            load_supplier(harness.root / paths.make_config_path(SUPPLIER))


def test_a_repeated_target_is_rejected(harness: IngestHarness) -> None:
    """I23: a repeated target would share the marker of the first, and never be delivered."""
    set_targets(harness, *({"flow": {"name": FLOW, "scope": {"market": market}}} for market in ("de", "ru")))
    with pytest.raises(RunFailed, match="must not contain a target twice"):
        load_supplier(harness.root / paths.make_config_path(SUPPLIER))
