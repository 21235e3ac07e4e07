"""What the maintenance of flows does by itself: it repairs counters and keeps schedules."""

from datetime import timedelta
from typing import Any

import pytest

from penstock.flows import maintenance
from penstock.kernel.errors import Invalid
from tests.flows.scenarios.test_limits import EVERY_MINUTE
from tests.flows.stepper import DIAMOND, FlowsStepper, flow_step, map_step, work


@pytest.mark.parametrize("harm", ["unmet = unmet + 1", "unmet = 0"])
async def test_the_sweep_repairs_counters(flows: FlowsStepper, harm: str) -> None:
    """F3: what a crash, or a hand in the database, left wrong is set right, and the run goes on to its end."""
    await flows.start({**DIAMOND, "m": map_step([1, 2], "a"), "z": work("m", "d")})
    await flows.work()
    await flows.start({**DIAMOND, "m": map_step([1, 2], "a"), "z": work("m", "d")}, "other")
    held = await flows.claim(1)
    await flows.report(held["a"])
    await flows.db.execute(f"UPDATE flow_step SET {harm} WHERE status = 'PENDING' OR kind = 'map'")
    await flows.db.execute("UPDATE flow_step SET status = 'PENDING', unmet = 5 WHERE status = 'READY'")
    await flows.maintenance.repair()
    await flows.work()
    await flows.maintenance.repair()
    await flows.work()
    assert await flows.status("other") == "SUCCEEDED"
    assert set((await flows.steps("other")).values()) == {"SUCCEEDED"}


@pytest.mark.parametrize(
    ("catch_up", "expected"),
    [("none", ["05"]), ("last", ["05"]), ("all", ["01", "02", "03", "04", "05"])],
)
async def test_a_schedule_catches_up_as_it_says(flows: FlowsStepper, catch_up: str, expected: list[str]) -> None:
    """F16: of the times that passed unseen none, the last or all are made up for; the one that is now is kept."""
    schedule = {"cron": "* * * * *", "catchUp": catch_up, "overlap": True}
    flows.catalogue.add("tick", {"a": work()}, schedule=schedule)
    await flows.maintenance.start_scheduled_runs()
    flows.clock.advance(timedelta(minutes=5, seconds=10))
    for _ in range(8):
        await flows.maintenance.start_scheduled_runs()
    rows = await flows.db.fetch("SELECT run_id, scheduled_for FROM flow_run ORDER BY id")
    assert [row["run_id"] for row in rows] == [f"tick-20260101T00{minute}00Z" for minute in expected]
    assert [f"{row['scheduled_for']:%M}" for row in rows] == expected


async def test_a_schedule_that_is_not_due_writes_nothing(flows: FlowsStepper) -> None:
    """F3, F16: looking whether it is time leaves no trace, however often it is done."""
    flows.catalogue.add("tick", {"a": work()}, schedule={"cron": "0 0 * * *"})
    await flows.maintenance.start_scheduled_runs()
    before = await flows.db.fetchrow("SELECT xmin, ctid FROM flow_schedule")
    for _ in range(3):
        await flows.maintenance.start_scheduled_runs()
    assert await flows.db.fetchrow("SELECT xmin, ctid FROM flow_schedule") == before


async def test_a_schedule_does_not_overlap(flows: FlowsStepper) -> None:
    """F16: while its last run is under way no other is started; afterwards it goes on."""
    flows.catalogue.add("tick", {"a": work()}, schedule={"cron": "* * * * *"})
    await flows.maintenance.start_scheduled_runs()
    for _ in range(3):
        flows.clock.advance(timedelta(minutes=1))
        await flows.maintenance.start_scheduled_runs()
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run") == 1
    await flows.work()
    await flows.maintenance.start_scheduled_runs()
    flows.clock.advance(timedelta(minutes=1))
    await flows.maintenance.start_scheduled_runs()
    names = [row["run_id"] for row in await flows.db.fetch("SELECT run_id FROM flow_run ORDER BY id")]
    assert names == ["tick-20260101T000100Z", "tick-20260101T000400Z"]


async def test_a_flow_within_gives_no_more_than_a_step_may(
    flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F14: what is more is left out, and it is told."""
    monkeypatch.setattr(maintenance, "DOCUMENT_LIMIT", 1_000)
    await flows.start({"f": flow_step({"a": work(), "b": work()}), "z": work("f")})
    for one in (await flows.claim()).values():
        await flows.report(one, outputs={"text": "x" * 600})
    await flows.settle_sub_runs()
    assert (await flows.step("f"))["outputs"] == {"runId": "r~f", "outputs": None, "truncated": True}


async def test_an_inner_run_that_cannot_be_told_does_not_hold_up_the_others(
    flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F14: the steps of the others end."""
    for name in ("x", "y"):
        await flows.start({"f": flow_step({"a": work()})}, name)
    await flows.work()
    outcome = maintenance._make_parent_end

    async def refused(tx: Any, row: Any, told: Any) -> Any:
        if told["run_id"] == "x~f":
            raise Invalid("BROKEN", "it cannot be told")
        return await outcome(tx, row, told)

    monkeypatch.setattr(maintenance, "_make_parent_end", refused)
    await flows.maintenance.settle_sub_runs()
    assert [await flows.status(name) for name in ("x", "y")] == ["RUNNING", "SUCCEEDED"]


async def test_a_flow_that_makes_no_sense_does_not_hold_up_the_others(flows: FlowsStepper) -> None:
    """F16: the schedules after it are kept."""
    flows.catalogue.add("a" * 95, {"a": work()}, schedule=EVERY_MINUTE)
    flows.catalogue.add("b", {"a": work()}, schedule=EVERY_MINUTE)
    for _ in range(2):
        await flows.maintenance.start_scheduled_runs()
        flows.clock.advance(timedelta(minutes=1))
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run WHERE flow = 'b'") == 1
