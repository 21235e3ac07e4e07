"""F2, F8, F14: validation of a flow: each step, its inputs, the graph of all steps; and the filling in of inputs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog
from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock.flows.contract import DEPTH_LIMIT, ENGINE_KINDS, FLOW, MAP, STEP_LIMIT
from penstock.flows.definition import templates as expressions
from penstock.flows.definition.expression_eval import EvaluationContext
from penstock.flows.definition.graph import StepGraph, ordered, suggest_name
from penstock.flows.definition.spec import Steps, StepSpec, WorkSpec
from penstock.kernel.errors import Invalid
from penstock.kernel.validation import describe_error

BAD_INPUTS = "BAD_INPUTS"
_TOLD = 20  # mistakes named in one answer
_MAP_HINT = "e.g. kind: map, over: ${steps.list.outputs.files}, do: {kind: http, inputs: {url: '${item}'}}"
_STEPS: TypeAdapter[Mapping[str, StepSpec]] = TypeAdapter(Steps)

M = TypeVar("M", bound=BaseModel)
KindChecks = Mapping[str, Callable[[Mapping[str, Any]], None]]
_NO_CHECKS: KindChecks = {}


def input_templates(work: WorkSpec) -> Mapping[str, Any]:
    """What of the inputs is filled before *work* begins: not the steps of a flow within, which have a run to come."""
    if work.kind == FLOW and "steps" in work.inputs:
        return {name: value for name, value in work.inputs.items() if name != "steps"}
    return work.inputs


def fill_inputs(work: WorkSpec, context: EvaluationContext) -> Mapping[str, Any]:
    """The inputs *work* begins with; Invalid REFERENCE_UNRESOLVED where something is not there."""
    return {**work.inputs, **expressions.fill(input_templates(work), context)}


def needs_evaluation(step: StepSpec) -> bool:
    """Whether it takes more than its dependencies to tell if a step runs, and with what."""
    is_judged = step.when is not None or step.on_skip == "skip" or step.kind in ENGINE_KINDS
    return is_judged or expressions.has_references(step.inputs)


def collect_references(step_id: str, step: StepSpec, kind_checks: KindChecks) -> Mapping[str, str]:
    """The steps its expressions refer to, each with the part that does; Invalid for all that is wrong with the step."""
    found: dict[str, str] = {}
    if step.when is not None:
        with step_errors(step_id, "when"):
            condition = expressions.condition(step.when)
            if condition.uses_item:
                raise _item_outside()
            found |= dict.fromkeys(condition.references, "when")
    for part, template in (("inputs", input_templates(step)), ("over", step.over)):
        found |= dict.fromkeys(_references(step_id, part, template, in_map=False), part)
    _check_work(step_id, "inputs", step, kind_checks)
    _check_kind(step_id, step)
    if step.do is not None:
        found |= dict.fromkeys(_references(step_id, "do.inputs", step.do.inputs, in_map=True), "do.inputs")
        _check_work(step_id, "do.inputs", step.do, kind_checks)
    return found


@contextmanager
def step_errors(step_id: str, part: str) -> Iterator[None]:
    """What is wrong within is told of that part of that step."""
    try:
        yield
    except Invalid as error:
        told = {**error.details, "step": step_id, "part": part}
        raise Invalid(error.code, f"step {step_id!r}, {part}: {error.message}", hint=error.hint, **told) from None


def _references(step_id: str, part: str, template: Any, *, in_map: bool) -> frozenset[str]:
    if not expressions.has_references(template):
        return frozenset()
    with step_errors(step_id, part):
        if not in_map and expressions.uses_item(template):
            raise _item_outside()
        return expressions.references(template)


def _item_outside() -> Invalid:
    return Invalid("BAD_REFERENCE", "there are `item` and `index` only in `do.inputs` of a map", hint=_MAP_HINT)


def _check_work(step_id: str, part: str, work: WorkSpec, kind_checks: KindChecks) -> None:
    """What its kind says of inputs as they are written; it leaves out what is referred to."""
    check = kind_checks.get(work.kind)
    if check is None:
        return
    with step_errors(step_id, part):
        try:
            check(work.inputs)
        except Invalid as error:
            raise Invalid("BAD_INPUTS", error.message, hint=error.hint, **error.details) from None
        except Exception as error:  # an edge: a check may be a user's
            structlog.get_logger().exception("input_check_crashed", part="flows", kind=work.kind, step=step_id)
            said = f"the check of the kind {work.kind!r} failed: {type(error).__name__}: {error}"
            raise Invalid("BAD_INPUTS", said, hint="`check_inputs` raises Invalid for inputs that are wrong") from error


def _check_kind(step_id: str, step: StepSpec) -> None:
    for part in ("retry", "timeout"):
        if step.kind in ENGINE_KINDS and getattr(step, part) is not None:
            within = "`do`" if step.kind == MAP else "the steps within"
            with step_errors(step_id, part):
                raise Invalid("BAD_STEP", f"steps of kind {step.kind!r} have none", hint=f"give it to {within}")
    if step.kind == MAP:
        _check_map(step_id, step)
        return
    for part in ("over", "do"):
        if getattr(step, part) is not None:
            with step_errors(step_id, part):
                raise Invalid("BAD_MAP", f"only steps of kind {MAP!r} have it", hint=_MAP_HINT)
    if step.kind == FLOW:
        given = [name for name in ("flow", "steps") if step.inputs.get(name) is not None]
        if len(given) != 1:
            with step_errors(step_id, "inputs"):
                said = "a flow within needs one of `flow`, the name of one, and `steps`"
                raise Invalid("BAD_INPUTS", said, hint="e.g. inputs: {flow: market-report, scope: {symbol: BTC}}")


def _check_map(step_id: str, step: StepSpec) -> None:
    with step_errors(step_id, "over"):
        over = step.over
        if over is None:
            raise Invalid("BAD_MAP", "a map needs it", hint=_MAP_HINT)
        if not isinstance(over, list) and not (isinstance(over, str) and "${" in over):
            raise Invalid("BAD_MAP", "is neither a list nor a reference to one", hint=_MAP_HINT)
        if isinstance(over, list) and len(over) > STEP_LIMIT:
            raise Invalid("TOO_MANY_STEPS", f"has {len(over):,} items, at most {STEP_LIMIT:,} make a run")
    with step_errors(step_id, "do"):
        if step.do is None:
            raise Invalid("BAD_MAP", "a map needs it", hint=_MAP_HINT)
        if step.do.kind in ENGINE_KINDS:
            raise Invalid("BAD_MAP", f"its kind cannot be {step.do.kind!r}", hint="let each item start what workers do")


def parse_inputs(model: type[M], inputs: Mapping[str, Any]) -> M:
    """The *inputs* as *model* has them; Invalid BAD_INPUTS that names what is wrong."""
    try:
        return model.model_validate(dict(inputs))
    except ValidationError as error:
        problems = [f"{_place(detail['loc'])}: {describe_error(detail)}" for detail in error.errors()]
    raise inputs_error(*problems)


def inputs_error(*problems: str) -> Invalid:
    """What is wrong with the inputs of a step, to be raised."""
    more = len(problems) - _TOLD
    said = "; ".join(problems[:_TOLD]) + (f"; and {more} more" if more > 0 else "")
    return Invalid(BAD_INPUTS, said, problems=list(problems[:_TOLD]))


def _place(path: tuple[int | str, ...]) -> str:
    return ".".join(map(str, ("inputs", *path)))


def validate_steps(steps: Mapping[str, StepSpec], kind_checks: KindChecks = _NO_CHECKS, *, depth: int = 1) -> StepGraph:
    """The graph of *steps*; Invalid naming the step and what is wrong with it, or with how they hang together."""
    graph = ordered(steps)
    references = {step_id: collect_references(step_id, step, kind_checks) for step_id, step in steps.items()}
    _check_references(steps, graph, {step_id: found for step_id, found in references.items() if found})
    for step_id, step in steps.items():
        if step.kind == FLOW and isinstance(step.inputs.get("steps"), dict | list):
            with step_errors(step_id, "inputs"):
                _check_within(step.inputs["steps"], kind_checks, depth)
    return graph


def _check_within(steps: Any, kind_checks: KindChecks, depth: int) -> None:
    if depth == DEPTH_LIMIT:
        raise Invalid("NESTING_TOO_DEEP", f"there are more than {DEPTH_LIMIT} flows within each other")
    try:
        validate_steps(_STEPS.validate_python(steps), kind_checks, depth=depth + 1)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, ("steps", *first["loc"])))
        raise Invalid("BAD_INPUTS", f"{place}: {describe_error(first)}") from None


def _check_references(
    steps: Mapping[str, StepSpec], graph: StepGraph, references: Mapping[str, Mapping[str, str]]
) -> None:
    """Outputs must be there before they are asked for: Invalid where a reference is not to a step before."""
    names = (name for step_id, found in references.items() for name in set(found) - set(steps[step_id].depends_on))
    far = {name: 1 << number for number, name in enumerate(sorted(set(names)))}
    before = _before(graph, far) if far else {}
    for step_id, found in references.items():
        for name, part in found.items():
            if name in far and not before[step_id] & far[name]:
                raise _not_before(step_id, name, part, steps)


def _before(graph: StepGraph, far: Mapping[str, int]) -> Mapping[str, int]:
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
        said, hint = f"it refers to step {name!r}, which is not there", suggest_name(name, steps)
    else:
        said, hint = f"it refers to step {name!r}, which does not come before it", f"add {name} to its `dependsOn`"
    return Invalid("BAD_REFERENCE", f"step {step_id!r}, {part}: {said}", hint=hint, step=step_id, part=part)
