"""The figures of a candle series."""

import math

import pytest

from penstock.flows.kinds.market.candles import CandleSeries
from penstock.flows.kinds.market.summary import compute_summary
from tests.flows.kinds.market.test_report import BEGIN, CANDLES, DAY


def test_figures_of_a_series() -> None:
    """F13: range, change, volatility, volume, and the largest fall."""
    facts = compute_summary(CandleSeries("TIDE", "1d", CANDLES))
    assert (facts.open, facts.close, facts.high, facts.low) == (100, 99, 112, 80.5)
    assert (facts.change, facts.change_percent) == (-1, -1)
    assert (facts.high_at, facts.low_at) == (BEGIN, BEGIN + DAY)
    assert facts.range_percent == pytest.approx((112 - 80.5) / 80.5 * 100)
    assert facts.drawdown_percent == pytest.approx(20)
    fall, rise = math.log(88 / 110), math.log(99 / 88)
    assert facts.volatility_percent == pytest.approx(abs(fall - rise) / math.sqrt(2) * 100)
    assert (facts.volume, facts.mean_volume, facts.busiest_at) == (6_000, 2_000, BEGIN + DAY)
    assert (facts.rising, facts.candles, list(facts.trends)) == (2, 3, [])
