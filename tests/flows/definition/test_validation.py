"""What is refused of the steps of a flow before anything runs, each mistake with its step."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.definition import validation
from penstock.flows.definition.expression_eval import EvaluationContext
from penstock.flows.definition.spec import StepSpec, WorkSpec
from penstock.kernel.errors import Invalid
from tests.flows.definition.step_graphs import Steps, dags, refused, step
from tests.support.soak import examples


def ancestors(steps: Steps, name: str) -> set[str]:
    found: set[str] = set()
    waiting = list(steps[name].depends_on)
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting += steps[one].depends_on
    return found


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(60, soak=5_000))
@given(dags(), st.data())
def test_only_what_comes_before_can_be_referred_to(steps: Steps, data: st.DataObject) -> None:
    """F2: the outputs of a step that is no ancestor may not be there yet."""
    if not steps:
        return
    name, other = data.draw(st.tuples(st.sampled_from(sorted(steps)), st.sampled_from(sorted(steps))))
    where = data.draw(st.sampled_from(["when", "inputs", "over", "do"]))
    text = f"steps.{other}.outputs.x"
    about: Mapping[str, Mapping[str, Any]] = {
        "when": {"when": f"{text} > 1"},
        "inputs": {"inputs": {"a": [f"x ${{{text}}}"]}},
        "over": {"kind": "map", "over": f"${{{text}}}", "do": WorkSpec(kind="http")},
        "do": {"kind": "map", "over": [1], "do": WorkSpec(kind="http", inputs={"a": f"${{{text}}}"})},
    }
    made = {**steps, name: step(*steps[name].depends_on, **about[where])}
    if other in ancestors(steps, name):
        validation.validate_steps(made)
        return
    error = refused(made)
    assert error.code == "BAD_REFERENCE"
    assert error.details["step"] == name
    assert repr(other) in error.message


@pytest.mark.parametrize(
    ("about", "expected"),
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
def test_a_step_that_cannot_work_is_told_with_its_name(about: dict[str, Any], expected: str) -> None:
    """F2, F8, F14: expressions, maps and flows within, before the run is made."""
    error = refused({"a": step(), "b": step("a", **about)})
    assert error.code == expected
    assert error.message.startswith("step 'b', ")
    assert error.details["step"] == "b"


def test_kinds_have_their_say_of_inputs() -> None:
    """F2: as they are written, in steps and in what a map does; what is referred to is left to them."""

    def few(inputs: Mapping[str, Any]) -> None:
        if isinstance(inputs["n"], int) and inputs["n"] > 3:
            raise Invalid("WHATEVER", "n is over 3", hint="take 3")

    checks = {"small": few}
    validation.validate_steps({"a": step(kind="small", inputs={"n": 3})}, checks)
    validation.validate_steps({"a": step(kind="small", inputs={"n": "${scope.n}"})}, checks)
    error = refused({"a": step(kind="small", inputs={"n": 4})}, kind_checks=checks)
    assert (error.code, error.message, error.hint) == ("BAD_INPUTS", "step 'a', inputs: n is over 3", "take 3")
    work = WorkSpec(kind="small", inputs={"n": 4})
    error = refused({"a": step(kind="map", over=[1], do=work)}, kind_checks=checks)
    assert error.message == "step 'a', do.inputs: n is over 3"


def test_the_steps_of_a_flow_within_refer_to_each_other() -> None:
    """F14: what is written there is filled in its own run, and nothing of it in the run around."""
    within = {"x": {"kind": "http"}, "y": {"kind": "http", "dependsOn": ["x"], "inputs": {"v": "${steps.x.outputs.v}"}}}
    inner = step("a", kind="flow", inputs={"steps": within, "scope": {"n": "${steps.a.outputs.n}"}})
    validation.validate_steps({"a": step(), "b": inner})
    filled = validation.fill_inputs(inner, EvaluationContext("r", {}, {"a": {"n": 3}}, {}))
    assert filled == {"steps": within, "scope": {"n": 3}}


def test_flows_within_flows_have_an_end() -> None:
    """F14: eight of them, no more."""

    def nested(depth: int) -> dict[str, Any]:
        return {"kind": "flow", "inputs": {"steps": {"x": nested(depth - 1)}}} if depth else {"kind": "http"}

    validation.validate_steps({"a": StepSpec.model_validate(nested(7))})
    assert refused({"a": StepSpec.model_validate(nested(8))}).code == "NESTING_TOO_DEEP"


@pytest.mark.parametrize(
    ("about", "expected"),
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
def test_the_engine_looks_at_what_must_be_judged(about: dict[str, Any], expected: bool) -> None:
    """F3: all else is ready with its last dependency."""
    assert validation.needs_evaluation(step(**about)) is expected
