"""Each clause by an example: what a run does when one thing happens."""

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


async def test_a_diamond_is_done_in_order(flows: FlowsStepper) -> None:
    """F1, F3: a step is READY once all it depends on has ended well, and not before."""
    await flows.start(DIAMOND)
    assert await flows.steps() == {"a": "READY", "b": "PENDING", "c": "PENDING", "d": "PENDING"}
    held = await flows.claim()
    assert await flows.steps() == {"a": "RUNNING", "b": "PENDING", "c": "PENDING", "d": "PENDING"}
    await flows.report(held["a"])
    held = await flows.claim()
    assert held.keys() == {"b", "c"}
    await flows.report(held["b"])
    assert await flows.steps() == {"a": "SUCCEEDED", "b": "SUCCEEDED", "c": "RUNNING", "d": "PENDING"}
    assert await flows.status() == "RUNNING"
    await flows.report(held["c"])
    assert await flows.work() == ["d"]
    assert await flows.status() == "SUCCEEDED"


async def test_nothing_follows_from_what_changes_nothing(flows: FlowsStepper) -> None:
    """F3: reports that repeat or come late, sweeps and looks on a run that stands as it should touch no row."""
    await flows.start({**DIAMOND, "m": map_step([1, 2]), "n": flow_step({"x": work()})})
    held = await flows.claim()
    await flows.report(held["a"], outputs={"v": 1})
    await flows.report(held["m[0]"], StepReportKind.FAILED)
    before = await flows.fingerprint()
    assert await flows.report(held["a"], outputs={"v": 1}) is StepReportAnswer.UNCHANGED
    assert await flows.report(held["a"], outputs={"v": 2}) is StepReportAnswer.CONFLICT
    assert await flows.report(held["m[0]"], StepReportKind.FAILED) is StepReportAnswer.UNCHANGED
    stranger = StepReport("r", "a", 99, StepReportKind.SUCCEEDED)
    unknown = StepReport("r", "nobody", 1, StepReportKind.SUCCEEDED)
    assert await flows.engine.report([stranger, unknown]) == [StepReportAnswer.SUPERSEDED, StepReportAnswer.UNKNOWN]
    assert await flows.engine.heartbeat([("r", "a", held["a"].fence), ("r", "nobody", 1)]) == {}
    assert await flows.engine.reap() == 0
    assert await flows.maintenance.repair() == 0
    for chore in (
        flows.maintenance.start_waiting_runs,
        flows.maintenance.start_scheduled_runs,
        flows.maintenance.publish_sealed,
        flows.maintenance.settle_sub_runs,
    ):
        await chore()
    async with flows.db.transaction() as tx:
        run = await flows.engine.find_run(tx, "r")
        told = await store.advance(tx, [run], flows.clock.now())
        assert (told.ready, told.to_evaluate, told.runs) == (set(), [], [])
    assert await flows.fingerprint() == before


async def test_a_heartbeat_is_no_move(flows: FlowsStepper) -> None:
    """F3: it extends a lease, and that is all: nothing is noted, nobody is woken."""
    await flows.start(DIAMOND)
    held = await flows.claim()
    _, noted, notified = await flows.fingerprint()
    flows.clock.advance(timedelta(seconds=30))
    assert await flows.engine.heartbeat([("r", "a", 1)]) == {("r", "a", 1): False}
    assert (await flows.fingerprint())[1:] == (noted, notified)
    assert (await flows.step("a"))["lease_until"] == held["a"].lease_until + timedelta(seconds=30)


# F4, F5: claims and reports.


async def test_a_claim_is_one_workers(flows: FlowsStepper) -> None:
    """F4: what is held is not handed out again; each claim has a fence of its own."""
    await flows.start({"a": work(), "b": work()})
    first, second = await flows.claim(1, "one"), await flows.claim(9, "two")
    assert (list(first), list(second)) == (["a"], ["b"])
    assert await flows.claim(9, "three") == {}
    await flows.report(first["a"], StepReportKind.RELEASED)
    again = await flows.claim(9, "three")
    assert (again["a"].fence, again["a"].attempt) == (first["a"].fence + 1, 1)


async def test_an_old_fence_changes_nothing(flows: FlowsStepper) -> None:
    """F4: the worker that lost its step is told so, whatever it says."""
    await flows.start({"a": work()})
    old = (await flows.claim())["a"]
    await flows.expire_leases()
    new = (await flows.claim(worker="other"))["a"]
    before = await flows.fingerprint()
    for said in StepReportKind:
        assert await flows.report(old, said) is StepReportAnswer.SUPERSEDED
    answers, _ = await flows.work_source.settle("w", [(old, make_report(old))], ["work"], 5)
    assert answers == [StepReportAnswer.SUPERSEDED]
    assert await flows.fingerprint() == before
    assert await flows.report(new, outputs={"v": 2}) is StepReportAnswer.SETTLED
    assert await flows.report(old, outputs={"v": 1}) is StepReportAnswer.SUPERSEDED
    assert (await flows.step("a"))["outputs"] == {"v": 2}


# F9–F11: cancel, retry, skip, lost leases.


async def test_a_lease_ends_with_the_time_a_step_may_take(flows: FlowsStepper) -> None:
    """F11: no heartbeat carries an attempt much beyond its timeout."""
    await flows.start({"a": work(timeout=90)})
    await flows.claim()
    for _ in range(2):
        flows.clock.advance(timedelta(seconds=50))
        await flows.engine.heartbeat([("r", "a", 1)])
    step = await flows.step("a")
    assert timedelta(seconds=90) <= step["lease_until"] - step["started_at"] <= timedelta(seconds=100)


# F16: limits and schedules.


async def test_a_flow_has_so_many_runs_at_once(flows: FlowsStepper) -> None:
    """F16: the others wait as PENDING, and begin in order."""
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


async def test_a_kind_has_so_many_steps_at_once(database_url: str, tmp_path: Path) -> None:
    """F16: whoever asks, and whatever a report frees."""
    async with flows_stepper(database_url, tmp_path, limits={"work": 2}) as flows:
        await flows.start({f"s{n}": work() for n in range(5)} | {"t": work("s0")})
        held = await flows.claim(worker="one")
        assert len(held) == 2
        assert await flows.claim(worker="two") == {}
        told = [(held["s0"], make_report(held["s0"]))]
        _, handed = await flows.work_source.settle("one", told, ["work"], 5)
        assert list(handed) == []
        assert len(await flows.claim(worker="two")) == 1


async def test_a_step_that_has_its_turn_again_is_told_at_once(flows: FlowsStepper) -> None:
    """F10, F17: who waits for a step need not wait for the next look."""
    await flows.start({"a": work(retry=AGAIN), "b": work(), "c": work()})
    held = await flows.claim()
    for name, said, is_reported in (
        ("a", StepReportKind.FAILED, True),
        ("b", StepReportKind.RELEASED, True),
        ("c", StepReportKind.SUCCEEDED, False),
    ):
        notified = flows.notifier.next_event(STEPS)
        await flows.report(held[name], said)
        assert notified.is_set() is is_reported, name


async def test_the_end_of_a_limited_kind_is_anothers_turn(database_url: str, tmp_path: Path) -> None:
    """F16: it is told at once, also when nothing has its turn by it."""
    async with flows_stepper(database_url, tmp_path, limits={WORK: 1}) as flows:
        await flows.start({"a": work(), "b": work()})
        held = (await flows.claim())["a"]
        notified = flows.notifier.next_event(STEPS)
        await flows.report(held)
        assert notified.is_set()
        held = (await flows.claim())["b"]
        notified = flows.notifier.next_event(STEPS)
        await flows.work_source.settle("w", [(held, make_report(held))], [WORK], 1)
        assert notified.is_set()


async def test_who_waits_is_let_go_when_the_engine_stops(flows: FlowsStepper) -> None:
    """F17: a claim that waits for a step is answered with none, at once, so that nobody is waited for."""
    waiting = asyncio.create_task(flows.engine.claim("w", {WORK: 1}, limit=1, wait=3_600))
    await asyncio.sleep(0)
    flows.engine.stop()
    async with asyncio.timeout(20):
        assert await waiting == []
