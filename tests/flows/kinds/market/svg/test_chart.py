"""F13: the local renderer: the content of every chart, and robustness against any candles."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lxml import etree

from penstock.flows.kinds.market.candles import Candle, CandleSeries
from penstock.flows.kinds.market.svg.axes import format_short
from penstock.flows.kinds.market.svg.chart import draw_chart
from penstock.flows.kinds.market.svg.layout import THEMES, ChartStyle
from tests.flows.kinds.market.chart_steps import BEGIN, HOUR, walk
from tests.support.soak import examples


def draw_xml(candles: Sequence[Candle], style: ChartStyle | None = None, symbol: str = "TIDE") -> etree._Element:
    """Return the chart as XML; all texts lie inside it, and all numbers are finite."""
    style = style or ChartStyle()
    text = draw_chart(CandleSeries(symbol, "1h", candles), style)
    assert "nan" not in text.lower()
    assert ">inf" not in text
    root = etree.fromstring(text.encode())
    for element in root.iter("{*}text"):
        assert -1 <= float(element.get("x", "0")) <= style.width + 1
        assert -1 <= float(element.get("y", "0")) <= style.height + 1
    return root


def read_texts(root: etree._Element) -> str:
    return " | ".join("".join(map(str, element.itertext())) for element in root.iter("{*}text"))


def read_fills(root: etree._Element) -> list[str]:
    return [str(element.get("fill")) for element in root.iter("{*}path")]


def test_chart_shows_its_figures() -> None:
    """F13: symbol, timeframe, last price and change, both averages, high and low, and the volume."""
    candles = walk(120)
    texts = read_texts(draw_xml(candles, ChartStyle(title="Weekly review")))
    assert "Weekly reviewTIDE1h" in texts
    assert f"{candles[-1].close:.3f}" in texts
    change = (candles[-1].close - candles[0].open) / candles[0].open * 100
    assert f"({change:+.2f}%)".replace("-", "−") in texts
    assert "since 5 Jan 2026" in texts
    assert f"High {max(c.high for c in candles):.3f}" in texts
    assert f"Low {min(c.low for c in candles):.3f}" in texts
    for period in (20, 50):
        assert f"MA {period}  {sum(c.close for c in candles[-period:]) / period:.3f}" in texts
    assert f"Volume{format_short(candles[-1].volume)}" in texts


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_rising_and_falling_candles_have_different_colours(theme: str) -> None:
    """F13: in both panes, with the colours of the requested theme."""
    colours = THEMES[theme]
    root = draw_xml(walk(50), ChartStyle(theme=theme))
    assert read_fills(root).count(colours.up) >= 2
    assert read_fills(root).count(colours.down) >= 2
    assert root.find("{*}rect").get("fill") == colours.paper  # type: ignore[union-attr]
    rising = [Candle(BEGIN + n * HOUR, 1, 3, 1, 2, 1) for n in range(5)]
    assert colours.down not in read_fills(draw_xml(rising, ChartStyle(theme=theme)))


def test_equal_candles_have_equal_bytes() -> None:
    """F6, F13: a chart that is rendered again has the same content."""
    assert draw_chart(CandleSeries("TIDE", "1h", walk(300)), ChartStyle()) == draw_chart(
        CandleSeries("TIDE", "1h", walk(300)), ChartStyle()
    )


@pytest.mark.parametrize("number", [1, 2, 3, 19, 20, 21, 49, 50, 51, 500, 20_000])
def test_any_number_of_candles_can_be_drawn(number: int) -> None:
    """F13: from one candle to twenty thousand, joined until they are distinguishable; the file stays small."""
    candles = walk(number, volatility=0.002)
    text = draw_chart(CandleSeries("TIDE", "1h", candles), ChartStyle())
    texts = read_texts(draw_xml(candles))
    assert len(text) < 60_000
    assert ("per candle" in texts) is (number > 300)
    assert ("MA 20" in texts) is (number >= 20)


def test_averages_use_candles_before_the_chart() -> None:
    """F13: with `last`, the averages use the candles that are not shown, too."""
    candles = walk(200)
    texts = read_texts(draw_xml(candles, ChartStyle(last=10)))
    assert f"MA 50  {sum(c.close for c in candles[-50:]) / 50:.3f}" in texts
    assert "since 12 Jan 2026" in texts


@pytest.mark.parametrize("price", [42.5, 0.0, 1e-9, 3.4e17, 5e-324, 1e300, -3.25])
def test_constant_price_is_drawn(price: float) -> None:
    """F13: a market without changes has a chart, too."""
    draw_xml([Candle(BEGIN + n * HOUR, price, price, price, price, 0) for n in range(30)])


@pytest.mark.parametrize(
    ("price", "label"), [(3.4e17, "e+17"), (1.2e-13, "e−13"), (0.00001234, "0.0000"), (1e6, ",000")]
)
def test_prices_of_any_size_have_labels(price: float, label: str) -> None:
    """F13: very large and very small prices have short, distinct labels."""
    root = draw_xml(walk(100, price=price, volatility=0.003))
    right = [str(element.text) for element in root.iter("{*}text") if float(element.get("x", "0")) > 1_050]
    prices = [text for text in right if label in text]
    assert len(prices) > 3
    assert len(set(prices)) >= len(prices) - 1  # the last price has two labels
    assert max(map(len, prices)) <= 16


@pytest.mark.parametrize(
    "symbol_text", ["<script>alert(1)</script>", "a&b\"c'd", "]]>", "\x00\x01\x1f", "\ud800", "日本 ₿", "x" * 5_000]
)
def test_texts_are_escaped(symbol_text: str) -> None:
    """F13: symbols and titles are text, whatever characters they contain."""
    root = draw_xml(walk(10), ChartStyle(title=symbol_text[:200]), symbol=symbol_text)
    allowed = {"svg", "title", "rect", "text", "tspan", "path", "circle"}
    assert {etree.QName(element).localname for element in root.iter()} <= allowed


@pytest.mark.parametrize(("width", "height"), [(320, 240), (4_096, 4_096), (4_096, 240), (320, 4_096)])
def test_charts_of_all_sizes(width: int, height: int) -> None:
    """F13: all sizes that a request may have."""
    root = draw_xml(walk(300), ChartStyle(width=width, height=height))
    assert (root.get("width"), root.get("height")) == (str(width), str(height))


VALUE = st.floats(-1e15, 1e15) | st.floats(-1e-6, 1e-6) | st.floats(0.01, 1e6)


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(40, soak=3_000))
@given(st.lists(st.tuples(VALUE, VALUE, VALUE, VALUE, st.floats(0, 1e18)), min_size=1, max_size=70), st.integers(1, 99))
@example([(1.0, 1.0, 1.0, 1.0, 5e-324)], 1)
@example([(1e-310, 2e-310, 3e-310, 1e-310, 0.0)] * 2, 2)
def test_any_candles_have_a_valid_chart(rows: list[tuple[float, float, float, float, float]], last: int) -> None:
    """F13: for all finite numbers the chart is well-formed."""
    candles = [
        Candle(BEGIN + n * HOUR, row[0], max(row[:4]), min(row[:4]), row[3], row[4]) for n, row in enumerate(rows)
    ]
    draw_xml(candles, ChartStyle(last=last))
