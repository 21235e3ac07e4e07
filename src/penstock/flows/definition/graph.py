"""F2: the dependency graph of steps, detection of cycles and of recursive flows, and hints for unknown names."""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any

from penstock.flows.contract import FLOW, STEP_LIMIT
from penstock.flows.definition.spec import FlowSpec, StepSpec
from penstock.kernel.errors import BadConfig, Invalid

_SEARCH_LIMIT = 200_000  # dependencies to follow in search of the shortest cycle
_MIN_SEARCH = 32  # dependencies to follow from each step at least
_SHOWN = 10  # steps of a cycle, and names in a hint
_NAMES_LIMIT = 1_000  # names to search for a similar one


@dataclass(frozen=True)
class StepGraph:
    """The steps in execution order, otherwise in the order of the document; the numbers are indexes of *ids*."""

    ids: Sequence[str]
    depends_on: Sequence[Sequence[int]]
    children: Sequence[Sequence[int]]

    def compute_layers(self) -> Sequence[Sequence[int]]:
        """Return the steps by layer: each step is in the layer after the last of its dependencies."""
        depth: list[int] = []
        for before in self.depends_on:
            depth.append(max((depth[index] for index in before), default=-1) + 1)
        layers: list[list[int]] = [[] for _ in range(max(depth, default=-1) + 1)]
        for index, layer in enumerate(depth):
            layers[layer].append(index)
        return layers


def build_graph(steps: Mapping[str, StepSpec]) -> StepGraph:
    """Return the graph of *steps*; raise Invalid for an unknown or repeated dependency, or a cycle."""
    if len(steps) > STEP_LIMIT:
        raise Invalid("TOO_MANY_STEPS", f"the flow has {len(steps):,} steps; a run has at most {STEP_LIMIT:,}")
    ids = list(steps)
    indexes = {step_id: index for index, step_id in enumerate(ids)}
    before = [_list_dependencies(step_id, step, indexes) for step_id, step in steps.items()]
    after = _invert(before)
    order = _sort(before, after)
    if len(order) < len(ids):
        raise _make_cycle_error(ids, before, set(range(len(ids))) - set(order))
    renumbered = {old: index for index, old in enumerate(order)}
    depends_on = [[renumbered[other] for other in before[old]] for old in order]
    return StepGraph([ids[old] for old in order], depends_on, _invert(depends_on))


def suggest_name(name: str, candidates: Iterable[str]) -> str:
    """Return a hint with the name that is similar to *name*, or with some of *candidates*."""
    names = list(islice(candidates, _NAMES_LIMIT))
    near = get_close_matches(name[:100], names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known names: {', '.join(names[:_SHOWN]) or 'none'}"


def _list_dependencies(step_id: str, step: StepSpec, indexes: Mapping[str, int]) -> list[int]:
    seen: set[str] = set()
    for name in step.depends_on:
        if name not in indexes:
            problem = f"step {step_id!r} depends on {name[:100]!r}, which does not exist"
            hint = suggest_name(name, (other for other in indexes if other != step_id))
            raise Invalid("UNKNOWN_DEPENDENCY", problem, hint=hint, step=step_id, dependency=name[:100])
        if name in seen:
            problem = f"step {step_id!r} depends on {name!r} twice"
            raise Invalid("DUPLICATE_DEPENDENCY", problem, hint="remove one of them", step=step_id, dependency=name)
        seen.add(name)
    return [indexes[name] for name in step.depends_on]


def _invert(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    inverted: list[list[int]] = [[] for _ in edges]
    for index, others in enumerate(edges):
        for other in others:
            inverted[other].append(index)
    return inverted


def _sort(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> list[int]:
    """Return the steps in execution order, without the steps in cycles and behind them."""
    unmet = [len(others) for others in before]
    ready = [index for index, count in enumerate(unmet) if count == 0]  # sorted, thus a heap
    order = []
    while ready:
        order.append(index := heapq.heappop(ready))
        for other in after[index]:
            unmet[other] -= 1
            if unmet[other] == 0:
                heapq.heappush(ready, other)
    return order


def _make_cycle_error(ids: Sequence[str], before: Sequence[Sequence[int]], blocked: set[int]) -> Invalid:
    edges = {index: [other for other in before[index] if other in blocked] for index in sorted(blocked)}
    cycle = [ids[index] for index in _find_cycle(edges)]
    shown = cycle if len(cycle) <= _SHOWN else [*cycle[: _SHOWN - 1], f"… {len(cycle) - _SHOWN:,} more …", cycle[-1]]
    problem = f"the dependencies form a cycle: {' → '.join([*shown, cycle[0]])}"
    hint = "remove one `dependsOn` of the cycle"
    return Invalid("CYCLE", problem, hint=hint, step=cycle[0], cycle=cycle[:100])


def _find_cycle(edges: Mapping[int, Sequence[int]]) -> Sequence[int]:
    """Return the shortest cycle that a limited search finds; each step is before the step that depends on it."""
    budget = max(_MIN_SEARCH, _SEARCH_LIMIT // len(edges))
    best = list[int]()
    for start in edges:
        best = _find_shortest_cycle(start, edges, len(best), budget) or best
    best = best or _find_shortest_cycle(_find_step_in_cycle(edges), edges, 0, sum(map(len, edges.values())))
    first = best.index(min(best))
    return best[first:] + best[:first]


def _find_step_in_cycle(edges: Mapping[int, Sequence[int]]) -> int:
    """Return a step of a cycle: following dependencies leads into one."""
    seen: set[int] = set()
    index = next(iter(edges))
    while index not in seen:
        seen.add(index)
        index = edges[index][0]
    return index


def _find_shortest_cycle(start: int, edges: Mapping[int, Sequence[int]], limit: int, budget: int) -> list[int]:
    """Return the shortest cycle through *start*, with fewer than *limit* steps (0: any number), within *budget*."""
    came_from: dict[int, int] = {}
    depth, visited = {start: 0}, 0
    pending = deque([start])
    while pending and visited <= budget:
        index = pending.popleft()
        if limit and depth[index] + 1 >= limit:
            break
        for other in edges[index]:
            visited += 1
            if other == start:
                return _trace_back(start, index, came_from)
            if other not in depth:
                came_from[other], depth[other] = index, depth[index] + 1
                pending.append(other)
    return []


def _trace_back(start: int, index: int, came_from: Mapping[int, int]) -> list[int]:
    """Return the path from *index*, which depends on *start*, back to *start*."""
    path = [index]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path


def find_recursion(flow: FlowSpec, others: Mapping[str, FlowSpec]) -> BadConfig | None:
    """Return the error FLOW_RECURSION if *flow* leads through *others* back to itself."""
    path = _find_recursive_path(flow, others)
    if path is None:
        return None
    problem = f"flow {flow.name} contains itself: {' → '.join(path)}"
    return BadConfig("FLOW_RECURSION", problem, hint="move the shared steps into a separate flow")


def _find_recursive_path(flow: FlowSpec, others: Mapping[str, FlowSpec]) -> list[str] | None:
    """Return the path from *flow* through *others* back to it, if any; names known only at run time are ignored."""
    came_from: dict[str, str] = {}
    pending = [flow]
    while pending:
        outer = pending.pop()
        for name in _list_inner_flows(outer):
            if name == flow.name:
                return [*_trace_names(outer.name, came_from), name]
            if name in others and name not in came_from:
                came_from[name] = outer.name
                pending.append(others[name])
    return None


def _list_inner_flows(flow: FlowSpec) -> Iterator[str]:
    """Yield the names of the sub-flows of *flow*, including those in inline steps of any depth."""
    yield from _list_names({"kind": step.kind, "inputs": step.inputs} for step in flow.steps.values())


def _list_names(steps: Iterable[Any]) -> Iterator[str]:
    for step in steps:
        inputs = step.get("inputs") or {}
        if step.get("kind") != FLOW:
            continue
        if isinstance(name := inputs.get("flow"), str):
            yield name
        inline = inputs.get("steps")
        if isinstance(inline, dict | list):
            yield from _list_names(inline.values() if isinstance(inline, dict) else inline)


def _trace_names(name: str, came_from: Mapping[str, str]) -> list[str]:
    path = [name]
    while path[0] in came_from:
        path.insert(0, came_from[path[0]])
    return path
