"""The graph of a flow: its order, its cycles, and the errors of dependencies."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.definition import validation
from tests.flows.definition.step_graphs import Steps, dags, step, validation_error
from tests.support.soak import examples


def naive_order(steps: Steps) -> list[str]:
    """Return the steps by repeated choice of the first step whose dependencies are complete."""
    order: list[str] = []
    while len(order) < len(steps):
        order.append(next(n for n, s in steps.items() if n not in order and set(s.depends_on) <= set(order)))
    return order


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(60, soak=5_000))
@given(dags())
def test_steps_are_in_execution_order(steps: Steps) -> None:
    """F2: each step follows its dependencies, otherwise the order of the document; layers are minimal."""
    graph = validation.validate_steps(steps)
    assert list(graph.ids) == naive_order(steps)
    for index, name in enumerate(graph.ids):
        assert [graph.ids[other] for other in graph.depends_on[index]] == steps[name].depends_on
        assert all(index in graph.children[other] for other in graph.depends_on[index])
    assert sum(map(len, graph.children)) == sum(map(len, graph.depends_on))
    layer_of = {index: number for number, layer in enumerate(graph.compute_layers()) for index in layer}
    assert len(layer_of) == len(steps)
    for index, before in enumerate(graph.depends_on):
        assert layer_of[index] == max((layer_of[other] + 1 for other in before), default=0)


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(60, soak=5_000))
@given(dags(), st.data())
def test_shortest_cycle_is_reported(steps: Steps, data: st.DataObject) -> None:
    """F2: the error has the steps of a cycle in order; no cycle of the flow is shorter."""
    names = st.sampled_from(sorted(steps) or [""])
    added = data.draw(st.lists(st.tuples(names, names), min_size=1, max_size=3)) if steps else []
    after = {name: sorted({*old.depends_on, *(b for a, b in added if a == name)}) for name, old in steps.items()}
    changed = {name: step(*after[name]) for name in steps}
    lengths = [length for name in changed if (length := cycle_length(changed, name))]
    if not lengths:
        validation.validate_steps(changed)
        return
    error = validation_error(changed)
    cycle = error.details["cycle"]
    assert error.code == "CYCLE"
    assert error.message.endswith(" → ".join([*cycle, cycle[0]]))
    assert all(before in changed[name].depends_on for before, name in pairwise([*cycle, cycle[0]]))
    assert len(cycle) == min(lengths)


def cycle_length(steps: Steps, name: str) -> int:
    """Return the length of the shortest path from a step back to itself, or 0."""
    reached, length = {name}, 0
    while reached and length <= len(steps):
        reached, length = {other for step_id in reached for other in steps[step_id].depends_on}, length + 1
        if name in reached:
            return length
    return 0


def test_unknown_dependency_is_named() -> None:
    """F2: the error has the step, the dependency, and a similar name."""
    error = validation_error({"fetch": step(), "report": step("fecth")})
    assert (error.code, error.message) == (
        "UNKNOWN_DEPENDENCY",
        "step 'report' depends on 'fecth', which does not exist",
    )
    assert error.hint == "did you mean 'fetch'?"
    assert "known names: a" in str(validation_error({"a": step(), "b": step("zzz")}).hint)


def test_invalid_dependencies() -> None:
    """F2: a repeated dependency, a step that depends on itself, and too many steps are refused."""
    assert validation_error({"a": step(), "b": step("a", "a")}).code == "DUPLICATE_DEPENDENCY"
    assert validation_error({"a": step("a")}).message.endswith("a → a")
    assert validation_error({str(number): step() for number in range(20_001)}).code == "TOO_MANY_STEPS"


def test_message_of_a_long_cycle_is_short() -> None:
    """F2: the message abbreviates a long cycle; a short cycle among many steps is found."""
    steps = {f"s{number}": step(f"s{(number - 1) % 20_000}") for number in range(20_000)}
    assert len(validation_error(steps).message) < 200
    steps["s7000"] = step("s6999", "s7001")
    assert validation_error(steps).message.endswith(": s7000 → s7001 → s7000")


@pytest.mark.full
def test_validation_of_large_flows_is_linear() -> None:
    """F2: validation is linear for a chain of 20,000 steps with references, and for a fan-out of 10,000 steps."""
    chain = {"s0": step()}
    for number in range(1, 20_000):
        chain[f"s{number}"] = step(f"s{number - 1}", inputs={"a": "${steps.s0.outputs.x}"}, when="scope.n > 1")
    middle = [f"m{number}" for number in range(10_000)]
    fan = {"a": step(), **{name: step("a") for name in middle}, "z": step(*middle)}
    start = time.process_time()
    assert len(validation.validate_steps(chain).compute_layers()) == 20_000
    assert len(validation.validate_steps(fan).compute_layers()) == 3
    assert time.process_time() - start < 10  # a pass for each step would take minutes
