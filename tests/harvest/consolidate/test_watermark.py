"""The watermark, and what changes while a run is under way: nothing is lost to the moment at which it changed."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from penstock.harvest.contract import HarvestRunState
from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import Transient
from tests.harvest.harness import (
    PAGE,
    HarvestHarness,
    changed,
    changing,
    harvest_harness,
    harvest_settings,
    opened,
    tapped,
)

OVERLAP = timedelta(seconds=0.1)


async def test_what_changes_during_a_run_is_in_the_next(harness: HarvestHarness) -> None:
    """H9: `lastUpdatedAt` is the run's upper bound less the overlap, and the next run begins there."""
    asked = tapped(harness.source)
    async with harness.working():
        for at in (1, 4, 9):
            done = changing(harness, asked, at, updates=40, inserts=10)
            first = await harness.completed(full=True)
            assert done
            assert first["watermark_after"] == first["upper_bound"] - OVERLAP
            await harness.is_whole(first["run_id"])
            await harness.equals_truth(but=changed(first, harness))
            asked.act, count = None, len(asked.requests)
            second = await harness.completed()
            assert (second["run_type"], second["watermark_before"]) == ("incremental", first["watermark_after"])
            windows = {(params["updated_after"], params["updated_upto"]) for _, params in asked.requests[count:]}
            assert [tuple(map(datetime.fromisoformat, window)) for window in windows] == [
                (second["watermark_before"], second["upper_bound"])
            ]
            assert second["heatmap"]["total"] >= len(done[0].updated) + len(done[0].inserted)
            await harness.is_whole(second["run_id"])
            await harness.equals_truth()


async def test_an_incremental_run_also_leaves_what_changes_meanwhile_to_the_next(harness: HarvestHarness) -> None:
    """H9: a record that leaves the window while it is read is not lost: it is in the next one."""
    asked = tapped(harness.source)
    async with harness.working():
        await harness.completed()
        for at in (1, 2, 4):
            harness.source.change(updates=100)
            done = changing(harness, asked, at, updates=60, inserts=5)
            run = await harness.completed()
            assert run["run_type"] == "incremental"
            assert done
            await harness.equals_truth(but=changed(run, harness))
            asked.act = None
            await harness.completed()
            await harness.equals_truth()


async def test_a_failed_run_moves_nothing(database_url: str, tmp_path: Path) -> None:
    """H11: watermark, history and blob are as before, and the next run asks for the same window and more."""
    async with harvest_harness(database_url, tmp_path, call={"attempts": 1}) as harness, harness.working():
        first = await harness.completed()
        harness.source.change(updates=50, inserts=10)
        asked = tapped(harness.source)
        asked.act = lambda path, _number: setattr(asked, "refuses", PAGE if path == PAGE else "")
        failed = await harness.ended(await harness.start(), HarvestRunState.CONSOLIDATION_SKIPPED)
        assert failed["run_type"] == "incremental"
        await harness.has_watermark(first)
        asked.act, asked.refuses = None, ""
        second = await harness.completed()
        assert second["watermark_before"] == failed["watermark_before"] == first["watermark_after"]
        await harness.equals_truth()
        await harness.has_watermark(second)


async def test_a_watermark_never_goes_back(database_url: str, tmp_path: Path) -> None:
    """H9: neither for a longer overlap nor for a clock that was put back; what changed then is in a later run."""
    async with harvest_harness(database_url, tmp_path) as harness:
        async with harness.working():
            first = await harness.completed()
        right = harness.db.clock
        harness.db.clock = ManualClock(right.now() - timedelta(hours=1))
        async with harness.working():
            harness.source.change(updates=20)
            early = await harness.completed()
            assert early["upper_bound"] < first["watermark_after"] == early["watermark_after"]
            await harness.has_watermark(early)
        harness.db.clock = right
        longer = harvest_settings(database_url, harness.source.url, tmp_path, overlap=3600)
        async with opened(longer, harness.source) as later, later.working():
            run = await later.completed()
            assert run["watermark_after"] == run["watermark_before"] == first["watermark_after"]
            await later.has_watermark(run)
            await later.equals_truth()


async def test_a_watermark_that_cannot_be_saved_fails_the_run(harness: HarvestHarness, tmp_path: Path) -> None:
    """H8, H12: three attempts, then FAILED, a CRITICAL alert, and nothing has happened; `retry` completes it."""
    place = tmp_path / "objects" / "harvest"
    place.parent.mkdir()
    place.write_text("in the way")
    async with harness.working():
        run_id = await harness.start()
        run = await harness.ended(run_id, HarvestRunState.FAILED)
        assert (run["completed_at"], run["watermark_after"], await harness.watermark()) == (None, None, None)
        assert await harness.alerts() == [("WATERMARK_NOT_SAVED", "CRITICAL")]
        assert await harness.db.fetchval("SELECT count(*) FROM harvest_watermark") == 0
        place.unlink()
        assert await harness.harvest.retry(run_id, "somebody") == []
        run = await harness.ended(run_id)
        moves = ["created", "workers_running", "consolidating", "failed", "consolidating", "completed"]
        assert await harness.moves("harvest.run", str(run_id)) == moves
        await harness.has_watermark(run)
        await harness.equals_truth()


async def test_a_late_writer_does_not_overwrite_the_blob(
    harness: HarvestHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H8: a storage that fails after it has written leaves a copy that the next attempt puts right."""
    storage, failures = type(harness.platform.storage), 0
    create = storage.create

    async def create_and_fail(self: object, path: str, data: bytes) -> object:
        nonlocal failures
        await create(self, path, data)  # type: ignore[arg-type]
        failures += 1
        raise Transient("STORAGE_DOWN", "it hung up before it answered")

    monkeypatch.setattr(storage, "create", create_and_fail)
    async with harness.working():
        run = await harness.completed()
    assert failures == 1
    await harness.is_whole(run["run_id"])
