"""What a report, or a lost lease, does to a step."""

from datetime import timedelta
from typing import Any

import pytest

from penstock.flows.contract import StepReportAnswer, StepReportKind
from penstock.flows.model import StepError, StepReport
from tests.flows.stepper import FlowsStepper, make_report, work

FINAL = StepError("BAD_SYMBOL", "there is no such symbol")


async def test_only_links_may_change_after_the_end(flows: FlowsStepper) -> None:
    """F5: `signed_url` and `expires_at` are taken over later; anything else is a contradiction."""
    await flows.start({"a": work()})
    held = (await flows.claim())["a"]
    await flows.report(held, outputs={"v": 1, "signed_url": "x"})
    assert (
        await flows.report(held, outputs={"v": 1, "signed_url": "y", "expires_at": "soon"})
        is StepReportAnswer.UNCHANGED
    )
    assert (await flows.step("a"))["outputs"] == {"v": 1, "signed_url": "y", "expires_at": "soon"}
    assert await flows.report(held, outputs={"v": 2, "signed_url": "z"}) is StepReportAnswer.CONFLICT
    assert (await flows.step("a"))["outputs"]["signed_url"] == "y"


async def test_of_two_reports_in_one_batch_the_first_counts(flows: FlowsStepper) -> None:
    """F5: the same again is fine, another is a conflict, in a batch as anywhere."""
    await flows.start({"a": work()})
    held = (await flows.claim())["a"]
    batch = [
        make_report(held, outputs={"v": 1}),
        make_report(held, StepReportKind.FAILED),
        make_report(held, outputs={"v": 1}),
    ]
    assert await flows.engine.report(batch) == [
        StepReportAnswer.SETTLED,
        StepReportAnswer.CONFLICT,
        StepReportAnswer.UNCHANGED,
    ]
    assert (await flows.step("a"))["outputs"] == {"v": 1}


async def test_an_error_is_kept_as_it_was_said(flows: FlowsStepper) -> None:
    """F5: code, message and details."""
    await flows.start({"a": work()})
    await flows.report(
        (await flows.claim())["a"], StepReportKind.FAILED, error=StepError("NO_DATA", "none", {"symbol": "X"})
    )
    assert (await flows.step("a"))["error"] == {"code": "NO_DATA", "message": "none", "details": {"symbol": "X"}}


async def test_a_step_is_tried_again_after_a_while(flows: FlowsStepper) -> None:
    """F10: up to maxAttempts, each time after a longer wait."""
    await flows.start({"a": work(retry={"maxAttempts": 3, "backoff": 10})})
    for first, most in ((5, 10), (10, 20)):
        await flows.report((await flows.claim())["a"], StepReportKind.FAILED)
        flows.clock.advance(timedelta(seconds=first - 1))
        assert await flows.claim() == {}
        flows.clock.advance(timedelta(seconds=most - first + 1))
    assert (await flows.claim())["a"].attempt == 3
    await flows.start({"a": work()}, "other")
    held = await flows.step("a")
    await flows.engine.report(
        [StepReport("r", "a", held["fence"], StepReportKind.FAILED, error=StepError("BROKEN", "it broke"))]
    )
    assert (await flows.status(), (await flows.steps())["a"]) == ("FAILED", "FAILED")


@pytest.mark.parametrize(
    ("retry", "is_retryable", "expected"),
    [
        ({}, None, "READY"),
        ({}, False, "FAILED"),
        ({"final": ["BAD_SYMBOL"]}, None, "FAILED"),
        ({"final": ["BAD_SYMBOL"]}, True, "FAILED"),
        ({"retryable": ["OTHER"]}, True, "FAILED"),
        ({"retryable": ["BAD_SYMBOL"]}, False, "READY"),
    ],
)
async def test_an_error_may_be_final(
    flows: FlowsStepper, retry: dict[str, Any], is_retryable: bool | None, expected: str
) -> None:
    """F10: what the step says of a code comes before what the worker thinks of it."""
    await flows.start({"a": work(retry={"maxAttempts": 2, "backoff": 0, **retry})})
    await flows.report((await flows.claim())["a"], StepReportKind.FAILED, error=FINAL, is_retryable=is_retryable)
    assert (await flows.steps())["a"] == expected


async def test_a_lost_lease_is_tried_again_under_a_new_fence(flows: FlowsStepper) -> None:
    """F11: READY again, until it has been tried often enough."""
    await flows.start({"a": work(), "b": work(retry={"maxAttempts": 1}), "c": work(required=False)})
    first = await flows.claim()
    assert await flows.expire_leases() == 3
    assert await flows.steps() == {"a": "CANCELLED", "b": "FAILED", "c": "CANCELLED"}
    assert (await flows.step("b"))["error"]["code"] == "LEASE_EXPIRED"
    await flows.operations.skip("r", "b", "tester")
    second = await flows.claim()
    assert second["a"].fence > first["a"].fence
    await flows.expire_leases()
    third = await flows.claim()
    assert third["a"].fence > second["a"].fence
    await flows.expire_leases()
    assert await flows.steps() == {"a": "FAILED", "b": "SKIPPED", "c": "SKIPPED"}
