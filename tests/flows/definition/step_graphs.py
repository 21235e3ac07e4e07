"""Graphs of steps for tests: generated graphs, and the errors of invalid graphs."""

from typing import Any

import pytest
from hypothesis import strategies as st

from penstock.flows.definition import validation
from penstock.flows.definition.spec import StepSpec
from penstock.kernel.errors import Invalid

Steps = dict[str, StepSpec]


def step(*after: str, kind: str = "http", **options: Any) -> StepSpec:
    return StepSpec(kind=kind, depends_on=list(after), **options)


def validation_error(steps: Steps, **checks: Any) -> Invalid:
    """Validate steps that must be invalid, and return the error."""
    with pytest.raises(Invalid) as caught:
        validation.validate_steps(steps, **checks)
    return caught.value


@st.composite
def dags(draw: st.DrawFn, most: int = 12) -> Steps:
    """Draw steps in any order, each with dependencies among the steps drawn before it."""
    count = draw(st.integers(0, most))
    names = [f"s{number}" for number in range(count)]
    after = {
        name: draw(st.lists(st.sampled_from(names[:number]), unique=True, max_size=4)) if number else []
        for number, name in enumerate(names)
    }
    return {name: step(*after[name]) for name in draw(st.permutations(names))}
