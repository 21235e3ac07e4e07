"""F15: drawings of the steps of a flow: boxes in layers with lines between them, a list, or a Mermaid flowchart."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.flows.contract import FLOW, MAP
from penstock.flows.definition.graph import StepGraph, build_graph
from penstock.flows.definition.spec import StepSpec

WIDTH = 110
_TEXT = 34  # characters of a line in a box
_BOX = 8  # columns around it
_LAYERS = 60
_LISTED = 200
_GAP = 3
_SWEEPS = 4
_LANE = 3  # columns of a line that passes through a layer: one of the three is always free
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
    """A box, or a line that passes through its layer if *label* is empty."""

    label: Sequence[str]
    parents: list["GraphNode"] = field(default_factory=list)
    children: list["GraphNode"] = field(default_factory=list)
    left: int = 0
    width: int = _LANE
    port: int = 0  # the column where its lines start

    @property
    def centre(self) -> float:
        return self.left + self.width // 2


@dataclass(frozen=True)
class _Net:
    """A line that connects all *tops* with all *bottoms*."""

    tops: Sequence[GraphNode]
    bottoms: Sequence[GraphNode]


def draw_layers(layers: Sequence[Sequence[GraphNode]], edges: Iterable[tuple[GraphNode, GraphNode]]) -> list[str]:
    """Return the lines of a drawing, with each node below its dependencies."""
    rows = [list(layer) for layer in layers]
    _connect_layers(rows, edges)
    _order_nodes(rows)
    nets = [_build_nets(row) for row in rows]
    _set_widths(nets, rows)
    _place_nodes(rows)
    canvas = _Canvas()
    for number, row in enumerate(rows):
        if number:
            canvas.join(nets[number - 1], row)
        canvas.put(row)
    return canvas.format_lines()


def _connect_layers(rows: list[list[GraphNode]], edges: Iterable[tuple[GraphNode, GraphNode]]) -> None:
    """Connect neighbouring layers; edges over several layers share one line per start node."""
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


def _order_nodes(rows: list[list[GraphNode]]) -> None:
    """Order the nodes of each layer by the positions of their neighbours, so that few lines cross."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for number in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            near = {node: index for index, node in enumerate(rows[number - 1 if down else number + 1])}
            current = {node: index for index, node in enumerate(rows[number])}
            rows[number].sort(key=lambda node: _compute_mean_position(node, near, current, down=down))


def _compute_mean_position(
    node: GraphNode, near: Mapping[GraphNode, int], current: Mapping[GraphNode, int], *, down: bool
) -> float:
    positions = [near[other] for other in (node.parents if down else node.children)]
    return sum(positions) / len(positions) if positions else current[node]


def _build_nets(row: Sequence[GraphNode]) -> list[_Net]:
    grouped: dict[frozenset[GraphNode], list[GraphNode]] = defaultdict(list)
    for node in row:
        if node.children:
            grouped[frozenset(node.children)].append(node)
    return [_Net(tops, tops[0].children) for tops in grouped.values()]


def _set_widths(nets: Sequence[Sequence[_Net]], rows: Sequence[Sequence[GraphNode]]) -> None:
    """Make every box wide enough for its label and for its incoming lines."""
    incoming: dict[GraphNode, int] = defaultdict(int)
    for net in (net for layer in nets for net in layer):
        for node in net.bottoms:
            incoming[node] += 1
    for node in (node for row in rows for node in row if node.label):
        node.width = max(max(map(len, node.label)) + 4, 2 * incoming[node] + 3)


def _place_nodes(rows: Sequence[Sequence[GraphNode]]) -> None:
    """Set the column of each node: below its parents, then above its children, without overlaps."""
    for row in rows:
        _place_row(row, [0.0] * len(row))
    for down in (True, False, True):
        for row in rows if down else reversed(rows):
            near = [node.parents if down else node.children for node in row]
            if any(near):
                preferred = [
                    (sum(other.centre for other in others) / len(others) if others else node.centre) - node.width // 2
                    for node, others in zip(row, near, strict=True)
                ]
                _place_row(row, preferred)
    first = min((node.left for row in rows for node in row), default=0)
    for node in (node for row in rows for node in row):
        node.left -= first


def _place_row(row: Sequence[GraphNode], preferred: Sequence[float]) -> None:
    right: int | None = None
    for node, left in zip(row, preferred, strict=True):
        node.left = round(left) if right is None else max(round(left), right + _GAP)
        right = node.left + node.width
    # Overlaps push nodes to the right only: shift the whole row back by the mean.
    shift = round(sum(left - node.left for node, left in zip(row, preferred, strict=True)) / len(row)) if row else 0
    for node in row:
        node.left += shift


class _Canvas:
    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], str] = {}
        self._height = 0

    def format_lines(self) -> list[str]:
        rows: dict[int, dict[int, str]] = defaultdict(dict)
        for (row, column), glyph in self._cells.items():
            rows[row][column] = glyph
        return [
            "".join(rows[row].get(column, " ") for column in range(max(rows[row], default=-1) + 1))
            for row in range(self._height)
        ]

    def put(self, row: Sequence[GraphNode]) -> None:
        """Draw the boxes of a layer, all with the same height."""
        height = max((len(node.label) for node in row), default=0) + 2
        for node in row:
            if not node.label:
                self._draw_vertical(node.port, self._height, self._height + height)
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
        """Draw the lines from the layer above to the layer *below*."""
        ports = _assign_ports(nets, below)
        spans = [[*(node.port for node in net.tops), *ports[number].values()] for number, net in enumerate(nets)]
        tracks = _assign_tracks(spans)
        height = max(max(tracks, default=-1) + 1, 1)
        for columns, track in zip(spans, tracks, strict=True):
            self._draw_trunk(columns, track)
        for number, net in enumerate(nets):
            self._draw_verticals(net, ports[number], tracks[number], height)
        for number, net in enumerate(nets):
            self._draw_corners(net, ports[number], tracks[number])
        self._height += height + 1

    def _draw_trunk(self, columns: Sequence[int], track: int) -> None:
        if track >= 0:
            self._write(min(columns), self._height + track, "─" * (max(columns) - min(columns) + 1))

    def _draw_verticals(self, net: _Net, ports: Mapping[GraphNode, int], track: int, height: int) -> None:
        for node in net.tops:
            self._draw_vertical(node.port, self._height, self._height + (height if track < 0 else track))
        for node, column in ports.items():
            self._draw_vertical(column, self._height + track + 1, self._height + height)
            self._cells[self._height + height, column] = "▼" if node.label else "│"
            if not node.label:
                node.port = column

    def _draw_corners(self, net: _Net, ports: Mapping[GraphNode, int], track: int) -> None:
        if track < 0:
            return
        directions: dict[int, int] = defaultdict(int)
        for node in net.tops:
            directions[node.port] |= _UP
        for column in ports.values():
            directions[column] |= _DOWN
        for column, vertical in directions.items():
            horizontal = (_LEFT if column > min(directions) else 0) | (_RIGHT if column < max(directions) else 0)
            self._cells[self._height + track, column] = _CORNERS[vertical | horizontal]

    def _draw_vertical(self, column: int, start: int, end: int) -> None:
        for row in range(start, end):
            self._cells[row, column] = "│"

    def _write(self, column: int, row: int, text: str) -> None:
        for offset, glyph in enumerate(text):
            self._cells[row, column + offset] = glyph


def _assign_ports(nets: Sequence[_Net], below: Sequence[GraphNode]) -> list[dict[GraphNode, int]]:
    """Return the column where each net ends at each node below: never a column of another net."""
    ports: list[dict[GraphNode, int]] = [{} for _ in nets]
    outgoing = {node.port: number for number, net in enumerate(nets) for node in net.tops}
    incoming: dict[GraphNode, list[int]] = defaultdict(list)
    for number in sorted(range(len(nets)), key=lambda number: sum(top.port for top in nets[number].tops)):
        for node in nets[number].bottoms:
            incoming[node].append(number)
    for node in below:
        taken: set[int] = set()
        for index, number in enumerate(incoming[node]):
            tops, offset = nets[number].tops, index * 2 - len(incoming[node]) + 1
            is_straight = len(tops) == 1 and tops[0].port in _compute_top_edge(node)
            preferred = tops[0].port if is_straight else node.left + node.width // 2 + offset
            inside = range(node.left, node.left + node.width) if not node.label else _compute_top_edge(node)
            free = (column for column in inside if column not in taken and outgoing.get(column, number) == number)
            ports[number][node] = min(free, key=lambda column: (abs(column - preferred), column))
            taken.add(ports[number][node])
    return ports


def _compute_top_edge(node: GraphNode) -> range:
    return range(node.left + 1, node.left + node.width - 1)


def _assign_tracks(spans: Sequence[Sequence[int]]) -> list[int]:
    """Return the row of each net's trunk, so that no two touch; -1 for a straight line."""
    tracks = [-1] * len(spans)
    ends: list[int] = []  # the last used column of each row
    for number in sorted(range(len(spans)), key=lambda number: min(spans[number])):
        first, last = min(spans[number]), max(spans[number])
        if first == last:
            continue
        row = next((row for row, end in enumerate(ends) if end < first), len(ends))
        ends[row : row + 1] = [last]
        tracks[number] = row
    return tracks


def draw_flow(steps: Mapping[str, StepSpec], width: int = WIDTH) -> str:
    """Draw the steps as boxes, each below its dependencies; as a list if the drawing is wider than *width*."""
    graph = build_graph(steps)
    if not steps:
        return "(no steps)"
    layers = graph.compute_layers()
    if len(layers) <= _LAYERS:
        lines = _draw_boxes(graph, steps, layers, width)
        if max(map(len, lines)) <= width:
            return "\n".join(lines)
    return "\n".join(_draw_list(graph, steps, layers))


def draw_mermaid(steps: Mapping[str, StepSpec]) -> str:
    """Draw the steps as a Mermaid flowchart."""
    graph = build_graph(steps)
    lines = ["flowchart TD"]
    for index, step_id in enumerate(graph.ids):
        step = steps[step_id]
        text = "<br/>".join(_escape(line) for line in _make_label_lines(step_id, step))
        start, end = {MAP: ("[[", "]]"), FLOW: ("[/", "/]")}.get(step.kind, ("{{", "}}") if step.when else ("[", "]"))
        lines.append(f'    s{index}{start}"{text}"{end}{"" if step.required else ":::optional"}')
    for index, before in enumerate(graph.depends_on):
        lines += [f"    s{other} --> s{index}" for other in before]
    if any(not step.required for step in steps.values()):
        lines.append("    classDef optional stroke-dasharray: 5 5")
    return "\n".join(lines)


def _escape(text: str) -> str:
    """Replace special characters by character codes of Mermaid."""
    return "".join(char if char.isalnum() or char in " _.-…×" else f"#{ord(char)};" for char in text)


def _make_label_lines(step_id: str, step: StepSpec) -> list[str]:
    kind = step.kind
    if step.kind == MAP and step.do is not None:
        kind = f"map × {step.do.kind}"
    elif step.kind == FLOW:
        kind = f"flow × {step.inputs.get('flow') or 'inline steps'}"
    lines = [step_id, kind]
    if step.when is not None:
        lines.append(f"when {' '.join(step.when.split())}")
    if not step.required:
        lines.append("optional")
    return [_shorten(line) for line in lines]


def _shorten(text: str) -> str:
    shown = "".join(char if char.isprintable() else "·" for char in text)
    return shown if len(shown) <= _TEXT else f"{shown[: _TEXT - 1]}…"


def _draw_boxes(
    graph: StepGraph, steps: Mapping[str, StepSpec], layers: Sequence[Sequence[int]], width: int
) -> list[str]:
    boxes: dict[int, GraphNode] = {}
    rows = []
    for layer in layers:
        row = _build_row([(n, _make_label_lines(graph.ids[n], steps[graph.ids[n]])) for n in layer], width)
        boxes |= row
        rows.append(list(dict.fromkeys(row.values())))
    edges = dict.fromkeys((boxes[before], boxes[index]) for index in boxes for before in graph.depends_on[index])
    return draw_layers(rows, edges)


def _build_row(labels: Sequence[tuple[int, list[str]]], width: int) -> dict[int, GraphNode]:
    """Return a box for each step; steps beyond *width* share one box."""
    row: dict[int, GraphNode] = {}
    used = 0
    for number, (index, label) in enumerate(labels):
        used += max(map(len, label)) + _BOX
        is_last = number == len(labels) - 1
        if number and used + (0 if is_last else _TEXT // 2 + _BOX) > width:
            rest = GraphNode([f"… and {len(labels) - number:,} more"])
            return row | {other: rest for other, _ in labels[number:]}
        row[index] = GraphNode(label)
    return row


def _draw_list(graph: StepGraph, steps: Mapping[str, StepSpec], layers: Sequence[Sequence[int]]) -> list[str]:
    """Return a line for each step, by layer, with its dependencies."""
    lines = []
    order = [(number, index) for number, layer in enumerate(layers, start=1) for index in layer]
    for number, index in order[:_LISTED]:
        name, *details = _make_label_lines(graph.ids[index], steps[graph.ids[index]])
        before = [graph.ids[other] for other in graph.depends_on[index]]
        more = f" and {len(before) - 5:,} more" if len(before) > 5 else ""
        after = f"  ← {', '.join(before[:5])}{more}" if before else ""
        lines.append(f"{number:>4}  {name}  ({', '.join(details)}){after}")
    if len(order) > _LISTED:
        lines.append(f"      … and {len(order) - _LISTED:,} more")
    return lines
