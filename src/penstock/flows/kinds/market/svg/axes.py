"""Axes of charts: round prices, formats of numbers, and labels of times."""

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_MAX_DECIMALS = 10  # smaller and larger numbers are written with an exponent
_LARGEST = 1e12
_SMALLEST = 1e-290  # smaller floats have fewer digits
_MAX_SPACING = 2.0  # average distance of two labels, as a multiple of the minimum
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear scale from values to pixels: *low* is drawn at *bottom*, *high* at *top*."""

    low: float
    high: float
    top: float
    bottom: float

    def y(self, value: float) -> float:
        """Return the vertical coordinate of *value*."""
        return self.bottom - (value - self.low) / (self.high - self.low) * (self.bottom - self.top)


def make_price_scale(low: float, high: float, top: float, bottom: float) -> Scale:
    """Return a scale with a margin above and below the prices, also for a single price."""
    margin = (high - low) * 0.06 or abs(high) * 0.02 or 1.0
    margin = max(margin, max(abs(low), abs(high)) * 1e-9, _SMALLEST)  # a smaller margin exceeds the precision of floats
    return Scale(low - margin, high + margin, top, bottom)


def compute_ticks(low: float, high: float, limit: int) -> tuple[list[float], float]:
    """Return up to *limit* round values from *low* to *high*, and the step between them."""
    step = compute_round_step((high - low) / max(limit, 1))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)], step


def compute_round_step(least: float) -> float:
    """Return the smallest round step of at least *least*."""
    least = max(least, _SMALLEST)
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in _ROUND if factor * power >= least * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class AxisForm:
    """A format of numbers: with *decimals*, or with *digits* and an exponent where decimals would be too long."""

    decimals: int
    digits: int | None = None

    def format_value(self, value: float) -> str:
        """Return the number with a typographic minus and thousands separators."""
        if self.digits is not None:
            return f"{value:.{self.digits - 1}e}".replace("-", MINUS)
        text = f"{value:,.{self.decimals}f}"
        return text.replace("-", MINUS) if text.strip("-0.,") else text.lstrip("-")

    def format_change(self, value: float) -> str:
        """Return the number with its sign."""
        return f"+{self.format_value(value)}" if value > 0 else self.format_value(value)


def choose_form(largest: float, step: float) -> AxisForm:
    """Return the shortest format that distinguishes the multiples of *step* up to *largest*."""
    decimals = next((n for n in range(_MAX_DECIMALS + 1) if _is_whole(step * 10**n)), None)
    if decimals is None or largest >= _LARGEST:
        return AxisForm(0, max(2, min(12, math.ceil(math.log10(max(largest / step, 1))) + 2)))
    return AxisForm(decimals)


def choose_price_form(prices: Sequence[float], step: float) -> AxisForm:
    """Return a format with the decimals of the prices, up to those that are visible on an axis with this step."""
    axis = choose_form(max(map(abs, prices)), step)
    if axis.digits is not None:
        return axis
    visible = max(0, math.ceil(-math.log10(step / 1_000)))
    present = max(_count_decimals(price) for price in prices)
    return AxisForm(max(axis.decimals, min(visible, present, _MAX_DECIMALS)))


def _is_whole(value: float) -> bool:
    return value >= 0.5 and abs(value - round(value)) < 1e-6 * value


def _count_decimals(price: float) -> int:
    text = repr(price)
    return _MAX_DECIMALS if "e" in text else len(text.partition(".")[2].rstrip("0"))


def format_short(value: float) -> str:
    """Return a quantity in a few characters, such as 12.5K."""
    if abs(value) >= _LARGEST:
        return f"{value:.3g}"
    for size, suffix in _SUFFIXES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class AxisLabel:
    """A label of the time axis, at the candle *index*."""

    index: int
    text: str
    is_strong: bool


def select_time_labels(times: Sequence[datetime], spacing: int) -> list[AxisLabel]:
    """Return labels at least *spacing* candles apart; starts of years and months before those of days and hours."""
    weights = [_rank_change(before, at) for before, at in pairwise(times)]
    selected: list[int] = []
    for weight in sorted(set(weights), reverse=True):
        for index in (n for n, own in enumerate(weights, start=1) if own == weight):
            at = bisect(selected, index)
            if all(abs(index - near) >= spacing for near in selected[max(0, at - 1) : at + 1]):
                selected.insert(at, index)
        if len(selected) * spacing * _MAX_SPACING >= len(times):
            break  # enough labels: smaller units, such as hours between days, would only distract
    if not selected and times:
        return [AxisLabel(0, f"{times[0]:%d %b %Y %H:%M}", is_strong=False)]
    return [_make_label(index, times[index - 1], times[index]) for index in selected]


def _rank_change(before: datetime, at: datetime) -> int:
    """Return the rank of the change from one time to the next: a new year has the highest."""
    if at.year != before.year:
        return 9
    if at.month != before.month:
        return 8
    if at.date() != before.date():
        return 7 if at.isocalendar()[1] != before.isocalendar()[1] else 6
    return _rank_hour_change(before, at)


def _rank_hour_change(before: datetime, at: datetime) -> int:
    for weight, hours in ((5, 12), (4, 6), (3, 3), (2, 1)):
        if at.hour // hours != before.hour // hours:
            return weight
    return 1 if at.minute // 15 != before.minute // 15 else 0


def _make_label(index: int, before: datetime, at: datetime) -> AxisLabel:
    if at.year != before.year:
        return AxisLabel(index, f"{at:%Y}", is_strong=True)
    if at.month != before.month:
        return AxisLabel(index, f"{at:%b}", is_strong=True)
    if at.date() != before.date():
        return AxisLabel(index, f"{at.day} {at:%b}", is_strong=False)
    return AxisLabel(index, f"{at:%H:%M}", is_strong=False)
