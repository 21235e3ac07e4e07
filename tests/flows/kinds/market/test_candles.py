"""Moving averages, and candles that are joined."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.flows.kinds.market.candles import compute_moving_average, join_candles
from tests.flows.kinds.market.chart_steps import walk


@given(st.lists(st.integers(-1_000, 1_000), min_size=1, max_size=60), st.integers(1, 60))
def test_moving_averages_are_means(values: list[int], period: int) -> None:
    """F13: the mean of the last so many, and nothing where there are fewer."""
    found = compute_moving_average(values, period)
    assert len(found) == len(values)
    for n, mean in enumerate(found):
        part = values[n - period + 1 : n + 1] if n + 1 >= period else []
        assert mean is None if not part else mean == pytest.approx(sum(part) / period)


def test_joined_candles_lose_nothing() -> None:
    """F13: the first open, the last close, the extremes and all the volume."""
    candles = walk(10)
    one, two = join_candles(candles, 6)
    assert (one.time, one.open, one.close) == (candles[0].time, candles[0].open, candles[5].close)
    assert (two.high, two.low) == (max(c.high for c in candles[6:]), min(c.low for c in candles[6:]))
    assert one.volume + two.volume == pytest.approx(sum(c.volume for c in candles))
