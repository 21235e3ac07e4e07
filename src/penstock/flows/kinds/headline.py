"""The words above a chart: what it shows, the last candle, and how far the price came."""

from collections.abc import Iterable
from datetime import datetime

from penstock.flows.kinds.market.svg.axes import short
from penstock.flows.kinds.market.svg.elements import element, num, safe, text
from penstock.flows.kinds.market.svg.layout import HEADER, LEFT, Sheet

_WIDE = 620  # pixels; narrower charts leave the last candle's prices out


def headline(sheet: Sheet) -> Iterable[str]:
    """What is shown, and the last price."""
    theme, wide = sheet.theme, sheet.look.width
    yield _run(LEFT, 30, 19, _names(sheet))
    edge = wide - 14
    last = sheet.candles[-1]
    yield text(
        edge, 30, sheet.price.text(last.close), fill=theme.ink, font_size=20, font_weight="700", text_anchor="end"
    )
    yield _change(sheet, edge)
    if wide >= _WIDE:
        yield _run(LEFT, 53, 12.5, _last_candle(sheet))


def legend(sheet: Sheet) -> Iterable[str]:
    """Which average has which colour, and the volume, inside their panes."""
    theme = sheet.theme
    words = [
        (f"MA {period}  {sheet.price.text(average[-1] or 0)}", colour, "600", 14)
        for (period, average), colour in zip(sheet.averages, theme.averages, strict=False)
    ]
    if sheet.joined > 1:
        words.append((f"{sheet.joined} × {sheet.series.timeframe} per candle", theme.faint, "400", 14))
    if words:
        yield _run(LEFT, HEADER + 21, 12, words, halo=theme.paper)
    if sheet.volumes is not None:
        words = [("Volume", theme.faint, "400", 0), (short(sheet.candles[-1].volume), theme.ink, "600", 6)]
        yield _run(LEFT, sheet.prices.bottom + 18, 12, words, halo=theme.paper)


Word = tuple[str, str, str, int]  # text, colour, weight, pixels before it


def _run(x: float, y: float, size: float, words: list[Word], halo: str | None = None) -> str:
    """Words that follow one another, however wide each of them is."""
    spans = "".join(
        element("tspan", safe(word), fill=fill, font_weight=weight, **({"dx": before} if n and before else {}))
        for n, (word, fill, weight, before) in enumerate(words)
    )
    around = {"stroke": halo, "stroke_width": "4", "paint_order": "stroke", "stroke_linejoin": "round"} if halo else {}
    return element("text", spans, x=x, y=y, font_size=num(size), **around)


def _names(sheet: Sheet) -> list[Word]:
    theme, series = sheet.theme, sheet.series
    room = int(sheet.look.width * 0.5 / 11)
    title = sheet.look.title or series.symbol or "Candles"
    words = [(_cut(title, room), theme.ink, "700", 0)]
    if sheet.look.title and series.symbol:
        words.append((_cut(series.symbol, room), theme.faint, "600", 12))
    return [*words, (series.timeframe, theme.faint, "400", 10)]


def _last_candle(sheet: Sheet) -> list[Word]:
    theme, last = sheet.theme, sheet.candles[-1]
    colour = theme.up if last.is_up else theme.down
    words: list[Word] = [(f"{last.time:%Y-%m-%d %H:%M} UTC", theme.faint, "400", 0)]
    for name, value in (("O", last.open), ("H", last.high), ("L", last.low), ("C", last.close)):
        words += [(name, theme.faint, "400", 12), (sheet.price.text(value), colour, "500", 4)]
    return words


def _change(sheet: Sheet, edge: float) -> str:
    """How far the price came since the first candle opened."""
    first, last = sheet.candles[0], sheet.candles[-1]
    change = last.close - first.open
    colour = sheet.theme.up if change >= 0 else sheet.theme.down
    said = sheet.price.change(change)
    if first.open:
        said += f" ({change / abs(first.open) * 100:+.2f}%)".replace("-", "\N{MINUS SIGN}")
    since = element("tspan", safe(f"since {_day(first.time)}"), fill=sheet.theme.faint, font_weight="400", dx=8)
    told = element("tspan", safe(said), fill=colour, font_weight="600")
    return element("text", told + since, x=edge, y=53, font_size="12.5", text_anchor="end")


def _day(at: datetime) -> str:
    return f"{at.day} {at:%b %Y}"


def _cut(words: str, room: int) -> str:
    return words if len(words) <= room else words[: room - 1] + "\N{HORIZONTAL ELLIPSIS}"
