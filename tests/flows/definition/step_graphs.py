"""Graphs of steps for tests: drawn ones, and what is refused of them."""

from typing import Any

import pytest
from hypothesis import strategies as st

from penstock.flows.definition import validation
from penstock.flows.definition.spec import StepSpec
from penstock.kernel.errors import Invalid

Steps = dict[str, StepSpec]


def step(*after: str, kind: str = "http", **about: Any) -> StepSpec:
    return StepSpec(kind=kind, depends_on=list(after), **about)


def refused(steps: Steps, **checks: Any) -> Invalid:
    with pytest.raises(Invalid) as caught:
        validation.validate_steps(steps, **checks)
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
