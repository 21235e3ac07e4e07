"""F15: drawings of the steps of a flow: boxes in layers with lines between them, a list, or a Mermaid flowchart."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.flows.contract import FLOW, MAP
from penstock.flows.definition.graph import StepGraph, ordered
from penstock.flows.definition.spec import StepSpec

WIDTH = 110
_TEXT = 34  # characters of a line in a box
_BOX = 8  # columns around it
_LAYERS = 60
_LISTED = 200
_GAP = 3
_SWEEPS = 4
_LANE = 3  # columns of a line that passes a layer by: one of them is always free
_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8
_CORNERS = {
    _UP | _RIGHT: "╰",
    _UP | _LEFT: "╯",
    _DOWN | _RIGHT: "╭",
    _DOWN | _LEFT: "╮",
    _UP | _DOWN | _RIGHT: "├",
    _UP | _DOWN | _LEFT: "┤",
    _UP | _LEFT | _RIGHT: "┴",
    _DOWN | _LEFT | _RIGHT: "┬",
    _UP | _DOWN | _LEFT | _RIGHT: "┼",
    _LEFT | _RIGHT: "─",
}


@dataclass(eq=False)
class GraphNode:
    """A box, or without a *label* a line that passes its layer by."""

    label: Sequence[str]
    parents: list["GraphNode"] = field(default_factory=list)
    children: list["GraphNode"] = field(default_factory=list)
    left: int = 0
    width: int = _LANE
    port: int = 0  # the column its lines leave by

    @property
    def centre(self) -> float:
        return self.left + self.width // 2


@dataclass(frozen=True)
class _Net:
    """All from *tops* to all of *bottoms*: one line, whoever follows it goes right."""

    tops: Sequence[GraphNode]
    bottoms: Sequence[GraphNode]


def draw_layers(layers: Sequence[Sequence[GraphNode]], edges: Iterable[tuple[GraphNode, GraphNode]]) -> list[str]:
    """The lines of a drawing: each node below those it comes after."""
    rows = [list(layer) for layer in layers]
    _connect(rows, edges)
    _arrange(rows)
    nets = [_nets(row) for row in rows]
    _size(nets, rows)
    _place(rows)
    canvas = _Canvas()
    for number, row in enumerate(rows):
        if number:
            canvas.join(nets[number - 1], row)
        canvas.put(row)
    return canvas.lines()


def _connect(rows: list[list[GraphNode]], edges: Iterable[tuple[GraphNode, GraphNode]]) -> None:
    """Join neighbouring layers; an edge over several goes by a line that all edges of its beginning share."""
    layer_of = {node: number for number, row in enumerate(rows) for node in row}
    passing: dict[tuple[GraphNode, int], GraphNode] = {}
    for start, end in edges:
        above = start
        for number in range(layer_of[start] + 1, layer_of[end]):
            lane = passing.get((start, number))
            if lane is None:
                lane = passing[start, number] = GraphNode(())
                rows[number].append(lane)
                _join(above, lane)
            above = lane
        _join(above, end)


def _join(above: GraphNode, below: GraphNode) -> None:
    above.children.append(below)
    below.parents.append(above)


def _arrange(rows: list[list[GraphNode]]) -> None:
    """Put each node near what it hangs together with, so that few lines cross."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for number in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            places = {node: place for place, node in enumerate(rows[number - 1 if down else number + 1])}
            current = {node: place for place, node in enumerate(rows[number])}
            rows[number].sort(key=lambda node: _middle(node, places, current, down=down))


def _middle(node: GraphNode, places: Mapping[GraphNode, int], current: Mapping[GraphNode, int], *, down: bool) -> float:
    near = [places[other] for other in (node.parents if down else node.children)]
    return sum(near) / len(near) if near else current[node]


def _nets(row: Sequence[GraphNode]) -> list[_Net]:
    grouped: dict[frozenset[GraphNode], list[GraphNode]] = defaultdict(list)
    for node in row:
        if node.children:
            grouped[frozenset(node.children)].append(node)
    return [_Net(tops, tops[0].children) for tops in grouped.values()]


def _size(nets: Sequence[Sequence[_Net]], rows: Sequence[Sequence[GraphNode]]) -> None:
    """Make every box wide enough for its label, and for the lines that come in."""
    coming: dict[GraphNode, int] = defaultdict(int)
    for net in (net for some in nets for net in some):
        for node in net.bottoms:
            coming[node] += 1
    for node in (node for row in rows for node in row if node.label):
        node.width = max(max(map(len, node.label)) + 4, 2 * coming[node] + 3)


def _place(rows: Sequence[Sequence[GraphNode]]) -> None:
    """Give each node its column: below its parents, then above its children, as near as the others let it."""
    for row in rows:
        _settle(row, [0.0] * len(row))
    for down in (True, False, True):
        for row in rows if down else reversed(rows):
            near = [node.parents if down else node.children for node in row]
            if any(near):
                wanted = [
                    (sum(other.centre for other in others) / len(others) if others else node.centre) - node.width // 2
                    for node, others in zip(row, near, strict=True)
                ]
                _settle(row, wanted)
    first = min((node.left for row in rows for node in row), default=0)
    for node in (node for row in rows for node in row):
        node.left -= first


def _settle(row: Sequence[GraphNode], wanted: Sequence[float]) -> None:
    right: int | None = None
    for node, left in zip(row, wanted, strict=True):
        node.left = round(left) if right is None else max(round(left), right + _GAP)
        right = node.left + node.width
    # Those pushed aside went to the right only: share that out.
    shift = round(sum(left - node.left for node, left in zip(row, wanted, strict=True)) / len(row)) if row else 0
    for node in row:
        node.left += shift


class _Canvas:
    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], str] = {}
        self._height = 0

    def lines(self) -> list[str]:
        rows: dict[int, dict[int, str]] = defaultdict(dict)
        for (row, column), glyph in self._cells.items():
            rows[row][column] = glyph
        return [
            "".join(rows[row].get(column, " ") for column in range(max(rows[row], default=-1) + 1))
            for row in range(self._height)
        ]

    def put(self, row: Sequence[GraphNode]) -> None:
        """Draw the boxes of a layer, all of one height."""
        height = max((len(node.label) for node in row), default=0) + 2
        for node in row:
            if not node.label:
                self._down(node.port, self._height, self._height + height)
                continue
            inner, end = node.width - 2, "┬" if node.children else "─"
            self._write(node.left, self._height, f"╭{'─' * inner}╮")
            for number in range(height - 2):
                text = node.label[number] if number < len(node.label) else ""
                self._write(node.left, self._height + 1 + number, f"│ {text.ljust(inner - 1)}│")
            self._write(node.left, self._height + height - 1, f"╰{'─' * inner}╯")
            node.port = node.left + node.width // 2
            self._cells[self._height + height - 1, node.port] = end
        self._height += height

    def join(self, nets: Sequence[_Net], below: Sequence[GraphNode]) -> None:
        """Draw the lines from the layer above to the one *below*."""
        ports = _ports(nets, below)
        spans = [[*(node.port for node in net.tops), *ports[number].values()] for number, net in enumerate(nets)]
        tracks = _tracks(spans)
        height = max(max(tracks, default=-1) + 1, 1)
        for columns, track in zip(spans, tracks, strict=True):
            self._trunk(columns, track)
        for number, net in enumerate(nets):
            self._verticals(net, ports[number], tracks[number], height)
        for number, net in enumerate(nets):
            self._corners(net, ports[number], tracks[number])
        self._height += height + 1

    def _trunk(self, columns: Sequence[int], track: int) -> None:
        if track >= 0:
            self._write(min(columns), self._height + track, "─" * (max(columns) - min(columns) + 1))

    def _verticals(self, net: _Net, ports: Mapping[GraphNode, int], track: int, height: int) -> None:
        for node in net.tops:
            self._down(node.port, self._height, self._height + (height if track < 0 else track))
        for node, column in ports.items():
            self._down(column, self._height + track + 1, self._height + height)
            self._cells[self._height + height, column] = "▼" if node.label else "│"
            if not node.label:
                node.port = column

    def _corners(self, net: _Net, ports: Mapping[GraphNode, int], track: int) -> None:
        if track < 0:
            return
        ways: dict[int, int] = defaultdict(int)
        for node in net.tops:
            ways[node.port] |= _UP
        for column in ports.values():
            ways[column] |= _DOWN
        for column, way in ways.items():
            sideways = (_LEFT if column > min(ways) else 0) | (_RIGHT if column < max(ways) else 0)
            self._cells[self._height + track, column] = _CORNERS[way | sideways]

    def _down(self, column: int, start: int, end: int) -> None:
        for row in range(start, end):
            self._cells[row, column] = "│"

    def _write(self, column: int, row: int, text: str) -> None:
        for place, glyph in enumerate(text):
            self._cells[row, column + place] = glyph


def _ports(nets: Sequence[_Net], below: Sequence[GraphNode]) -> list[dict[GraphNode, int]]:
    """The column by which each net comes to each of its ends: never one another net leaves by, or comes by."""
    ports: list[dict[GraphNode, int]] = [{} for _ in nets]
    leaving = {node.port: number for number, net in enumerate(nets) for node in net.tops}
    coming: dict[GraphNode, list[int]] = defaultdict(list)
    for number in sorted(range(len(nets)), key=lambda number: sum(top.port for top in nets[number].tops)):
        for node in nets[number].bottoms:
            coming[node].append(number)
    for node in below:
        taken: set[int] = set()
        for place, number in enumerate(coming[node]):
            tops, aside = nets[number].tops, place * 2 - len(coming[node]) + 1
            is_straight = len(tops) == 1 and tops[0].port in _top_edge(node)
            wanted = tops[0].port if is_straight else node.left + node.width // 2 + aside
            inside = range(node.left, node.left + node.width) if not node.label else _top_edge(node)
            free = (column for column in inside if column not in taken and leaving.get(column, number) == number)
            ports[number][node] = min(free, key=lambda column: (abs(column - wanted), column))
            taken.add(ports[number][node])
    return ports


def _top_edge(node: GraphNode) -> range:
    return range(node.left + 1, node.left + node.width - 1)


def _tracks(spans: Sequence[Sequence[int]]) -> list[int]:
    """The row of each net's trunk, so that no two touch; -1 where it goes straight down."""
    tracks = [-1] * len(spans)
    ends: list[int] = []  # of what is in each row
    for number in sorted(range(len(spans)), key=lambda number: min(spans[number])):
        first, last = min(spans[number]), max(spans[number])
        if first == last:
            continue
        row = next((row for row, end in enumerate(ends) if end < first), len(ends))
        ends[row : row + 1] = [last]
        tracks[number] = row
    return tracks


def draw_flow(steps: Mapping[str, StepSpec], width: int = WIDTH) -> str:
    """The steps as boxes, each below those it waits for; as a list where that would be wider than *width*."""
    graph = ordered(steps)
    if not steps:
        return "(no steps)"
    layers = graph.layers()
    if len(layers) <= _LAYERS:
        lines = _boxes(graph, steps, layers, width)
        if max(map(len, lines)) <= width:
            return "\n".join(lines)
    return "\n".join(_listed(graph, steps, layers))


def draw_mermaid(steps: Mapping[str, StepSpec]) -> str:
    """The steps as a Mermaid flowchart."""
    graph = ordered(steps)
    lines = ["flowchart TD"]
    for place, step_id in enumerate(graph.ids):
        step = steps[step_id]
        text = "<br/>".join(_escaped(line) for line in _label(step_id, step))
        start, end = {MAP: ("[[", "]]"), FLOW: ("[/", "/]")}.get(step.kind, ("{{", "}}") if step.when else ("[", "]"))
        lines.append(f'    s{place}{start}"{text}"{end}{"" if step.required else ":::optional"}')
    for place, before in enumerate(graph.depends_on):
        lines += [f"    s{other} --> s{place}" for other in before]
    if any(not step.required for step in steps.values()):
        lines.append("    classDef optional stroke-dasharray: 5 5")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Mermaid's own way: a number for every character that means something to it."""
    return "".join(one if one.isalnum() or one in " _.-…×" else f"#{ord(one)};" for one in text)


def _label(step_id: str, step: StepSpec) -> list[str]:
    kind = step.kind
    if step.kind == MAP and step.do is not None:
        kind = f"map × {step.do.kind}"
    elif step.kind == FLOW:
        kind = f"flow × {step.inputs.get('flow') or 'steps within'}"
    lines = [step_id, kind]
    if step.when is not None:
        lines.append(f"when {' '.join(step.when.split())}")
    if not step.required:
        lines.append("optional")
    return [_short(line) for line in lines]


def _short(text: str) -> str:
    shown = "".join(one if one.isprintable() else "·" for one in text)
    return shown if len(shown) <= _TEXT else f"{shown[: _TEXT - 1]}…"


def _boxes(graph: StepGraph, steps: Mapping[str, StepSpec], layers: Sequence[Sequence[int]], width: int) -> list[str]:
    boxes: dict[int, GraphNode] = {}
    rows = []
    for layer in layers:
        row = _row([(place, _label(graph.ids[place], steps[graph.ids[place]])) for place in layer], width)
        boxes |= row
        rows.append(list(dict.fromkeys(row.values())))
    edges = dict.fromkeys((boxes[before], boxes[place]) for place in boxes for before in graph.depends_on[place])
    return draw_layers(rows, edges)


def _row(labels: Sequence[tuple[int, list[str]]], width: int) -> dict[int, GraphNode]:
    """A box for each, or one for all that would make the row too wide."""
    row: dict[int, GraphNode] = {}
    used = 0
    for number, (place, label) in enumerate(labels):
        used += max(map(len, label)) + _BOX
        is_last = number == len(labels) - 1
        if number and used + (0 if is_last else _TEXT // 2 + _BOX) > width:
            rest = GraphNode([f"… and {len(labels) - number:,} more"])
            return row | {other: rest for other, _ in labels[number:]}
        row[place] = GraphNode(label)
    return row


def _listed(graph: StepGraph, steps: Mapping[str, StepSpec], layers: Sequence[Sequence[int]]) -> list[str]:
    """One line a step, by layer, with what it waits for."""
    lines = []
    order = [(number, place) for number, layer in enumerate(layers, start=1) for place in layer]
    for number, place in order[:_LISTED]:
        name, *about = _label(graph.ids[place], steps[graph.ids[place]])
        before = [graph.ids[other] for other in graph.depends_on[place]]
        more = f" and {len(before) - 5:,} more" if len(before) > 5 else ""
        after = f"  ← {', '.join(before[:5])}{more}" if before else ""
        lines.append(f"{number:>4}  {name}  ({', '.join(about)}){after}")
    if len(order) > _LISTED:
        lines.append(f"      … and {len(order) - _LISTED:,} more")
    return lines
