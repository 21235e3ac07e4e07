"""Validation of the steps of a flow: each error names its step."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.definition import validation
from penstock.flows.definition.expression_eval import EvaluationContext
from penstock.flows.definition.spec import StepSpec, WorkSpec
from penstock.kernel.errors import Invalid
from tests.flows.definition.step_graphs import Steps, dags, step, validation_error
from tests.support.soak import examples


def ancestors(steps: Steps, name: str) -> set[str]:
    names: set[str] = set()
    pending = list(steps[name].depends_on)
    while pending:
        if (other := pending.pop()) not in names:
            names.add(other)
            pending += steps[other].depends_on
    return names


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(60, soak=5_000))
@given(dags(), st.data())
def test_only_ancestors_can_be_referred_to(steps: Steps, data: st.DataObject) -> None:
    """F2: a reference to a step that is not an ancestor is refused: its outputs may not exist yet."""
    if not steps:
        return
    name, other = data.draw(st.tuples(st.sampled_from(sorted(steps)), st.sampled_from(sorted(steps))))
    where = data.draw(st.sampled_from(["when", "inputs", "over", "do"]))
    text = f"steps.{other}.outputs.x"
    options: Mapping[str, Mapping[str, Any]] = {
        "when": {"when": f"{text} > 1"},
        "inputs": {"inputs": {"a": [f"x ${{{text}}}"]}},
        "over": {"kind": "map", "over": f"${{{text}}}", "do": WorkSpec(kind="http")},
        "do": {"kind": "map", "over": [1], "do": WorkSpec(kind="http", inputs={"a": f"${{{text}}}"})},
    }
    changed = {**steps, name: step(*steps[name].depends_on, **options[where])}
    if other in ancestors(steps, name):
        validation.validate_steps(changed)
        return
    error = validation_error(changed)
    assert error.code == "BAD_REFERENCE"
    assert error.details["step"] == name
    assert repr(other) in error.message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"when": "nonsense >"}, "BAD_EXPRESSION"),
        ({"inputs": {"a": {"b": ["${scope.}"]}}}, "BAD_EXPRESSION"),
        ({"inputs": {"a": "${item}"}}, "BAD_REFERENCE"),
        ({"when": "index > 1"}, "BAD_REFERENCE"),
        ({"kind": "map", "over": "${item}", "do": WorkSpec(kind="http")}, "BAD_REFERENCE"),
        ({"when": "steps.nowhere.outputs.x"}, "BAD_REFERENCE"),
        ({"kind": "map"}, "BAD_MAP"),
        ({"kind": "map", "over": [1]}, "BAD_MAP"),
        ({"kind": "map", "do": WorkSpec(kind="http")}, "BAD_MAP"),
        ({"kind": "map", "over": "text", "do": WorkSpec(kind="http")}, "BAD_MAP"),
        ({"kind": "map", "over": {"a": 1}, "do": WorkSpec(kind="http")}, "BAD_MAP"),
        ({"kind": "map", "over": [1], "do": WorkSpec(kind="map")}, "BAD_MAP"),
        ({"kind": "map", "over": [1], "do": WorkSpec(kind="flow", inputs={"flow": "x"})}, "BAD_MAP"),
        ({"kind": "map", "over": [1] * 20_001, "do": WorkSpec(kind="http")}, "TOO_MANY_STEPS"),
        ({"kind": "map", "over": [1], "do": WorkSpec(kind="http", inputs={"a": "${"})}, "BAD_EXPRESSION"),
        ({"over": [1]}, "BAD_MAP"),
        ({"do": WorkSpec(kind="http")}, "BAD_MAP"),
        ({"kind": "flow"}, "BAD_INPUTS"),
        ({"kind": "flow", "inputs": {"flow": "x", "steps": {}}}, "BAD_INPUTS"),
        ({"kind": "flow", "inputs": {"steps": {"x": {"kynd": "http"}}}}, "BAD_INPUTS"),
        ({"kind": "flow", "inputs": {"steps": {"x": {"kind": "http", "dependsOn": ["x"]}}}}, "CYCLE"),
    ],
)
def test_error_of_a_step_has_its_name(options: dict[str, Any], expected: str) -> None:
    """F2, F8, F14: errors in expressions, maps and sub-flows are found before a run is created."""
    error = validation_error({"a": step(), "b": step("a", **options)})
    assert error.code == expected
    assert error.message.startswith("step 'b', ")
    assert error.details["step"] == "b"


def test_input_checks_of_kinds_are_applied() -> None:
    """F2: the input check of a kind gets the inputs as written, of steps and of the items of a map."""

    def check_inputs(inputs: Mapping[str, Any]) -> None:
        if isinstance(inputs["n"], int) and inputs["n"] > 3:
            raise Invalid("WHATEVER", "n is over 3", hint="take 3")

    checks = {"small": check_inputs}
    validation.validate_steps({"a": step(kind="small", inputs={"n": 3})}, checks)
    validation.validate_steps({"a": step(kind="small", inputs={"n": "${scope.n}"})}, checks)
    error = validation_error({"a": step(kind="small", inputs={"n": 4})}, kind_checks=checks)
    assert (error.code, error.message, error.hint) == ("BAD_INPUTS", "step 'a', inputs: n is over 3", "take 3")
    work = WorkSpec(kind="small", inputs={"n": 4})
    error = validation_error({"a": step(kind="map", over=[1], do=work)}, kind_checks=checks)
    assert error.message == "step 'a', do.inputs: n is over 3"


def test_references_of_inline_steps_belong_to_the_sub_run() -> None:
    """F14: references in inline steps are resolved in the sub-run, and not in the parent run."""
    steps = {"x": {"kind": "http"}, "y": {"kind": "http", "dependsOn": ["x"], "inputs": {"v": "${steps.x.outputs.v}"}}}
    inner = step("a", kind="flow", inputs={"steps": steps, "scope": {"n": "${steps.a.outputs.n}"}})
    validation.validate_steps({"a": step(), "b": inner})
    filled = validation.fill_inputs(inner, EvaluationContext("r", {}, {"a": {"n": 3}}, {}))
    assert filled == {"steps": steps, "scope": {"n": 3}}


def test_nesting_of_flows_is_limited() -> None:
    """F14: flows are nested at most eight levels deep."""

    def nested(depth: int) -> dict[str, Any]:
        return {"kind": "flow", "inputs": {"steps": {"x": nested(depth - 1)}}} if depth else {"kind": "http"}

    validation.validate_steps({"a": StepSpec.model_validate(nested(7))})
    assert validation_error({"a": StepSpec.model_validate(nested(8))}).code == "NESTING_TOO_DEEP"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"inputs": {"a": ["$x", "{}", 1]}, "required": False}, False),
        ({"when": "true"}, True),
        ({"on_skip": "skip"}, True),
        ({"inputs": {"a": [{"b": "${scope.x}"}]}}, True),
        ({"inputs": {"a": "$${x}"}}, True),
        ({"kind": "map", "over": [], "do": WorkSpec(kind="http")}, True),
        ({"kind": "flow", "inputs": {"flow": "x"}}, True),
    ],
)
def test_steps_that_the_engine_evaluates(options: dict[str, Any], expected: bool) -> None:
    """F3: steps without conditions, references and engine kinds are READY with their last dependency."""
    assert validation.needs_evaluation(step(**options)) is expected
