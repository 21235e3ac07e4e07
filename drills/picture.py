"""The chart of a drill: latency, freshness, errors and faults over time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from drills.figures import Bucket
from drills.recorder import InjectedFault

WIDTH, LEFT, RIGHT = 1200, 74, 184
PANEL, GAP, FOOT, HEAD, LANE = 190, 34, 44, 48, 18
LETTER_WIDTH = 6.7  # approximate width of a letter in a label
_FONT = "font-family='system-ui, sans-serif'"
_BLUE, _NAVY, _ORANGE, _GREEN, _RED, _GREY = "#4c9be8", "#1b4f8f", "#e08a1e", "#2e9e5b", "#d03a3a", "#8a929c"


@dataclass(frozen=True)
class Line:
    """A curve: its name in the legend, its colour, and its value in an interval."""

    name: str
    colour: str
    value: Callable[[Bucket], float | None]
    is_dots: bool = False


@dataclass(frozen=True)
class Panel:
    """Several curves with a common axis."""

    title: str
    lines: Sequence[Line]
    is_log: bool


PANELS = (
    Panel(
        "latency, ms",
        (
            Line("read p50", _BLUE, lambda bucket: bucket.read_p50),
            Line("read p99", _NAVY, lambda bucket: bucket.read_p99),
            Line("write p50", "#f2bf7d", lambda bucket: bucket.write_p50),
            Line("write p99", _ORANGE, lambda bucket: bucket.write_p99),
        ),
        is_log=True,
    ),
    Panel(
        "freshness, ms",
        (
            Line("p50", "#8fd0a8", lambda bucket: bucket.fresh_p50),
            Line("p99", _GREEN, lambda bucket: bucket.fresh_p99),
            Line("max", "#14532d", lambda bucket: bucket.fresh_max),
            Line("pod unavailable", _GREY, lambda bucket: bucket.unavailable_max, is_dots=True),
        ),
        is_log=True,
    ),
    Panel(
        "errors per second",
        (
            Line("all", _RED, lambda bucket: bucket.errors_per_second),
            Line("reads, after 1 retry", "#6b1d1d", lambda bucket: bucket.errors_after_retry_per_second),
        ),
        is_log=False,
    ),
)


def draw(title: str, buckets: Sequence[Bucket], faults: Sequence[InjectedFault]) -> str:
    """Return the chart as SVG."""
    end = max((bucket.at for bucket in buckets), default=0.0) + _width_of(buckets)
    lanes = _lanes(faults, end)
    top = HEAD + LANE * (max(lanes, default=-1) + 1)
    height = top + len(PANELS) * (PANEL + GAP) + FOOT - GAP
    bottom = height - FOOT
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'>",
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>",
        _text(LEFT, 24, title, size=16, weight=600),
        *(_parse_fault(fault, lane, end, top, bottom) for fault, lane in zip(faults, lanes, strict=True)),
    ]
    for number, panel in enumerate(PANELS):
        parts += _panel(panel, buckets, end, top + number * (PANEL + GAP))
    parts += [_time_axis(end, bottom), _fault_key(bottom) if faults else "", "</svg>"]
    return "\n".join(parts)


def _width_of(buckets: Sequence[Bucket]) -> float:
    return buckets[1].at - buckets[0].at if len(buckets) > 1 else 1.0


def _x(at: float, end: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(max(at / end, 0.0), 1.0)


def make_label(fault: InjectedFault) -> str:
    """Return the label of a fault."""
    if fault.failure:
        return f"{fault.name}: not injected"
    if not fault.is_judged:
        return f"{fault.name}: stopped"
    if fault.seconds is None:
        return f"{fault.name}: not recovered"
    return f"{fault.name}: recovered after {fault.seconds:.1f} s" if fault.seconds else f"{fault.name}: no effect"


def _extent(fault: InjectedFault, end: float) -> tuple[float, float]:
    """Return the start and the end of the label: right of the line of the fault, or left of it without space."""
    line, width = _x(fault.started_at, end), LETTER_WIDTH * len(make_label(fault)) + 10
    return (line, line + width) if line + width <= WIDTH else (line - width, line)


def _lanes(faults: Sequence[InjectedFault], end: float) -> list[int]:
    """Return the row of each label, 0 at the top, so that no label covers the line of another fault."""
    depths: list[int] = []  # of the later faults, in reverse order
    for number in range(len(faults) - 1, -1, -1):
        left, right = _extent(faults[number], end)
        later = zip(faults[:number:-1], depths, strict=True)
        depths.append(
            max((1 + depth for fault, depth in later if left < _x(fault.started_at, end) <= right + 4), default=0)
        )
    deepest = max(depths, default=0)
    return [deepest - depth for depth in reversed(depths)]


def _parse_fault(fault: InjectedFault, lane: int, end: float, top: float, bottom: float) -> str:
    left, right = _x(fault.started_at, end), _x(end if fault.end is None else fault.end, end)
    recovered_at = right if fault.recovered_at is None else _x(fault.recovered_at, end)
    row = HEAD + LANE * lane
    shade = _RED if fault.seconds != 0 else _GREY
    parts = [
        f"<g class='fault'><title>{escape(f'{fault.name} at {fault.started_at:.1f} s: {fault.what}')}</title>",
        f"<rect x='{left:.1f}' y='{top}' width='{max(right - left, 0):.1f}' height='{bottom - top}'"
        f" fill='{shade}' fill-opacity='0.1'/>",
        f"<path d='M{left:.1f} {row - 8}V{bottom}' stroke='{_RED}' stroke-width='1.3'/>",
        f"<path d='M{recovered_at:.1f} {top}V{bottom}' stroke='{_GREEN}' stroke-width='1.3' stroke-dasharray='4 3'/>"
        if fault.seconds
        else "",
        "<g paint-order='stroke' stroke='#ffffff' stroke-width='3'>",
        _text(_extent(fault, end)[0] + 5, row + 3, make_label(fault), colour=_RED),
        "</g>",
        "</g>",
    ]
    return "".join(parts)


def _panel(panel: Panel, buckets: Sequence[Bucket], end: float, top: float) -> list[str]:
    values = [value for line in panel.lines for bucket in buckets if (value := line.value(bucket)) is not None]
    scale = _Scale(values, top, is_log=panel.is_log)
    right = WIDTH - RIGHT
    parts = [f"<path d='M{LEFT} {top}V{top + PANEL}H{right}' fill='none' stroke='#5b626b'/>"]
    for value in scale.ticks:
        y = scale.y(value)
        parts.append(f"<path d='M{LEFT} {y:.1f}H{right}' stroke='#5b626b' stroke-opacity='0.16'/>")
        parts.append(_text(LEFT - 7, y + 4, f"{value:,g}", anchor="end", colour="#5b626b"))
    middle = top + PANEL / 2
    parts.append(
        f"<text transform='translate(16 {middle:.0f}) rotate(-90)' text-anchor='middle' font-size='12' {_FONT}"
        f" fill='#22272e'>{escape(panel.title)}</text>"
    )
    half = _width_of(buckets) / 2
    for number, line in enumerate(panel.lines):
        points = [(_x(bucket.at + half, end), line.value(bucket)) for bucket in buckets]
        parts.append(_curve(line, points, scale))
        parts.append(_key(line, right + 16, top + 12 + number * 20))
    return parts


def _curve(line: Line, points: Sequence[tuple[float, float | None]], scale: "_Scale") -> str:
    """Return a curve with gaps for missing values; single values are dots."""
    if line.is_dots:
        return "".join(_dot(line, x, scale.y(value)) for x, value in points if value is not None)
    parts, path = [], ""
    for number, (x, value) in enumerate(points):
        if value is None:
            continue
        follows = number > 0 and points[number - 1][1] is not None
        leads = number + 1 < len(points) and points[number + 1][1] is not None
        path += f"{'L' if follows else 'M'}{x:.1f} {scale.y(value):.1f}"
        if not follows and not leads:
            parts.append(_dot(line, x, scale.y(value)))
    parts.append(f"<path d='{path or 'M0 0'}' fill='none' stroke='{line.colour}' stroke-width='1.8'/>")
    return "".join(parts)


def _dot(line: Line, x: float, y: float) -> str:
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='none' stroke='{line.colour}' stroke-width='1.6'/>"


def _key(line: Line, x: float, y: float) -> str:
    if line.is_dots:
        return _dot(line, x + 9, y) + _text(x + 25, y + 4, line.name)
    return f"<path d='M{x} {y}h18' stroke='{line.colour}' stroke-width='3'/>" + _text(x + 25, y + 4, line.name)


def _fault_key(bottom: float) -> str:
    x, y = WIDTH - RIGHT + 16, bottom - 34
    return "".join(
        (
            f"<path d='M{x + 9} {y - 8}v16' stroke='{_RED}' stroke-width='1.3'/>",
            _text(x + 25, y + 4, "fault injected"),
            f"<path d='M{x + 9} {y + 14}v16' stroke='{_GREEN}' stroke-width='1.3' stroke-dasharray='4 3'/>",
            _text(x + 25, y + 26, "recovered"),
        )
    )


def _time_axis(end: float, bottom: float) -> str:
    step = next((step for step in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600) if end / step <= 16), 1800)
    parts = []
    for number in range(int(end / step) + 1):
        x = _x(number * step, end)
        parts.append(f"<path d='M{x:.1f} {bottom}v5' stroke='#5b626b'/>")
        parts.append(_text(x, bottom + 19, f"{number * step}", anchor="middle", colour="#5b626b"))
    parts.append(_text(_x(end / 2, end), bottom + 36, "seconds since the load began", anchor="middle"))
    return "".join(parts)


def _text(
    x: float,
    y: float,
    message: str,
    *,
    size: int = 12,
    weight: int = 400,
    anchor: str = "start",
    colour: str = "#22272e",
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' font-weight='{weight}' text-anchor='{anchor}' {_FONT}"
        f" fill='{colour}'>{escape(message)}</text>"
    )


class _Scale:
    """The conversion of values to heights."""

    def __init__(self, values: Sequence[float], top: float, *, is_log: bool) -> None:
        self._top = top
        self._is_log = is_log
        if is_log:
            acknowledged_version = [max(value, 0.1) for value in values] or [1.0]
            low, high = (
                math.floor(math.log10(min(acknowledged_version))),
                math.ceil(math.log10(max(acknowledged_version) * 1.05)),
            )
            self._low, self._high = float(low), float(max(high, low + 1))
            self.ticks = [10.0**power for power in range(low, int(self._high) + 1)]
        else:
            step = _round_step(max(values, default=0.0) / 4)
            self._low, self._high = 0.0, max(step * math.ceil(max(values, default=0.0) / step), step)
            self.ticks = [step * number for number in range(round(self._high / step) + 1)]

    def y(self, value: float) -> float:
        measure_freshness = math.log10(max(value, 10**self._low)) if self._is_log else value
        return self._top + PANEL * (1 - (measure_freshness - self._low) / (self._high - self._low))


def _round_step(rough: float) -> float:
    """Return *rough* rounded up to 1, 2 or 5 times a power of ten, and at least 1."""
    if rough <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
