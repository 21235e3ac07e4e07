"""What a column may be configured to be, and which targets there are."""

import re

import pytest
from pydantic import ValidationError

from penstock.ingest.model import RunFailed
from penstock.ingest.supplier import SupplierColumn, load_supplier
from penstock.ingest.tree import paths
from tests.ingest.harness import SUPPLIER, IngestHarness, set_targets

FLOW, OTHER_FLOW = "after-prices", "also-after-prices"


@pytest.mark.parametrize(
    ("form", "said"),
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
def test_a_format_that_reads_no_date_is_refused(form: str, message: str) -> None:
    """I18: when the configuration is read, not when the file is; time zones are never converted unasked."""
    with pytest.raises(ValidationError, match=re.escape(message)):
        SupplierColumn.model_validate({"from": "cell", "type": "datetime", "formats": ["%d.%m.%Y", form]})


@pytest.mark.parametrize("form", ["%d.%m.%y", "%Y%m%d", "%e %b %Y", "%-d/%-m/%Y", "%%%d.%m.%Y г.", "%D %r", "%j %Y"])
def test_a_format_that_reads_what_it_writes_is_right(form: str) -> None:
    """I18: whatever strftime writes a whole date with."""
    assert SupplierColumn.model_validate({"from": "cell", "type": "date", "formats": [form]}).formats == [form]


def test_a_column_knows_its_options() -> None:
    """I18: who adds an option to a column also adds it here."""
    tried = {"source", "type", "required", "empty", "default", "case", "replace", "extract", "pattern", "values"}
    tried |= {"formats", "decimal", "scale", "round", "at_least", "min", "max", "max_length", "fill_down"}
    assert set(SupplierColumn.model_fields) == tried


def test_a_target_is_one_thing(harness: IngestHarness) -> None:
    """I23: none, or two in one, is a mistake of the configuration, and told as one."""
    for wrong in ({}, {"flow": {"name": FLOW}, "webhook": {"url": "http://127.0.0.1:1/gone"}}):
        set_targets(harness, wrong)
        with pytest.raises(RunFailed, match="must have exactly one of `dictionary`, `flow` and `webhook`"):
            load_supplier(harness.root / paths.config(SUPPLIER))


def test_a_target_is_named_once(harness: IngestHarness) -> None:
    """I23: a second one would share the first one's marker, and never be told."""
    set_targets(harness, *({"flow": {"name": FLOW, "scope": {"market": market}}} for market in ("de", "ru")))
    with pytest.raises(RunFailed, match="must not contain a target twice"):
        load_supplier(harness.root / paths.config(SUPPLIER))
