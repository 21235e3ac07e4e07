"""Draw a state machine: states in layers from the initial state, moves as arrows with their names at the target.

A move that passes a layer has its own position in it; moves that lead back are drawn above all layers. So lines may
cross each other, but never a state or a name.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from docs.generators.layers import Layers, Node, arrange_layers

from penstock.kernel.machine import StateMachine

_LETTER, _SMALL_LETTER = 7.9, 7.3  # widths in a monospaced font
_PORT, _GAP, _LANE, _TRACK, _BEND = 19, 14, 13, 9, 7
_LONG = 12
# Colours that are readable on white and on black.
_STYLE = """text { font: 12px ui-monospace, 'DejaVu Sans Mono', Consolas, monospace; fill: #747d88 }
.state text { font-size: 13px; fill: #fff; text-anchor: middle }
.state rect { fill: #2f6f8c; stroke: #2f6f8c } .state .final { fill: none; stroke-width: 1.5 }
path { fill: none; stroke: #747d88; stroke-width: 1.4 } .tip, circle { fill: #747d88; stroke: none }"""

Point = tuple[float, float]


def draw(machine: StateMachine[Any], title: str) -> str:
    """Return the diagram as SVG."""
    picture = _Picture(arrange_layers(machine), start=machine.initial.value)
    finals = {state.value for state in machine.finals}
    size = f'width="{picture.right:.0f}" height="{picture.bottom:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {picture.right:.0f} {picture.bottom:.0f}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        *picture.start(),
        *picture.ahead(),
        *picture.back(),
        *picture.arrivals(),
        *picture.states(finals),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


class _Picture:
    """The positions of all elements in pixels."""

    def __init__(self, layers: Layers, start: str) -> None:
        self._layers, self._initial = layers, Node(start, 0)
        self._moves_to = {
            node: [name for name, target in layers.targets.items() if target == node]
            for node in layers.targets.values()
        }
        self._top = 16 + _LANE * len(layers.back)
        self._stack()
        self._spread()
        self._ports = {name: y for node in self._moves_to for name, y in self._arriving(node)}

    def _stack(self) -> None:
        """Position every layer from top to bottom, vertically centred."""
        tall = [sum(map(self._height, nodes)) + _GAP * (len(nodes) - 1) for nodes in self._layers.nodes]
        self._y: dict[Node, float] = {}
        for nodes, height in zip(self._layers.nodes, tall, strict=True):
            at = self._top + (max(tall) - height) / 2
            for node in nodes:
                self._y[node] = at + self._height(node) / 2
                at += self._height(node) + _GAP
        self.bottom = self._top + max(tall) + 8

    def _height(self, node: Node) -> float:
        arriving = len(self._moves_to.get(node, [])) + (node == self._initial)
        return max(16 + 16 * len(_lines(node.name)), _PORT * arriving + 10) if node.is_state else _PORT

    def _spread(self) -> None:
        """Position every layer from left to right: tracks of vertical lines, names of moves, states."""
        self._stubs: list[float] = []
        self._boxes: list[float] = []
        self._ends: list[float] = []
        at = 0.0
        for layer, nodes in enumerate(self._layers.nodes):
            turning = len(self._leaving(layer - 1)) + len(self._returning(layer))
            self._stubs.append(at + _TRACK * turning + (26 if layer else 16))
            letters = [len(name) for node in nodes for name in self._moves_to.get(node, [])]
            self._boxes.append(self._stubs[-1] + _SMALL_LETTER * max(letters, default=0) + 16)
            at = self._boxes[-1] + max(_width(node) for node in nodes if node.is_state)
            self._ends.append(at)
        self.right = at + _TRACK * len(self._leaving(len(self._ends) - 1)) + 14

    def _leaving(self, layer: int) -> list[str]:
        """Return the moves that lead back from this layer."""
        return [name for name, nodes in self._layers.back.items() if any(node.layer == layer for node in nodes)]

    def _returning(self, layer: int) -> list[str]:
        return [name for name in self._layers.back if self._layers.targets[name].layer == layer]

    def _arriving(self, node: Node) -> Iterator[tuple[str, float]]:
        """Yield the height of each move to a state: moves that lead back first, then the others by their source."""

        def origin(name: str) -> float:
            links = [link for link in self._layers.ahead if link.move == name and link.target == node]
            return sum(self._y[link.source] for link in links) / len(links) if links else 0

        names = sorted(self._moves_to[node], key=origin)
        middle = (len(names) - 1 + (node == self._initial)) / 2
        yield from ((name, self._y[node] + (place - middle) * _PORT + 4) for place, name in enumerate(names))

    def _leave(self, node: Node, move: str) -> float:
        """Return the height at which a move leaves a state: moves that lead back first, then by target."""
        goals = {name: 0.0 for name, nodes in self._layers.back.items() if node in nodes}
        goals |= {link.move: self._reach(link.target, link.move) for link in self._layers.ahead if link.source == node}
        order = sorted(goals, key=lambda name: goals[name])
        room = min(9, (self._height(node) - 12) / max(1, len(order) - 1))
        return self._y[node] + (order.index(move) - (len(order) - 1) / 2) * room

    def _reach(self, node: Node, move: str) -> float:
        return self._ports[move] if node.is_state else self._y[node]

    def start(self) -> Iterator[str]:
        """Yield the arrow to the initial state."""
        before = len(self._moves_to.get(self._initial, []))
        x, y = self._boxes[0] - 26, self._y[self._initial] + before / 2 * _PORT + (4 if before else 0)
        yield f'<circle cx="{x:.0f}" cy="{y:.0f}" r="5"/>'
        yield from _arrow(x, y, self._boxes[0])

    def ahead(self) -> Iterator[str]:
        for link in self._layers.ahead:
            layer, y = link.source.layer, self._leave(link.source, link.move)
            start = self._boxes[layer] + _width(link.source) if link.source.is_state else self._stubs[layer]
            x = self._ends[layer]  # a wider state may stand above or below
            end, height = self._stubs[link.target.layer], self._reach(link.target, link.move)
            bend = f"C{(x + end) / 2:.0f} {y:.0f} {(x + end) / 2:.0f} {height:.0f} {end:.0f} {height:.0f}"
            yield f'<path d="M{start:.0f} {y:.0f}H{x:.0f}{bend}"/>'

    def back(self) -> Iterator[str]:
        for place, (name, sources) in enumerate(self._layers.back.items()):
            lane, layer = self._top - 8 - _LANE * (place + 1), self._layers.targets[name].layer
            down = self._stubs[layer] - _TRACK * (1 + self._returning(layer).index(name))
            for node in sources:
                up = self._ends[node.layer] + _TRACK * (1 + self._leaving(node.layer).index(name))
                y, height = self._leave(node, name), self._ports[name]
                turns = [(up, y), (up, lane), (down, lane), (down, height)]
                yield _bent([(self._boxes[node.layer] + _width(node), y), *turns, (self._stubs[layer], height)])

    def arrivals(self) -> Iterator[str]:
        for name, node in self._layers.targets.items():
            x, y = self._stubs[node.layer], self._ports[name]
            yield from _arrow(x, y, self._boxes[node.layer])
            yield f'<text x="{x + 2:.0f}" y="{y - 4:.0f}">{escape(name)}</text>'

    def states(self, finals: set[str]) -> Iterator[str]:
        for node in (node for nodes in self._layers.nodes for node in nodes if node.is_state):
            x, y, width, height = self._boxes[node.layer], self._y[node], _width(node), self._height(node)
            ring = _box(x - 3, y, width + 6, height + 6, 'class="final" rx="10"') if node.name in finals else ""
            box = _box(x, y, width, height, 'rx="8"')
            text = _text(x + width / 2, y, _lines(node.name))
            yield f'<g class="state">{box}{ring}{text}</g>'


def _width(node: Node) -> float:
    return _LETTER * max(map(len, _lines(node.name))) + 22


def _lines(name: str) -> list[str]:
    """Return a long name in two lines."""
    first, dash, second = name.rpartition("_") if len(name) > _LONG else ("", "", name)
    return [line for line in (first + dash, second) if line]


def _text(x: float, middle: float, lines: Sequence[str]) -> str:
    top = middle + 4 - 8 * (len(lines) - 1)
    spans = [f'<tspan x="{x:.0f}" y="{top + 16 * n:.0f}">{escape(line)}</tspan>' for n, line in enumerate(lines)]
    return f"<text>{''.join(spans)}</text>"


def _box(x: float, middle: float, width: float, height: float, more: str) -> str:
    place = f'x="{x:.0f}" y="{middle - height / 2:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f"<rect {more} {place}/>"


def _arrow(x: float, y: float, end: float) -> Iterator[str]:
    """Return a line to the right with an arrow head."""
    yield f'<path d="M{x:.0f} {y:.0f}H{end - 8:.0f}"/>'
    yield f'<path class="tip" d="M{end - 3:.0f} {y:.0f}l-9 -4v8z"/>'


def _bent(points: Sequence[Point]) -> str:
    """Return a line along the points with rounded corners."""
    path = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for before, here, after in zip(points, points[1:], points[2:], strict=False):
        (x, y), (end, height) = _near(here, before), _near(here, after)
        path += f"L{x:.0f} {y:.0f}Q{here[0]:.0f} {here[1]:.0f} {end:.0f} {height:.0f}"
    return f'<path d="{path}L{points[-1][0]:.0f} {points[-1][1]:.0f}"/>'


def _near(here: Point, there: Point) -> Point:
    """Return the point at which a line to *here* starts to turn."""
    part = min(_BEND / max(abs(there[0] - here[0]), abs(there[1] - here[1]), 1), 0.5)
    return here[0] + (there[0] - here[0]) * part, here[1] + (there[1] - here[1]) * part
