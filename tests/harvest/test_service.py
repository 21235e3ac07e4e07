"""Actions of operators: runs are started, taken up again, forced and cancelled."""

import asyncio
from uuid import UUID

import pytest

from penstock.harvest import contract
from penstock.kernel.errors import Conflict, Transient
from tests.harvest.api_client import HarvestApiClient
from tests.harvest.harness import HarvestHarness
from tests.harvest.stepper import FEED


async def test_one_run_at_a_time(harness: HarvestHarness) -> None:
    """H2: of those who start a run at once one does; the others are told which is under way."""
    for count in (1, 2):
        starts = await asyncio.gather(*(harness.start() for _ in range(8)), return_exceptions=True)
        refused = [start for start in starts if isinstance(start, Conflict)]
        [run_id] = [start for start in starts if isinstance(start, UUID)]
        assert len(refused) == 7
        assert {(error.code, error.details["runId"]) for error in refused} == {("RUN_ACTIVE", str(run_id))}
        async with harness.run_workers():
            await harness.wait_for_end(run_id)
        assert await harness.db.fetchval("SELECT count(*) FROM run_metadata") == count


async def test_what_failed_is_taken_up_again(api: HarvestApiClient) -> None:
    """H13, H11: one partition, then all that failed; what was not asked for stays failed."""
    run_id = await api.fail_run()
    run = await api.get(f"/runs/{run_id}")
    assert (run["state"], run["status"]) == ("consolidation_skipped", "failed")
    assert run["failedWorkers"] == run["expectedWorkers"]
    assert "partitions failed" in run["error"]
    alerts = (await api.get(f"/feeds/{FEED}/alerts"))["alerts"]
    assert [(alert["code"], alert["runId"], alert["isSettled"]) for alert in alerts] == [
        ("CONSOLIDATION_SKIPPED", run_id, False)
    ]
    one = await api.post(f"/runs/{run_id}/partitions/partition-0/retry")
    assert one == {"partitions": ["partition-0"]}
    again = await api.get(f"/runs/{run_id}")
    assert (again["state"], again["failedWorkers"]) == ("workers_running", run["failedWorkers"] - 1)
    assert again["error"] is None
    rest = await api.post(f"/runs/{run_id}/retry")
    assert len(rest["partitions"]) == run["failedWorkers"] - 1
    await api.stepper.finish()
    done = await api.get(f"/runs/{run_id}")
    assert (done["state"], done["records"]) == ("completed", 120)
    revived = [one for one in done["history"] if (one["from"], one["to"]) == ("failed", "running")]
    assert {one["actor"] for one in revived} == {"operator"}


async def test_a_failed_consolidation_is_taken_up_again(api: HarvestApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """H13, H11: where all partitions are there, retry means consolidation."""

    async def down(*_: object) -> None:
        raise Transient("STORAGE_DOWN", "nobody is there")

    run_id = await api.stepper.plan_run()
    await api.stepper.drain(contract.WORK_ITEMS)
    with monkeypatch.context() as broken:
        broken.setattr(api.stepper.storage, "create", down)
        await api.stepper.drain(contract.CONSOLIDATIONS)
    run = await api.get(f"/runs/{run_id}")
    assert (run["state"], run["failedWorkers"]) == ("failed", 0)
    assert "STORAGE_DOWN" in run["error"]
    assert await api.refused(f"/runs/{run_id}/partitions/partition-0/retry") == (409, "NOTHING_FAILED")
    assert await api.post(f"/runs/{run_id}/retry") == {"partitions": []}
    await api.stepper.drain(contract.CONSOLIDATIONS)
    assert (await api.get(f"/runs/{run_id}"))["state"] == "completed"


async def test_force_and_cancel_are_kept_with_the_run(api: HarvestApiClient) -> None:
    """H13, H5: who and why, in the run, its history and an alert."""
    run_id = str(await api.stepper.plan_run())
    cancelled = await api.post(f"/runs/{run_id}/cancel", {"reason": "wrong day"})
    assert (cancelled["state"], cancelled["runId"]) == ("consolidation_skipped", run_id)
    errors = {one["error"] for one in (await api.get(f"/runs/{run_id}/partitions"))["partitions"]}
    assert errors == {"CANCELLED: by operator: wrong day"}
    forced = await api.post(f"/runs/{run_id}/force", {"reason": "half will do"})
    assert (forced["state"], forced["status"]) == ("consolidating", "failed")
    assert (forced["forcedBy"], forced["forceReason"]) == ("operator", "half will do")
    assert "forced: half will do" in [one["reason"] for one in (await api.get(f"/runs/{run_id}"))["history"]]
    alerts = (await api.get(f"/feeds/{FEED}/alerts"))["alerts"]
    assert [alert["code"] for alert in alerts] == ["RUN_FORCED", "CONSOLIDATION_SKIPPED"]
    assert "half will do" in alerts[0]["message"]
    assert len((await api.get(f"/feeds/{FEED}/alerts", limit=1))["alerts"]) == 1


async def test_a_plan_is_cancelled(api: HarvestApiClient) -> None:
    """H13: a run that is not one yet ends at once, and the feed is free again."""
    run_id = (await api.post(f"/feeds/{FEED}/runs"))["runId"]
    told = await api.post(f"/runs/{run_id}/cancel", {"reason": "typo"})
    assert (told["state"], told["status"], told["error"]) == ("failed", "failed", "CANCELLED: by operator: typo")
    await api.stepper.drain(contract.PLANS)
    assert (await api.get(f"/runs/{run_id}"))["state"] == "failed"
    await api.post(f"/feeds/{FEED}/runs")


async def test_what_a_state_does_not_allow(api: HarvestApiClient) -> None:
    """H13: 409 with a code that stays, and nothing changed."""
    first = await api.fail_run()
    active = (await api.post(f"/feeds/{FEED}/runs"))["runId"]
    answer = await api.http.post(f"/feeds/{FEED}/runs")
    assert (answer.status_code, answer.json()["code"], answer.json()["runId"]) == (409, "RUN_ACTIVE", active)
    assert "hint" in answer.json()
    because = {"reason": "please"}
    assert await api.refused(f"/runs/{first}/retry") == (409, "RUN_ACTIVE")
    assert await api.refused(f"/runs/{first}/force", because) == (409, "RUN_ACTIVE")
    await api.stepper.drain(contract.PLANS)
    assert await api.refused(f"/runs/{active}/force", because) == (409, "BAD_MOVE")
    assert await api.refused(f"/runs/{active}/retry") == (409, "NOTHING_FAILED")
    assert await api.refused(f"/runs/{active}/partitions/partition-0/retry") == (409, "NOTHING_FAILED")
    await api.stepper.finish()
    assert await api.refused(f"/runs/{active}/cancel", because) == (409, "NOT_FETCHING")
    assert await api.refused(f"/runs/{active}/force", because) == (409, "BAD_MOVE")
    assert await api.refused(f"/runs/{active}/retry") == (409, "NOTHING_FAILED")
    for act in ("retry", "force"):
        assert await api.refused(f"/runs/{first}/{act}", because) == (409, "RUN_SUPERSEDED")
    assert (await api.get(f"/runs/{first}"))["state"] == "consolidation_skipped"
    assert (await api.get(f"/runs/{active}"))["state"] == "completed"


async def test_a_plan_that_failed_is_no_run_to_take_up(api: HarvestApiClient) -> None:
    """H13: what never began has nothing to retry or force; the listing has it, so it is not said to be unknown."""
    run_id = (await api.post(f"/feeds/{FEED}/runs"))["runId"]
    for act in ("retry", "force"):
        assert await api.refused(f"/runs/{run_id}/{act}", {"reason": "please"}) == (409, "RUN_NOT_STARTED")
    await api.post(f"/runs/{run_id}/cancel", {"reason": "typo"})
    for act in ("retry", "force", "cancel"):
        assert await api.refused(f"/runs/{run_id}/{act}", {"reason": "please"}) == (409, "RUN_NOT_STARTED")
