"""Axes: where round prices lie, how numbers are written, and which moments are worth a label."""

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_LONGEST = 10  # decimals that are written out; smaller and larger numbers take an exponent
_LARGEST = 1e12
_SMALLEST = 1e-290  # what is below has not all its digits
_AIR = 2.0  # times the least distance of two labels, on average, at most
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to heights: *low* is drawn at *bottom*, *high* at *top*."""

    low: float
    high: float
    top: float
    bottom: float

    def y(self, value: float) -> float:
        """How far down *value* is drawn."""
        return self.bottom - (value - self.low) / (self.high - self.low) * (self.bottom - self.top)


def price_scale(low: float, high: float, top: float, bottom: float) -> Scale:
    """A scale with air above and below; one price alone gets air of its own size."""
    air = (high - low) * 0.06 or abs(high) * 0.02 or 1.0
    air = max(air, max(abs(low), abs(high)) * 1e-9, _SMALLEST)  # below, floats hardly tell prices apart
    return Scale(low - air, high + air, top, bottom)


def ticks(low: float, high: float, most: int) -> tuple[list[float], float]:
    """Round values from *low* to *high*, no more than *most*, and the step between them."""
    step = round_step((high - low) / max(most, 1))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)], step


def round_step(least: float) -> float:
    """The smallest step that is round, and not below *least*."""
    least = max(least, _SMALLEST)
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in _ROUND if factor * power >= least * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class AxisForm:
    """How numbers are written: with so many decimals, or, where that would be long, so many digits and an exponent."""

    decimals: int
    digits: int | None = None

    def text(self, value: float) -> str:
        """The number, with a true minus and separators."""
        if self.digits is not None:
            return f"{value:.{self.digits - 1}e}".replace("-", MINUS)
        text = f"{value:,.{self.decimals}f}"
        return text.replace("-", MINUS) if text.strip("-0.,") else text.lstrip("-")

    def change(self, value: float) -> str:
        """The number, with its sign."""
        return f"+{self.text(value)}" if value > 0 else self.text(value)


def form_of(largest: float, step: float) -> AxisForm:
    """How multiples of *step* up to *largest* are told apart."""
    decimals = next((n for n in range(_LONGEST + 1) if _is_whole(step * 10**n)), None)
    if decimals is None or largest >= _LARGEST:
        return AxisForm(0, max(2, min(12, math.ceil(math.log10(max(largest / step, 1))) + 2)))
    return AxisForm(decimals)


def price_form(prices: Sequence[float], step: float) -> AxisForm:
    """How prices are told: with the decimals they have, as far as they can be seen on an axis with such steps."""
    axis = form_of(max(map(abs, prices)), step)
    if axis.digits is not None:
        return axis
    useful = max(0, math.ceil(-math.log10(step / 1_000)))
    present = max(_decimals(price) for price in prices)
    return AxisForm(max(axis.decimals, min(useful, present, _LONGEST)))


def _is_whole(value: float) -> bool:
    return value >= 0.5 and abs(value - round(value)) < 1e-6 * value


def _decimals(price: float) -> int:
    text = repr(price)
    return _LONGEST if "e" in text else len(text.partition(".")[2].rstrip("0"))


def short(value: float) -> str:
    """A quantity in few characters, such as 12.5K."""
    if abs(value) >= _LARGEST:
        return f"{value:.3g}"
    for size, suffix in _SUFFIXES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class AxisLabel:
    """A moment on the time axis."""

    place: int
    text: str
    is_strong: bool


def time_labels(times: Sequence[datetime], room: int) -> list[AxisLabel]:
    """Labels at least *room* places apart, the beginnings of years and months before those of days and hours."""
    weights = [_weight(before, at) for before, at in pairwise(times)]
    taken: list[int] = []
    for weight in sorted(set(weights), reverse=True):
        for place in (n for n, own in enumerate(weights, start=1) if own == weight):
            at = bisect(taken, place)
            if all(abs(place - near) >= room for near in taken[max(0, at - 1) : at + 1]):
                taken.insert(at, place)
        if len(taken) * room * _AIR >= len(times):
            break  # enough: hours between days, or days between months, would only be in the way
    if not taken and times:
        return [AxisLabel(0, f"{times[0]:%d %b %Y %H:%M}", is_strong=False)]
    return [_label(place, times[place - 1], times[place]) for place in taken]


def _weight(before: datetime, at: datetime) -> int:
    """How great a change it is from one moment to the next."""
    if at.year != before.year:
        return 9
    if at.month != before.month:
        return 8
    if at.date() != before.date():
        return 7 if at.isocalendar()[1] != before.isocalendar()[1] else 6
    return _hour_weight(before, at)


def _hour_weight(before: datetime, at: datetime) -> int:
    for weight, hours in ((5, 12), (4, 6), (3, 3), (2, 1)):
        if at.hour // hours != before.hour // hours:
            return weight
    return 1 if at.minute // 15 != before.minute // 15 else 0


def _label(place: int, before: datetime, at: datetime) -> AxisLabel:
    if at.year != before.year:
        return AxisLabel(place, f"{at:%Y}", is_strong=True)
    if at.month != before.month:
        return AxisLabel(place, f"{at:%b}", is_strong=True)
    if at.date() != before.date():
        return AxisLabel(place, f"{at.day} {at:%b}", is_strong=False)
    return AxisLabel(place, f"{at:%H:%M}", is_strong=False)
