"""A process dies before any statement and any call of the storage: the next one comes to the same end."""

import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.flows.contract import StepReportKind
from penstock.flows.model import ClaimedStep, StepError
from tests.flows.scenarios.crash_scenarios import is_consistent
from tests.flows.scenarios.statement_crash import StatementCrasher, statement_crasher
from tests.flows.stepper import (
    LEASE,
    WORK,
    FlowsStepper,
    ProcessDied,
    flow_step,
    flows_stepper,
    make_report,
    map_step,
    work,
)
from tests.support.soak import Campaign, examples

Act = Callable[[FlowsStepper], Awaitable[Any]]
Prepare = Callable[["ProcessSequence", FlowsStepper, str], Awaitable[Act]]
DAY = timedelta(days=1)
MOST = 20
ENDS = """
    SELECT r.run_id, r.status AS run_status, t.step_id, t.status, t.outputs, t.error, t.artifacts, t.fence
    FROM flow_run r LEFT JOIN flow_step t ON t.run = r.id WHERE starts_with(r.run_id, $1) ORDER BY r.run_id, t.n"""
UNENDED = """
    SELECT EXISTS (
            SELECT FROM flow_run WHERE status IN ('PENDING', 'RUNNING') OR parent_n IS NOT NULL AND NOT is_reported)
        OR EXISTS (SELECT FROM flow_step WHERE status IN ('PENDING', 'READY', 'RUNNING'))"""


class ProcessSequence:
    """One database on which processes come and go, and the time that passes meanwhile."""

    def __init__(self, url: str, folder: Path, statement_crasher: StatementCrasher) -> None:
        self._url, self._folder, self.statement_crasher = url, folder, statement_crasher
        self._now: datetime | None = None
        self.asked: list[Act] = []  # what a client who is not answered asks again
        self.claimed: set[tuple[str, str, int]] = set()
        self.flows: dict[str, Mapping[str, Any]] = {}

    def process(self) -> AbstractAsyncContextManager[FlowsStepper]:
        return flows_stepper(self._url, self._folder)

    def grown_older(self, one: FlowsStepper) -> None:
        """Time goes on where the last process left it."""
        if self._now is not None:
            one.clock.advance(self._now - one.clock.now())
        for name, flow in self.flows.items():
            one.catalogue.add(name, **flow)

    def left(self, one: FlowsStepper) -> None:
        self._now = one.clock.now()

    async def claim(self, one: FlowsStepper, limit: int = 1) -> dict[str, ClaimedStep]:
        """Take what there is; nobody ever had it under that fence."""
        held = await one.claim(limit)
        for claimed in held.values():
            what = (claimed.run_id, claimed.step_id, claimed.fence)
            assert what not in self.claimed
            self.claimed.add(what)
        return held

    async def go_on(self, one: FlowsStepper) -> None:
        """Do whatever is there to be done until nothing is."""
        for _ in range(MOST):
            one.clock.advance(LEASE + timedelta(seconds=1))
            for chore in ("reap", "publish_sealed", "settle_sub_runs", "start_waiting_runs", "start_scheduled_runs"):
                await getattr(one.maintenance, chore)()
            while held := await self.claim(one):
                for step in held.values():
                    await one.work_source.settle("w", [(step, await said(one, step))], [], 0)
            if not await one.db.fetchval(UNENDED):
                return
        raise AssertionError(f"not at an end after {MOST} rounds of chores")


async def said(one: FlowsStepper, held: ClaimedStep) -> Any:
    """What a worker says of a step: its name decides."""
    if held.step_id.startswith("bad"):
        return make_report(held, StepReportKind.FAILED, error=StepError("BROKEN", "it broke"))
    if held.step_id.startswith("leave"):
        await one.write(held)
        return make_report(held, outputs={"v": 1}, artifacts=["out.txt"])
    return make_report(held, outputs={"v": 1, "list": [1, 2]})


def settling(steps: Mapping[str, Any], *first: str, then: str) -> Prepare:
    """The report on step *then* once those before it are done."""

    async def prepare(life: ProcessSequence, one: FlowsStepper, name: str) -> Act:
        await one.start(steps, name)
        for done in first:
            held = (await life.claim(one))[done]
            await one.work_source.settle("w", [(held, await said(one, held))], [], 0)
        held = (await life.claim(one))[then]
        told = await said(one, held)

        async def act(one: FlowsStepper) -> None:
            await one.work_source.settle("w", [(held, told)], [WORK], 1)

        return act

    return prepare


def creating(steps: Mapping[str, Any]) -> Prepare:
    """A run is asked for."""

    async def prepare(life: ProcessSequence, _one: FlowsStepper, name: str) -> Act:
        async def act(one: FlowsStepper) -> None:
            await one.start(steps, name)

        life.asked.append(act)
        return act

    return prepare


async def reaping(life: ProcessSequence, one: FlowsStepper, name: str) -> Act:
    """Two workers are gone; one of their steps is in a run that has failed."""
    await one.start({"a": work(), "b": work("a")}, f"{name}.1")
    await one.start({"c": work(), "bad": work(), "d": work("c")}, f"{name}.2")
    held = await life.claim(one, 10)
    await one.work_source.settle("w", [(held["bad"], await said(one, held["bad"]))], [], 0)
    one.clock.advance(2 * LEASE)
    return lambda one: one.maintenance.reap()


async def telling(life: ProcessSequence, one: FlowsStepper, name: str) -> Act:
    """A run within has ended, and a step of another that is cancelled has one under way."""
    await one.start({"in": flow_step({"a": work()}), "z": work("in")}, f"{name}.1")
    await one.start({"in": flow_step({"b": work()}), "z": work("in")}, f"{name}.2")
    held = await life.claim(one, 10)
    await one.work_source.settle("w", [(held["a"], await said(one, held["a"]))], [], 0)
    await one.operations.cancel(f"{name}.2", "tester")
    return lambda one: one.settle_sub_runs()


async def admitting(life: ProcessSequence, one: FlowsStepper, name: str) -> Act:
    """Of three runs of a flow, one at a time, the first has ended."""
    life.flows[name] = {"steps": {"each": map_step([1, 2]), "z": work("each")}, "max_active_runs": 1}
    life.grown_older(one)
    for number in range(3):
        await one.start(None, f"{name}.{number}", flow=name)
    await one.operations.cancel(f"{name}.0", "tester")
    return lambda one: one.maintenance.start_waiting_runs()


async def keeping_schedule(life: ProcessSequence, one: FlowsStepper, name: str) -> Act:
    """The time of a flow has come."""
    schedule = {"cron": "0 0 * * *"}
    life.flows[name] = {"steps": {"a": work(), "in": flow_step({"b": work()}, "a")}, "schedule": schedule}
    life.grown_older(one)
    await one.maintenance.start_scheduled_runs()
    one.clock.advance(DAY)
    return lambda one: one.maintenance.start_scheduled_runs()


async def publishing(life: ProcessSequence, one: FlowsStepper, name: str) -> Act:
    """Who was told a report died before it published what was left."""
    await one.start({"leave": work(), "each": map_step("${steps.leave.outputs.list}", "leave")}, name)
    held = (await life.claim(one))["leave"]
    for file in ("a.txt", "b.txt"):
        await one.write(held, file)
    told = make_report(held, outputs={"list": [1, 2]}, artifacts=["a.txt", "b.txt"])
    one.storage.is_dying = True
    with pytest.raises(ProcessDied):
        await one.work_source.settle("w", [(held, told)], [], 0)
    one.storage.is_dying = False
    assert (await one.step("leave", name))["sealed"] is not None
    one.clock.advance(LEASE)
    return lambda one: one.maintenance.publish_sealed()


LEAVES = {"leave": work(), "b": work("leave")}
MAPS = {"a": work(), "each": map_step("${steps.a.outputs.list}", "a"), "z": work("each")}
INSIDE = {"a": work(), "in": flow_step({"b": work(), "leave": work("b")}, "a"), "z": work("in")}
FAILS = {"a": work(), "b": work("a"), "bad": work("a"), "z": work("bad", "b"), "end": work("z")}
SKIPS = {"a": work(), "b": work("a", when="steps.a.outputs.v == 2"), "c": work("b", onSkip="skip"), "z": work("c")}
ITEM_FAILS = {"bad": map_step([1, 2, 3]), "z": work("bad")}
ACTS: dict[str, Prepare] = {
    "create a chain": creating({"a": work(), "b": work("a")}),
    "create what begins with maps": creating(
        {"each": map_step([1, 2]), "in": flow_step({"a": work(), "e": map_step([1])})}
    ),
    "create nothing": creating({}),
    "report artifacts": settling(LEAVES, then="leave"),
    "pass on": settling({"a": work(), "b": work("a")}, then="a"),
    "settle the last": settling({"a": work(), "b": work("a")}, "a", then="b"),
    "settle before many": settling({"a": work(), "b": work("a"), "c": work("a"), "z": work("b", "c")}, then="a"),
    "settle before a map": settling(MAPS, then="a"),
    "settle the last item": settling(MAPS, "a", "each[0]", then="each[1]"),
    "settle before a flow": settling(INSIDE, then="a"),
    "settle before a condition": settling(SKIPS, then="a"),
    "settle a failure": settling(FAILS, "a", "b", then="bad"),
    "settle an item's failure": settling(ITEM_FAILS, then="bad[0]"),
    "reap": reaping,
    "tell the outer run": telling,
    "admit": admitting,
    "keep a schedule": keeping_schedule,
    "publish again": publishing,
}


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@pytest.mark.parametrize("name", ACTS)
async def test_the_next_process_comes_to_the_same_end(
    name: str, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, campaign: Campaign
) -> None:
    """F2–F7, F11, F14, F16: whatever was not said or written when a process died, the end is the same."""
    with statement_crasher(monkeypatch) as one:
        life = ProcessSequence(database_url, tmp_path, one)
        assert not await has_died(life, ACTS[name], 10_000, "whole")
        wanted, calls = await ends(life, "whole"), one.calls
        deaths: list[bool] = []
        for nth in range(1, calls + 1, examples(max(1, (calls + 1) // 2), soak=1)):
            try:
                deaths.append(await has_died(life, ACTS[name], nth, f"died{nth}x"))
                assert await ends(life, f"died{nth}x") == wanted
                campaign.end_round(faults=deaths[-1])
            except AssertionError as error:
                error.add_note(f"died at call {nth} of {calls}")
                raise
        assert deaths.count(False) <= 1 <= deaths.count(True)  # a seal is renewed beside: a call more, or less


async def has_died(life: ProcessSequence, prepare: Prepare, nth: int, name: str) -> bool:
    """Prepare, do it and die at the *nth* call; then others go on."""
    life.flows, life.asked = {}, []
    async with life.process() as first:
        life.grown_older(first)
        act = await prepare(life, first, name)
        is_dead = await life.statement_crasher.dies(lambda: act(first), nth)
        life.left(first)
    async with life.process() as other:
        life.grown_older(other)
        assert await other.maintenance.repair() == 0
        for again in life.asked:
            await again(other)
        await life.go_on(other)
        await is_consistent(other.db)
        life.left(other)
    return is_dead


async def ends(life: ProcessSequence, name: str) -> list[tuple[Any, ...]]:
    """How all ended, but for who did it, when, and which item was first; what was left is the winner's."""
    who = re.compile(rf"{name}|-\d{{8}}T\d{{6}}Z|(?<=bad)\[\d\]")
    async with life.process() as one:
        rows = await one.db.fetch(ENDS, name)
        for row in rows:
            for kept in row["artifacts"] or []:
                written = f"{row['run_id']}/{row['step_id']}/{row['fence']}".encode()
                assert (await one.storage.get(kept["path"])).data == written
    return sorted(
        (
            who.sub("", f"{row['run_id']}/{row['step_id']}"),
            row["run_status"],
            row["status"],
            who.sub("", str(row["outputs"])),
            str(row["error"] and row["error"]["code"]),
            [kept["name"] for kept in row["artifacts"] or []],
        )
        for row in rows
    )
