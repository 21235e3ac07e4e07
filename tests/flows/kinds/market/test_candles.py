"""Moving averages and joined candles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.flows.kinds.market.candles import compute_moving_average, join_candles
from tests.flows.kinds.market.chart_steps import walk


@given(st.lists(st.integers(-1_000, 1_000), min_size=1, max_size=60), st.integers(1, 60))
def test_moving_averages_are_means(values: list[int], period: int) -> None:
    """F13: the mean of the last values of the period, and None where there are fewer."""
    means = compute_moving_average(values, period)
    assert len(means) == len(values)
    for n, mean in enumerate(means):
        part = values[n - period + 1 : n + 1] if n + 1 >= period else []
        assert mean is None if not part else mean == pytest.approx(sum(part) / period)


def test_joined_candles_lose_nothing() -> None:
    """F13: the first open, the last close, the extremes and the total volume."""
    candles = walk(10)
    first, second = join_candles(candles, 6)
    assert (first.time, first.open, first.close) == (candles[0].time, candles[0].open, candles[5].close)
    assert (second.high, second.low) == (max(c.high for c in candles[6:]), min(c.low for c in candles[6:]))
    assert first.volume + second.volume == pytest.approx(sum(c.volume for c in candles))
