"""F13: the local renderer: what every chart shows, and what no candles can break."""

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


def drawn(candles: Sequence[Candle], look: ChartStyle | None = None, symbol: str = "TIDE") -> etree._Element:
    """The chart as XML, which it must be; nothing lies outside it, and no number is missing."""
    look = look or ChartStyle()
    text = draw_chart(CandleSeries(symbol, "1h", candles), look)
    assert "nan" not in text.lower()
    assert ">inf" not in text
    root = etree.fromstring(text.encode())
    for element in root.iter("{*}text"):
        assert -1 <= float(element.get("x", "0")) <= look.width + 1
        assert -1 <= float(element.get("y", "0")) <= look.height + 1
    return root


def words(root: etree._Element) -> str:
    return " | ".join("".join(map(str, element.itertext())) for element in root.iter("{*}text"))


def fills(root: etree._Element) -> list[str]:
    return [str(element.get("fill")) for element in root.iter("{*}path")]


def test_a_chart_says_what_it_shows() -> None:
    """F13: symbol, timeframe, last price and change, both averages, high and low, and the volume."""
    candles = walk(120)
    said = words(drawn(candles, ChartStyle(title="Weekly review")))
    assert "Weekly reviewTIDE1h" in said
    assert f"{candles[-1].close:.3f}" in said
    change = (candles[-1].close - candles[0].open) / candles[0].open * 100
    assert f"({change:+.2f}%)".replace("-", "−") in said
    assert "since 5 Jan 2026" in said
    assert f"High {max(c.high for c in candles):.3f}" in said
    assert f"Low {min(c.low for c in candles):.3f}" in said
    for period in (20, 50):
        assert f"MA {period}  {sum(c.close for c in candles[-period:]) / period:.3f}" in said
    assert f"Volume{format_short(candles[-1].volume)}" in said


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_candles_that_rise_and_fall_have_their_colours(theme: str) -> None:
    """F13: one colour up, another down, in both panes, of the theme that was asked for."""
    colours = THEMES[theme]
    root = drawn(walk(50), ChartStyle(theme=theme))
    assert fills(root).count(colours.up) >= 2
    assert fills(root).count(colours.down) >= 2
    assert root.find("{*}rect").get("fill") == colours.paper  # type: ignore[union-attr]
    rising = [Candle(BEGIN + n * HOUR, 1, 3, 1, 2, 1) for n in range(5)]
    assert colours.down not in fills(drawn(rising, ChartStyle(theme=theme)))


def test_the_same_candles_give_the_same_bytes() -> None:
    """F6, F13: a chart drawn again is the same chart."""
    assert draw_chart(CandleSeries("TIDE", "1h", walk(300)), ChartStyle()) == draw_chart(
        CandleSeries("TIDE", "1h", walk(300)), ChartStyle()
    )


@pytest.mark.parametrize("number", [1, 2, 3, 19, 20, 21, 49, 50, 51, 500, 20_000])
def test_any_number_of_candles_can_be_drawn(number: int) -> None:
    """F13: one candle or twenty thousand, which are joined until they can be told apart; the text stays small."""
    candles = walk(number, restless=0.002)
    text = draw_chart(CandleSeries("TIDE", "1h", candles), ChartStyle())
    said = words(drawn(candles))
    assert len(text) < 60_000
    assert ("per candle" in said) is (number > 300)
    assert ("MA 20" in said) is (number >= 20)


def test_averages_know_what_was_before_the_chart() -> None:
    """F13: with `last`, the averages still count the candles that are not shown."""
    candles = walk(200)
    said = words(drawn(candles, ChartStyle(last=10)))
    assert f"MA 50  {sum(c.close for c in candles[-50:]) / 50:.3f}" in said
    assert "since 12 Jan 2026" in said


@pytest.mark.parametrize("price", [42.5, 0.0, 1e-9, 3.4e17, 5e-324, 1e300, -3.25])
def test_a_price_that_never_moves_is_a_line(price: float) -> None:
    """F13: flat markets have a chart too."""
    drawn([Candle(BEGIN + n * HOUR, price, price, price, price, 0) for n in range(30)])


@pytest.mark.parametrize(
    ("price", "label"), [(3.4e17, "e+17"), (1.2e-13, "e−13"), (0.00001234, "0.0000"), (1e6, ",000")]
)
def test_prices_of_any_size_have_labels(price: float, label: str) -> None:
    """F13: huge and tiny prices are told in few characters, and told apart."""
    root = drawn(walk(100, price=price, restless=0.003))
    right = [str(element.text) for element in root.iter("{*}text") if float(element.get("x", "0")) > 1_050]
    prices = [text for text in right if label in text]
    assert len(prices) > 3
    assert len(set(prices)) >= len(prices) - 1  # the last price is told twice
    assert max(map(len, prices)) <= 16


@pytest.mark.parametrize(
    "evil", ["<script>alert(1)</script>", "a&b\"c'd", "]]>", "\x00\x01\x1f", "\ud800", "日本 ₿", "x" * 5_000]
)
def test_no_text_can_break_out(evil: str) -> None:
    """F13: symbols and titles are text, whatever is in them."""
    root = drawn(walk(10), ChartStyle(title=evil[:200]), symbol=evil)
    known = {"svg", "title", "rect", "text", "tspan", "path", "circle"}
    assert {etree.QName(element).localname for element in root.iter()} <= known


@pytest.mark.parametrize(("width", "height"), [(320, 240), (4_096, 4_096), (4_096, 240), (320, 4_096)])
def test_a_chart_of_any_size(width: int, height: int) -> None:
    """F13: the sizes a request may have."""
    root = drawn(walk(300), ChartStyle(width=width, height=height))
    assert (root.get("width"), root.get("height")) == (str(width), str(height))


VALUE = st.floats(-1e15, 1e15) | st.floats(-1e-6, 1e-6) | st.floats(0.01, 1e6)


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(40, soak=3_000))
@given(st.lists(st.tuples(VALUE, VALUE, VALUE, VALUE, st.floats(0, 1e18)), min_size=1, max_size=70), st.integers(1, 99))
@example([(1.0, 1.0, 1.0, 1.0, 5e-324)], 1)
@example([(1e-310, 2e-310, 3e-310, 1e-310, 0.0)] * 2, 2)
def test_no_candles_can_break_a_chart(rows: list[tuple[float, float, float, float, float]], last: int) -> None:
    """F13: whatever finite numbers come, the chart is well-formed."""
    candles = [
        Candle(BEGIN + n * HOUR, row[0], max(row[:4]), min(row[:4]), row[3], row[4]) for n, row in enumerate(rows)
    ]
    drawn(candles, ChartStyle(last=last))
