"""The watermark, and what changes while a run is under way: nothing is lost to the moment at which it changed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from uuid import UUID

import pytest

from penstock.harvest.contract import RunState
from penstock.harvest.local.dataset import Changed
from penstock.harvest.local.server import LocalSource
from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import Conflict, Transient
from tests.harvest.harness import FEED, PAGE, HarvestHarness, RequestLog, harvest_settings, opened, rigged, tapped
from tests.support.soak import examples
from tests.support.types import Json

OVERLAP = timedelta(seconds=0.1)


@pytest.fixture
async def rig(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestHarness]:
    async with rigged(database_url, tmp_path, partitions={"count": 12, "least": 20}) as rig:
        yield rig


def changing(rig: HarvestHarness, asked: RequestLog, at: int, **changes: int) -> list[Changed]:
    """Change the source just before its *at*-th page from now on; what was changed comes to the list."""
    done: list[Changed] = []
    first = len(asked.of(PAGE))

    def act(path: str, number: int) -> None:
        if path == PAGE and number == first + at:
            done.append(rig.source.change(**changes))

    asked.act = act
    return done


def changed(run: Json, rig: HarvestHarness) -> set[str]:
    """What the source changed after the run's upper bound, and has still."""
    return rig.source.changed_ids_since(run["upper_bound"])


async def test_what_changes_during_a_run_is_in_the_next(rig: HarvestHarness) -> None:
    """H9: `lastUpdatedAt` is the run's upper bound less the overlap, and the next run begins there."""
    asked = tapped(rig.source)
    async with rig.working():
        for at in (1, 4, 9):
            done = changing(rig, asked, at, updates=40, inserts=10)
            first = await rig.completed(full=True)
            assert done
            assert first["watermark_after"] == first["upper_bound"] - OVERLAP
            await rig.is_whole(first["run_id"])
            await rig.equals_truth(but=changed(first, rig))
            asked.act, count = None, len(asked.requests)
            second = await rig.completed()
            assert (second["run_type"], second["watermark_before"]) == ("incremental", first["watermark_after"])
            windows = {(params["updated_after"], params["updated_upto"]) for _, params in asked.requests[count:]}
            assert [tuple(map(datetime.fromisoformat, window)) for window in windows] == [
                (second["watermark_before"], second["upper_bound"])
            ]
            assert second["heatmap"]["total"] >= len(done[0].updated) + len(done[0].inserted)
            await rig.is_whole(second["run_id"])
            await rig.equals_truth()


async def test_an_incremental_run_also_leaves_what_changes_meanwhile_to_the_next(rig: HarvestHarness) -> None:
    """H9: a record that leaves the window while it is read is not lost: it is in the next one."""
    asked = tapped(rig.source)
    async with rig.working():
        await rig.completed()
        for at in (1, 2, 4):
            rig.source.change(updates=100)
            done = changing(rig, asked, at, updates=60, inserts=5)
            run = await rig.completed()
            assert run["run_type"] == "incremental"
            assert done
            await rig.equals_truth(but=changed(run, rig))
            asked.act = None
            await rig.completed()
            await rig.equals_truth()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_rows_that_move_are_found(rig: HarvestHarness) -> None:
    """H16: rows move, come and go between pages; what did not change is there, the next two runs do the rest."""
    asked, random, again = tapped(rig.source), Random(4), 0
    async with rig.working():
        for _ in range(examples(4, soak=60)):
            asked.act = None
            changes = {name: random.randint(0, 12) for name in ("updates", "inserts", "deletes")}
            moments = {len(asked.of(PAGE)) + random.randint(1, 20) for _ in range(3)}

            def act(path: str, number: int, moments: set[int] = moments, changes: dict[str, int] = changes) -> None:
                if path == PAGE and number in moments:
                    rig.source.change(**changes)

            asked.act = act
            run = await rig.completed(full=True)
            asked.act = None
            again += max(part["scan"] for part in await rig.partitions(run["run_id"])) > 1
            gone = set(await rig.canonical()) - set(rig.source.truth())
            await rig.equals_truth(but=changed(run, rig), gone=gone)
            await rig.completed()
            await rig.equals_truth(gone=gone)
            await rig.completed(full=True)
            await rig.equals_truth()
    assert again


async def test_a_pass_over_moving_rows_is_made_again(rig: HarvestHarness) -> None:
    """H16: pages shifted by a row that went are read once more, so no other row is lost between two pages."""
    asked = tapped(rig.source)
    async with rig.working():
        done = changing(rig, asked, 20, deletes=30)
        run = await rig.completed()
        assert done
        assert max(part["scan"] for part in await rig.partitions(run["run_id"])) == 2
        await rig.equals_truth(gone=done[0].deleted)
        await rig.is_whole(run["run_id"])


async def test_a_failed_run_moves_nothing(database_url: str, tmp_path: Path) -> None:
    """H11: watermark, history and blob are as before, and the next run asks for the same window and more."""
    async with rigged(database_url, tmp_path, call={"attempts": 1}) as rig, rig.working():
        first = await rig.completed()
        rig.source.change(updates=50, inserts=10)
        asked = tapped(rig.source)
        asked.act = lambda path, _number: setattr(asked, "refuses", PAGE if path == PAGE else "")
        failed = await rig.ended(await rig.start(), RunState.CONSOLIDATION_SKIPPED)
        assert failed["run_type"] == "incremental"
        await rig.has_watermark(first)
        asked.act, asked.refuses = None, ""
        second = await rig.completed()
        assert second["watermark_before"] == failed["watermark_before"] == first["watermark_after"]
        await rig.equals_truth()
        await rig.has_watermark(second)


async def test_a_watermark_never_goes_back(database_url: str, tmp_path: Path) -> None:
    """H9: neither for a longer overlap nor for a clock that was put back; what changed then is in a later run."""
    async with rigged(database_url, tmp_path) as rig:
        async with rig.working():
            first = await rig.completed()
        right = rig.db.clock
        rig.db.clock = ManualClock(right.now() - timedelta(hours=1))
        async with rig.working():
            rig.source.change(updates=20)
            early = await rig.completed()
            assert early["upper_bound"] < first["watermark_after"] == early["watermark_after"]
            await rig.has_watermark(early)
        rig.db.clock = right
        longer = harvest_settings(database_url, rig.source.url, tmp_path, overlap=3600)
        async with opened(longer, rig.source) as later, later.working():
            run = await later.completed()
            assert run["watermark_after"] == run["watermark_before"] == first["watermark_after"]
            await later.has_watermark(run)
            await later.equals_truth()


async def test_a_watermark_that_cannot_be_saved_fails_the_run(rig: HarvestHarness, tmp_path: Path) -> None:
    """H8, H12: three attempts, then FAILED, a CRITICAL alert, and nothing has happened; `retry` completes it."""
    place = tmp_path / "objects" / "harvest"
    place.parent.mkdir()
    place.write_text("in the way")
    async with rig.working():
        run_id = await rig.start()
        run = await rig.ended(run_id, RunState.FAILED)
        assert (run["completed_at"], run["watermark_after"], await rig.watermark()) == (None, None, None)
        assert await rig.alerts() == [("WATERMARK_NOT_SAVED", "CRITICAL")]
        assert await rig.db.fetchval("SELECT count(*) FROM harvest_watermark") == 0
        place.unlink()
        assert await rig.harvest.retry(run_id, "somebody") == []
        run = await rig.ended(run_id)
        moves = ["created", "workers_running", "consolidating", "failed", "consolidating", "completed"]
        assert await rig.moves("harvest.run", str(run_id)) == moves
        await rig.has_watermark(run)
        await rig.equals_truth()


async def test_a_late_writer_does_not_overwrite_the_blob(rig: HarvestHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """H8: a storage that fails after it has written leaves a copy that the next attempt puts right."""
    storage, failures = type(rig.platform.storage), 0
    create = storage.create

    async def create_and_fail(self: object, path: str, data: bytes) -> object:
        nonlocal failures
        await create(self, path, data)  # type: ignore[arg-type]
        failures += 1
        raise Transient("STORAGE_DOWN", "it hung up before it answered")

    monkeypatch.setattr(storage, "create", create_and_fail)
    async with rig.working():
        run = await rig.completed()
    assert failures == 1
    await rig.is_whole(run["run_id"])


async def test_one_run_at_a_time(rig: HarvestHarness) -> None:
    """H2: of those who start a run at once one does; the others are told which is under way."""
    for count in (1, 2):
        starts = await asyncio.gather(*(rig.start() for _ in range(8)), return_exceptions=True)
        refused = [start for start in starts if isinstance(start, Conflict)]
        [run_id] = [start for start in starts if isinstance(start, UUID)]
        assert len(refused) == 7
        assert {(error.code, error.details["runId"]) for error in refused} == {("RUN_ACTIVE", str(run_id))}
        async with rig.working():
            await rig.ended(run_id)
        assert await rig.db.fetchval("SELECT count(*) FROM run_metadata") == count


async def test_a_full_run_deletes_what_is_gone(rig: HarvestHarness) -> None:
    """H10: softly, only after a full run; an incremental one never does; what returns is live again."""
    async with rig.working():
        await rig.completed()
        restore = remembered(rig.source)
        gone = set(rig.source.change(deletes=40).deleted)
        run = await rig.completed()
        assert (run["run_type"], run["deleted"]) == ("incremental", None)
        assert set(await rig.canonical()) - set(rig.source.truth()) == gone
        run = await rig.completed(full=True)
        assert run["deleted"] == len(gone)
        assert set(await rig.canonical(deleted=True)) == gone
        await rig.equals_truth()
        restore()
        await rig.completed(full=True)
        assert await rig.canonical(deleted=True) == {}
        await rig.equals_truth()


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


async def test_too_much_to_be_gone_is_not_believed(rig: HarvestHarness) -> None:
    """H10: over `max_delete_ratio` nothing is deleted, and somebody is told; the run completes."""
    async with rig.working():
        await rig.completed()
        gone = rig.source.change(deletes=61).deleted  # of 300; a fifth is allowed
        run = await rig.completed(full=True)
        assert run["deleted"] == 0
        assert await rig.alerts() == [("DELETION_SKIPPED", "WARNING")]
        await rig.equals_truth(gone=gone)
        await rig.is_whole(run["run_id"])


async def test_a_record_that_moves_to_another_partition_is_not_gone(rig: HarvestHarness) -> None:
    """H10: out of a partition not read yet into one that was read: it is looked for before anything is deleted."""
    asked = tapped(rig.source)
    async with rig.working():
        await rig.completed()
        found = 0
        for at in (15, 18, 21):
            done = changing(rig, asked, at, updates=40, deletes=1)
            run = await rig.completed(full=True)
            asked.act = None
            query = "SELECT count(*) FROM raw_record WHERE feed = $1 AND seen_run = $2 AND seen_in = 'sweep'"
            found += await rig.db.fetchval(query, FEED, run["run_id"])
            assert set(await rig.canonical(deleted=True)).isdisjoint(rig.source.truth())
            assert set(rig.source.truth()) <= set(await rig.canonical())
            assert done
        assert found
