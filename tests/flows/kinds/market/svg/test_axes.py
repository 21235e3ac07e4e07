"""Ticks and labels of axes."""

import math
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.kinds.market.svg.axes import choose_form, compute_ticks, select_time_labels
from tests.flows.kinds.market.chart_steps import BEGIN
from tests.support.soak import examples


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(100, soak=10_000))
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 15))
def test_ticks_are_round_and_few(low: float, span: float, limit: int) -> None:
    """F13: ticks lie on the axis, are multiples of 1, 2, 2.5 or 5 times a power of ten, and have distinct labels."""
    span = max(span, abs(low) * 1e-9)  # what a price scale has at least
    ticks, step = compute_ticks(low, low + span, limit)
    assert len(ticks) <= limit + 1
    lead = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert any(math.isclose(lead, factor, rel_tol=1e-6) for factor in (1, 2, 2.5, 5))
    assert all(low - step * 1e-6 <= tick <= low + span + step * 1e-6 for tick in ticks)
    form = choose_form(max(abs(low), abs(low + span)), step)
    labels = [form.format_value(tick) for tick in ticks]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("interval", "number", "texts"),
    [
        (timedelta(days=1), 260, ["Feb", "Apr", "Jun", "Aug"]),
        (timedelta(days=15), 120, ["2027", "2028", "2029", "2030"]),
        (timedelta(minutes=5), 300, ["06:00", "12:00", "18:00", "6 Jan"]),
    ],
)
def test_time_labels_prefer_larger_units(interval: timedelta, number: int, texts: list[str]) -> None:
    """F13: years before months before days before hours, with a minimum distance."""
    labels = select_time_labels([BEGIN + n * interval for n in range(number)], 20)
    assert all(after.index - before.index >= 20 for before, after in pairwise(labels))
    assert {*texts} <= {label.text for label in labels}
