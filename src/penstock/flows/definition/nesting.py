"""F14: flows by name within flows: none may come back to itself, for it could wait for its own end."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.flows.contract import FLOW
from penstock.flows.definition.spec import FlowSpec
from penstock.kernel.errors import BadConfig


def within_itself(flow: FlowSpec, others: Mapping[str, FlowSpec]) -> BadConfig | None:
    """Why *flow* cannot stand beside *others*, if it leads through them back to itself."""
    way = _circle(flow, others)
    if way is None:
        return None
    told = f"flow {flow.name} would run within itself: {' → '.join(way)}"
    return BadConfig("FLOW_WITHIN_ITSELF", told, hint="take its steps into another flow")


def _circle(flow: FlowSpec, others: Mapping[str, FlowSpec]) -> list[str] | None:
    """The way from *flow* through *others* back to it, if there is one; names known only at run time are not seen."""
    came_from: dict[str, str] = {}
    ahead = [flow]
    while ahead:
        within = ahead.pop()
        for name in _inner(within):
            if name == flow.name:
                return [*_way(within.name, came_from), name]
            if name in others and name not in came_from:
                came_from[name] = within.name
                ahead.append(others[name])
    return None


def _inner(flow: FlowSpec) -> Iterator[str]:
    """The flows *flow* has within, at whatever depth of steps written inline."""
    yield from _named({"kind": step.kind, "inputs": step.inputs} for step in flow.steps.values())


def _named(steps: Iterable[Any]) -> Iterator[str]:
    for step in steps:
        inputs = step.get("inputs") or {}
        if step.get("kind") != FLOW:
            continue
        if isinstance(name := inputs.get("flow"), str):
            yield name
        written = inputs.get("steps")
        if isinstance(written, dict | list):
            yield from _named(written.values() if isinstance(written, dict) else written)


def _way(name: str, came_from: Mapping[str, str]) -> list[str]:
    way = [name]
    while way[0] in came_from:
        way.insert(0, came_from[way[0]])
    return way
