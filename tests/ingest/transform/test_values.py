"""Tests of dates, texts and enums, against the reference implementation."""

from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ingest.supplier import SupplierColumn
from penstock.ingest.transform.values import read_column
from tests.ingest.transform.pipeline_runs import assert_as_expected, supplier_of

_dates = st.dates().map(lambda day: day.strftime("%d.%m.%Y")) | st.builds(
    "{:02d}.{:02d}.{:04d}".format, st.integers(0, 40), st.integers(0, 13), st.integers(0, 9999)
)
_moments = st.builds(
    lambda moment, end: moment.replace(microsecond=0).isoformat() + end,
    st.datetimes(),
    st.sampled_from(["", "", "Z", ".000", ".999999Z", "+03:00", "-0000", "z"]),
) | st.datetimes().map(lambda moment: moment.strftime("%d.%m.%Y %I:%M %p"))
_day_cells = (
    _dates | _moments | st.dates().map(str) | st.sampled_from(["", "2025-02-30", "2025-02-28 noon", "01/31/2025"])
)
_forms = st.lists(
    st.sampled_from(["%d.%m.%Y", "%m/%d/%Y", "%Y-%m-%dT%H:%M:%S", "%d.%m.%Y %I:%M %p", "%Y-%m-%dT%T", "%d.%m.%Y %R"]),
    unique=True,
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["date", "datetime"]), _forms, st.lists(_day_cells, min_size=1, max_size=20))
def test_dates(kind: str, forms: list[str], cells: list[str]) -> None:
    """I18: the first matching format gives the day; a day that does not exist is bad."""
    column = {"from": "cell", "type": kind, "formats": forms, "required": True}
    supplier = supplier_of({"id": {"from": "id"}, "value": column}, keep_raw=True)
    assert_as_expected([["id", "cell"], *([str(number), cell] for number, cell in enumerate(cells))], supplier)


@pytest.mark.parametrize(
    ("form", "cell", "value"),
    [
        ("%d.%m.%Y %I:%M %p", "04.03.2025 09:34 PM", "2025-03-04T21:34:00"),
        ("%d.%m.%Y %l:%M %P", "04.03.2025 9:34 pm", "2025-03-04T21:34:00"),
        ("%d.%m.%Y %R", "04.03.2025 21:34", "2025-03-04T21:34:00"),
        ("%d.%m.%Y %T", "04.03.2025 21:34:56", "2025-03-04T21:34:56"),
        ("%d.%m.%Y %X", "04.03.2025 21:34:56", "2025-03-04T21:34:56"),
        ("%c", "Tue Mar  4 21:34:56 2025", "2025-03-04T21:34:56"),
        ("%s", "1741124096", "2025-03-04T21:34:56"),
        ("%d.%m.%Y", "04.03.2025", "2025-03-04T00:00:00"),
        (None, "2025-03-04T21:34:56.789", "2025-03-04T21:34:56"),
        (None, "2025-03-04 21:34:56.999999Z", "2025-03-04T21:34:56"),
        (None, "2025-03-04T21:34Z", "2025-03-04T21:34:00"),
        (None, "2025-03-04T21:34:56Z", "2025-03-04T21:34:56"),
        (None, "2025-03-04T21:34:56+03:00", None),
        (None, "2025-03-04T21:34:56+00:00", None),
        (None, "2025-03-04T21:34.5", None),
        (None, "2025-03-04Z", None),
    ],
)
def test_a_timestamp_keeps_its_time(form: str | None, cell: str, value: str | None) -> None:
    """I18: the time of every format is read to the second; a time of another zone is bad."""
    column = {"from": "cell", "type": "datetime", "formats": [form] if form else []}
    column_values = read_column(SupplierColumn.model_validate(column), pl.Series([cell]), is_required=True)
    assert (column_values.value[0], column_values.is_bad[0]) == (value, value is None)
    as_date = read_column(
        SupplierColumn.model_validate({**column, "type": "date"}), pl.Series([cell]), is_required=True
    )
    assert as_date.value[0] == "2025-03-04" or value is None


_words = st.text("abБб \t-\u00a0", max_size=6)


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "type": st.just("string"),
            "required": st.booleans(),
            "empty": st.sampled_from([[], ["-"], ["a", "б"]]),
            "default": st.sampled_from([None, "none"]),
            "case": st.sampled_from([None, "upper", "lower"]),
            "replace": st.sampled_from([{}, {"^$": "a"}, {"[ -]+": " ", "b": ""}]),
            "extract": st.sampled_from([None, "[ab]+", "a(.*)", "(?:a|b) +"]),
            "pattern": st.sampled_from([None, "[ab]*", "a|b", ".*"]),
            "max_length": st.sampled_from([None, 3]),
            "fill_down": st.booleans(),
        }
    )
    | st.fixed_dictionaries(
        {
            "type": st.just("enum"),
            "required": st.booleans(),
            "default": st.none(),
            "values": st.sampled_from([["a", "б", "a b"], {"A": 1, "ab": 2}, {"a": True, "b": False}]),
        }
    ),
    st.lists(_words, min_size=1, max_size=20),
)
def test_texts_and_enums(column: dict[str, Any], cells: list[str]) -> None:
    """I18: texts are trimmed, replaced, extracted, converted to a case and checked, in this order."""
    supplier = supplier_of({"id": {"from": "id"}, "value": {"from": "cell", **column}}, keep_raw=True)
    assert_as_expected([["id", "cell"], *([str(number), cell] for number, cell in enumerate(cells))], supplier)
