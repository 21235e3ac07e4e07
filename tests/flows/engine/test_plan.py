"""Runs made of what was asked for."""

import gc
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.flows.definition.spec import RunRequest
from penstock.flows.model import NewStep
from penstock.kernel.errors import Conflict, Invalid
from tests.flows.stepper import DIAMOND, FlowsStepper, work


async def test_the_same_request_makes_one_run(flows: FlowsStepper) -> None:
    """F2: a runId is taken once; the same request is answered with it, another is refused."""
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
        ({"a": work(), "b": work("nobody")}, "nobody"),
    ],
)
async def test_what_is_no_flow_is_refused(flows: FlowsStepper, steps: dict[str, Any], named: str) -> None:
    """F2: circles and unknown dependencies are named, and nothing is kept of them."""
    with pytest.raises(Invalid, match=named):
        await flows.start(steps)
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run") == 0


async def test_an_id_that_comes_twice_is_named() -> None:
    """F2: in a list of steps each has an id of its own."""
    with pytest.raises(ValidationError, match="two steps have the id 'a'"):
        RunRequest.model_validate({"steps": [{"id": "a", "kind": "x"}, {"id": "a", "kind": "y"}]})


async def test_an_empty_flow_has_succeeded(flows: FlowsStepper) -> None:
    """F2: there is nothing to wait for."""
    await flows.start({})
    assert await flows.status() == "SUCCEEDED"


async def test_what_is_given_inline_is_not_remembered(flows: FlowsStepper) -> None:
    """F2: it does not come again, and there may be much of it; a flow with a name is planned once."""
    flows.catalogue.add("again", {"named-step": work()})
    await flows.start({"inline-step": work()})
    await flows.start(None, "other", flow="again")
    gc.collect()
    known = {get_object.step_id for get_object in gc.get_objects() if isinstance(get_object, NewStep)}
    assert ("inline-step" in known, "named-step" in known) == (False, True)
