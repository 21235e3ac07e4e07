"""The layout of a chart: theme, panes and scales, and the candles, joined where they would be too dense."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.flows.kinds.market.candles import Candle, CandleSeries, compute_moving_average, join_candles
from penstock.flows.kinds.market.svg.axes import (
    AxisForm,
    Scale,
    choose_form,
    choose_price_form,
    compute_ticks,
    make_price_scale,
)

AVERAGES = (20, 50)
HEADER, TIME_AXIS, LEFT = 68, 30, 16
_LEGEND = 26  # pixels above the candles
_LETTER = 7.2  # width of a character on the axes in pixels, in the widest font
_SLOT, _LEAST_SLOT = 28.0, 4.0  # width of a candle in pixels; candles that would be narrower are joined
_VOLUME_SHARE, _GAP = 0.19, 14
_TICK = 52  # minimum distance of two prices on the axis, in pixels

Average = Sequence[float | None]


class Theme(NamedTuple):
    """The colours of a chart."""

    paper: str
    ink: str
    faint: str
    mark: str  # the symbol behind the candles
    grid: str
    frame: str
    up: str
    down: str
    averages: tuple[str, str]


THEMES = {
    "light": Theme(
        paper="#ffffff",
        ink="#131722",
        faint="#6a6f7d",
        mark="#f6f7f9",
        grid="#eef0f4",
        frame="#d5d9e2",
        up="#089981",
        down="#f23645",
        averages=("#2962ff", "#f57c00"),
    ),
    "dark": Theme(
        paper="#131722",
        ink="#e3e6ee",
        faint="#8a91a2",
        mark="#191e2b",
        grid="#1f2533",
        frame="#333a4b",
        up="#22ab94",
        down="#f7525f",
        averages=("#5b8cff", "#ffb74d"),
    ),
}


@dataclass(frozen=True, slots=True)
class ChartStyle:
    """The style of a chart; *last* is the maximum number of candles."""

    width: int = 1200
    height: int = 675
    theme: str = "light"
    title: str | None = None
    last: int | None = None


@dataclass(frozen=True, slots=True)
class ChartLayout:
    """The positions, scales and formats of a chart."""

    style: ChartStyle
    theme: Theme
    series: CandleSeries
    candles: Sequence[Candle]
    joined: int  # candles of the series per drawn candle
    averages: Sequence[tuple[int, Average]]
    prices: Scale
    volumes: Scale | None
    ticks: Sequence[float]
    axis: AxisForm
    price: AxisForm
    right: float  # end of the panes, start of the price axis
    left: float  # start of the first candle
    slot: float

    @property
    def bottom(self) -> float:
        """Return the end of the panes, which is the start of the time axis."""
        return self.style.height - TIME_AXIS

    @property
    def body(self) -> int:
        """Return the width of a candle body; odd, so that the wick is in the middle."""
        width = max(1, int(self.slot * 0.76))
        return width - 1 + width % 2

    def x(self, index: float) -> float:
        """Return the middle of a candle, on a whole pixel."""
        return math.floor(self.left + (index + 0.5) * self.slot)


def make_layout(series: CandleSeries, style: ChartStyle) -> ChartLayout:
    """Return the layout of a series with at least one candle."""
    shown = len(series.candles) if style.last is None else min(style.last, len(series.candles))
    size = max(1, math.ceil(shown * _LEAST_SLOT / ((style.width - LEFT) * 0.9)))
    # Joined from the start of the chart; the earlier candles count for the averages.
    joined = join_candles(series.candles[(len(series.candles) - shown) % size :], size)
    candles = joined[-math.ceil(shown / size) :]
    averages = _compute_averages(joined, len(candles))
    means = [value for _, average in averages for value in average if value is not None]
    low, high = min(*means, *(c.low for c in candles), math.inf), max(*means, *(c.high for c in candles), -math.inf)
    has_volume = any(candle.volume > 0 for candle in candles)
    bottom = style.height - TIME_AXIS
    floor = bottom - (bottom - HEADER) * _VOLUME_SHARE if has_volume else bottom
    prices = make_price_scale(low, high, HEADER + _LEGEND, floor)
    marks, step = compute_ticks(prices.low, prices.high, max(2, int((floor - HEADER - _LEGEND) / _TICK)))
    axis, price = choose_form(max(abs(low), abs(high)), step), choose_price_form([c.close for c in candles[-50:]], step)
    labels = [axis.format_value(mark) for mark in marks] + [price.format_value(candles[-1].close)]
    right = style.width - math.ceil(max(map(len, labels)) * _LETTER + 18)
    slot = min(_SLOT, (right - LEFT) * 0.975 / len(candles))
    is_full = slot < _SLOT
    left = LEFT if is_full else LEFT + (right - LEFT - slot * len(candles)) / 2
    volumes = Scale(0, max(c.volume for c in candles), floor + _GAP, bottom) if has_volume else None
    return ChartLayout(
        style,
        THEMES[style.theme],
        series,
        candles,
        size,
        averages,
        prices,
        volumes,
        marks,
        axis,
        price,
        right,
        left,
        slot,
    )


def _compute_averages(candles: Sequence[Candle], shown: int) -> list[tuple[int, Average]]:
    """Return the moving averages at the drawn candles, except those without enough candles."""
    closes = [candle.close for candle in candles]
    averages = [(period, compute_moving_average(closes, period)[-shown:]) for period in AVERAGES]
    return [(period, average) for period, average in averages if average[-1] is not None]
