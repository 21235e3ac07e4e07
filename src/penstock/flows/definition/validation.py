"""F2, F8, F14: validation of the steps, inputs and graph of a flow, and resolution of input references."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog
from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock.flows.contract import DEPTH_LIMIT, ENGINE_KINDS, FLOW, MAP, STEP_LIMIT
from penstock.flows.definition import templates as expressions
from penstock.flows.definition.expression_eval import EvaluationContext
from penstock.flows.definition.graph import StepGraph, build_graph, suggest_name
from penstock.flows.definition.spec import Steps, StepSpec, WorkSpec
from penstock.kernel.errors import Invalid
from penstock.kernel.validation import describe_error

BAD_INPUTS = "BAD_INPUTS"
_SHOWN = 20  # problems in one error
_MAP_HINT = "e.g. kind: map, over: ${steps.list.outputs.files}, do: {kind: http, inputs: {url: '${item}'}}"
_STEPS: TypeAdapter[Mapping[str, StepSpec]] = TypeAdapter(Steps)

M = TypeVar("M", bound=BaseModel)
KindChecks = Mapping[str, Callable[[Mapping[str, Any]], None]]
_NO_CHECKS: KindChecks = {}


def get_input_templates(work: WorkSpec) -> Mapping[str, Any]:
    """Return the inputs with references to resolve. The inline steps of a sub-flow are resolved in its own run."""
    if work.kind == FLOW and "steps" in work.inputs:
        return {name: value for name, value in work.inputs.items() if name != "steps"}
    return work.inputs


def fill_inputs(work: WorkSpec, context: EvaluationContext) -> Mapping[str, Any]:
    """Return the inputs of *work* with references resolved; raise Invalid REFERENCE_UNRESOLVED for a missing value."""
    return {**work.inputs, **expressions.fill_template(get_input_templates(work), context)}


def needs_evaluation(step: StepSpec) -> bool:
    """Return whether the engine must evaluate a condition, a reference or a kind before the step can be READY."""
    is_conditional = step.when is not None or step.on_skip == "skip"
    return is_conditional or step.kind in ENGINE_KINDS or expressions.has_references(step.inputs)


def collect_references(step_id: str, step: StepSpec, kind_checks: KindChecks) -> Mapping[str, str]:
    """Validate a step, and return the steps that it refers to, each with the key of the reference."""
    references: dict[str, str] = {}
    if step.when is not None:
        with locate_step_errors(step_id, "when"):
            condition = expressions.parse_condition(step.when)
            if condition.uses_item:
                raise _make_item_error()
            references |= dict.fromkeys(condition.references, "when")
    for part, template in (("inputs", get_input_templates(step)), ("over", step.over)):
        references |= dict.fromkeys(_find_references(step_id, part, template, in_map=False), part)
    _check_work(step_id, "inputs", step, kind_checks)
    _check_kind(step_id, step)
    if step.do is not None:
        references |= dict.fromkeys(_find_references(step_id, "do.inputs", step.do.inputs, in_map=True), "do.inputs")
        _check_work(step_id, "do.inputs", step.do, kind_checks)
    return references


@contextmanager
def locate_step_errors(step_id: str, part: str) -> Iterator[None]:
    """Add the step and the key to errors that are raised inside."""
    try:
        yield
    except Invalid as error:
        details = {**error.details, "step": step_id, "part": part}
        raise Invalid(error.code, f"step {step_id!r}, {part}: {error.message}", hint=error.hint, **details) from None


def _find_references(step_id: str, part: str, template: Any, *, in_map: bool) -> frozenset[str]:
    if not expressions.has_references(template):
        return frozenset()
    with locate_step_errors(step_id, part):
        if not in_map and expressions.uses_item(template):
            raise _make_item_error()
        return expressions.find_references(template)


def _make_item_error() -> Invalid:
    return Invalid("BAD_REFERENCE", "`item` and `index` exist only in `do.inputs` of a map", hint=_MAP_HINT)


def _check_work(step_id: str, part: str, work: WorkSpec, kind_checks: KindChecks) -> None:
    """Apply the input check of the kind to the inputs as written; the check ignores references."""
    check = kind_checks.get(work.kind)
    if check is None:
        return
    with locate_step_errors(step_id, part):
        try:
            check(work.inputs)
        except Invalid as error:
            raise Invalid("BAD_INPUTS", error.message, hint=error.hint, **error.details) from None
        except Exception as error:  # the check may be code of a user
            structlog.get_logger().exception("flow_input_check_crashed", kind=work.kind, step=step_id)
            problem = f"the input check of kind {work.kind!r} crashed: {type(error).__name__}: {error}"
            raise Invalid("BAD_INPUTS", problem, hint="`check_inputs` must raise Invalid for wrong inputs") from error


def _check_kind(step_id: str, step: StepSpec) -> None:
    for part in ("retry", "timeout"):
        if step.kind in ENGINE_KINDS and getattr(step, part) is not None:
            target = "`do`" if step.kind == MAP else "the steps of the sub-flow"
            with locate_step_errors(step_id, part):
                raise Invalid("BAD_STEP", f"not allowed in steps of kind {step.kind!r}", hint=f"move it to {target}")
    if step.kind == MAP:
        _check_map(step_id, step)
        return
    for part in ("over", "do"):
        if getattr(step, part) is not None:
            with locate_step_errors(step_id, part):
                raise Invalid("BAD_MAP", f"only allowed in steps of kind {MAP!r}", hint=_MAP_HINT)
    if step.kind == FLOW:
        sources = [name for name in ("flow", "steps") if step.inputs.get(name) is not None]
        if len(sources) != 1:
            with locate_step_errors(step_id, "inputs"):
                problem = "a sub-flow needs either `flow`, the name of a flow, or `steps`"
                raise Invalid("BAD_INPUTS", problem, hint="e.g. inputs: {flow: market-report, scope: {symbol: BTC}}")


def _check_map(step_id: str, step: StepSpec) -> None:
    with locate_step_errors(step_id, "over"):
        over = step.over
        if over is None:
            raise Invalid("BAD_MAP", "required in a map", hint=_MAP_HINT)
        if not isinstance(over, list) and not (isinstance(over, str) and "${" in over):
            raise Invalid("BAD_MAP", "must be a list or a reference to a list", hint=_MAP_HINT)
        if isinstance(over, list) and len(over) > STEP_LIMIT:
            raise Invalid("TOO_MANY_STEPS", f"has {len(over):,} items; a run has at most {STEP_LIMIT:,} steps")
    with locate_step_errors(step_id, "do"):
        if step.do is None:
            raise Invalid("BAD_MAP", "required in a map", hint=_MAP_HINT)
        if step.do.kind in ENGINE_KINDS:
            problem = f"the kind cannot be {step.do.kind!r}"
            raise Invalid("BAD_MAP", problem, hint="use a kind that workers execute")


def parse_inputs(model: type[M], inputs: Mapping[str, Any]) -> M:
    """Parse *inputs* as *model*; raise Invalid BAD_INPUTS with all problems."""
    try:
        return model.model_validate(dict(inputs))
    except ValidationError as error:
        problems = [f"{_format_path(detail['loc'])}: {describe_error(detail)}" for detail in error.errors()]
    raise make_inputs_error(*problems)


def make_inputs_error(*problems: str) -> Invalid:
    """Return the error BAD_INPUTS with *problems* of the inputs of a step."""
    more = len(problems) - _SHOWN
    message = "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return Invalid(BAD_INPUTS, message, problems=list(problems[:_SHOWN]))


def _format_path(path: tuple[int | str, ...]) -> str:
    return ".".join(map(str, ("inputs", *path)))


def validate_steps(steps: Mapping[str, StepSpec], kind_checks: KindChecks = _NO_CHECKS, *, depth: int = 1) -> StepGraph:
    """Validate *steps*, and return their graph; an error names the step."""
    graph = build_graph(steps)
    references = {step_id: collect_references(step_id, step, kind_checks) for step_id, step in steps.items()}
    _check_references(steps, graph, {step_id: names for step_id, names in references.items() if names})
    for step_id, step in steps.items():
        if step.kind == FLOW and isinstance(step.inputs.get("steps"), dict | list):
            with locate_step_errors(step_id, "inputs"):
                _validate_inner_steps(step.inputs["steps"], kind_checks, depth)
    return graph


def _validate_inner_steps(steps: Any, kind_checks: KindChecks, depth: int) -> None:
    if depth == DEPTH_LIMIT:
        raise Invalid("NESTING_TOO_DEEP", f"flows are nested deeper than {DEPTH_LIMIT} levels")
    try:
        validate_steps(_STEPS.validate_python(steps), kind_checks, depth=depth + 1)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, ("steps", *first["loc"])))
        raise Invalid("BAD_INPUTS", f"{path}: {describe_error(first)}") from None


def _check_references(
    steps: Mapping[str, StepSpec], graph: StepGraph, references: Mapping[str, Mapping[str, str]]
) -> None:
    """Raise Invalid for a reference to a step that may end after the referring step starts."""
    names = (name for step_id, parts in references.items() for name in set(parts) - set(steps[step_id].depends_on))
    indirect = {name: 1 << number for number, name in enumerate(sorted(set(names)))}
    ancestors = _find_ancestors(graph, indirect) if indirect else {}
    for step_id, parts in references.items():
        for name, part in parts.items():
            if name in indirect and not ancestors[step_id] & indirect[name]:
                raise _make_reference_error(step_id, name, part, steps)


def _find_ancestors(graph: StepGraph, steps: Mapping[str, int]) -> Mapping[str, int]:
    """Return the ancestors of each step among *steps*, as a bit set: one pass for any graph."""
    bits = [steps.get(step_id, 0) for step_id in graph.ids]
    ancestors: list[int] = []
    for before in graph.depends_on:
        union = 0
        for index in before:
            union |= ancestors[index] | bits[index]
        ancestors.append(union)
    return dict(zip(graph.ids, ancestors, strict=True))


def _make_reference_error(step_id: str, name: str, part: str, steps: Mapping[str, StepSpec]) -> Invalid:
    if name not in steps:
        problem, hint = f"it refers to step {name!r}, which does not exist", suggest_name(name, steps)
    else:
        problem = f"it refers to step {name!r}, which is not a dependency"
        hint = f"add {name} to `dependsOn` of step {step_id}"
    return Invalid("BAD_REFERENCE", f"step {step_id!r}, {part}: {problem}", hint=hint, step=step_id, part=part)
