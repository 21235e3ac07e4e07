"""The effect of a report, or of an expired lease, on a step."""

from datetime import timedelta
from typing import Any

import pytest

from penstock.flows.contract import StepReportAnswer, StepReportKind
from penstock.flows.model import StepError, StepReport
from tests.flows.stepper import FlowsStepper, make_report, work

FINAL = StepError("BAD_SYMBOL", "there is no such symbol")


async def test_only_links_may_change_after_the_end(flows: FlowsStepper) -> None:
    """F5: `signed_url` and `expires_at` may change later; any other difference is a conflict."""
    await flows.start({"a": work()})
    claimed = (await flows.claim())["a"]
    await flows.report(claimed, outputs={"v": 1, "signed_url": "x"})
    assert (
        await flows.report(claimed, outputs={"v": 1, "signed_url": "y", "expires_at": "soon"})
        is StepReportAnswer.UNCHANGED
    )
    assert (await flows.step("a"))["outputs"] == {"v": 1, "signed_url": "y", "expires_at": "soon"}
    assert await flows.report(claimed, outputs={"v": 2, "signed_url": "z"}) is StepReportAnswer.CONFLICT
    assert (await flows.step("a"))["outputs"]["signed_url"] == "y"


async def test_first_of_two_reports_in_a_batch_counts(flows: FlowsStepper) -> None:
    """F5: an equal second report is unchanged, a different one is a conflict."""
    await flows.start({"a": work()})
    claimed = (await flows.claim())["a"]
    batch = [
        make_report(claimed, outputs={"v": 1}),
        make_report(claimed, StepReportKind.FAILED),
        make_report(claimed, outputs={"v": 1}),
    ]
    assert await flows.engine.report(batch) == [
        StepReportAnswer.SETTLED,
        StepReportAnswer.CONFLICT,
        StepReportAnswer.UNCHANGED,
    ]
    assert (await flows.step("a"))["outputs"] == {"v": 1}


async def test_error_is_stored_unchanged(flows: FlowsStepper) -> None:
    """F5: the code, the message and the details are stored."""
    await flows.start({"a": work()})
    await flows.report(
        (await flows.claim())["a"], StepReportKind.FAILED, error=StepError("NO_DATA", "none", {"symbol": "X"})
    )
    assert (await flows.step("a"))["error"] == {"code": "NO_DATA", "message": "none", "details": {"symbol": "X"}}


async def test_failed_step_is_retried_after_a_delay(flows: FlowsStepper) -> None:
    """F10: a step has up to maxAttempts attempts, with increasing delays."""
    await flows.start({"a": work(retry={"maxAttempts": 3, "backoff": 10})})
    for first, most in ((5, 10), (10, 20)):
        await flows.report((await flows.claim())["a"], StepReportKind.FAILED)
        flows.clock.advance(timedelta(seconds=first - 1))
        assert await flows.claim() == {}
        flows.clock.advance(timedelta(seconds=most - first + 1))
    assert (await flows.claim())["a"].attempt == 3
    await flows.start({"a": work()}, "other")
    claimed = await flows.step("a")
    await flows.engine.report(
        [StepReport("r", "a", claimed["fence"], StepReportKind.FAILED, error=StepError("BROKEN", "it broke"))]
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
async def test_retry_policy_of_the_step_has_priority(
    flows: FlowsStepper, retry: dict[str, Any], is_retryable: bool | None, expected: str
) -> None:
    """F10: the error codes in the policy of the step override the opinion of the worker."""
    await flows.start({"a": work(retry={"maxAttempts": 2, "backoff": 0, **retry})})
    await flows.report((await flows.claim())["a"], StepReportKind.FAILED, error=FINAL, is_retryable=is_retryable)
    assert (await flows.steps())["a"] == expected


async def test_expired_lease_is_retried_under_a_new_fence(flows: FlowsStepper) -> None:
    """F11: the step is READY again, until its last attempt."""
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
