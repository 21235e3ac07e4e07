"""F2, F15: a flow's steps as a graph, checked before anything runs."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from penstock.flows.contract import DEPTH_LIMIT, FLOW
from penstock.flows.definition.graph import Graph, did_you_mean, ordered
from penstock.flows.definition.spec import Steps, StepSpec
from penstock.flows.definition.validation import KindChecks, filled, is_looked_at, of_step, referred_to, templates
from penstock.flows.drawing import drawing, mermaid
from penstock.kernel.errors import Invalid

__all__ = ["Graph", "checked", "drawing", "filled", "is_looked_at", "mermaid", "templates"]

_STEPS: TypeAdapter[Mapping[str, StepSpec]] = TypeAdapter(Steps)
_NO_CHECKS: KindChecks = {}


def checked(steps: Mapping[str, StepSpec], kind_checks: KindChecks = _NO_CHECKS, *, depth: int = 1) -> Graph:
    """The graph of *steps*; Invalid naming the step and what is wrong with it, or with how they hang together."""
    graph = ordered(steps)
    references = {step_id: referred_to(step_id, step, kind_checks) for step_id, step in steps.items()}
    _check_references(steps, graph, {step_id: found for step_id, found in references.items() if found})
    for step_id, step in steps.items():
        if step.kind == FLOW and isinstance(step.inputs.get("steps"), dict | list):
            with of_step(step_id, "inputs"):
                _check_within(step.inputs["steps"], kind_checks, depth)
    return graph


def _check_within(steps: Any, kind_checks: KindChecks, depth: int) -> None:
    if depth == DEPTH_LIMIT:
        raise Invalid("TOO_DEEP", f"there are more than {DEPTH_LIMIT} flows within each other")
    try:
        checked(_STEPS.validate_python(steps), kind_checks, depth=depth + 1)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, ("steps", *first["loc"])))
        raise Invalid("BAD_INPUTS", f"{place}: {first['msg'].removeprefix('Value error, ')}") from None


def _check_references(steps: Mapping[str, StepSpec], graph: Graph, references: Mapping[str, Mapping[str, str]]) -> None:
    """Outputs must be there before they are asked for: Invalid where a reference is not to a step before."""
    names = (name for step_id, found in references.items() for name in set(found) - set(steps[step_id].depends_on))
    far = {name: 1 << number for number, name in enumerate(sorted(set(names)))}
    before = _before(graph, far) if far else {}
    for step_id, found in references.items():
        for name, part in found.items():
            if name in far and not before[step_id] & far[name]:
                raise _not_before(step_id, name, part, steps)


def _before(graph: Graph, far: Mapping[str, int]) -> Mapping[str, int]:
    """Which of the steps *far* away come before each step, as a set of bits: one pass, whatever the graph."""
    bits = [far.get(step_id, 0) for step_id in graph.ids]
    reached: list[int] = []
    for before in graph.depends_on:
        found = 0
        for place in before:
            found |= reached[place] | bits[place]
        reached.append(found)
    return dict(zip(graph.ids, reached, strict=True))


def _not_before(step_id: str, name: str, part: str, steps: Mapping[str, StepSpec]) -> Invalid:
    if name not in steps:
        said, hint = f"it refers to step {name!r}, which is not there", did_you_mean(name, steps)
    else:
        said, hint = f"it refers to step {name!r}, which does not come before it", f"add {name} to its `dependsOn`"
    return Invalid("BAD_REFERENCE", f"step {step_id!r}, {part}: {said}", hint=hint, step=step_id, part=part)
