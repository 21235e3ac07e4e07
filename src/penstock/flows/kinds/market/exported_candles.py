"""Candles: as an artifact, the last of them, fewer of them, and their averages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, NamedTuple

import orjson

COLUMNS = ("time", "open", "high", "low", "close", "volume")


class Candle(NamedTuple):
    """What a price did in the time that began at *time*."""

    time: datetime
    open: float
    high: float
    low: float
    close: float
    volume: float

    @property
    def is_up(self) -> bool:
        """Whether it closed where it opened, or higher."""
        return self.close >= self.open


@dataclass(frozen=True, slots=True)
class Series:
    """The candles of one timeframe, in order of time."""

    symbol: str
    timeframe: str
    candles: Sequence[Candle]

    def last(self, number: int | None) -> "Series":
        """The latest so many; all of them for None."""
        return self if number is None else replace(self, candles=self.candles[-number:])

    def as_dict(self) -> dict[str, Any]:
        """As it is kept and sent."""
        rows = [[instant(candle.time), *candle[1:]] for candle in self.candles]
        return {
            "symbol": self.symbol,
            "timeframe": self.timeframe,
            "timezone": "UTC",
            "columns": COLUMNS,
            "candles": rows,
        }

    def as_bytes(self) -> bytes:
        """The artifact: the same bytes for the same candles."""
        return orjson.dumps(self.as_dict())


def read_series(data: bytes) -> Series:
    """What `as_bytes` wrote; ValueError for anything else."""
    document = orjson.loads(data)
    try:
        candles = [Candle(datetime.fromisoformat(row[0]), *map(float, row[1:])) for row in document["candles"]]
        return Series(str(document["symbol"]), str(document["timeframe"]), candles)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not an export of candles: {error!r}") from error


def instant(at: datetime) -> str:
    """ISO 8601 in UTC, to the second."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def joined(candles: Sequence[Candle], size: int) -> list[Candle]:
    """Fewer candles, each of *size* that follow one another; the last may be of fewer."""
    return [_one(candles[n : n + size]) for n in range(0, len(candles), size)]


def _one(group: Sequence[Candle]) -> Candle:
    high, low = max(c.high for c in group), min(c.low for c in group)
    return Candle(group[0].time, group[0].open, high, low, group[-1].close, sum(c.volume for c in group))


def moving_average(values: Sequence[float], period: int) -> list[float | None]:
    """The mean of the last *period* values at each place; None where there are fewer."""
    sums = [0.0, *accumulate(values)]
    means = [(sums[n] - sums[n - period]) / period for n in range(period, len(sums))]
    return [None] * min(period - 1, len(values)) + list(means)
