"""A process dies before any statement or call of the storage: the next process reaches the same end."""

import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.flows.contract import StepReportKind
from penstock.flows.model import ClaimedStep, StepError
from tests.flows.scenarios.crash_scenarios import check_consistency
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
ROUND_LIMIT = 20
ENDS = """
    SELECT r.run_id, r.status AS run_status, t.step_id, t.status, t.outputs, t.error, t.artifacts, t.fence
    FROM flow_run r LEFT JOIN flow_step t ON t.run = r.id WHERE starts_with(r.run_id, $1) ORDER BY r.run_id, t.n"""
UNENDED = """
    SELECT EXISTS (
            SELECT FROM flow_run WHERE status IN ('PENDING', 'RUNNING') OR parent_n IS NOT NULL AND NOT is_reported)
        OR EXISTS (SELECT FROM flow_step WHERE status IN ('PENDING', 'READY', 'RUNNING'))"""


class ProcessSequence:
    """Successive processes on one database, with the time that passes between them."""

    def __init__(self, url: str, folder: Path, statement_crasher: StatementCrasher) -> None:
        self._url, self._folder, self.statement_crasher = url, folder, statement_crasher
        self._now: datetime | None = None
        self.requests: list[Act] = []  # requests that a client without a response repeats
        self.claimed: set[tuple[str, str, int]] = set()
        self.flows: dict[str, Mapping[str, Any]] = {}

    def process(self) -> AbstractAsyncContextManager[FlowsStepper]:
        return flows_stepper(self._url, self._folder)

    def restore_clock(self, flows: FlowsStepper) -> None:
        """Set the clock to the time at which the last process ended."""
        if self._now is not None:
            flows.clock.advance(self._now - flows.clock.now())
        for name, flow in self.flows.items():
            flows.catalogue.add(name, **flow)

    def save_clock(self, flows: FlowsStepper) -> None:
        self._now = flows.clock.now()

    async def claim(self, flows: FlowsStepper, limit: int = 1) -> dict[str, ClaimedStep]:
        """Claim steps; no step was claimed under the same fence before."""
        claimed = await flows.claim(limit)
        for step in claimed.values():
            name = (step.run_id, step.step_id, step.fence)
            assert name not in self.claimed
            self.claimed.add(name)
        return claimed

    async def run_to_end(self, flows: FlowsStepper) -> None:
        """Execute maintenance and steps until all runs have ended."""
        for _ in range(ROUND_LIMIT):
            flows.clock.advance(LEASE + timedelta(seconds=1))
            for task in ("reap", "publish_sealed", "settle_sub_runs", "start_waiting_runs", "start_scheduled_runs"):
                await getattr(flows.maintenance, task)()
            while claimed := await self.claim(flows):
                for step in claimed.values():
                    await flows.work_source.settle("w", [(step, await make_step_report(flows, step))], [], 0)
            if not await flows.db.fetchval(UNENDED):
                return
        raise AssertionError(f"not at an end after {ROUND_LIMIT} rounds of maintenance")


async def make_step_report(flows: FlowsStepper, claimed: ClaimedStep) -> Any:
    """Return the report on a step, which depends on its name."""
    if claimed.step_id.startswith("bad"):
        return make_report(claimed, StepReportKind.FAILED, error=StepError("BROKEN", "it broke"))
    if claimed.step_id.startswith("leave"):
        await flows.write(claimed)
        return make_report(claimed, outputs={"v": 1}, artifacts=["out.txt"])
    return make_report(claimed, outputs={"v": 1, "list": [1, 2]})


def prepare_settle(steps: Mapping[str, Any], *first: str, then: str) -> Prepare:
    """Prepare the report on step *then*, after its dependencies have ended."""

    async def prepare(sequence: ProcessSequence, flows: FlowsStepper, name: str) -> Act:
        await flows.start(steps, name)
        for done in first:
            claimed = (await sequence.claim(flows))[done]
            await flows.work_source.settle("w", [(claimed, await make_step_report(flows, claimed))], [], 0)
        claimed = (await sequence.claim(flows))[then]
        report = await make_step_report(flows, claimed)

        async def act(flows: FlowsStepper) -> None:
            await flows.work_source.settle("w", [(claimed, report)], [WORK], 1)

        return act

    return prepare


def prepare_create(steps: Mapping[str, Any]) -> Prepare:
    """Prepare the creation of a run."""

    async def prepare(sequence: ProcessSequence, _flows: FlowsStepper, name: str) -> Act:
        async def act(flows: FlowsStepper) -> None:
            await flows.start(steps, name)

        sequence.requests.append(act)
        return act

    return prepare


async def prepare_reap(sequence: ProcessSequence, flows: FlowsStepper, name: str) -> Act:
    """Prepare the expiry of the leases of two workers; one of their steps is in a failed run."""
    await flows.start({"a": work(), "b": work("a")}, f"{name}.1")
    await flows.start({"c": work(), "bad": work(), "d": work("c")}, f"{name}.2")
    claimed = await sequence.claim(flows, 10)
    await flows.work_source.settle("w", [(claimed["bad"], await make_step_report(flows, claimed["bad"]))], [], 0)
    flows.clock.advance(2 * LEASE)
    return lambda flows: flows.maintenance.reap()


async def prepare_sub_runs(sequence: ProcessSequence, flows: FlowsStepper, name: str) -> Act:
    """Prepare an ended sub-run, and an active sub-run of a cancelled run."""
    await flows.start({"in": flow_step({"a": work()}), "z": work("in")}, f"{name}.1")
    await flows.start({"in": flow_step({"b": work()}), "z": work("in")}, f"{name}.2")
    claimed = await sequence.claim(flows, 10)
    await flows.work_source.settle("w", [(claimed["a"], await make_step_report(flows, claimed["a"]))], [], 0)
    await flows.operations.cancel(f"{name}.2", "tester")
    return lambda flows: flows.settle_sub_runs()


async def prepare_waiting_runs(sequence: ProcessSequence, flows: FlowsStepper, name: str) -> Act:
    """Prepare three runs of a flow with one active run at a time, of which the first has ended."""
    sequence.flows[name] = {"steps": {"each": map_step([1, 2]), "z": work("each")}, "max_active_runs": 1}
    sequence.restore_clock(flows)
    for number in range(3):
        await flows.start(None, f"{name}.{number}", flow=name)
    await flows.operations.cancel(f"{name}.0", "tester")
    return lambda flows: flows.maintenance.start_waiting_runs()


async def prepare_schedule(sequence: ProcessSequence, flows: FlowsStepper, name: str) -> Act:
    """Prepare a flow whose schedule is due."""
    schedule = {"cron": "0 0 * * *"}
    sequence.flows[name] = {"steps": {"a": work(), "in": flow_step({"b": work()}, "a")}, "schedule": schedule}
    sequence.restore_clock(flows)
    await flows.maintenance.start_scheduled_runs()
    flows.clock.advance(DAY)
    return lambda flows: flows.maintenance.start_scheduled_runs()


async def prepare_publication(sequence: ProcessSequence, flows: FlowsStepper, name: str) -> Act:
    """Prepare an accepted report whose process died before the publication."""
    await flows.start({"leave": work(), "each": map_step("${steps.leave.outputs.list}", "leave")}, name)
    claimed = (await sequence.claim(flows))["leave"]
    for file in ("a.txt", "b.txt"):
        await flows.write(claimed, file)
    report = make_report(claimed, outputs={"list": [1, 2]}, artifacts=["a.txt", "b.txt"])
    flows.storage.is_dying = True
    with pytest.raises(ProcessDied):
        await flows.work_source.settle("w", [(claimed, report)], [], 0)
    flows.storage.is_dying = False
    assert (await flows.step("leave", name))["sealed"] is not None
    flows.clock.advance(LEASE)
    return lambda flows: flows.maintenance.publish_sealed()


LEAVES = {"leave": work(), "b": work("leave")}
MAPS = {"a": work(), "each": map_step("${steps.a.outputs.list}", "a"), "z": work("each")}
INSIDE = {"a": work(), "in": flow_step({"b": work(), "leave": work("b")}, "a"), "z": work("in")}
FAILS = {"a": work(), "b": work("a"), "bad": work("a"), "z": work("bad", "b"), "end": work("z")}
SKIPS = {"a": work(), "b": work("a", when="steps.a.outputs.v == 2"), "c": work("b", onSkip="skip"), "z": work("c")}
ITEM_FAILS = {"bad": map_step([1, 2, 3]), "z": work("bad")}
ACTS: dict[str, Prepare] = {
    "create a chain": prepare_create({"a": work(), "b": work("a")}),
    "create with a map first": prepare_create(
        {"each": map_step([1, 2]), "in": flow_step({"a": work(), "e": map_step([1])})}
    ),
    "create an empty flow": prepare_create({}),
    "report artifacts": prepare_settle(LEAVES, then="leave"),
    "settle and prefetch": prepare_settle({"a": work(), "b": work("a")}, then="a"),
    "settle the last step": prepare_settle({"a": work(), "b": work("a")}, "a", then="b"),
    "settle before several steps": prepare_settle(
        {"a": work(), "b": work("a"), "c": work("a"), "z": work("b", "c")}, then="a"
    ),
    "settle before a map": prepare_settle(MAPS, then="a"),
    "settle the last item": prepare_settle(MAPS, "a", "each[0]", then="each[1]"),
    "settle before a flow": prepare_settle(INSIDE, then="a"),
    "settle before a condition": prepare_settle(SKIPS, then="a"),
    "settle a failure": prepare_settle(FAILS, "a", "b", then="bad"),
    "settle the failure of an item": prepare_settle(ITEM_FAILS, then="bad[0]"),
    "reap": prepare_reap,
    "settle sub-runs": prepare_sub_runs,
    "start waiting runs": prepare_waiting_runs,
    "start scheduled runs": prepare_schedule,
    "publish sealed steps": prepare_publication,
}


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@pytest.mark.parametrize("name", ACTS)
async def test_next_process_reaches_the_same_end(
    name: str, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, campaign: Campaign
) -> None:
    """F2–F7, F11, F14, F16: the end is the same at whatever statement a process died."""
    with statement_crasher(monkeypatch) as crasher:
        sequence = ProcessSequence(database_url, tmp_path, crasher)
        assert not await has_died(sequence, ACTS[name], 10_000, "whole")
        expected, calls = await read_ends(sequence, "whole"), crasher.calls
        deaths: list[bool] = []
        for nth in range(1, calls + 1, examples(max(1, (calls + 1) // 2), soak=1)):
            try:
                deaths.append(await has_died(sequence, ACTS[name], nth, f"died{nth}x"))
                assert await read_ends(sequence, f"died{nth}x") == expected
                campaign.end_round(faults=deaths[-1])
            except AssertionError as error:
                error.add_note(f"died at call {nth} of {calls}")
                raise
        assert deaths.count(False) <= 1 <= deaths.count(True)  # a background task may add or remove one call


async def has_died(sequence: ProcessSequence, prepare: Prepare, nth: int, name: str) -> bool:
    """Prepare and execute the act, and die at the *nth* call; then let another process continue."""
    sequence.flows, sequence.requests = {}, []
    async with sequence.process() as first:
        sequence.restore_clock(first)
        act = await prepare(sequence, first, name)
        is_dead = await sequence.statement_crasher.run_until_crash(lambda: act(first), nth)
        sequence.save_clock(first)
    async with sequence.process() as other:
        sequence.restore_clock(other)
        assert await other.maintenance.repair() == 0
        for again in sequence.requests:
            await again(other)
        await sequence.run_to_end(other)
        await check_consistency(other.db)
        sequence.save_clock(other)
    return is_dead


async def read_ends(sequence: ProcessSequence, name: str) -> list[tuple[Any, ...]]:
    """Return the end of all steps, without worker, time and the order of items; check the artifacts."""
    masked = re.compile(rf"{name}|-\d{{8}}T\d{{6}}Z|(?<=bad)\[\d\]")
    async with sequence.process() as flows:
        rows = await flows.db.fetch(ENDS, name)
        for row in rows:
            for artifact in row["artifacts"] or []:
                content = f"{row['run_id']}/{row['step_id']}/{row['fence']}".encode()
                assert (await flows.storage.get(artifact["path"])).data == content
    return sorted(
        (
            masked.sub("", f"{row['run_id']}/{row['step_id']}"),
            row["run_status"],
            row["status"],
            masked.sub("", str(row["outputs"])),
            str(row["error"] and row["error"]["code"]),
            [artifact["name"] for artifact in row["artifacts"] or []],
        )
        for row in rows
    )
