"""The watermark, and changes during a run: no change is lost, whatever its time is."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from penstock.harvest.contract import HarvestRunState
from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import Transient
from tests.harvest.harness import (
    PAGE,
    HarvestHarness,
    change_at_page,
    changed_keys,
    harvest_harness,
    harvest_settings,
    open_harness,
    record_requests,
)

OVERLAP = timedelta(seconds=0.1)


async def test_changes_during_a_run_are_in_the_next_one(harness: HarvestHarness) -> None:
    """H9: the watermark is the upper bound minus the overlap, and the next run starts there."""
    log = record_requests(harness.source)
    async with harness.run_workers():
        for at in (1, 4, 9):
            changes = change_at_page(harness, log, at, updates=40, inserts=10)
            first = await harness.complete_run(full=True)
            assert changes
            assert first["watermark_after"] == first["upper_bound"] - OVERLAP
            await harness.check_run(first["run_id"])
            await harness.check_records(but=changed_keys(first, harness))
            log.act, count = None, len(log.requests)
            second = await harness.complete_run()
            assert (second["run_type"], second["watermark_before"]) == ("incremental", first["watermark_after"])
            windows = {
                (params["updated_after"], params["updated_upto"])
                for _, params in log.requests[count:]
                if params  # the count without parameters detects a source that ignores them
            }
            assert [tuple(map(datetime.fromisoformat, window)) for window in windows] == [
                (second["watermark_before"], second["upper_bound"])
            ]
            assert second["heatmap"]["total"] >= len(changes[0].updated) + len(changes[0].inserted)
            await harness.check_run(second["run_id"])
            await harness.check_records()


async def test_changes_during_an_incremental_run_are_in_the_next_one(harness: HarvestHarness) -> None:
    """H9: a record that leaves the window of a run is in the window of the next run."""
    log = record_requests(harness.source)
    async with harness.run_workers():
        await harness.complete_run()
        for at in (1, 2, 4):
            harness.source.change_records(updates=100)
            changes = change_at_page(harness, log, at, updates=60, inserts=5)
            run = await harness.complete_run()
            assert run["run_type"] == "incremental"
            assert changes
            await harness.check_records(but=changed_keys(run, harness))
            log.act = None
            await harness.complete_run()
            await harness.check_records()


async def test_failed_run_does_not_move_the_watermark(database_url: str, tmp_path: Path) -> None:
    """H11: watermark, history and blob do not change, and the next run includes the window of the failed run."""
    async with harvest_harness(database_url, tmp_path, call={"attempts": 1}) as harness, harness.run_workers():
        first = await harness.complete_run()
        harness.source.change_records(updates=50, inserts=10)
        log = record_requests(harness.source)
        log.act = lambda path, _number: setattr(log, "refuses", PAGE if path == PAGE else "")
        failed = await harness.wait_for_end(await harness.start(), HarvestRunState.CONSOLIDATION_SKIPPED)
        assert failed["run_type"] == "incremental"
        await harness.check_watermark(first)
        log.act, log.refuses = None, ""
        second = await harness.complete_run()
        assert second["watermark_before"] == failed["watermark_before"] == first["watermark_after"]
        await harness.check_records()
        await harness.check_watermark(second)


async def test_watermark_never_goes_back(database_url: str, tmp_path: Path) -> None:
    """H9: not even after a longer overlap or a clock that was set back; the changes are in a later run."""
    async with harvest_harness(database_url, tmp_path) as harness:
        async with harness.run_workers():
            first = await harness.complete_run()
        clock = harness.db.clock
        harness.db.clock = ManualClock(clock.now() - timedelta(hours=1))
        async with harness.run_workers():
            harness.source.change_records(updates=20)
            early = await harness.complete_run()
            assert early["upper_bound"] < first["watermark_after"] == early["watermark_after"]
            await harness.check_watermark(early)
        harness.db.clock = clock
        longer = harvest_settings(database_url, harness.source.url, tmp_path, overlap=3600)
        async with open_harness(longer, harness.source) as later, later.run_workers():
            run = await later.complete_run()
            assert run["watermark_after"] == run["watermark_before"] == first["watermark_after"]
            await later.check_watermark(run)
            await later.check_records()


async def test_unsaved_watermark_fails_the_run(harness: HarvestHarness, tmp_path: Path) -> None:
    """H8, H12: after three attempts the run fails with a CRITICAL alert and without effects; a retry completes it."""
    folder = tmp_path / "objects" / "harvest"
    folder.parent.mkdir()
    folder.write_text("a file instead of the folder")
    async with harness.run_workers():
        run_id = await harness.start()
        run = await harness.wait_for_end(run_id, HarvestRunState.FAILED)
        assert (run["completed_at"], run["watermark_after"], await harness.watermark()) == (None, None, None)
        assert await harness.alerts() == [("WATERMARK_NOT_SAVED", "CRITICAL")]
        assert await harness.db.fetchval("SELECT count(*) FROM harvest_watermark") == 0
        folder.unlink()
        assert await harness.harvest.retry(run_id, "operator") == []
        run = await harness.wait_for_end(run_id)
        moves = ["created", "workers_running", "consolidating", "failed", "consolidating", "completed"]
        assert await harness.list_moves("harvest.run", str(run_id)) == moves
        await harness.check_watermark(run)
        await harness.check_records()


async def test_failed_write_of_the_blob_is_repeated(harness: HarvestHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """H8: a storage that fails after the write leaves a copy that the next attempt corrects."""
    storage, failures = type(harness.platform.storage), 0
    create = storage.create

    async def create_and_fail(self: object, path: str, data: bytes) -> object:
        nonlocal failures
        await create(self, path, data)  # type: ignore[arg-type]
        failures += 1
        raise Transient("STORAGE_DOWN", "the connection was closed before the response")

    monkeypatch.setattr(storage, "create", create_and_fail)
    async with harness.run_workers():
        run = await harness.complete_run()
    assert failures == 1
    await harness.check_run(run["run_id"])
