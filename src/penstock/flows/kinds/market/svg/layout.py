"""The layout of a chart: its theme, panes and scales, and its candles, joined where they would be too dense."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.flows.kinds.market.candles import Candle, CandleSeries, joined, moving_average
from penstock.flows.kinds.market.svg.axes import AxisForm, Scale, form_of, price_form, price_scale, ticks

AVERAGES = (20, 50)
HEADER, TIME_AXIS, LEFT = 68, 30, 16
_LEGEND = 26  # pixels above the candles
_LETTER = 7.2  # pixels of a character on the axes, in the widest font there may be
_SLOT, _LEAST_SLOT = 28.0, 4.0  # pixels a candle takes at most; below the least, candles are joined
_VOLUME_SHARE, _GAP = 0.19, 14
_TICK = 52  # pixels between two prices on the axis, at least

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
    """How one chart is to look; *last* is how many candles it shows at most."""

    width: int = 1200
    height: int = 675
    theme: str = "light"
    title: str | None = None
    last: int | None = None


@dataclass(frozen=True, slots=True)
class ChartLayout:
    """A chart laid out."""

    look: ChartStyle
    theme: Theme
    series: CandleSeries
    candles: Sequence[Candle]
    joined: int  # candles of the series in one that is drawn
    averages: Sequence[tuple[int, Average]]
    prices: Scale
    volumes: Scale | None
    ticks: Sequence[float]
    axis: AxisForm
    price: AxisForm
    right: float  # where the panes end and the price axis begins
    left: float  # where the first candle's room begins
    slot: float

    @property
    def bottom(self) -> float:
        """Where the panes end and the time axis begins."""
        return self.look.height - TIME_AXIS

    @property
    def body(self) -> int:
        """The width of a candle; odd, so that its wick is in the middle."""
        width = max(1, int(self.slot * 0.76))
        return width - 1 + width % 2

    def x(self, place: float) -> float:
        """The middle of a candle, on a whole pixel."""
        return math.floor(self.left + (place + 0.5) * self.slot)


def lay_out(series: CandleSeries, look: ChartStyle) -> ChartLayout:
    """The sheet for at least one candle."""
    shown = len(series.candles) if look.last is None else min(look.last, len(series.candles))
    size = max(1, math.ceil(shown * _LEAST_SLOT / ((look.width - LEFT) * 0.9)))
    # Joined from where the chart begins; what is before it counts for the averages.
    every = joined(series.candles[(len(series.candles) - shown) % size :], size)
    candles = every[-math.ceil(shown / size) :]
    averages = _averages(every, len(candles))
    known = [value for _, average in averages for value in average if value is not None]
    low, high = min(*known, *(c.low for c in candles), math.inf), max(*known, *(c.high for c in candles), -math.inf)
    has_volume = any(candle.volume > 0 for candle in candles)
    bottom = look.height - TIME_AXIS
    floor = bottom - (bottom - HEADER) * _VOLUME_SHARE if has_volume else bottom
    prices = price_scale(low, high, HEADER + _LEGEND, floor)
    marks, step = ticks(prices.low, prices.high, max(2, int((floor - HEADER - _LEGEND) / _TICK)))
    axis, price = form_of(max(abs(low), abs(high)), step), price_form([c.close for c in candles[-50:]], step)
    labels = [axis.text(mark) for mark in marks] + [price.text(candles[-1].close)]
    right = look.width - math.ceil(max(map(len, labels)) * _LETTER + 18)
    slot = min(_SLOT, (right - LEFT) * 0.975 / len(candles))
    is_full = slot < _SLOT
    left = LEFT if is_full else LEFT + (right - LEFT - slot * len(candles)) / 2
    volumes = Scale(0, max(c.volume for c in candles), floor + _GAP, bottom) if has_volume else None
    return ChartLayout(
        look,
        THEMES[look.theme],
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


def _averages(candles: Sequence[Candle], shown: int) -> list[tuple[int, Average]]:
    """Each average at each candle that is shown, where there is one."""
    closes = [candle.close for candle in candles]
    found = [(period, moving_average(closes, period)[-shown:]) for period in AVERAGES]
    return [(period, average) for period, average in found if average[-1] is not None]
