"""F13: the local renderer: candlesticks as SVG, the same bytes for the same candles."""

import math
from collections.abc import Callable, Iterable

from penstock.flows.kinds.headline import headline, legend
from penstock.flows.kinds.looks import Look
from penstock.flows.kinds.market.exported_candles import Candle, Series
from penstock.flows.kinds.market.svg.axes import short, ticks, time_labels
from penstock.flows.kinds.market.svg.elements import box, element, num, safe, text
from penstock.flows.kinds.market.svg.layout import HEADER, LEFT, Sheet, lay_out

_FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_LABEL_ROOM = 84  # pixels between two labels of the time axis, at least
_LEADER = 22  # pixels from a high or low to its label


def draw(series: Series, look: Look) -> str:
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


def _symbol(sheet: Sheet) -> Iterable[str]:
    """The symbol, large and faint behind everything."""
    name = sheet.series.symbol
    if name:
        wide = sheet.right - LEFT
        size = min(wide / (0.72 * len(name)), sheet.look.height * 0.2)
        middle = (sheet.prices.top + sheet.prices.bottom) / 2 + size * 0.36
        bold = {"font_weight": "700", "text_anchor": "middle"}
        yield text(LEFT + wide / 2, middle, name, fill=sheet.theme.mark, font_size=size, **bold)


def _time_axis(sheet: Sheet) -> Iterable[str]:
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


def _price_axis(sheet: Sheet) -> Iterable[str]:
    theme, last, lines = sheet.theme, sheet.prices.y(sheet.candles[-1].close), ""
    for tick in sheet.ticks:
        y = round(sheet.prices.y(tick))
        lines += f"M0 {y + 0.5}H{num(sheet.right)}"
        is_clear = abs(y - last) > 17 and sheet.prices.top - 12 < y < sheet.prices.bottom - 6
        if is_clear:
            yield text(sheet.right + 9, y + 4, sheet.axis.text(tick), fill=theme.faint)
    yield element("path", d=lines, stroke=theme.grid)


def _volume(sheet: Sheet) -> Iterable[str]:
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


def _candles(sheet: Sheet) -> Iterable[str]:
    y = sheet.prices.y

    def candle(n: int, one: Candle) -> str:
        x, top, bottom = sheet.x(n), round(y(max(one.open, one.close))), round(y(min(one.open, one.close)))
        high, low = round(y(one.high)), round(y(one.low))
        wick = box(x, high, 1, low - high) if low > high else ""
        return wick + box(x - sheet.body // 2, top, sheet.body, max(1, bottom - top))

    yield from _coloured(sheet, candle)


def _coloured(sheet: Sheet, shape: Callable[[int, Candle], str], **attributes: str) -> Iterable[str]:
    """One path of all candles that rose, one of all that fell."""
    for is_up, colour in ((True, sheet.theme.up), (False, sheet.theme.down)):
        path = "".join(shape(n, candle) for n, candle in enumerate(sheet.candles) if candle.is_up is is_up)
        if path:
            yield element("path", d=path, fill=colour, **attributes)


def _averages(sheet: Sheet) -> Iterable[str]:
    for (_, average), colour in zip(sheet.averages, sheet.theme.averages, strict=False):
        places = [(n, value) for n, value in enumerate(average) if value is not None]
        points = [f"{num(sheet.x(n) + 0.5)} {num(sheet.prices.y(value))}" for n, value in places]
        yield element(
            "path", d="M" + "L".join(points), fill="none", stroke=colour, stroke_width="1.6", stroke_linejoin="round"
        )


def _extremes(sheet: Sheet) -> Iterable[str]:
    """The highest and the lowest price, told where they were."""
    places = range(len(sheet.candles))
    top = max(places, key=lambda n: sheet.candles[n].high)
    bottom = min(places, key=lambda n: sheet.candles[n].low)
    if len(places) < 2 or sheet.candles[top].high == sheet.candles[bottom].low:
        return
    yield _extreme(sheet, top, sheet.candles[top].high, "High")
    yield _extreme(sheet, bottom, sheet.candles[bottom].low, "Low")


def _extreme(sheet: Sheet, place: int, price: float, name: str) -> str:
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


def _last_price(sheet: Sheet) -> Iterable[str]:
    last = sheet.candles[-1]
    colour, y = sheet.theme.up if last.is_up else sheet.theme.down, round(sheet.prices.y(last.close))
    line = f"M0 {y + 0.5}H{num(sheet.right)}"
    yield element("path", d=line, stroke=colour, stroke_dasharray="2 3", opacity="0.85")
    yield element("path", d=box(sheet.right + 1, y - 10, sheet.look.width - sheet.right - 1, 21), fill=colour)
    yield text(sheet.right + 9, y + 4.5, sheet.price.text(last.close), fill="#ffffff", font_weight="600")
