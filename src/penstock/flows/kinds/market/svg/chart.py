"""F13: the local renderer: candlesticks as SVG, the same bytes for the same candles."""

import math
from collections.abc import Callable, Iterable

from penstock.flows.kinds.market.candles import Candle, CandleSeries
from penstock.flows.kinds.market.svg.axes import short, ticks, time_labels
from penstock.flows.kinds.market.svg.elements import box, element, num, safe, text
from penstock.flows.kinds.market.svg.layout import HEADER, LEFT, ChartLayout, ChartStyle, lay_out

_WIDE = 620  # pixels; narrower charts leave the last candle's prices out
_FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_LABEL_ROOM = 84  # pixels between two labels of the time axis, at least
_LEADER = 22  # pixels from a high or low to its label

Word = tuple[str, str, str, int]  # text, colour, weight, pixels before it


def headline(sheet: ChartLayout) -> Iterable[str]:
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


def legend(sheet: ChartLayout) -> Iterable[str]:
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


def _run(x: float, y: float, size: float, words: list[Word], halo: str | None = None) -> str:
    """Words that follow one another, however wide each of them is."""
    spans = "".join(
        element("tspan", safe(word), fill=fill, font_weight=weight, **({"dx": before} if n and before else {}))
        for n, (word, fill, weight, before) in enumerate(words)
    )
    around = {"stroke": halo, "stroke_width": "4", "paint_order": "stroke", "stroke_linejoin": "round"} if halo else {}
    return element("text", spans, x=x, y=y, font_size=num(size), **around)


def _names(sheet: ChartLayout) -> list[Word]:
    theme, series = sheet.theme, sheet.series
    room = int(sheet.look.width * 0.5 / 11)
    title = sheet.look.title or series.symbol or "Candles"
    words = [(_cut(title, room), theme.ink, "700", 0)]
    if sheet.look.title and series.symbol:
        words.append((_cut(series.symbol, room), theme.faint, "600", 12))
    return [*words, (series.timeframe, theme.faint, "400", 10)]


def _last_candle(sheet: ChartLayout) -> list[Word]:
    theme, last = sheet.theme, sheet.candles[-1]
    colour = theme.up if last.is_up else theme.down
    words: list[Word] = [(f"{last.time:%Y-%m-%d %H:%M} UTC", theme.faint, "400", 0)]
    for name, value in (("O", last.open), ("H", last.high), ("L", last.low), ("C", last.close)):
        words += [(name, theme.faint, "400", 12), (sheet.price.text(value), colour, "500", 4)]
    return words


def _change(sheet: ChartLayout, edge: float) -> str:
    """How far the price came since the first candle opened."""
    first, last = sheet.candles[0], sheet.candles[-1]
    change = last.close - first.open
    colour = sheet.theme.up if change >= 0 else sheet.theme.down
    said = sheet.price.change(change)
    if first.open:
        said += f" ({change / abs(first.open) * 100:+.2f}%)".replace("-", "\N{MINUS SIGN}")
    day = f"{first.time.day} {first.time:%b %Y}"
    since = element("tspan", safe(f"since {day}"), fill=sheet.theme.faint, font_weight="400", dx=8)
    told = element("tspan", safe(said), fill=colour, font_weight="600")
    return element("text", told + since, x=edge, y=53, font_size="12.5", text_anchor="end")


def _cut(words: str, room: int) -> str:
    return words if len(words) <= room else words[: room - 1] + "\N{HORIZONTAL ELLIPSIS}"


def draw(series: CandleSeries, look: ChartStyle) -> str:
    """The chart of a series of at least one candle."""
    sheet = lay_out(series, look)
    width, height, theme = look.width, look.height, sheet.theme
    said = f"{look.title or series.symbol} {series.timeframe}".strip()
    parts = [
        element("title", safe(said)),
        element("rect", width=width, height=height, fill=theme.paper),
        *_symbol(sheet),
        *_time_axis(sheet),
        *_price_axis(sheet),
        *_volume(sheet),
        *_candles(sheet),
        *_averages(sheet),
        *_extremes(sheet),
        *_last_price(sheet),
        *headline(sheet),
        *legend(sheet),
    ]
    return element(
        "svg",
        "\n" + "\n".join(parts) + "\n",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        font_family=_FONT,
        font_size=12,
        style="font-variant-numeric:tabular-nums",
    )


def _symbol(sheet: ChartLayout) -> Iterable[str]:
    """The symbol, large and faint behind everything."""
    name = sheet.series.symbol
    if name:
        wide = sheet.right - LEFT
        size = min(wide / (0.72 * len(name)), sheet.look.height * 0.2)
        middle = (sheet.prices.top + sheet.prices.bottom) / 2 + size * 0.36
        bold = {"font_weight": "700", "text_anchor": "middle"}
        yield text(LEFT + wide / 2, middle, name, fill=sheet.theme.mark, font_size=size, **bold)


def _time_axis(sheet: ChartLayout) -> Iterable[str]:
    theme, lines = sheet.theme, ""
    labels = time_labels([candle.time for candle in sheet.candles], math.ceil(_LABEL_ROOM / sheet.slot))
    for label in labels:
        x = sheet.x(label.place) + 0.5
        if not LEFT + 18 < x < sheet.right - 18:
            continue
        lines += f"M{num(x)} {HEADER}V{num(sheet.bottom)}"
        fill, weight = (theme.ink, "600") if label.is_strong else (theme.faint, "400")
        place = sheet.bottom + 19
        yield text(x, place, label.text, fill=fill, font_weight=weight, text_anchor="middle")
    if lines:
        yield element("path", d=lines, stroke=theme.grid)
    frame = f"M0 {num(sheet.bottom + 0.5)}H{sheet.look.width}M{num(sheet.right + 0.5)} {HEADER}V{num(sheet.bottom)}"
    yield element("path", d=f"M0 {HEADER - 0.5}H{sheet.look.width}{frame}", stroke=theme.frame)


def _price_axis(sheet: ChartLayout) -> Iterable[str]:
    theme, last, lines = sheet.theme, sheet.prices.y(sheet.candles[-1].close), ""
    for tick in sheet.ticks:
        y = round(sheet.prices.y(tick))
        lines += f"M0 {y + 0.5}H{num(sheet.right)}"
        is_clear = abs(y - last) > 17 and sheet.prices.top - 12 < y < sheet.prices.bottom - 6
        if is_clear:
            yield text(sheet.right + 9, y + 4, sheet.axis.text(tick), fill=theme.faint)
    yield element("path", d=lines, stroke=theme.grid)


def _volume(sheet: ChartLayout) -> Iterable[str]:
    if sheet.volumes is None:
        return
    theme, scale = sheet.theme, sheet.volumes
    yield element("path", d=f"M0 {num(round(sheet.prices.bottom) + 0.5)}H{sheet.look.width}", stroke=theme.frame)
    for tick in ticks(0, scale.high, 2)[0][1:]:
        yield text(sheet.right + 9, round(scale.y(tick)) + 4, short(tick), fill=theme.faint)

    def bar(n: int, candle: Candle) -> str:
        height = math.ceil(scale.bottom - scale.y(candle.volume))
        return box(sheet.x(n) - sheet.body // 2, scale.bottom - height, sheet.body, height) if height else ""

    yield from _coloured(sheet, bar, opacity="0.5")


def _candles(sheet: ChartLayout) -> Iterable[str]:
    y = sheet.prices.y

    def candle(n: int, one: Candle) -> str:
        x, top, bottom = sheet.x(n), round(y(max(one.open, one.close))), round(y(min(one.open, one.close)))
        high, low = round(y(one.high)), round(y(one.low))
        wick = box(x, high, 1, low - high) if low > high else ""
        return wick + box(x - sheet.body // 2, top, sheet.body, max(1, bottom - top))

    yield from _coloured(sheet, candle)


def _coloured(sheet: ChartLayout, shape: Callable[[int, Candle], str], **attributes: str) -> Iterable[str]:
    """One path of all candles that rose, one of all that fell."""
    for is_up, colour in ((True, sheet.theme.up), (False, sheet.theme.down)):
        path = "".join(shape(n, candle) for n, candle in enumerate(sheet.candles) if candle.is_up is is_up)
        if path:
            yield element("path", d=path, fill=colour, **attributes)


def _averages(sheet: ChartLayout) -> Iterable[str]:
    for (_, average), colour in zip(sheet.averages, sheet.theme.averages, strict=False):
        places = [(n, value) for n, value in enumerate(average) if value is not None]
        points = [f"{num(sheet.x(n) + 0.5)} {num(sheet.prices.y(value))}" for n, value in places]
        yield element(
            "path", d="M" + "L".join(points), fill="none", stroke=colour, stroke_width="1.6", stroke_linejoin="round"
        )


def _extremes(sheet: ChartLayout) -> Iterable[str]:
    """The highest and the lowest price, told where they were."""
    places = range(len(sheet.candles))
    top = max(places, key=lambda n: sheet.candles[n].high)
    bottom = min(places, key=lambda n: sheet.candles[n].low)
    if len(places) < 2 or sheet.candles[top].high == sheet.candles[bottom].low:
        return
    yield _extreme(sheet, top, sheet.candles[top].high, "High")
    yield _extreme(sheet, bottom, sheet.candles[bottom].low, "Low")


def _extreme(sheet: ChartLayout, place: int, price: float, name: str) -> str:
    x, y = sheet.x(place) + 0.5, round(sheet.prices.y(price)) + (-5.5 if name == "High" else 5.5)
    side = 1 if x < (LEFT + sheet.right) / 2 else -1
    end = x + side * _LEADER
    line = element("path", d=f"M{num(x)} {num(y)}H{num(end)}", stroke=sheet.theme.faint)
    dot = element("circle", cx=x, cy=y, r="2", fill=sheet.theme.faint)
    anchor = "start" if side > 0 else "end"
    halo = {"stroke": sheet.theme.paper, "stroke_width": "4", "paint_order": "stroke", "stroke_linejoin": "round"}
    said = f"{name} {sheet.price.text(price)}"
    return (
        line
        + dot
        + text(end + side * 5, y + 4, said, fill=sheet.theme.ink, text_anchor=anchor, font_size="11.5", **halo)
    )


def _last_price(sheet: ChartLayout) -> Iterable[str]:
    last = sheet.candles[-1]
    colour, y = sheet.theme.up if last.is_up else sheet.theme.down, round(sheet.prices.y(last.close))
    line = f"M0 {y + 0.5}H{num(sheet.right)}"
    yield element("path", d=line, stroke=colour, stroke_dasharray="2 3", opacity="0.85")
    yield element("path", d=box(sheet.right + 1, y - 10, sheet.look.width - sheet.right - 1, 21), fill=colour)
    yield text(sheet.right + 9, y + 4.5, sheet.price.text(last.close), fill="#ffffff", font_weight="600")
