"""The flows that are measured, and the worker that does their steps: nothing, but noting when."""

from collections import defaultdict
from time import perf_counter  # one clock for all processes

from benchmarks.peers.flows_env import BREADTH, FIRST, LAST, LENGTH, MIDDLE
from penstock.flows.definition.spec import FlowSpec
from penstock.flows.step import FlowStep, Workers

KIND = "noop"
WARM_UP, LARGE = 8, 10_000
workers = Workers()
ticks: defaultdict[int, list[float]] = defaultdict(list)  # by the flow, or by the part of the fan


@workers.worker(KIND)
async def noop(step: FlowStep) -> dict[str, list[int]] | None:
    ticks[step.inputs.get("part", step.scope.get("flow", 0))].append(perf_counter())
    return {"items": list(range(step.inputs["items"]))} if "items" in step.inputs else None


def fan_of(breadth: int) -> str:
    """The name of a fan whose steps are all written down."""
    return f"fan-{breadth}"


def map_of(breadth: int) -> str:
    """The name of a fan that goes over a list, known only when it runs."""
    return f"map-{breadth}"


def _chain() -> FlowSpec:
    steps = {f"s{n}": {"kind": KIND, "dependsOn": [f"s{n - 1}"] if n else []} for n in range(LENGTH)}
    return FlowSpec.model_validate({"name": "chain", "steps": steps})


def _fan(breadth: int) -> FlowSpec:
    names = [f"m{n}" for n in range(breadth)]
    middle = {name: _step(MIDDLE, "first") for name in names}
    return FlowSpec.model_validate(
        {"name": fan_of(breadth), "steps": {"first": _step(FIRST), **middle, "last": _step(LAST, *names)}}
    )


def _map(breadth: int) -> FlowSpec:
    over = "${steps.first.outputs.items}"
    return FlowSpec.model_validate(
        {
            "name": map_of(breadth),
            "steps": {
                "first": {"kind": KIND, "inputs": {"part": FIRST, "items": breadth}},
                "each": {"kind": "map", "dependsOn": ["first"], "over": over, "do": _step(MIDDLE)},
                "last": _step(LAST, "each"),
            },
        }
    )


def _step(part: int, *depends_on: str) -> dict[str, object]:
    return {"kind": KIND, "inputs": {"part": part}, **({"dependsOn": depends_on} if depends_on else {})}


chain = _chain()
fans = {breadth: _fan(breadth) for breadth in (WARM_UP, BREADTH, LARGE)}
maps = {breadth: _map(breadth) for breadth in (WARM_UP, BREADTH, LARGE)}
warm_fan, fan, large_fan = fans.values()
warm_map, map_, large_map = maps.values()
