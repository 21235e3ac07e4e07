"""The graph of a flow: its order, its rings, and all that is told before anything runs."""

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.definition import validation
from penstock.flows.definition.expression_eval import Context
from penstock.flows.definition.spec import StepSpec, Work
from penstock.kernel.errors import Invalid
from tests.support.soak import examples

Steps = dict[str, StepSpec]


def step(*after: str, kind: str = "http", **about: Any) -> StepSpec:
    return StepSpec(kind=kind, depends_on=list(after), **about)


def refused(steps: Steps, **checks: Any) -> Invalid:
    with pytest.raises(Invalid) as caught:
        validation.checked_steps(steps, **checks)
    return caught.value


@st.composite
def dags(draw: st.DrawFn, most: int = 12) -> Steps:
    """Steps in any order of writing, each after some that were drawn before it."""
    count = draw(st.integers(0, most))
    names = [f"s{number}" for number in range(count)]
    after = {
        name: draw(st.lists(st.sampled_from(names[:place]), unique=True, max_size=4)) if place else []
        for place, name in enumerate(names)
    }
    return {name: step(*after[name]) for name in draw(st.permutations(names))}


def plain_order(steps: Steps) -> list[str]:
    """The first by writing of all whose turn it is, again and again."""
    order: list[str] = []
    while len(order) < len(steps):
        order.append(next(n for n, s in steps.items() if n not in order and set(s.depends_on) <= set(order)))
    return order


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
@given(dags())
def test_steps_are_in_an_order_they_can_run_in(steps: Steps) -> None:
    """F2: each after those it depends on, in the order of writing where it is free; layers as deep as they must be."""
    found = validation.checked_steps(steps)
    assert list(found.ids) == plain_order(steps)
    for place, name in enumerate(found.ids):
        assert [found.ids[other] for other in found.depends_on[place]] == steps[name].depends_on
        assert all(place in found.children[other] for other in found.depends_on[place])
    assert sum(map(len, found.children)) == sum(map(len, found.depends_on))
    layer_of = {place: number for number, layer in enumerate(found.layers()) for place in layer}
    assert len(layer_of) == len(steps)
    for place, before in enumerate(found.depends_on):
        assert layer_of[place] == max((layer_of[other] + 1 for other in before), default=0)


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(60, soak=5_000))
@given(dags(), st.data())
def test_the_shortest_ring_is_named(steps: Steps, data: st.DataObject) -> None:
    """F2: a ring is told as it goes round, and none in the flow is shorter."""
    names = st.sampled_from(sorted(steps) or [""])
    added = data.draw(st.lists(st.tuples(names, names), min_size=1, max_size=3)) if steps else []
    after = {name: sorted({*one.depends_on, *(b for a, b in added if a == name)}) for name, one in steps.items()}
    made = {name: step(*after[name]) for name in steps}
    rings = [ring for name in made if (ring := ring_length(made, name))]
    if not rings:
        validation.checked_steps(made)
        return
    error = refused(made)
    ring = error.details["ring"]
    assert error.code == "CYCLE"
    assert error.message.endswith(" → ".join([*ring, ring[0]]))
    assert all(one in made[other].depends_on for one, other in pairwise([*ring, ring[0]]))
    assert len(ring) == min(rings)


def ring_length(steps: Steps, name: str) -> int:
    """How long the way from a step back to itself is; 0 where there is none."""
    reached, length = {name}, 0
    while reached and length <= len(steps):
        reached, length = {other for one in reached for other in steps[one].depends_on}, length + 1
        if name in reached:
            return length
    return 0


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
        "over": {"kind": "map", "over": f"${{{text}}}", "do": Work(kind="http")},
        "do": {"kind": "map", "over": [1], "do": Work(kind="http", inputs={"a": f"${{{text}}}"})},
    }
    made = {**steps, name: step(*steps[name].depends_on, **about[where])}
    if other in ancestors(steps, name):
        validation.checked_steps(made)
        return
    error = refused(made)
    assert error.code == "BAD_REFERENCE"
    assert error.details["step"] == name
    assert repr(other) in error.message


def test_a_dependency_that_is_not_there_is_named() -> None:
    """F2: with the step, and the one that was probably meant."""
    error = refused({"fetch": step(), "report": step("fecth")})
    assert (error.code, error.message) == ("UNKNOWN_DEPENDENCY", "step 'report' depends on 'fecth', which is not there")
    assert error.hint == "did you mean 'fetch'?"
    assert "there are a" in str(refused({"a": step(), "b": step("zzz")}).hint)


def test_what_makes_no_graph_is_told() -> None:
    """F2: dependencies that come twice, a step after itself, too many steps."""
    assert refused({"a": step(), "b": step("a", "a")}).code == "DUPLICATE_DEPENDENCY"
    assert refused({"a": step("a")}).message.endswith("a → a")
    assert refused({str(number): step() for number in range(20_001)}).code == "TOO_MANY_STEPS"


def test_a_long_ring_is_told_in_short() -> None:
    """F2: and a short one that is hidden among many steps is found."""
    ring = {f"s{number}": step(f"s{(number - 1) % 20_000}") for number in range(20_000)}
    assert len(refused(ring).message) < 200
    ring["s7000"] = step("s6999", "s7001")
    assert refused(ring).message.endswith(": s7000 → s7001 → s7000")


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"when": "nonsense >"}, "BAD_EXPRESSION"),
        ({"inputs": {"a": {"b": ["${scope.}"]}}}, "BAD_EXPRESSION"),
        ({"inputs": {"a": "${item}"}}, "BAD_REFERENCE"),
        ({"when": "index > 1"}, "BAD_REFERENCE"),
        ({"kind": "map", "over": "${item}", "do": Work(kind="http")}, "BAD_REFERENCE"),
        ({"when": "steps.nowhere.outputs.x"}, "BAD_REFERENCE"),
        ({"kind": "map"}, "BAD_MAP"),
        ({"kind": "map", "over": [1]}, "BAD_MAP"),
        ({"kind": "map", "do": Work(kind="http")}, "BAD_MAP"),
        ({"kind": "map", "over": "text", "do": Work(kind="http")}, "BAD_MAP"),
        ({"kind": "map", "over": {"a": 1}, "do": Work(kind="http")}, "BAD_MAP"),
        ({"kind": "map", "over": [1], "do": Work(kind="map")}, "BAD_MAP"),
        ({"kind": "map", "over": [1], "do": Work(kind="flow", inputs={"flow": "x"})}, "BAD_MAP"),
        ({"kind": "map", "over": [1] * 20_001, "do": Work(kind="http")}, "TOO_MANY_STEPS"),
        ({"kind": "map", "over": [1], "do": Work(kind="http", inputs={"a": "${"})}, "BAD_EXPRESSION"),
        ({"over": [1]}, "BAD_MAP"),
        ({"do": Work(kind="http")}, "BAD_MAP"),
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
    validation.checked_steps({"a": step(kind="small", inputs={"n": 3})}, checks)
    validation.checked_steps({"a": step(kind="small", inputs={"n": "${scope.n}"})}, checks)
    error = refused({"a": step(kind="small", inputs={"n": 4})}, kind_checks=checks)
    assert (error.code, error.message, error.hint) == ("BAD_INPUTS", "step 'a', inputs: n is over 3", "take 3")
    work = Work(kind="small", inputs={"n": 4})
    error = refused({"a": step(kind="map", over=[1], do=work)}, kind_checks=checks)
    assert error.message == "step 'a', do.inputs: n is over 3"


def test_the_steps_of_a_flow_within_refer_to_each_other() -> None:
    """F14: what is written there is filled in its own run, and nothing of it in the run around."""
    within = {"x": {"kind": "http"}, "y": {"kind": "http", "dependsOn": ["x"], "inputs": {"v": "${steps.x.outputs.v}"}}}
    inner = step("a", kind="flow", inputs={"steps": within, "scope": {"n": "${steps.a.outputs.n}"}})
    validation.checked_steps({"a": step(), "b": inner})
    filled = validation.filled(inner, Context("r", {}, {"a": {"n": 3}}, {}))
    assert filled == {"steps": within, "scope": {"n": 3}}


def test_flows_within_flows_have_an_end() -> None:
    """F14: eight of them, no more."""

    def nested(depth: int) -> dict[str, Any]:
        return {"kind": "flow", "inputs": {"steps": {"x": nested(depth - 1)}}} if depth else {"kind": "http"}

    validation.checked_steps({"a": StepSpec.model_validate(nested(7))})
    assert refused({"a": StepSpec.model_validate(nested(8))}).code == "TOO_DEEP"


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({}, False),
        ({"inputs": {"a": ["$x", "{}", 1]}, "required": False}, False),
        ({"when": "true"}, True),
        ({"on_skip": "skip"}, True),
        ({"inputs": {"a": [{"b": "${scope.x}"}]}}, True),
        ({"inputs": {"a": "$${x}"}}, True),
        ({"kind": "map", "over": [], "do": Work(kind="http")}, True),
        ({"kind": "flow", "inputs": {"flow": "x"}}, True),
    ],
)
def test_the_engine_looks_at_what_must_be_judged(about: dict[str, Any], expected: bool) -> None:
    """F3: all else is ready with its last dependency."""
    assert validation.is_looked_at(step(**about)) is expected


@pytest.mark.full
def test_large_flows_are_checked_in_one_pass() -> None:
    """F2: a chain of 20,000, each of which refers to the first; a fan-out of 10,000 and its fan-in."""
    chain = {"s0": step()}
    for number in range(1, 20_000):
        chain[f"s{number}"] = step(f"s{number - 1}", inputs={"a": "${steps.s0.outputs.x}"}, when="scope.n > 1")
    middle = [f"m{number}" for number in range(10_000)]
    fan = {"a": step(), **{name: step("a") for name in middle}, "z": step(*middle)}
    begin = time.process_time()
    assert len(validation.checked_steps(chain).layers()) == 20_000
    assert len(validation.checked_steps(fan).layers()) == 3
    assert time.process_time() - begin < 10  # a pass for each step would take minutes
