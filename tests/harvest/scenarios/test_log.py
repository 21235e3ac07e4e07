"""The log of runs: one event for each completion and each failure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.harvest.contract import CONSOLIDATIONS, PLANS, WORK_ITEMS
from penstock.kernel.errors import Transient
from tests.harvest.scripted_source import ScriptedSource, half_without_shape, scripted_harvest, stones
from tests.harvest.stepper import FEED


def select(logs: Sequence[Mapping[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [dict(entry) for entry in logs if entry["event"] in names]


async def test_completion_is_logged_once(database_url: str, tmp_path: Path) -> None:
    """H8: the event has feed, run, kind, records, deleted records and seconds."""
    source = ScriptedSource(stones(200))
    async with scripted_harvest(database_url, tmp_path, source) as stepper:
        with capture_logs() as logs:
            first = await stepper.plan_run()
            await stepper.finish()
            del source.rows["k00007"]
            second = await stepper.plan_run(full=True)
            await stepper.finish()
    completed = select(logs, "harvest_run_completed")
    assert [(entry["run"], entry["kind"], entry["records"], entry["deleted"]) for entry in completed] == [
        (str(first), "full", 200, 0),
        (str(second), "full", 199, 1),
    ]
    for entry in completed:
        assert (entry["feed"], entry["log_level"]) == (FEED, "info")
        assert 0 <= entry["seconds"] < 60
    assert select(logs, "harvest_run_failed") == []


async def test_failed_consolidation_is_logged_once(database_url: str, tmp_path: Path) -> None:
    """H12: the event is a warning with feed, run, code and error."""
    async with scripted_harvest(database_url, tmp_path, half_without_shape()) as stepper:
        with capture_logs() as logs:
            run_id = await stepper.plan_run()
            await stepper.finish()
    assert select(logs, "harvest_run_failed", "harvest_run_completed") == [
        {
            "event": "harvest_run_failed",
            "log_level": "warning",
            "feed": FEED,
            "run": str(run_id),
            "code": "CONSOLIDATION_FAILED",
            "error": "100 of 200 records could not be stored or mapped; limits.max_reject_ratio is 0.01",
        }
    ]


async def test_failed_attempts_are_logged_as_one_failure(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H12: a consolidation that fails in every attempt is logged once."""

    async def fail(*_: object) -> None:
        raise Transient("STORAGE_DOWN", "the storage does not respond")

    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(60))) as stepper:
        monkeypatch.setattr(stepper.storage, "create", fail)
        with capture_logs() as logs:
            await stepper.plan_run()
            await stepper.drain(WORK_ITEMS)
            await stepper.drain(CONSOLIDATIONS)
    [failed] = select(logs, "harvest_run_failed")
    assert (failed["code"], "STORAGE_DOWN" in failed["error"]) == ("WATERMARK_NOT_SAVED", True)


async def test_failed_partitions_and_cancellations_are_logged_once(database_url: str, tmp_path: Path) -> None:
    """H5, H11: a run with failed partitions, and runs that are cancelled before and after their plan."""
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(200))) as stepper:
        with capture_logs() as logs:
            failed = await stepper.plan_run()
            await stepper.fetcher.fail(failed, "partition-0", "SOURCE_ERROR: a test")
            await stepper.drain(WORK_ITEMS)
            cancelled = await stepper.plan_run()
            await stepper.harvest.cancel(cancelled, "ann", "wrong feed")
            unplanned = await stepper.harvest.start(FEED, "test")
            await stepper.harvest.cancel(unplanned, "ann", "wrong feed")
            await stepper.drain(PLANS)
    logged = select(logs, "harvest_run_failed")
    assert [(entry["run"], entry["code"]) for entry in logged] == [
        (str(failed), "CONSOLIDATION_SKIPPED"),
        (str(cancelled), "CONSOLIDATION_SKIPPED"),
        (str(unplanned), "PLAN_FAILED"),
    ]
    assert logged[0]["error"].startswith("1 of ")
    assert logged[1]["error"] == logged[2]["error"] == "CANCELLED: by ann: wrong feed"
