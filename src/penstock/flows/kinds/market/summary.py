"""Facts of a candle series, and a summary of them as Markdown: sentences, a table, links to the charts."""

import math
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Any
from urllib.parse import quote

from penstock.flows.kinds.market.candles import Candle, CandleSeries, instant, moving_average
from penstock.flows.kinds.market.svg.axes import AxisForm, price_form, round_step, short

TRENDS = (20, 50)
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~$])")


@dataclass(frozen=True, slots=True)
class TimeframeSummary:
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


def facts_of(series: CandleSeries) -> TimeframeSummary:
    """The facts of at least one candle."""
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
        change_percent=_change_in_percent(last.close - first.open, first.open),
        high=top.high,
        high_at=top.time,
        low=bottom.low,
        low_at=bottom.time,
        range_percent=_change_in_percent(top.high - bottom.low, bottom.low),
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


def _change_in_percent(part: float, whole: float) -> float | None:
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


def plain(text: str) -> str:
    """Any text, as words of one line of Markdown."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def summary(symbol: str, facts: TimeframeSummary) -> str:
    """What happened: a sentence, and what stands out."""
    form, name = _form(facts), plain(symbol) or "The price"
    verb = "rose" if facts.change > 0 else "fell" if facts.change < 0 else "stood still"
    by = f" {_percent(abs(facts.change_percent))}" if facts.change_percent and facts.change else ""
    said = (
        f"{name} {verb}{by} from {_day(facts.first)} to {_day(facts.last)}: "
        f"it opened at {form.text(facts.open)} and closed at **{form.text(facts.close)}**."
    )
    points = [_range(facts, form), _pace(facts), *_trend(facts, form), *_volume(facts)]
    return said + "\n\n" + "\n".join(f"- {point}" for point in points)


def _range(facts: TimeframeSummary, form: AxisForm) -> str:
    low, high = (f"{form.text(facts.low)} ({_day(facts.low_at)})", f"{form.text(facts.high)} ({_day(facts.high_at)})")
    deepest = facts.drawdown_percent
    fall = f"; the deepest fall from an earlier close was {_percent(deepest)}" if deepest else ""
    return f"**Range:** from {low} to {high}{fall}."


def _pace(facts: TimeframeSummary) -> str:
    said = f"**Pace:** {facts.rising:,} of {facts.candles:,} candles of {facts.timeframe} rose"
    varied = facts.volatility_percent
    return f"{said}; from one to the next the price varied by {_percent(varied)}." if varied is not None else f"{said}."


def _trend(facts: TimeframeSummary, form: AxisForm) -> list[str]:
    sides = [
        f"{'above' if facts.close > mean else 'below' if facts.close < mean else 'at'} "
        f"the average of {period} candles ({form.text(mean)})"
        for period, mean in facts.trends
    ]
    return [f"**Trend:** the last close is {' and '.join(sides)}."] if sides else []


def _volume(facts: TimeframeSummary) -> list[str]:
    if not facts.volume:
        return []
    return [
        f"**Volume:** {short(facts.volume)} in all, {short(facts.mean_volume)} a candle; "
        f"most on {_day(facts.busiest_at)} ({short(facts.busiest_volume)}); "
        f"the last candle had {facts.last_volume / facts.mean_volume:.2f} times the mean."
    ]


def table(all_facts: Sequence[TimeframeSummary]) -> str:
    """The figures, a column for each timeframe."""
    rows = [
        ("", [facts.timeframe for facts in all_facts]),
        ("Candles", [f"{facts.candles:,}" for facts in all_facts]),
        ("First", [_moment(facts.first) for facts in all_facts]),
        ("Last", [_moment(facts.last) for facts in all_facts]),
        ("Open", [_form(facts).text(facts.open) for facts in all_facts]),
        ("High", [_form(facts).text(facts.high) for facts in all_facts]),
        ("Low", [_form(facts).text(facts.low) for facts in all_facts]),
        ("Close", [_form(facts).text(facts.close) for facts in all_facts]),
        ("Change", [_form(facts).change(facts.change) for facts in all_facts]),
        ("Change in percent", [_percent(facts.change_percent, "+") for facts in all_facts]),
        ("Range", [_percent(facts.range_percent) for facts in all_facts]),
        ("Deepest fall", [_percent(facts.drawdown_percent) for facts in all_facts]),
        ("Volatility per candle", [_percent(facts.volatility_percent) for facts in all_facts]),
        ("Rising candles", [f"{facts.rising:,}" for facts in all_facts]),
        ("Volume", [short(facts.volume) for facts in all_facts]),
        ("Volume per candle", [short(facts.mean_volume) for facts in all_facts]),
    ]
    lines = [f"| {' | '.join((name, *cells))} |" for name, cells in rows]
    lines.insert(1, "|---|" + "---:|" * len(all_facts))
    return "\n".join(lines)


def picture(name: str, path: str, report: str) -> str:
    """A chart, linked from where the *report* is."""
    return f"![{plain(name)}]({quote(posixpath.relpath(path, posixpath.dirname(report)))})"


def _form(facts: TimeframeSummary) -> AxisForm:
    prices = (facts.open, facts.high, facts.low, facts.close)
    span = max(facts.high - facts.low, abs(facts.high) * 1e-4, 1e-12)
    return price_form(prices, round_step(span / 10))


def _percent(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.2f} %"


def _day(at: datetime) -> str:
    return f"{at.day} {at:%B %Y}"


def _moment(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M}"
