"""F15: a flow drawn, for the terminal and for Mermaid."""

from collections.abc import Mapping, Sequence

from penstock.flows.contract import FLOW, MAP
from penstock.flows.definition.graph import Graph, ordered
from penstock.flows.definition.render import Node, drawn
from penstock.flows.definition.spec import StepSpec

WIDTH = 110
_TEXT = 34  # characters of a line in a box
_BOX = 8  # columns around it
_LAYERS = 60
_LISTED = 200


def drawing(steps: Mapping[str, StepSpec], width: int = WIDTH) -> str:
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


def mermaid(steps: Mapping[str, StepSpec]) -> str:
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


def _boxes(graph: Graph, steps: Mapping[str, StepSpec], layers: Sequence[Sequence[int]], width: int) -> list[str]:
    boxes: dict[int, Node] = {}
    rows = []
    for layer in layers:
        row = _row([(place, _label(graph.ids[place], steps[graph.ids[place]])) for place in layer], width)
        boxes |= row
        rows.append(list(dict.fromkeys(row.values())))
    edges = dict.fromkeys((boxes[before], boxes[place]) for place in boxes for before in graph.depends_on[place])
    return drawn(rows, edges)


def _row(labels: Sequence[tuple[int, list[str]]], width: int) -> dict[int, Node]:
    """A box for each, or one for all that would make the row too wide."""
    row: dict[int, Node] = {}
    used = 0
    for number, (place, label) in enumerate(labels):
        used += max(map(len, label)) + _BOX
        is_last = number == len(labels) - 1
        if number and used + (0 if is_last else _TEXT // 2 + _BOX) > width:
            rest = Node([f"… and {len(labels) - number:,} more"])
            return row | {other: rest for other, _ in labels[number:]}
        row[place] = Node(label)
    return row


def _listed(graph: Graph, steps: Mapping[str, StepSpec], layers: Sequence[Sequence[int]]) -> list[str]:
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
