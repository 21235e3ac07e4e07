"""Claims, reports, heartbeats, limits and notifications of the engine."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from penstock.flows import store
from penstock.flows.contract import StepReportAnswer, StepReportKind
from penstock.flows.engine.engine import STEPS
from penstock.flows.model import StepReport
from penstock.kernel.errors import Conflict
from tests.flows.stepper import (
    DIAMOND,
    WORK,
    FlowsStepper,
    flow_step,
    flows_stepper,
    make_report,
    map_step,
    work,
)

AGAIN = {"maxAttempts": 2, "backoff": 0}

# F1–F3: made, and in order.


async def test_diamond_runs_in_order(flows: FlowsStepper) -> None:
    """F1, F3: a step is READY when all its dependencies have succeeded, and not before."""
    await flows.start(DIAMOND)
    assert await flows.steps() == {"a": "READY", "b": "PENDING", "c": "PENDING", "d": "PENDING"}
    claimed = await flows.claim()
    assert await flows.steps() == {"a": "RUNNING", "b": "PENDING", "c": "PENDING", "d": "PENDING"}
    await flows.report(claimed["a"])
    claimed = await flows.claim()
    assert claimed.keys() == {"b", "c"}
    await flows.report(claimed["b"])
    assert await flows.steps() == {"a": "SUCCEEDED", "b": "SUCCEEDED", "c": "RUNNING", "d": "PENDING"}
    assert await flows.status() == "RUNNING"
    await flows.report(claimed["c"])
    assert await flows.work() == ["d"]
    assert await flows.status() == "SUCCEEDED"


async def test_repeated_calls_write_nothing(flows: FlowsStepper) -> None:
    """F3: repeated or late reports, and maintenance of a consistent run, write no row."""
    await flows.start({**DIAMOND, "m": map_step([1, 2]), "n": flow_step({"x": work()})})
    claimed = await flows.claim()
    await flows.report(claimed["a"], outputs={"v": 1})
    await flows.report(claimed["m[0]"], StepReportKind.FAILED)
    before = await flows.fingerprint()
    assert await flows.report(claimed["a"], outputs={"v": 1}) is StepReportAnswer.UNCHANGED
    assert await flows.report(claimed["a"], outputs={"v": 2}) is StepReportAnswer.CONFLICT
    assert await flows.report(claimed["m[0]"], StepReportKind.FAILED) is StepReportAnswer.UNCHANGED
    stranger = StepReport("r", "a", 99, StepReportKind.SUCCEEDED)
    unknown = StepReport("r", "unknown", 1, StepReportKind.SUCCEEDED)
    assert await flows.engine.report([stranger, unknown]) == [StepReportAnswer.SUPERSEDED, StepReportAnswer.UNKNOWN]
    assert await flows.engine.heartbeat([("r", "a", claimed["a"].fence), ("r", "unknown", 1)]) == {}
    assert await flows.engine.reap() == 0
    assert await flows.maintenance.repair() == 0
    for task in (
        flows.maintenance.start_waiting_runs,
        flows.maintenance.start_scheduled_runs,
        flows.maintenance.publish_sealed,
        flows.maintenance.settle_sub_runs,
    ):
        await task()
    async with flows.db.transaction() as tx:
        run = await flows.engine.find_run(tx, "r")
        settlement = await store.advance(tx, [run], flows.clock.now())
        assert (settlement.ready, settlement.to_evaluate, settlement.runs) == (set(), [], [])
    assert await flows.fingerprint() == before


async def test_heartbeat_only_extends_the_lease(flows: FlowsStepper) -> None:
    """F3: a heartbeat writes no journal entry and sends no notification."""
    await flows.start(DIAMOND)
    claimed = await flows.claim()
    _, noted, notified = await flows.fingerprint()
    flows.clock.advance(timedelta(seconds=30))
    assert await flows.engine.heartbeat([("r", "a", 1)]) == {("r", "a", 1): False}
    assert (await flows.fingerprint())[1:] == (noted, notified)
    assert (await flows.step("a"))["lease_until"] == claimed["a"].lease_until + timedelta(seconds=30)


# F4, F5: claims and reports.


async def test_claims_are_exclusive(flows: FlowsStepper) -> None:
    """F4: a claimed step is not claimed again; every claim has its own fence."""
    await flows.start({"a": work(), "b": work()})
    first, second = await flows.claim(1, "one"), await flows.claim(9, "two")
    assert (list(first), list(second)) == (["a"], ["b"])
    assert await flows.claim(9, "three") == {}
    await flows.report(first["a"], StepReportKind.RELEASED)
    again = await flows.claim(9, "three")
    assert (again["a"].fence, again["a"].attempt) == (first["a"].fence + 1, 1)


async def test_an_old_fence_changes_nothing(flows: FlowsStepper) -> None:
    """F4: the report of a worker that has lost its step is SUPERSEDED."""
    await flows.start({"a": work()})
    old = (await flows.claim())["a"]
    await flows.expire_leases()
    new = (await flows.claim(worker="other"))["a"]
    before = await flows.fingerprint()
    for outcome in StepReportKind:
        assert await flows.report(old, outcome) is StepReportAnswer.SUPERSEDED
    answers, _ = await flows.work_source.settle("w", [(old, make_report(old))], ["work"], 5)
    assert answers == [StepReportAnswer.SUPERSEDED]
    assert await flows.fingerprint() == before
    assert await flows.report(new, outputs={"v": 2}) is StepReportAnswer.SETTLED
    assert await flows.report(old, outputs={"v": 1}) is StepReportAnswer.SUPERSEDED
    assert (await flows.step("a"))["outputs"] == {"v": 2}


# F9–F11: cancel, retry, skip, lost leases.


async def test_lease_ends_with_the_timeout(flows: FlowsStepper) -> None:
    """F11: heartbeats do not extend an attempt much beyond its timeout."""
    await flows.start({"a": work(timeout=90)})
    await flows.claim()
    for _ in range(2):
        flows.clock.advance(timedelta(seconds=50))
        await flows.engine.heartbeat([("r", "a", 1)])
    step = await flows.step("a")
    assert timedelta(seconds=90) <= step["lease_until"] - step["started_at"] <= timedelta(seconds=100)


# F16: limits and schedules.


async def test_concurrent_runs_of_a_flow_are_limited(flows: FlowsStepper) -> None:
    """F16: further runs wait as PENDING, and start in order."""
    flows.catalogue.add("one", {"a": work()}, maxActiveRuns=1)
    for name in ("x", "y", "z"):
        await flows.start(None, name, flow="one")
    assert [await flows.status(name) for name in ("x", "y", "z")] == ["RUNNING", "PENDING", "PENDING"]
    with pytest.raises(Conflict):
        await flows.operations.skip("y", "a", "tester")
    await flows.operations.cancel("y", "tester")
    assert (await flows.claim()).keys() == {"a"}
    await flows.maintenance.start_waiting_runs()
    assert await flows.claim() == {}
    await flows.operations.cancel("x", "tester")
    await flows.maintenance.start_waiting_runs()
    assert [await flows.status(name) for name in ("x", "y", "z")] == ["CANCELLED", "CANCELLED", "RUNNING"]


async def test_concurrent_steps_of_a_kind_are_limited(database_url: str, tmp_path: Path) -> None:
    """F16: for all workers, and for prefetched steps."""
    async with flows_stepper(database_url, tmp_path, limits={"work": 2}) as flows:
        await flows.start({f"s{n}": work() for n in range(5)} | {"t": work("s0")})
        claimed = await flows.claim(worker="one")
        assert len(claimed) == 2
        assert await flows.claim(worker="two") == {}
        batch = [(claimed["s0"], make_report(claimed["s0"]))]
        _, prefetched = await flows.work_source.settle("w2", batch, ["work"], 5)
        assert list(prefetched) == []
        assert len(await flows.claim(worker="two")) == 1


async def test_retried_step_wakes_a_waiting_claim(flows: FlowsStepper) -> None:
    """F10, F17: a waiting claim gets the step without waiting for the next poll."""
    await flows.start({"a": work(retry=AGAIN), "b": work(), "c": work()})
    claimed = await flows.claim()
    for name, outcome, is_reported in (
        ("a", StepReportKind.FAILED, True),
        ("b", StepReportKind.RELEASED, True),
        ("c", StepReportKind.SUCCEEDED, False),
    ):
        notified = flows.notifier.get_next_event(STEPS)
        await flows.report(claimed[name], outcome)
        assert notified.is_set() is is_reported, name


async def test_end_of_a_limited_step_wakes_a_waiting_claim(database_url: str, tmp_path: Path) -> None:
    """F16: also when the end makes no other step READY."""
    async with flows_stepper(database_url, tmp_path, limits={WORK: 1}) as flows:
        await flows.start({"a": work(), "b": work()})
        claimed = (await flows.claim())["a"]
        notified = flows.notifier.get_next_event(STEPS)
        await flows.report(claimed)
        assert notified.is_set()
        claimed = (await flows.claim())["b"]
        notified = flows.notifier.get_next_event(STEPS)
        await flows.work_source.settle("w", [(claimed, make_report(claimed))], [WORK], 1)
        assert notified.is_set()


async def test_waiting_claim_ends_when_the_engine_stops(flows: FlowsStepper) -> None:
    """F17: a waiting claim returns no steps at once, so that it does not delay the stop."""
    waiting = asyncio.create_task(flows.engine.claim("w", {WORK: 1}, limit=1, wait=3_600))
    await asyncio.sleep(0)
    flows.engine.stop()
    async with asyncio.timeout(20):
        assert await waiting == []
