"""The graph of a flow: its order, its notifications, and all that is told before anything runs."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.definition import validation
from tests.flows.definition.step_graphs import Steps, dags, refused, step
from tests.support.soak import examples


def plain_order(steps: Steps) -> list[str]:
    """The first by writing of all whose turn it is, again and again."""
    order: list[str] = []
    while len(order) < len(steps):
        order.append(next(n for n, s in steps.items() if n not in order and set(s.depends_on) <= set(order)))
    return order


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(60, soak=5_000))
@given(dags())
def test_steps_are_in_an_order_they_can_run_in(steps: Steps) -> None:
    """F2: each after those it depends on, in the order of writing where it is free; layers as deep as they must be."""
    found = validation.validate_steps(steps)
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
    notifications = [ring for name in made if (ring := ring_length(made, name))]
    if not notifications:
        validation.validate_steps(made)
        return
    error = refused(made)
    ring = error.details["ring"]
    assert error.code == "CYCLE"
    assert error.message.endswith(" → ".join([*ring, ring[0]]))
    assert all(one in made[other].depends_on for one, other in pairwise([*ring, ring[0]]))
    assert len(ring) == min(notifications)


def ring_length(steps: Steps, name: str) -> int:
    """How long the way from a step back to itself is; 0 where there is none."""
    reached, length = {name}, 0
    while reached and length <= len(steps):
        reached, length = {other for one in reached for other in steps[one].depends_on}, length + 1
        if name in reached:
            return length
    return 0


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


@pytest.mark.full
def test_large_flows_are_checked_in_one_pass() -> None:
    """F2: a chain of 20,000, each of which refers to the first; a fan-out of 10,000 and its fan-in."""
    chain = {"s0": step()}
    for number in range(1, 20_000):
        chain[f"s{number}"] = step(f"s{number - 1}", inputs={"a": "${steps.s0.outputs.x}"}, when="scope.n > 1")
    middle = [f"m{number}" for number in range(10_000)]
    fan = {"a": step(), **{name: step("a") for name in middle}, "z": step(*middle)}
    begin = time.process_time()
    assert len(validation.validate_steps(chain).layers()) == 20_000
    assert len(validation.validate_steps(fan).layers()) == 3
    assert time.process_time() - begin < 10  # a pass for each step would take minutes
