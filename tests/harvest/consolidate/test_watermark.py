"""The watermark, and what changes while a run is under way: nothing is lost to the moment at which it changed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from uuid import UUID

import pytest

from penstock.harvest.contract import RunState
from penstock.harvest.simulator.dataset import Changed
from penstock.harvest.simulator.server import LocalSource
from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import Conflict, Transient
from tests.harvest.harness import (
    FEED,
    PAGE,
    HarvestHarness,
    RequestLog,
    harvest_harness,
    harvest_settings,
    opened,
    tapped,
)
from tests.support.soak import Campaign, examples
from tests.support.types import Json

OVERLAP = timedelta(seconds=0.1)


@pytest.fixture
async def harness(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestHarness]:
    async with harvest_harness(database_url, tmp_path, partitions={"count": 12, "least": 20}) as harness:
        yield harness


def changing(harness: HarvestHarness, asked: RequestLog, at: int, **changes: int) -> list[Changed]:
    """Change the source just before its *at*-th page from now on; what was changed comes to the list."""
    done: list[Changed] = []
    first = len(asked.of(PAGE))

    def act(path: str, number: int) -> None:
        if path == PAGE and number == first + at:
            done.append(harness.source.change(**changes))

    asked.act = act
    return done


def changed(run: Json, harness: HarvestHarness) -> set[str]:
    """What the source changed after the run's upper bound, and has still."""
    return harness.source.changed_ids_since(run["upper_bound"])


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


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_rows_that_move_are_found(harness: HarvestHarness, campaign: Campaign) -> None:
    """H16: rows move, come and go between pages; what did not change is there, the next two runs do the rest."""
    campaign.counts_items = True
    asked, random, again = tapped(harness.source), Random(4), 0
    async with harness.working():
        for _ in range(examples(4, soak=60)):
            asked.act = None
            changes = {name: random.randint(0, 12) for name in ("updates", "inserts", "deletes")}
            moments = {len(asked.of(PAGE)) + random.randint(1, 20) for _ in range(3)}

            def act(path: str, number: int, moments: set[int] = moments, changes: dict[str, int] = changes) -> None:
                if path == PAGE and number in moments:
                    harness.source.change(**changes)

            asked.act = act
            run = await harness.completed(full=True)
            asked.act = None
            again += max(part["scan"] for part in await harness.partitions(run["run_id"])) > 1
            gone = set(await harness.canonical()) - set(harness.source.truth())
            await harness.equals_truth(but=changed(run, harness), gone=gone)
            await harness.completed()
            await harness.equals_truth(gone=gone)
            await harness.completed(full=True)
            await harness.equals_truth()
            campaign.end_round()
    assert again


async def test_a_pass_over_moving_rows_is_made_again(harness: HarvestHarness) -> None:
    """H16: pages shifted by a row that went are read once more, so no other row is lost between two pages."""
    asked = tapped(harness.source)
    async with harness.working():
        done = changing(harness, asked, 20, deletes=30)
        run = await harness.completed()
        assert done
        assert max(part["scan"] for part in await harness.partitions(run["run_id"])) == 2
        await harness.equals_truth(gone=done[0].deleted)
        await harness.is_whole(run["run_id"])


async def test_a_failed_run_moves_nothing(database_url: str, tmp_path: Path) -> None:
    """H11: watermark, history and blob are as before, and the next run asks for the same window and more."""
    async with harvest_harness(database_url, tmp_path, call={"attempts": 1}) as harness, harness.working():
        first = await harness.completed()
        harness.source.change(updates=50, inserts=10)
        asked = tapped(harness.source)
        asked.act = lambda path, _number: setattr(asked, "refuses", PAGE if path == PAGE else "")
        failed = await harness.ended(await harness.start(), RunState.CONSOLIDATION_SKIPPED)
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
        run = await harness.ended(run_id, RunState.FAILED)
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


async def test_one_run_at_a_time(harness: HarvestHarness) -> None:
    """H2: of those who start a run at once one does; the others are told which is under way."""
    for count in (1, 2):
        starts = await asyncio.gather(*(harness.start() for _ in range(8)), return_exceptions=True)
        refused = [start for start in starts if isinstance(start, Conflict)]
        [run_id] = [start for start in starts if isinstance(start, UUID)]
        assert len(refused) == 7
        assert {(error.code, error.details["runId"]) for error in refused} == {("RUN_ACTIVE", str(run_id))}
        async with harness.working():
            await harness.ended(run_id)
        assert await harness.db.fetchval("SELECT count(*) FROM run_metadata") == count


async def test_a_full_run_deletes_what_is_gone(harness: HarvestHarness) -> None:
    """H10: softly, only after a full run; an incremental one never does; what returns is live again."""
    async with harness.working():
        await harness.completed()
        restore = remembered(harness.source)
        gone = set(harness.source.change(deletes=40).deleted)
        run = await harness.completed()
        assert (run["run_type"], run["deleted"]) == ("incremental", None)
        assert set(await harness.canonical()) - set(harness.source.truth()) == gone
        run = await harness.completed(full=True)
        assert run["deleted"] == len(gone)
        assert set(await harness.canonical(deleted=True)) == gone
        await harness.equals_truth()
        restore()
        await harness.completed(full=True)
        assert await harness.canonical(deleted=True) == {}
        await harness.equals_truth()


def remembered(source: LocalSource) -> Callable[[], None]:
    """What brings the source back to where it is now."""
    dataset = source._routes.dataset
    lists = dataset._bodies, dataset._by_price, dataset._by_moment
    saved = [list(one) for one in lists]

    def restore() -> None:
        for one, was in zip(lists, saved, strict=True):
            one[:] = was  # type: ignore[index]
        dataset._selections.clear()

    return restore


async def test_too_much_to_be_gone_is_not_believed(harness: HarvestHarness) -> None:
    """H10: over `max_delete_ratio` nothing is deleted, and somebody is told; the run completes."""
    async with harness.working():
        await harness.completed()
        gone = harness.source.change(deletes=61).deleted  # of 300; a fifth is allowed
        run = await harness.completed(full=True)
        assert run["deleted"] == 0
        assert await harness.alerts() == [("DELETION_SKIPPED", "WARNING")]
        await harness.equals_truth(gone=gone)
        await harness.is_whole(run["run_id"])


async def test_a_record_that_moves_to_another_partition_is_not_gone(harness: HarvestHarness) -> None:
    """H10: out of a partition not read yet into one that was read: it is looked for before anything is deleted."""
    asked = tapped(harness.source)
    async with harness.working():
        await harness.completed()
        found = 0
        for at in (15, 18, 21):
            done = changing(harness, asked, at, updates=40, deletes=1)
            run = await harness.completed(full=True)
            asked.act = None
            query = "SELECT count(*) FROM raw_record WHERE feed = $1 AND seen_run = $2 AND seen_in = 'sweep'"
            found += await harness.db.fetchval(query, FEED, run["run_id"])
            assert set(await harness.canonical(deleted=True)).isdisjoint(harness.source.truth())
            assert set(harness.source.truth()) <= set(await harness.canonical())
            assert done
        assert found
