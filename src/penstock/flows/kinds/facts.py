"""What can be said of candles with certainty: range, change, volatility, volume."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Any

from penstock.flows.kinds.market.exported_candles import Candle, Series, instant, moving_average

TRENDS = (20, 50)


@dataclass(frozen=True, slots=True)
class Facts:
    """One timeframe in figures. A percentage of a price that is not above zero is None."""

    timeframe: str
    candles: int
    first: datetime
    last: datetime
    open: float
    close: float
    change: float
    change_percent: float | None
    high: float
    high_at: datetime
    low: float
    low_at: datetime
    range_percent: float | None
    drawdown_percent: float | None
    volatility_percent: float | None
    rising: int
    volume: float
    mean_volume: float
    busiest_volume: float
    busiest_at: datetime
    last_volume: float
    trends: Sequence[tuple[int, float]]  # averages of so many closes, as far as there are so many

    def as_dict(self) -> dict[str, Any]:
        """As it is told to a model: times in words, numbers without noise."""
        named = {name: _plain(getattr(self, name)) for name in self.__slots__ if name != "trends"}
        return {**named, "averages": {str(period): _plain(value) for period, value in self.trends}}


def facts_of(series: Series) -> Facts:
    """The facts of at least one candle."""
    candles = series.candles
    first, last = candles[0], candles[-1]
    top, bottom = max(candles, key=lambda c: c.high), min(candles, key=lambda c: c.low)
    busiest, volume = max(candles, key=lambda c: c.volume), math.fsum(c.volume for c in candles)
    closes = [c.close for c in candles]
    return Facts(
        timeframe=series.timeframe,
        candles=len(candles),
        first=first.time,
        last=last.time,
        open=first.open,
        close=last.close,
        change=last.close - first.open,
        change_percent=_percent(last.close - first.open, first.open),
        high=top.high,
        high_at=top.time,
        low=bottom.low,
        low_at=bottom.time,
        range_percent=_percent(top.high - bottom.low, bottom.low),
        drawdown_percent=_drawdown(candles),
        volatility_percent=_volatility(closes),
        rising=sum(c.close > c.open for c in candles),
        volume=volume,
        mean_volume=volume / len(candles),
        busiest_volume=busiest.volume,
        busiest_at=busiest.time,
        last_volume=last.volume,
        trends=[(n, mean) for n in TRENDS if (mean := moving_average(closes, n)[-1]) is not None],
    )


def _percent(part: float, whole: float) -> float | None:
    return part / whole * 100 if whole > 0 else None


def _drawdown(candles: Sequence[Candle]) -> float | None:
    """How deep the price fell below the highest close before."""
    closes = [c.close for c in candles]
    if min(closes) <= 0:
        return None
    return max((peak - close) / peak * 100 for peak, close in zip(accumulate(closes, max), closes, strict=True))


def _volatility(closes: Sequence[float]) -> float | None:
    """The standard deviation of the change from close to close."""
    if len(closes) < 3 or min(closes) <= 0:
        return None
    changes = [math.log(after / before) for before, after in pairwise(closes)]
    mean = math.fsum(changes) / len(changes)
    return math.sqrt(math.fsum((change - mean) ** 2 for change in changes) / (len(changes) - 1)) * 100


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return instant(value)
    return float(f"{value:.8g}") if isinstance(value, float) else value
