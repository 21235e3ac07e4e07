"""F2, F8, F14: what must hold of each step for itself, before it is part of any run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from penstock.flows.contract import ENGINE_KINDS, FLOW, MAP, STEP_LIMIT
from penstock.flows.definition import templates as expressions
from penstock.flows.definition.spec import StepSpec, Work
from penstock.kernel.errors import Invalid

KindChecks = Mapping[str, Callable[[Mapping[str, Any]], None]]
_MAP_HINT = "e.g. kind: map, over: ${steps.list.outputs.files}, do: {kind: http, inputs: {url: '${item}'}}"


def templates(work: Work) -> Mapping[str, Any]:
    """What of the inputs is filled before *work* begins: not the steps of a flow within, which have a run to come."""
    if work.kind == FLOW and "steps" in work.inputs:
        return {name: value for name, value in work.inputs.items() if name != "steps"}
    return work.inputs


def filled(work: Work, context: expressions.Context) -> Mapping[str, Any]:
    """The inputs *work* begins with; Invalid UNRESOLVED where something is not there."""
    return {**work.inputs, **expressions.fill(templates(work), context)}


def is_looked_at(step: StepSpec) -> bool:
    """Whether it takes more than its dependencies to tell if a step runs, and with what."""
    is_judged = step.when is not None or step.on_skip == "skip" or step.kind in ENGINE_KINDS
    return is_judged or expressions.has_references(step.inputs)


def referred_to(step_id: str, step: StepSpec, kind_checks: KindChecks) -> Mapping[str, str]:
    """The steps its expressions refer to, each with the part that does; Invalid for all that is wrong with the step."""
    found: dict[str, str] = {}
    if step.when is not None:
        with of_step(step_id, "when"):
            condition = expressions.condition(step.when)
            if condition.uses_item:
                raise _item_outside()
            found |= dict.fromkeys(condition.references, "when")
    for part, template in (("inputs", templates(step)), ("over", step.over)):
        found |= dict.fromkeys(_references(step_id, part, template, in_map=False), part)
    _check_work(step_id, "inputs", step, kind_checks)
    _check_kind(step_id, step)
    if step.do is not None:
        found |= dict.fromkeys(_references(step_id, "do.inputs", step.do.inputs, in_map=True), "do.inputs")
        _check_work(step_id, "do.inputs", step.do, kind_checks)
    return found


@contextmanager
def of_step(step_id: str, part: str) -> Iterator[None]:
    """What is wrong within is told of that part of that step."""
    try:
        yield
    except Invalid as error:
        told = {**error.details, "step": step_id, "part": part}
        raise Invalid(error.code, f"step {step_id!r}, {part}: {error.message}", hint=error.hint, **told) from None


def _references(step_id: str, part: str, template: Any, *, in_map: bool) -> frozenset[str]:
    if not expressions.has_references(template):
        return frozenset()
    with of_step(step_id, part):
        if not in_map and expressions.uses_item(template):
            raise _item_outside()
        return expressions.references(template)


def _item_outside() -> Invalid:
    return Invalid("BAD_REFERENCE", "there are `item` and `index` only in `do.inputs` of a map", hint=_MAP_HINT)


def _check_work(step_id: str, part: str, work: Work, kind_checks: KindChecks) -> None:
    """What its kind says of inputs as they are written; it leaves out what is referred to."""
    check = kind_checks.get(work.kind)
    if check is None:
        return
    with of_step(step_id, part):
        try:
            check(work.inputs)
        except Invalid as error:
            raise Invalid("BAD_INPUTS", error.message, hint=error.hint, **error.details) from None


def _check_kind(step_id: str, step: StepSpec) -> None:
    for part in ("retry", "timeout"):
        if step.kind in ENGINE_KINDS and getattr(step, part) is not None:
            within = "`do`" if step.kind == MAP else "the steps within"
            with of_step(step_id, part):
                raise Invalid("BAD_STEP", f"steps of kind {step.kind!r} have none", hint=f"give it to {within}")
    if step.kind == MAP:
        _check_map(step_id, step)
        return
    for part in ("over", "do"):
        if getattr(step, part) is not None:
            with of_step(step_id, part):
                raise Invalid("BAD_MAP", f"only steps of kind {MAP!r} have it", hint=_MAP_HINT)
    if step.kind == FLOW:
        given = [name for name in ("flow", "steps") if step.inputs.get(name) is not None]
        if len(given) != 1:
            with of_step(step_id, "inputs"):
                said = "a flow within needs one of `flow`, the name of one, and `steps`"
                raise Invalid("BAD_INPUTS", said, hint="e.g. inputs: {flow: market-report, scope: {symbol: BTC}}")


def _check_map(step_id: str, step: StepSpec) -> None:
    with of_step(step_id, "over"):
        over = step.over
        if over is None:
            raise Invalid("BAD_MAP", "a map needs it", hint=_MAP_HINT)
        if not isinstance(over, list) and not (isinstance(over, str) and "${" in over):
            raise Invalid("BAD_MAP", "is neither a list nor a reference to one", hint=_MAP_HINT)
        if isinstance(over, list) and len(over) > STEP_LIMIT:
            raise Invalid("TOO_MANY_STEPS", f"has {len(over):,} items, at most {STEP_LIMIT:,} make a run")
    with of_step(step_id, "do"):
        if step.do is None:
            raise Invalid("BAD_MAP", "a map needs it", hint=_MAP_HINT)
        if step.do.kind in ENGINE_KINDS:
            raise Invalid("BAD_MAP", f"its kind cannot be {step.do.kind!r}", hint="let each item start what workers do")
