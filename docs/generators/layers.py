"""Arrange the states of a machine in layers: each state after its sources, except for moves that lead back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import permutations
from typing import NamedTuple

from penstock.kernel.machine import StateMachine


class Node(NamedTuple):
    """A state in its layer, or a move that passes a layer."""

    name: str
    layer: int
    is_state: bool = True


class Link(NamedTuple):
    """A part of a forward move, between two adjacent layers."""

    move: str
    source: Node
    target: Node


@dataclass(frozen=True)
class Layers:
    """The nodes of each layer from top to bottom, and the moves between them."""

    nodes: list[list[Node]]
    targets: Mapping[str, Node]  # of every move
    ahead: Sequence[Link]
    back: Mapping[str, Sequence[Node]]  # sources of moves that lead back, the shortest first


def arrange_layers(machine: StateMachine[StrEnum]) -> Layers:
    """Return the layers in the order with the fewest crossings."""
    depths = _depths(machine)
    states = {state: Node(state.value, depths[state]) for state in machine.states}
    layers: list[list[Node]] = [[] for _ in range(max(depths.values()) + 1)]
    for node in states.values():
        layers[node.layer].append(node)
    targets, ahead, back = {}, [], {}
    for move in machine.moves.values():
        sources, target = [states[source] for source in move.sources], states[move.target]
        targets[move.name] = target
        steps = {layer: Node(move.name, layer, is_state=False) for layer in range(target.layer)} | {
            target.layer: target
        }
        before = [source for source in sources if source.layer < target.layer]
        passing = [
            steps[layer]
            for layer in range(min((source.layer for source in before), default=target.layer) + 1, target.layer)
        ]
        ahead += [Link(move.name, node, steps[node.layer + 1]) for node in [*before, *passing]]
        for node in passing:
            layers[node.layer].append(node)
        if behind := [source for source in sources if source.layer >= target.layer]:
            back[move.name] = behind
    for layer in [*range(1, len(layers)), *reversed(range(len(layers))), *range(1, len(layers))]:
        layers[layer] = _order_layer(layers, layer, ahead)
    reach = {name: max(source.layer for source in sources) - targets[name].layer for name, sources in back.items()}
    return Layers(layers, targets, ahead, {name: back[name] for name in sorted(back, key=lambda name: reach[name])})


def _depths(machine: StateMachine[StrEnum]) -> Mapping[StrEnum, int]:
    """Return the layer of each state."""
    ahead: list[tuple[StrEnum, StrEnum]] = []

    def walk(state: StrEnum, path: tuple[StrEnum, ...]) -> None:
        for move in machine.moves.values():
            if state in move.sources and move.target not in path:
                is_known = any(target is move.target for _, target in ahead)
                ahead.append((state, move.target))
                if not is_known:
                    walk(move.target, (*path, move.target))

    walk(machine.initial, (machine.initial,))
    states = list(machine.states)
    depths = dict.fromkeys(states, 0)
    for _ in states:
        for source, target in ahead:
            depths[target] = max(depths[target], depths[source] + 1)
    return depths


def _order_layer(layers: Sequence[Sequence[Node]], layer: int, links: Sequence[Link]) -> list[Node]:
    """Return the order of a layer with the fewest crossings and the shortest vertical distances."""
    near = [link for link in links if layer in (link.source.layer, link.target.layer)]

    def cost(order: Sequence[Node]) -> tuple[int, float]:
        candidate = [order if index == layer else nodes for index, nodes in enumerate(layers)]
        at = {node: index - len(nodes) / 2 for nodes in candidate for index, node in enumerate(nodes)}
        ends = [(link.source.layer, at[link.source], at[link.target]) for link in near]
        crossings = sum(a == b and (c - e) * (d - f) < 0 for a, c, d in ends for b, e, f in ends)
        return crossings, sum(abs(start - end) for _, start, end in ends)

    return min((list(order) for order in permutations(layers[layer])), key=cost)
