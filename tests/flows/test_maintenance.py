"""Maintenance of flows: repair of counters, schedules, and sub-runs."""

from datetime import timedelta
from typing import Any

import pytest

from penstock.flows import maintenance
from penstock.kernel.errors import Invalid
from tests.flows.scenarios.test_limits import EVERY_MINUTE
from tests.flows.stepper import DIAMOND, FlowsStepper, flow_step, map_step, work


@pytest.mark.parametrize("harm", ["unmet = unmet + 1", "unmet = 0"])
async def test_repair_fixes_counters(flows: FlowsStepper, harm: str) -> None:
    """F3: wrong counters after a crash or a manual change are repaired, and the run continues to its end."""
    await flows.start({**DIAMOND, "m": map_step([1, 2], "a"), "z": work("m", "d")})
    await flows.work()
    await flows.start({**DIAMOND, "m": map_step([1, 2], "a"), "z": work("m", "d")}, "other")
    claimed = await flows.claim(1)
    await flows.report(claimed["a"])
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
async def test_schedule_catches_up(flows: FlowsStepper, catch_up: str, expected: list[str]) -> None:
    """F16: of the missed times none, the last or all are caught up; the present time starts a run."""
    schedule = {"cron": "* * * * *", "catchUp": catch_up, "overlap": True}
    flows.catalogue.add("tick", {"a": work()}, schedule=schedule)
    await flows.maintenance.start_scheduled_runs()
    flows.clock.advance(timedelta(minutes=5, seconds=10))
    for _ in range(8):
        await flows.maintenance.start_scheduled_runs()
    rows = await flows.db.fetch("SELECT run_id, scheduled_for FROM flow_run ORDER BY id")
    assert [row["run_id"] for row in rows] == [f"tick-20260101T00{minute}00Z" for minute in expected]
    assert [f"{row['scheduled_for']:%M}" for row in rows] == expected


async def test_schedule_that_is_not_due_writes_nothing(flows: FlowsStepper) -> None:
    """F3, F16: an evaluation before the due time writes no row."""
    flows.catalogue.add("tick", {"a": work()}, schedule={"cron": "0 0 * * *"})
    await flows.maintenance.start_scheduled_runs()
    before = await flows.db.fetchrow("SELECT xmin, ctid FROM flow_schedule")
    for _ in range(3):
        await flows.maintenance.start_scheduled_runs()
    assert await flows.db.fetchrow("SELECT xmin, ctid FROM flow_schedule") == before


async def test_scheduled_runs_do_not_overlap(flows: FlowsStepper) -> None:
    """F16: no run starts while the previous run is active; afterwards the schedule continues."""
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


async def test_outputs_of_sub_runs_are_limited(flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: outputs above the limit are omitted, and `truncated` is true."""
    monkeypatch.setattr(maintenance, "DOCUMENT_LIMIT", 1_000)
    await flows.start({"f": flow_step({"a": work(), "b": work()}), "z": work("f")})
    for step in (await flows.claim()).values():
        await flows.report(step, outputs={"text": "x" * 600})
    await flows.settle_sub_runs()
    assert (await flows.step("f"))["outputs"] == {"runId": "r~f", "outputs": None, "truncated": True}


async def test_failed_report_of_a_sub_run_does_not_delay_others(
    flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F14: the steps of the other sub-runs end."""
    for name in ("x", "y"):
        await flows.start({"f": flow_step({"a": work()})}, name)
    await flows.work()
    outcome = maintenance._make_parent_end

    async def refuse(tx: Any, row: Any, sub_run: Any) -> Any:
        if sub_run["run_id"] == "x~f":
            raise Invalid("BROKEN", "it cannot be reported")
        return await outcome(tx, row, sub_run)

    monkeypatch.setattr(maintenance, "_make_parent_end", refuse)
    await flows.maintenance.settle_sub_runs()
    assert [await flows.status(name) for name in ("x", "y")] == ["RUNNING", "SUCCEEDED"]


async def test_invalid_schedule_does_not_delay_others(flows: FlowsStepper) -> None:
    """F16: the schedules of the other flows start their runs."""
    flows.catalogue.add("a" * 95, {"a": work()}, schedule=EVERY_MINUTE)
    flows.catalogue.add("b", {"a": work()}, schedule=EVERY_MINUTE)
    for _ in range(2):
        await flows.maintenance.start_scheduled_runs()
        flows.clock.advance(timedelta(minutes=1))
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run WHERE flow = 'b'") == 1
