"""The log of runs and steps: each change is logged once, whatever caused it, and only after its transaction."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.flows.contract import StepReportKind
from penstock.flows.model import StepError
from penstock.kernel.errors import Conflict, Transient
from tests.flows.stepper import FlowsStepper, flow_step, make_report, map_step, work

RETRY = {"maxAttempts": 2, "backoff": 0}
SECOND = timedelta(seconds=1)


def select(logs: Sequence[Mapping[str, Any]], *events: str) -> list[dict[str, Any]]:
    """Return the log entries of *events*."""
    return [dict(entry) for entry in logs if entry["event"] in events]


async def test_start_and_success_of_a_run_are_logged(flows: FlowsStepper) -> None:
    """F1: a run logs its start and its success at INFO, with its flow and its duration; plain steps log nothing."""
    flows.catalogue.add("report", {"a": work(), "b": work("a")})
    with capture_logs() as logs:
        await flows.start(None, flow="report")
        await flows.start(None, flow="report")
        flows.clock.advance(2 * SECOND)
        await flows.work()
    assert logs == [
        {"event": "flow_run_started", "log_level": "info", "run": "r", "flow": "report"},
        {"event": "flow_run_succeeded", "log_level": "info", "run": "r", "flow": "report", "seconds": 2.0},
    ]


async def test_prefetched_steps_log_the_same(flows: FlowsStepper) -> None:
    """F3–F5: a run whose steps are settled with prefetch logs its success too."""
    await flows.start({"a": work(), "b": work("a")})
    with capture_logs() as logs:
        claimed = list((await flows.claim()).values())
        while claimed:
            batch = [(step, make_report(step)) for step in claimed]
            _, claimed = await flows.work_source.settle("w", batch, ["work"], 10)  # type: ignore[assignment]
    assert [entry["event"] for entry in logs] == ["flow_run_succeeded"]


async def test_a_failure_is_logged_with_step_and_code(flows: FlowsStepper) -> None:
    """F5, F7: the failed step and its run are logged at WARNING, with the error code."""
    await flows.start({"a": work(), "b": work("a")})
    claimed = (await flows.claim())["a"]
    error = StepError("NO_DATA", "the warehouse is empty")
    with capture_logs() as logs:
        for _ in range(2):  # the second report changes nothing
            await flows.report(claimed, StepReportKind.FAILED, error=error)
    step = {"run": "r", "step": "a", "kind": "work", "attempt": 1, "code": "NO_DATA", "error": "the warehouse is empty"}
    run = {"run": "r", "flow": None, "seconds": 0.0, "reason": "step a failed", "code": "NO_DATA"}
    assert logs == [
        {"event": "flow_step_failed", "log_level": "warning", **step},
        {"event": "flow_run_failed", "log_level": "warning", **run},
    ]


async def test_the_failure_of_an_item_names_the_map(flows: FlowsStepper) -> None:
    """F14: the item and its map are logged; the reason of the run is that of the database."""
    await flows.start({"m": map_step([1, 2])})
    with capture_logs() as logs:
        await flows.report((await flows.claim(1))["m[0]"], StepReportKind.FAILED)
    failed = [(entry["step"], entry["code"]) for entry in select(logs, "flow_step_failed")]
    assert failed == [("m[0]", "BROKEN"), ("m", "ITEM_FAILED")]
    [run] = select(logs, "flow_run_failed")
    reason = await flows.db.fetchval("SELECT reason FROM flow_run")
    assert (run["reason"], run["code"]) == (reason, "BROKEN") == ("step m failed", "BROKEN")


async def test_a_failed_step_that_is_not_required_is_logged(flows: FlowsStepper) -> None:
    """F7: the step is logged at WARNING, although its run succeeds."""
    await flows.start({"a": work(required=False)})
    with capture_logs() as logs:
        await flows.work("a")
    assert [entry["event"] for entry in logs] == ["flow_step_failed", "flow_run_succeeded"]


async def test_retries_are_logged_with_their_attempt(flows: FlowsStepper) -> None:
    """F10, F11: a retry is logged at INFO with its reason, a release at DEBUG, expired leases with their number."""
    await flows.start({"a": work(retry=RETRY)})
    with capture_logs() as logs:
        await flows.report((await flows.claim())["a"], StepReportKind.RELEASED)
        await flows.report((await flows.claim())["a"], StepReportKind.FAILED)
        await flows.claim()
        await flows.expire_leases()
    step = {"run": "r", "step": "a", "kind": "work"}
    assert logs[:3] == [
        {
            "event": "flow_step_released",
            "log_level": "debug",
            **step,
            "attempt": 0,
            "reason": "released by the worker",
        },
        {"event": "flow_step_retried", "log_level": "info", **step, "attempt": 1, "reason": "BROKEN: it broke"},
        {"event": "flow_leases_expired", "log_level": "info", "steps": 1},
    ]
    assert [(entry["event"], entry.get("code")) for entry in logs[3:]] == [
        ("flow_step_failed", "LEASE_EXPIRED"),
        ("flow_run_failed", "LEASE_EXPIRED"),
    ]


async def test_operations_of_users_are_logged_once(flows: FlowsStepper) -> None:
    """F9, F10, F19: cancel, retry, skip and resume are logged with the user, and a repeated cancel is not logged."""
    await flows.start({"a": work(), "b": work("a")})
    await flows.work("a")
    with capture_logs() as logs:
        await flows.operations.retry("r", "alice", "a")
        await flows.operations.skip("r", "a", "alice", "not needed")
        await flows.operations.cancel("r", "alice", "by mistake")
        await flows.operations.cancel("r", "alice", "by mistake")
        await flows.operations.resume("r", "b", "alice", "again")
    run = {"run": "r", "flow": None, "seconds": 0.0, "reason": "by mistake"}
    assert logs == [
        {"event": "flow_run_retried", "log_level": "info", "run": "r", "steps": 2, "actor": "alice"},
        {
            "event": "flow_step_skipped",
            "log_level": "info",
            "run": "r",
            "step": "a",
            "actor": "alice",
            "reason": "not needed",
        },
        {"event": "flow_run_cancelled", "log_level": "warning", **run},
        {
            "event": "flow_run_resumed",
            "log_level": "info",
            "run": "again",
            "resumed_from": "r",
            "step": "b",
            "actor": "alice",
        },
        {"event": "flow_run_started", "log_level": "info", "run": "again", "flow": None},
    ]


async def test_a_change_that_was_rolled_back_is_not_logged(
    flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F3: nothing is logged if the transaction fails after the steps were settled."""
    await flows.start({"a": work()})
    claimed = (await flows.claim())["a"]

    async def fail(*_args: Any) -> None:
        raise Transient("DATABASE_DOWN", "gone")

    monkeypatch.setattr(flows.engine.advance, "follow", fail)
    with capture_logs() as logs, pytest.raises(Transient):
        await flows.report(claimed, StepReportKind.FAILED)
    assert logs == []
    with capture_logs() as logs, pytest.raises(Conflict):
        await flows.operations.retry("r", "alice", "a")
    assert logs == []


async def test_sub_runs_waiting_runs_and_artifacts_are_logged(flows: FlowsStepper) -> None:
    """F6, F14, F16: a run is logged too if the maintenance starts it, and if a publication ends it."""
    flows.catalogue.add("limited", {"a": work()}, maxActiveRuns=1)
    with capture_logs() as logs:
        await flows.start(None, "one", flow="limited")
        await flows.start(None, "two", flow="limited")
        claimed = (await flows.claim())["a"]
        await flows.write(claimed)
        await flows.report(claimed, artifacts=["out.txt"])
        await flows.maintenance.start_waiting_runs()
        await flows.work("a")
        await flows.start({"s": flow_step({"x": work()})}, "outer")
        await flows.work("x")
        await flows.settle_sub_runs()
    assert [(entry["event"], entry["run"]) for entry in logs if entry["event"].startswith("flow_run")] == [
        ("flow_run_started", "one"),
        ("flow_run_succeeded", "one"),
        ("flow_run_started", "two"),
        ("flow_run_failed", "two"),
        ("flow_run_started", "outer"),
        ("flow_run_started", "outer~s"),
        ("flow_run_failed", "outer~s"),
        ("flow_run_failed", "outer"),
    ]
