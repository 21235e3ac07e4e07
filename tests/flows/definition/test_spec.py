"""The model of a step: limits of durations, and inputs that are JSON."""

from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.flows.definition.spec import FlowSpec, StepSpec


@pytest.mark.parametrize(
    "invalid",
    [
        {"timeout": 8e13},
        {"retry": {"backoff": 8e13}},
        {"retry": {"maxBackoff": 8e13}},
        {"timeout": "P400D"},
    ],
)
def test_durations_are_limited(invalid: dict[str, Any]) -> None:
    """F10, F11: durations of more than 366 days are refused: they would overflow in leases and delays."""
    with pytest.raises(ValidationError):
        StepSpec.model_validate({"kind": "work", **invalid})
    year = {"timeout": "P366D", "retry": {"backoff": "P366D", "maxBackoff": "P366D"}}
    assert StepSpec.model_validate({"kind": "work", **year}).timeout == timedelta(days=366)


def test_inputs_are_json() -> None:
    """F2: values that JSON or PostgreSQL cannot represent are refused."""
    flow = FlowSpec.model_validate({"name": "f", "scope": {"t": (1, 2)}})
    assert flow.scope == {"t": [1, 2]}
    for wrong in ({"a": float("nan")}, {"a": 2**63}, {"a": "\0"}, {"a": {"\ud800": 1}}, {"a": {1: 2}}, {"a": b"x"}):
        with pytest.raises(ValueError, match="a"):
            FlowSpec.model_validate({"name": "f", "scope": wrong})
