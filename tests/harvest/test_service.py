"""Actions of operators: start, retry, force and cancel runs."""

import asyncio
from uuid import UUID

import pytest

from penstock.harvest import contract
from penstock.kernel.errors import Conflict, Transient
from tests.harvest.api_client import HarvestApiClient
from tests.harvest.harness import HarvestHarness
from tests.harvest.stepper import FEED


async def test_feed_has_one_active_run(harness: HarvestHarness) -> None:
    """H2: of concurrent requests one starts a run; the others fail with the id of the active run."""
    for count in (1, 2):
        starts = await asyncio.gather(*(harness.start() for _ in range(8)), return_exceptions=True)
        refused = [start for start in starts if isinstance(start, Conflict)]
        [run_id] = [start for start in starts if isinstance(start, UUID)]
        assert len(refused) == 7
        assert {(error.code, error.details["runId"]) for error in refused} == {("RUN_ACTIVE", str(run_id))}
        async with harness.run_workers():
            await harness.wait_for_end(run_id)
        assert await harness.db.fetchval("SELECT count(*) FROM run_metadata") == count


async def test_retry_of_partitions(api: HarvestApiClient) -> None:
    """H13, H11: a retry resumes one failed partition, or all of them."""
    run_id = await api.fail_run()
    run = await api.get(f"/runs/{run_id}")
    assert (run["state"], run["status"]) == ("consolidation_skipped", "failed")
    assert run["failedWorkers"] == run["expectedWorkers"]
    assert "partitions failed" in run["error"]
    alerts = (await api.get(f"/feeds/{FEED}/alerts"))["alerts"]
    assert [(alert["code"], alert["runId"], alert["isSettled"]) for alert in alerts] == [
        ("CONSOLIDATION_SKIPPED", run_id, False)
    ]
    result = await api.post(f"/runs/{run_id}/partitions/partition-0/retry")
    assert result == {"partitions": ["partition-0"]}
    again = await api.get(f"/runs/{run_id}")
    assert (again["state"], again["failedWorkers"]) == ("workers_running", run["failedWorkers"] - 1)
    assert again["error"] is None
    rest = await api.post(f"/runs/{run_id}/retry")
    assert len(rest["partitions"]) == run["failedWorkers"] - 1
    await api.stepper.finish()
    done = await api.get(f"/runs/{run_id}")
    assert (done["state"], done["records"]) == ("completed", 120)
    revived = [move for move in done["history"] if (move["from"], move["to"]) == ("failed", "running")]
    assert {move["actor"] for move in revived} == {"operator"}


async def test_retry_of_a_consolidation(api: HarvestApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """H13, H11: if all partitions are complete, a retry resumes the consolidation."""

    async def fail(*_: object) -> None:
        raise Transient("STORAGE_DOWN", "the storage does not respond")

    run_id = await api.stepper.plan_run()
    await api.stepper.drain(contract.WORK_ITEMS)
    with monkeypatch.context() as broken:
        broken.setattr(api.stepper.storage, "create", fail)
        await api.stepper.drain(contract.CONSOLIDATIONS)
    run = await api.get(f"/runs/{run_id}")
    assert (run["state"], run["failedWorkers"]) == ("failed", 0)
    assert "STORAGE_DOWN" in run["error"]
    assert await api.refused(f"/runs/{run_id}/partitions/partition-0/retry") == (409, "NOTHING_FAILED")
    assert await api.post(f"/runs/{run_id}/retry") == {"partitions": []}
    await api.stepper.drain(contract.CONSOLIDATIONS)
    assert (await api.get(f"/runs/{run_id}"))["state"] == "completed"


async def test_force_and_cancel_are_recorded(api: HarvestApiClient) -> None:
    """H13, H5: actor and reason are in the run, in its history and in an alert."""
    run_id = str(await api.stepper.plan_run())
    cancelled = await api.post(f"/runs/{run_id}/cancel", {"reason": "wrong day"})
    assert (cancelled["state"], cancelled["runId"]) == ("consolidation_skipped", run_id)
    errors = {part["error"] for part in (await api.get(f"/runs/{run_id}/partitions"))["partitions"]}
    assert errors == {"CANCELLED: by operator: wrong day"}
    forced = await api.post(f"/runs/{run_id}/force", {"reason": "confirmed"})
    assert (forced["state"], forced["status"]) == ("consolidating", "failed")
    assert (forced["forcedBy"], forced["forceReason"]) == ("operator", "confirmed")
    assert "forced: confirmed" in [move["reason"] for move in (await api.get(f"/runs/{run_id}"))["history"]]
    alerts = (await api.get(f"/feeds/{FEED}/alerts"))["alerts"]
    assert [alert["code"] for alert in alerts] == ["RUN_FORCED", "CONSOLIDATION_SKIPPED"]
    assert "confirmed" in alerts[0]["message"]
    assert len((await api.get(f"/feeds/{FEED}/alerts", limit=1))["alerts"]) == 1


async def test_plan_is_cancelled(api: HarvestApiClient) -> None:
    """H13: a run that is being planned ends at once, and another run can start."""
    run_id = (await api.post(f"/feeds/{FEED}/runs"))["runId"]
    run = await api.post(f"/runs/{run_id}/cancel", {"reason": "typo"})
    assert (run["state"], run["status"], run["error"]) == ("failed", "failed", "CANCELLED: by operator: typo")
    await api.stepper.drain(contract.PLANS)
    assert (await api.get(f"/runs/{run_id}"))["state"] == "failed"
    await api.post(f"/feeds/{FEED}/runs")


async def test_actions_that_the_state_does_not_allow(api: HarvestApiClient) -> None:
    """H13: 409 with a stable code, without effect."""
    first = await api.fail_run()
    active = (await api.post(f"/feeds/{FEED}/runs"))["runId"]
    response = await api.http.post(f"/feeds/{FEED}/runs")
    assert (response.status_code, response.json()["code"], response.json()["runId"]) == (409, "RUN_ACTIVE", active)
    assert "hint" in response.json()
    action = {"reason": "please"}
    assert await api.refused(f"/runs/{first}/retry") == (409, "RUN_ACTIVE")
    assert await api.refused(f"/runs/{first}/force", action) == (409, "RUN_ACTIVE")
    await api.stepper.drain(contract.PLANS)
    assert await api.refused(f"/runs/{active}/force", action) == (409, "BAD_MOVE")
    assert await api.refused(f"/runs/{active}/retry") == (409, "NOTHING_FAILED")
    assert await api.refused(f"/runs/{active}/partitions/partition-0/retry") == (409, "NOTHING_FAILED")
    await api.stepper.finish()
    assert await api.refused(f"/runs/{active}/cancel", action) == (409, "NOT_FETCHING")
    assert await api.refused(f"/runs/{active}/force", action) == (409, "BAD_MOVE")
    assert await api.refused(f"/runs/{active}/retry") == (409, "NOTHING_FAILED")
    for action_name in ("retry", "force"):
        assert await api.refused(f"/runs/{first}/{action_name}", action) == (409, "RUN_SUPERSEDED")
    assert (await api.get(f"/runs/{first}"))["state"] == "consolidation_skipped"
    assert (await api.get(f"/runs/{active}"))["state"] == "completed"


async def test_failed_plan_cannot_be_retried(api: HarvestApiClient) -> None:
    """H13: a run that never started cannot be retried or forced; it is listed, so the error is 409 and not 404."""
    run_id = (await api.post(f"/feeds/{FEED}/runs"))["runId"]
    for action_name in ("retry", "force"):
        assert await api.refused(f"/runs/{run_id}/{action_name}", {"reason": "please"}) == (409, "RUN_NOT_STARTED")
    await api.post(f"/runs/{run_id}/cancel", {"reason": "typo"})
    for action_name in ("retry", "force", "cancel"):
        assert await api.refused(f"/runs/{run_id}/{action_name}", {"reason": "please"}) == (409, "RUN_NOT_STARTED")
