"""F2: the order of steps by their dependencies, cycles of steps and of flows within flows, hints for unknown names."""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from penstock.flows.contract import FLOW, STEP_LIMIT
from penstock.flows.definition.spec import FlowSpec, StepSpec
from penstock.kernel.errors import BadConfig, Invalid

_SEARCH_LIMIT = 200_000  # dependencies looked at for the shortest ring
_NEAR = 32  # of these, from each step at least
_SHOWN = 10  # steps of a ring
_KNOWN = 1_000  # names looked through for one that was meant


@dataclass(frozen=True)
class StepGraph:
    """Steps in an order they can run in, that of writing where they are free; the numbers are places in *ids*."""

    ids: Sequence[str]
    depends_on: Sequence[Sequence[int]]
    children: Sequence[Sequence[int]]

    def layers(self) -> Sequence[Sequence[int]]:
        """Steps that could run at once, were all of them equally long: each right below the last it waits for."""
        depth: list[int] = []
        for before in self.depends_on:
            depth.append(max((depth[place] for place in before), default=-1) + 1)
        layers: list[list[int]] = [[] for _ in range(max(depth, default=-1) + 1)]
        for place, found in enumerate(depth):
            layers[found].append(place)
        return layers


def ordered(steps: Mapping[str, StepSpec]) -> StepGraph:
    """The graph of *steps*; Invalid for dependencies that are unknown, come twice or go round in a ring."""
    if len(steps) > STEP_LIMIT:
        raise Invalid("TOO_MANY_STEPS", f"there are {len(steps):,} steps, at most {STEP_LIMIT:,} make a run")
    ids = list(steps)
    places = {step_id: place for place, step_id in enumerate(ids)}
    before = [_dependencies(step_id, step, places) for step_id, step in steps.items()]
    after = _turned(before)
    order = _in_order(before, after)
    if len(order) < len(ids):
        raise _ring_found(ids, before, set(range(len(ids))) - set(order))
    renumbered = {old: place for place, old in enumerate(order)}
    depends_on = [[renumbered[other] for other in before[old]] for old in order]
    return StepGraph([ids[old] for old in order], depends_on, _turned(depends_on))


def suggest_name(name: str, known: Iterable[str]) -> str:
    """A hint with the name that was meant, or some there are."""
    names = [one for one, _ in zip(known, range(_KNOWN), strict=False)]
    near = get_close_matches(name[:100], names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names[:_SHOWN]) or 'none'}"


def _dependencies(step_id: str, step: StepSpec, places: Mapping[str, int]) -> list[int]:
    seen: set[str] = set()
    for name in step.depends_on:
        if name not in places:
            said = f"step {step_id!r} depends on {name[:100]!r}, which is not there"
            hint = suggest_name(name, (place for place in places if place != step_id))
            raise Invalid("UNKNOWN_DEPENDENCY", said, hint=hint, step=step_id, dependency=name[:100])
        if name in seen:
            said = f"step {step_id!r} depends on {name!r} twice"
            raise Invalid("DUPLICATE_DEPENDENCY", said, hint="name it once", step=step_id, dependency=name)
        seen.add(name)
    return [places[name] for name in step.depends_on]


def _turned(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    turned: list[list[int]] = [[] for _ in edges]
    for place, others in enumerate(edges):
        for other in others:
            turned[other].append(place)
    return turned


def _in_order(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> list[int]:
    """Every place whose turn comes; those in notifications, and those behind them, never have one."""
    unmet = [len(others) for others in before]
    free = [place for place, count in enumerate(unmet) if count == 0]  # sorted, thus a heap
    order = []
    while free:
        order.append(place := heapq.heappop(free))
        for other in after[place]:
            unmet[other] -= 1
            if unmet[other] == 0:
                heapq.heappush(free, other)
    return order


def _ring_found(ids: Sequence[str], before: Sequence[Sequence[int]], stuck: set[int]) -> Invalid:
    waits = {place: [other for other in before[place] if other in stuck] for place in sorted(stuck)}
    ring = [ids[place] for place in _ring(waits)]
    folded = ring if len(ring) <= _SHOWN else [*ring[: _SHOWN - 1], f"… {len(ring) - _SHOWN:,} more …", ring[-1]]
    said = f"the steps go round in a ring: {' → '.join([*folded, ring[0]])}"
    return Invalid("CYCLE", said, hint="take one `dependsOn` out of the ring", step=ring[0], ring=ring[:100])


def _ring(waits: Mapping[int, Sequence[int]]) -> Sequence[int]:
    """The shortest ring, as far as can be told in a short while; each step before the one that waits for it."""
    budget = max(_NEAR, _SEARCH_LIMIT // len(waits))  # a short one is found near by, however many steps there are
    best = list[int]()
    for start in waits:
        best = _shortest_through(start, waits, len(best), budget) or best
    best = best or _shortest_through(_place_on_a_ring(waits), waits, 0, sum(map(len, waits.values())))
    first = best.index(min(best))
    return best[first:] + best[:first]


def _place_on_a_ring(waits: Mapping[int, Sequence[int]]) -> int:
    """Whoever follows what each waits for comes round in the end."""
    seen: set[int] = set()
    place = next(iter(waits))
    while place not in seen:
        seen.add(place)
        place = waits[place][0]
    return place


def _shortest_through(start: int, waits: Mapping[int, Sequence[int]], limit: int, budget: int) -> list[int]:
    """The shortest ring through *start*, of fewer than *limit* steps (0: of any number), if it is found in time."""
    came_from: dict[int, int] = {}
    depth, looked_at = {start: 0}, 0
    waiting = deque([start])
    while waiting and looked_at <= budget:
        place = waiting.popleft()
        if limit and depth[place] + 1 >= limit:
            break
        for other in waits[place]:
            looked_at += 1
            if other == start:
                return _way_back(start, place, came_from)
            if other not in depth:
                came_from[other], depth[other] = place, depth[place] + 1
                waiting.append(other)
    return []


def _way_back(start: int, place: int, came_from: Mapping[int, int]) -> list[int]:
    """From *place*, which waits for *start*, by those that wait for it in turn."""
    way = [place]
    while way[-1] != start:
        way.append(came_from[way[-1]])
    return way


def find_recursion(flow: FlowSpec, others: Mapping[str, FlowSpec]) -> BadConfig | None:
    """Why *flow* cannot stand beside *others*, if it leads through them back to itself."""
    way = _circle(flow, others)
    if way is None:
        return None
    told = f"flow {flow.name} would run within itself: {' → '.join(way)}"
    return BadConfig("FLOW_RECURSION", told, hint="take its steps into another flow")


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
