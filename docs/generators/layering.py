"""The states of a machine in layers: each after all those that lead to it, but for moves that lead back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import permutations
from typing import NamedTuple

from penstock.kernel.machine import StateMachine


class Node(NamedTuple):
    """A state in its layer, or a move that passes one."""

    name: str
    layer: int
    is_state: bool = True


class Link(NamedTuple):
    """A piece of a move that leads ahead, from one layer to the next."""

    move: str
    source: Node
    target: Node


@dataclass(frozen=True)
class Layers:
    """What each layer has from top to bottom, and what leads where."""

    nodes: list[list[Node]]
    targets: Mapping[str, Node]  # of every move
    ahead: Sequence[Link]
    back: Mapping[str, Sequence[Node]]  # where moves lead back from, the shortest way first


def layered(machine: StateMachine[StrEnum]) -> Layers:
    """The layers, in the order that tangles the links least."""
    depths = _depths(machine)
    states = {state: Node(state.value, depths[state]) for state in machine.states}
    layers: list[list[Node]] = [[] for _ in range(max(depths.values()) + 1)]
    for node in states.values():
        layers[node.layer].append(node)
    targets, ahead, back = {}, [], {}
    for move in machine.moves.values():
        sources, target = [states[source] for source in move.sources], states[move.target]
        targets[move.name] = target
        way = {layer: Node(move.name, layer, is_state=False) for layer in range(target.layer)} | {target.layer: target}
        before = [source for source in sources if source.layer < target.layer]
        passing = [
            way[layer] for layer in range(min((one.layer for one in before), default=target.layer) + 1, target.layer)
        ]
        ahead += [Link(move.name, node, way[node.layer + 1]) for node in [*before, *passing]]
        for node in passing:
            layers[node.layer].append(node)
        if behind := [source for source in sources if source.layer >= target.layer]:
            back[move.name] = behind
    for layer in [*range(1, len(layers)), *reversed(range(len(layers))), *range(1, len(layers))]:
        layers[layer] = _untangled(layers, layer, ahead)
    reach = {name: max(source.layer for source in sources) - targets[name].layer for name, sources in back.items()}
    return Layers(layers, targets, ahead, {name: back[name] for name in sorted(back, key=lambda name: reach[name])})


def _depths(machine: StateMachine[StrEnum]) -> Mapping[StrEnum, int]:
    """The layer of each state."""
    ahead: list[tuple[StrEnum, StrEnum]] = []

    def walk(state: StrEnum, way: tuple[StrEnum, ...]) -> None:
        for move in machine.moves.values():
            if state in move.sources and move.target not in way:
                is_known = any(target is move.target for _, target in ahead)
                ahead.append((state, move.target))
                if not is_known:
                    walk(move.target, (*way, move.target))

    walk(machine.initial, (machine.initial,))
    states = list(machine.states)
    depths = dict.fromkeys(states, 0)
    for _ in states:
        for source, target in ahead:
            depths[target] = max(depths[target], depths[source] + 1)
    return depths


def _untangled(layers: Sequence[Sequence[Node]], layer: int, links: Sequence[Link]) -> list[Node]:
    """The order of a layer whose links cross least, and go up and down least."""
    near = [link for link in links if layer in (link.source.layer, link.target.layer)]

    def tangle(order: Sequence[Node]) -> tuple[int, float]:
        tried = [order if place == layer else nodes for place, nodes in enumerate(layers)]
        at = {node: place - len(nodes) / 2 for nodes in tried for place, node in enumerate(nodes)}
        ends = [(link.source.layer, at[link.source], at[link.target]) for link in near]
        crossings = sum(a == b and (c - e) * (d - f) < 0 for a, c, d in ends for b, e, f in ends)
        return crossings, sum(abs(start - end) for _, start, end in ends)

    return min((list(order) for order in permutations(layers[layer])), key=tangle)
