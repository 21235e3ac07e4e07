"""F2: the creation of runs from requests."""

import gc
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.flows.definition.spec import RunRequest
from penstock.flows.model import NewStep
from penstock.kernel.errors import Conflict, Invalid
from tests.flows.stepper import DIAMOND, FlowsStepper, work


async def test_repeated_request_creates_one_run(flows: FlowsStepper) -> None:
    """F2: an equal request with a used runId returns its run; a different request is refused."""
    await flows.start(DIAMOND)
    before = await flows.fingerprint()
    await flows.start(dict(reversed(DIAMOND.items())))
    assert await flows.fingerprint() == before
    with pytest.raises(Conflict, match="with a different request"):
        await flows.start({"a": work()})
    assert await flows.fingerprint() == before


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ({"a": work("b"), "b": work("a")}, "a"),
        ({"a": work("a")}, "a"),
        ({"a": work(), "b": work("unknown")}, "unknown"),
    ],
)
async def test_invalid_flows_are_refused(flows: FlowsStepper, steps: dict[str, Any], named: str) -> None:
    """F2: cycles and unknown dependencies are named, and nothing is stored."""
    with pytest.raises(Invalid, match=named):
        await flows.start(steps)
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run") == 0


async def test_duplicate_step_ids_are_named() -> None:
    """F2: the ids in a list of steps must be unique."""
    with pytest.raises(ValidationError, match="two steps have the id 'a'"):
        RunRequest.model_validate({"steps": [{"id": "a", "kind": "x"}, {"id": "a", "kind": "y"}]})


async def test_empty_flow_succeeds(flows: FlowsStepper) -> None:
    """F2: a run without steps has succeeded at once."""
    await flows.start({})
    assert await flows.status() == "SUCCEEDED"


async def test_plans_of_inline_steps_are_not_cached(flows: FlowsStepper) -> None:
    """F2: inline steps rarely run again and may be large; a named flow is planned once."""
    flows.catalogue.add("again", {"named-step": work()})
    await flows.start({"inline-step": work()})
    await flows.start(None, "other", flow="again")
    gc.collect()
    cached = {step.step_id for step in gc.get_objects() if isinstance(step, NewStep)}
    assert ("inline-step" in cached, "named-step" in cached) == (False, True)
