"""F13: the local renderer: candlesticks as SVG, the same bytes for the same candles."""

import math
from collections.abc import Callable, Iterable

from penstock.flows.kinds.market.candles import Candle, CandleSeries
from penstock.flows.kinds.market.svg.axes import compute_ticks, format_short, select_time_labels
from penstock.flows.kinds.market.svg.elements import escape_text, format_px, make_box_path, make_element, make_text
from penstock.flows.kinds.market.svg.layout import HEADER, LEFT, ChartLayout, ChartStyle, make_layout

_MIN_DETAIL_WIDTH = 620  # pixels; narrower charts omit the prices of the last candle
_FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_LABEL_SPACING = 84  # minimum distance of two labels of the time axis, in pixels
_LEADER = 22  # distance of a high or low from its label, in pixels

Word = tuple[str, str, str, int]  # text, colour, font weight, space before it in pixels


def draw_headline(layout: ChartLayout) -> Iterable[str]:
    """Yield the title, the symbol, the last price and its change."""
    theme, width = layout.theme, layout.style.width
    yield _draw_words(LEFT, 30, 19, _make_title(layout))
    edge = width - 14
    last = layout.candles[-1]
    yield make_text(
        edge,
        30,
        layout.price.format_value(last.close),
        fill=theme.ink,
        font_size=20,
        font_weight="700",
        text_anchor="end",
    )
    yield _draw_change(layout, edge)
    if width >= _MIN_DETAIL_WIDTH:
        yield _draw_words(LEFT, 53, 12.5, _make_last_candle(layout))


def draw_legend(layout: ChartLayout) -> Iterable[str]:
    """Yield the legend of the averages and of the volume."""
    theme = layout.theme
    words = [
        (f"MA {period}  {layout.price.format_value(average[-1] or 0)}", colour, "600", 14)
        for (period, average), colour in zip(layout.averages, theme.averages, strict=False)
    ]
    if layout.joined > 1:
        words.append((f"{layout.joined} × {layout.series.timeframe} per candle", theme.faint, "400", 14))
    if words:
        yield _draw_words(LEFT, HEADER + 21, 12, words, halo=theme.paper)
    if layout.volumes is not None:
        words = [("Volume", theme.faint, "400", 0), (format_short(layout.candles[-1].volume), theme.ink, "600", 6)]
        yield _draw_words(LEFT, layout.prices.bottom + 18, 12, words, halo=theme.paper)


def _draw_words(x: float, y: float, size: float, words: list[Word], halo: str | None = None) -> str:
    """Return one line of words in different styles."""
    spans = "".join(
        make_element(
            "tspan", escape_text(word), fill=fill, font_weight=weight, **({"dx": before} if n and before else {})
        )
        for n, (word, fill, weight, before) in enumerate(words)
    )
    around = {"stroke": halo, "stroke_width": "4", "paint_order": "stroke", "stroke_linejoin": "round"} if halo else {}
    return make_element("text", spans, x=x, y=y, font_size=format_px(size), **around)


def _make_title(layout: ChartLayout) -> list[Word]:
    theme, series = layout.theme, layout.series
    limit = int(layout.style.width * 0.5 / 11)
    title = layout.style.title or series.symbol or "Candles"
    words = [(_truncate(title, limit), theme.ink, "700", 0)]
    if layout.style.title and series.symbol:
        words.append((_truncate(series.symbol, limit), theme.faint, "600", 12))
    return [*words, (series.timeframe, theme.faint, "400", 10)]


def _make_last_candle(layout: ChartLayout) -> list[Word]:
    theme, last = layout.theme, layout.candles[-1]
    colour = theme.up if last.is_up else theme.down
    words: list[Word] = [(f"{last.time:%Y-%m-%d %H:%M} UTC", theme.faint, "400", 0)]
    for name, value in (("O", last.open), ("H", last.high), ("L", last.low), ("C", last.close)):
        words += [(name, theme.faint, "400", 12), (layout.price.format_value(value), colour, "500", 4)]
    return words


def _draw_change(layout: ChartLayout, edge: float) -> str:
    """Return the change of the price since the first candle opened."""
    first, last = layout.candles[0], layout.candles[-1]
    change = last.close - first.open
    colour = layout.theme.up if change >= 0 else layout.theme.down
    amount = layout.price.format_change(change)
    if first.open:
        amount += f" ({change / abs(first.open) * 100:+.2f}%)".replace("-", "\N{MINUS SIGN}")
    day = f"{first.time.day} {first.time:%b %Y}"
    since = make_element("tspan", escape_text(f"since {day}"), fill=layout.theme.faint, font_weight="400", dx=8)
    value = make_element("tspan", escape_text(amount), fill=colour, font_weight="600")
    return make_element("text", value + since, x=edge, y=53, font_size="12.5", text_anchor="end")


def _truncate(words: str, limit: int) -> str:
    return words if len(words) <= limit else words[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def draw_chart(series: CandleSeries, style: ChartStyle) -> str:
    """Return the chart of a series with at least one candle, as SVG."""
    layout = make_layout(series, style)
    width, height, theme = style.width, style.height, layout.theme
    title = f"{style.title or series.symbol} {series.timeframe}".strip()
    parts = [
        make_element("title", escape_text(title)),
        make_element("rect", width=width, height=height, fill=theme.paper),
        *_draw_symbol(layout),
        *_draw_time_axis(layout),
        *_draw_price_axis(layout),
        *_draw_volume(layout),
        *_draw_candles(layout),
        *_draw_averages(layout),
        *_draw_extremes(layout),
        *_draw_last_price(layout),
        *draw_headline(layout),
        *draw_legend(layout),
    ]
    return make_element(
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


def _draw_symbol(layout: ChartLayout) -> Iterable[str]:
    """Yield the symbol, large and faint in the background."""
    name = layout.series.symbol
    if name:
        width = layout.right - LEFT
        size = min(width / (0.72 * len(name)), layout.style.height * 0.2)
        middle = (layout.prices.top + layout.prices.bottom) / 2 + size * 0.36
        bold = {"font_weight": "700", "text_anchor": "middle"}
        yield make_text(LEFT + width / 2, middle, name, fill=layout.theme.mark, font_size=size, **bold)


def _draw_time_axis(layout: ChartLayout) -> Iterable[str]:
    theme, lines = layout.theme, ""
    labels = select_time_labels([candle.time for candle in layout.candles], math.ceil(_LABEL_SPACING / layout.slot))
    for label in labels:
        x = layout.x(label.index) + 0.5
        if not LEFT + 18 < x < layout.right - 18:
            continue
        lines += f"M{format_px(x)} {HEADER}V{format_px(layout.bottom)}"
        fill, weight = (theme.ink, "600") if label.is_strong else (theme.faint, "400")
        yield make_text(x, layout.bottom + 19, label.text, fill=fill, font_weight=weight, text_anchor="middle")
    if lines:
        yield make_element("path", d=lines, stroke=theme.grid)
    bottom, right = format_px(layout.bottom), format_px(layout.right + 0.5)
    frame = f"M0 {format_px(layout.bottom + 0.5)}H{layout.style.width}M{right} {HEADER}V{bottom}"
    yield make_element("path", d=f"M0 {HEADER - 0.5}H{layout.style.width}{frame}", stroke=theme.frame)


def _draw_price_axis(layout: ChartLayout) -> Iterable[str]:
    theme, last, lines = layout.theme, layout.prices.y(layout.candles[-1].close), ""
    for tick in layout.ticks:
        y = round(layout.prices.y(tick))
        lines += f"M0 {y + 0.5}H{format_px(layout.right)}"
        is_clear = abs(y - last) > 17 and layout.prices.top - 12 < y < layout.prices.bottom - 6
        if is_clear:
            yield make_text(layout.right + 9, y + 4, layout.axis.format_value(tick), fill=theme.faint)
    yield make_element("path", d=lines, stroke=theme.grid)


def _draw_volume(layout: ChartLayout) -> Iterable[str]:
    if layout.volumes is None:
        return
    theme, scale = layout.theme, layout.volumes
    yield make_element(
        "path", d=f"M0 {format_px(round(layout.prices.bottom) + 0.5)}H{layout.style.width}", stroke=theme.frame
    )
    for tick in compute_ticks(0, scale.high, 2)[0][1:]:
        yield make_text(layout.right + 9, round(scale.y(tick)) + 4, format_short(tick), fill=theme.faint)

    def draw_bar(n: int, candle: Candle) -> str:
        height = math.ceil(scale.bottom - scale.y(candle.volume))
        return (
            make_box_path(layout.x(n) - layout.body // 2, scale.bottom - height, layout.body, height) if height else ""
        )

    yield from _draw_coloured(layout, draw_bar, opacity="0.5")


def _draw_candles(layout: ChartLayout) -> Iterable[str]:
    y = layout.prices.y

    def draw_shape(n: int, candle: Candle) -> str:
        x, top = layout.x(n), round(y(max(candle.open, candle.close)))
        bottom = round(y(min(candle.open, candle.close)))
        high, low = round(y(candle.high)), round(y(candle.low))
        wick = make_box_path(x, high, 1, low - high) if low > high else ""
        return wick + make_box_path(x - layout.body // 2, top, layout.body, max(1, bottom - top))

    yield from _draw_coloured(layout, draw_shape)


def _draw_coloured(layout: ChartLayout, shape: Callable[[int, Candle], str], **attributes: str) -> Iterable[str]:
    """Yield one path of all rising candles, and one of all falling candles."""
    for is_up, colour in ((True, layout.theme.up), (False, layout.theme.down)):
        path = "".join(shape(n, candle) for n, candle in enumerate(layout.candles) if candle.is_up is is_up)
        if path:
            yield make_element("path", d=path, fill=colour, **attributes)


def _draw_averages(layout: ChartLayout) -> Iterable[str]:
    for (_, average), colour in zip(layout.averages, layout.theme.averages, strict=False):
        values = [(n, value) for n, value in enumerate(average) if value is not None]
        points = [f"{format_px(layout.x(n) + 0.5)} {format_px(layout.prices.y(value))}" for n, value in values]
        yield make_element(
            "path", d="M" + "L".join(points), fill="none", stroke=colour, stroke_width="1.6", stroke_linejoin="round"
        )


def _draw_extremes(layout: ChartLayout) -> Iterable[str]:
    """Yield labels at the highest and the lowest price."""
    indexes = range(len(layout.candles))
    top = max(indexes, key=lambda n: layout.candles[n].high)
    bottom = min(indexes, key=lambda n: layout.candles[n].low)
    if len(indexes) < 2 or layout.candles[top].high == layout.candles[bottom].low:
        return
    yield _draw_extreme(layout, top, layout.candles[top].high, "High")
    yield _draw_extreme(layout, bottom, layout.candles[bottom].low, "Low")


def _draw_extreme(layout: ChartLayout, index: int, price: float, name: str) -> str:
    x, y = layout.x(index) + 0.5, round(layout.prices.y(price)) + (-5.5 if name == "High" else 5.5)
    side = 1 if x < (LEFT + layout.right) / 2 else -1
    end = x + side * _LEADER
    line = make_element("path", d=f"M{format_px(x)} {format_px(y)}H{format_px(end)}", stroke=layout.theme.faint)
    dot = make_element("circle", cx=x, cy=y, r="2", fill=layout.theme.faint)
    anchor = "start" if side > 0 else "end"
    halo = {"stroke": layout.theme.paper, "stroke_width": "4", "paint_order": "stroke", "stroke_linejoin": "round"}
    label = f"{name} {layout.price.format_value(price)}"
    return (
        line
        + dot
        + make_text(end + side * 5, y + 4, label, fill=layout.theme.ink, text_anchor=anchor, font_size="11.5", **halo)
    )


def _draw_last_price(layout: ChartLayout) -> Iterable[str]:
    last = layout.candles[-1]
    colour, y = layout.theme.up if last.is_up else layout.theme.down, round(layout.prices.y(last.close))
    line = f"M0 {y + 0.5}H{format_px(layout.right)}"
    yield make_element("path", d=line, stroke=colour, stroke_dasharray="2 3", opacity="0.85")
    yield make_element(
        "path", d=make_box_path(layout.right + 1, y - 10, layout.style.width - layout.right - 1, 21), fill=colour
    )
    yield make_text(layout.right + 9, y + 4.5, layout.price.format_value(last.close), fill="#ffffff", font_weight="600")
