"""The figures of a candle series, and their description in Markdown: sentences, a table, links to the charts."""

import math
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Any
from urllib.parse import quote

from penstock.flows.kinds.market.candles import Candle, CandleSeries, compute_moving_average, format_time
from penstock.flows.kinds.market.svg.axes import AxisForm, choose_price_form, compute_round_step, format_short

TRENDS = (20, 50)
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~$])")


@dataclass(frozen=True, slots=True)
class TimeframeSummary:
    """The figures of one timeframe. A percentage of a price of zero or less is None."""

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
    trends: Sequence[tuple[int, float]]  # moving averages: the period, and the last value

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as they are sent to a model: times as text, rounded numbers."""
        figures = {name: _encode_value(getattr(self, name)) for name in self.__slots__ if name != "trends"}
        return {**figures, "averages": {str(period): _encode_value(value) for period, value in self.trends}}


def compute_summary(series: CandleSeries) -> TimeframeSummary:
    """Return the figures of a series with at least one candle."""
    candles = series.candles
    first, last = candles[0], candles[-1]
    top, bottom = max(candles, key=lambda c: c.high), min(candles, key=lambda c: c.low)
    busiest, volume = max(candles, key=lambda c: c.volume), math.fsum(c.volume for c in candles)
    closes = [c.close for c in candles]
    return TimeframeSummary(
        timeframe=series.timeframe,
        candles=len(candles),
        first=first.time,
        last=last.time,
        open=first.open,
        close=last.close,
        change=last.close - first.open,
        change_percent=_compute_percent(last.close - first.open, first.open),
        high=top.high,
        high_at=top.time,
        low=bottom.low,
        low_at=bottom.time,
        range_percent=_compute_percent(top.high - bottom.low, bottom.low),
        drawdown_percent=_compute_drawdown(candles),
        volatility_percent=_compute_volatility(closes),
        rising=sum(c.close > c.open for c in candles),
        volume=volume,
        mean_volume=volume / len(candles),
        busiest_volume=busiest.volume,
        busiest_at=busiest.time,
        last_volume=last.volume,
        trends=[(n, mean) for n in TRENDS if (mean := compute_moving_average(closes, n)[-1]) is not None],
    )


def _compute_percent(part: float, whole: float) -> float | None:
    return part / whole * 100 if whole > 0 else None


def _compute_drawdown(candles: Sequence[Candle]) -> float | None:
    """Return the largest fall below the highest earlier close, in percent."""
    closes = [c.close for c in candles]
    if min(closes) <= 0:
        return None
    return max((peak - close) / peak * 100 for peak, close in zip(accumulate(closes, max), closes, strict=True))


def _compute_volatility(closes: Sequence[float]) -> float | None:
    """Return the standard deviation of the changes from close to close, in percent."""
    if len(closes) < 3 or min(closes) <= 0:
        return None
    changes = [math.log(after / before) for before, after in pairwise(closes)]
    mean = math.fsum(changes) / len(changes)
    return math.sqrt(math.fsum((change - mean) ** 2 for change in changes) / (len(changes) - 1)) * 100


def _encode_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return format_time(value)
    return float(f"{value:.8g}") if isinstance(value, float) else value


def escape_markdown(text: str) -> str:
    """Return a text as one line of Markdown, with special characters escaped."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def describe_summary(symbol: str, facts: TimeframeSummary) -> str:
    """Return a sentence on the change of the price, and a list of remarkable figures."""
    form, name = _choose_form(facts), escape_markdown(symbol) or "The price"
    verb = "rose" if facts.change > 0 else "fell" if facts.change < 0 else "did not change"
    by = f" {_format_percent(abs(facts.change_percent))}" if facts.change_percent and facts.change else ""
    sentence = (
        f"{name} {verb}{by} from {_format_day(facts.first)} to {_format_day(facts.last)}: "
        f"it opened at {form.format_value(facts.open)} and closed at **{form.format_value(facts.close)}**."
    )
    points = [
        _describe_range(facts, form),
        _describe_pace(facts),
        *_describe_trend(facts, form),
        *_describe_volume(facts),
    ]
    return sentence + "\n\n" + "\n".join(f"- {point}" for point in points)


def _describe_range(facts: TimeframeSummary, form: AxisForm) -> str:
    low, high = (
        f"{form.format_value(facts.low)} ({_format_day(facts.low_at)})",
        f"{form.format_value(facts.high)} ({_format_day(facts.high_at)})",
    )
    drawdown = facts.drawdown_percent
    fall = f"; the largest fall from an earlier close was {_format_percent(drawdown)}" if drawdown else ""
    return f"**Range:** from {low} to {high}{fall}."


def _describe_pace(facts: TimeframeSummary) -> str:
    rising = f"**Pace:** {facts.rising:,} of {facts.candles:,} candles of {facts.timeframe} rose"
    volatility = facts.volatility_percent
    return (
        f"{rising}; the volatility per candle was {_format_percent(volatility)}."
        if volatility is not None
        else f"{rising}."
    )


def _describe_trend(facts: TimeframeSummary, form: AxisForm) -> list[str]:
    sides = [
        f"{'above' if facts.close > mean else 'below' if facts.close < mean else 'at'} "
        f"the average of the last {period} candles ({form.format_value(mean)})"
        for period, mean in facts.trends
    ]
    return [f"**Trend:** the last close is {' and '.join(sides)}."] if sides else []


def _describe_volume(facts: TimeframeSummary) -> list[str]:
    if not facts.volume:
        return []
    return [
        f"**Volume:** {format_short(facts.volume)} in total, {format_short(facts.mean_volume)} per candle; "
        f"the largest on {_format_day(facts.busiest_at)} ({format_short(facts.busiest_volume)}); "
        f"the last candle had {facts.last_volume / facts.mean_volume:.2f} times the mean."
    ]


def make_table(all_facts: Sequence[TimeframeSummary]) -> str:
    """Return a table of the figures, with a column for each timeframe."""
    rows = [
        ("", [facts.timeframe for facts in all_facts]),
        ("Candles", [f"{facts.candles:,}" for facts in all_facts]),
        ("First", [_format_minute(facts.first) for facts in all_facts]),
        ("Last", [_format_minute(facts.last) for facts in all_facts]),
        ("Open", [_choose_form(facts).format_value(facts.open) for facts in all_facts]),
        ("High", [_choose_form(facts).format_value(facts.high) for facts in all_facts]),
        ("Low", [_choose_form(facts).format_value(facts.low) for facts in all_facts]),
        ("Close", [_choose_form(facts).format_value(facts.close) for facts in all_facts]),
        ("Change", [_choose_form(facts).format_change(facts.change) for facts in all_facts]),
        ("Change in percent", [_format_percent(facts.change_percent, "+") for facts in all_facts]),
        ("Range", [_format_percent(facts.range_percent) for facts in all_facts]),
        ("Largest fall", [_format_percent(facts.drawdown_percent) for facts in all_facts]),
        ("Volatility per candle", [_format_percent(facts.volatility_percent) for facts in all_facts]),
        ("Rising candles", [f"{facts.rising:,}" for facts in all_facts]),
        ("Volume", [format_short(facts.volume) for facts in all_facts]),
        ("Volume per candle", [format_short(facts.mean_volume) for facts in all_facts]),
    ]
    lines = [f"| {' | '.join((name, *cells))} |" for name, cells in rows]
    lines.insert(1, "|---|" + "---:|" * len(all_facts))
    return "\n".join(lines)


def link_chart(name: str, path: str, report: str) -> str:
    """Return a Markdown image of a chart, with its path relative to the *report*."""
    return f"![{escape_markdown(name)}]({quote(posixpath.relpath(path, posixpath.dirname(report)))})"


def _choose_form(facts: TimeframeSummary) -> AxisForm:
    prices = (facts.open, facts.high, facts.low, facts.close)
    span = max(facts.high - facts.low, abs(facts.high) * 1e-4, 1e-12)
    return choose_price_form(prices, compute_round_step(span / 10))


def _format_percent(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.2f} %"


def _format_day(at: datetime) -> str:
    return f"{at.day} {at:%B %Y}"


def _format_minute(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M}"
