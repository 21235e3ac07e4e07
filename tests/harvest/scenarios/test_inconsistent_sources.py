"""Sources that give less than they count, give for ever, or move their records: nothing is lost, deleted or doubled."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.harvest.contract import CONSOLIDATIONS, WORK_ITEMS
from penstock.harvest.model import PagePosition, PartitionRange, TimeWindow
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from penstock.kernel.tasks.outcome import Done, Failed
from tests.harvest.scripted_source import (
    ONE_PART,
    CursorSource,
    ScriptedSource,
    alerts,
    completed,
    drained,
    end_pauses,
    make_turn,
    partitions,
    scripted_harvest,
    stones,
)
from tests.harvest.stepper import FEED


@pytest.mark.parametrize("upto", [30, 0])
async def test_a_source_that_gives_less_than_it_counts_is_not_believed(
    database_url: str, tmp_path: Path, upto: int
) -> None:
    """H16, H10: it is asked again in every pass there is; then the run fails, deletes nothing and moves nothing."""
    source = ScriptedSource(stones(200))
    limits = {"passes": 3, "max_delete_ratio": 1}
    async with scripted_harvest(database_url, tmp_path, source, limits=limits) as one:
        first = await completed(one)
        source.gives_upto, source.pages = upto, []
        run_id = await one.planned(full=True)
        await one.finish()
        run, parts = await one.run(run_id), await partitions(one, run_id)
        short = [part for part in parts.values() if part["kind"] == "range"]
        assert run["state"] == "consolidation_skipped"
        assert {part["error_message"].split(":")[0] for part in short} == {"SOURCE_SHORT"}
        assert source.pages.count(PagePosition(0)) == 3 * len(short) + (len(parts) - len(short))
        assert (await one.canonical()).keys() == source.rows.keys()
        assert await one.db.fetchval("SELECT watermark FROM harvest_feed") == first["watermark_after"]


async def test_an_empty_page_by_mistake_is_not_the_end(database_url: str, tmp_path: Path) -> None:
    """H16: what the first pass did not give the second does."""
    source = ScriptedSource(stones(200))

    async def forget_once(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        source.gives_upto = 0 if len(source.pages) == 2 else None

    source.before_page = forget_once
    async with scripted_harvest(database_url, tmp_path, source) as one:
        run = await completed(one)
        parts = await partitions(one, run["run_id"])
        assert sorted(part["scan"] for part in parts.values()) == [1, 1, 1, 1, 2]
        assert (await one.canonical()).keys() == source.rows.keys()


@pytest.mark.parametrize("note", ["x" * 3_000, "\0"], ids=["too large", "refused by PostgreSQL"])
async def test_a_record_that_cannot_be_kept_any_more_is_not_gone(database_url: str, tmp_path: Path, note: str) -> None:
    """H10: it is set aside, but it was seen; what is gone is deleted all the same."""
    source = ScriptedSource(stones(200))
    async with scripted_harvest(database_url, tmp_path, source, limits={"record_bytes": 2_000}) as one:
        await completed(one)
        source.rows["k00007"]["note"] = note
        del source.rows["k00150"]
        run = await completed(one, full=True)
        assert (run["deleted"], run["rejected"]) == (1, 1)
        assert (await one.canonical()).keys() == source.rows.keys()


async def test_a_record_without_a_key_may_be_any_that_is_missing(database_url: str, tmp_path: Path) -> None:
    """H10: as long as one was set aside nothing is called gone, and somebody is told."""
    source = ScriptedSource(stones(200))
    async with scripted_harvest(database_url, tmp_path, source) as one:
        await completed(one)
        source.rows["k00007"]["id"] = None
        del source.rows["k00150"]
        run = await completed(one, full=True)
        assert (run["deleted"], await alerts(one)) == (0, ["DELETION_SKIPPED"])
        assert {"k00007", "k00150"} <= (await one.canonical()).keys()
        source.rows["k00007"]["id"] = "k00007"
        assert (await completed(one, full=True))["deleted"] == 1
        assert (await one.canonical()).keys() == source.rows.keys()


async def test_a_source_without_an_end_fails_the_partition(database_url: str, tmp_path: Path) -> None:
    """H4: one that does not heed the offset is not asked for ever."""
    source = ScriptedSource(stones(400), heeds_offset=False)
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART, page_size=400) as one:
        run_id = await one.planned()
        await drained(one, WORK_ITEMS, within=10)
        [part] = (await partitions(one, run_id)).values()
        assert (part["status"], part["error_message"].split(":")[0]) == ("failed", "SOURCE_PAGING_ENDLESS")
        assert (await one.run(run_id))["state"] == "consolidation_skipped"


async def test_a_sweep_without_an_end_deletes_nothing(database_url: str, tmp_path: Path) -> None:
    """H10: what changed meanwhile is not looked for without an end; the run completes, and somebody is told."""
    source = ScriptedSource(stones(400))
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART, page_size=400) as one:
        await completed(one)
        known = set(source.rows)
        del source.rows["k00150"]
        run_id = await one.planned(full=True)
        await one.drain(WORK_ITEMS)
        for row in source.rows.values():
            row["updatedAt"] = one.db.clock.now().isoformat()
        source.heeds_offset = False
        async with asyncio.timeout(30):
            assert await drained(one, CONSOLIDATIONS) == [Done()]
        run = await one.run(run_id)
        assert (run["state"], run["deleted"], await alerts(one)) == ("completed", 0, ["DELETION_SKIPPED"])
        assert (await one.canonical()).keys() == known


@pytest.mark.parametrize("pages", [2, 3])
@pytest.mark.parametrize("failure", [SourceFailed, SourceRefused])
async def test_an_end_that_cannot_be_counted_is_fetched_again(
    database_url: str, tmp_path: Path, pages: int, failure: type[SourceFailed]
) -> None:
    """H4, H6: a source of cursors whose recount fails costs attempts, not an endless walk; then nothing is doubled."""
    source, limits = CursorSource(stones(70)), {"passes": 2}
    changes: dict[str, Any] = {"partitions": ONE_PART, "pages_per_turn": pages, "limits": limits}

    async def fail(range_: PartitionRange, window: TimeWindow) -> None:
        raise failure("SOURCE_DOWN", "it does not count")

    async with scripted_harvest(database_url, tmp_path, source, **changes) as one:
        run_id = await one.planned()
        source.before_count, before = fail, source.before_count
        outcomes = await drained(one, WORK_ITEMS)
        assert isinstance(outcomes[-1], Failed)
        [part] = (await partitions(one, run_id)).values()
        assert (part["status"], part["told"], part["seen"], part["next_offset"]) == ("failed", 60, 60, 60)
        assert part["error_message"] == "SOURCE_DOWN: it does not count"
        source.before_count = before
        await one.harvest.retry(run_id, "test")
        await one.finish()
        [part] = (await partitions(one, run_id)).values()
        assert (part["status"], part["told"], part["seen"]) == ("completed", 70, 70)
        assert (await one.run(run_id))["state"] == "completed"
        assert (await one.canonical()).keys() == source.rows.keys()


async def test_a_pause_without_end_is_told_once(database_url: str, tmp_path: Path) -> None:
    """H15: a partition that is to wait is parked, fails never, and after an hour somebody is told."""
    source = ScriptedSource(stones(60))

    async def pause(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        raise SourcePaused("SOURCE_THROTTLED", "429", after=timedelta(minutes=10))

    source.before_page = pause
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART) as one:
        run_id = await one.planned()
        for _ in range(6):  # more often than a message is delivered
            assert await drained(one, WORK_ITEMS, within=2) == [Done()]
            [part] = (await partitions(one, run_id)).values()
            assert part["waits_until"] > one.db.clock.now() + timedelta(minutes=9)
            assert await one.fetcher.unpark() == 0
            await one.rescuer.look()
            assert await one.bus.backlog(WORK_ITEMS) == 0
            assert await end_pauses(one) == 1
        assert await alerts(one) == []
        await drained(one, WORK_ITEMS, within=2)
        await one.db.execute("UPDATE partition_progress SET updated_at = now() - interval '61 minutes'")
        for _ in range(2):
            await one.rescuer.look()
        assert await alerts(one) == ["NO_PROGRESS"]
        message = await one.db.fetchval("SELECT message FROM harvest_alert")
        assert message.endswith("has kept no page for 60 minutes; it goes on waiting.")
        [part] = (await partitions(one, run_id)).values()
        assert (part["status"], part["rescues"], (await one.run(run_id))["state"]) == (None, 0, "created")


async def test_a_removal_and_an_insertion_that_balance_are_noticed(database_url: str, tmp_path: Path) -> None:
    """H16: also where the source's clock is behind: within the overlap, the change is seen and a second pass made."""
    source = ScriptedSource(stones(200))
    async with scripted_harvest(database_url, tmp_path, source, overlap=60, pages_per_turn=1) as one:
        await completed(one)
        run_id = await one.planned(full=True)
        part = (await partitions(one, run_id))["partition-0"]
        inside = [key for key, row in source.rows.items() if row["price"] < part["upper_bound"]]
        await make_turn(one, run_id, "partition-0")
        del source.rows[inside[2]]  # seen; and so the 31st slips into the page that was read
        late = (one.db.clock.now() - timedelta(seconds=10)).isoformat()
        source.rows["new"] = {**source.rows[inside[-1]], "id": "new", "updatedAt": late}
        await one.finish()
        assert (await partitions(one, run_id))["partition-0"]["scan"] > 1
        assert (await one.run(run_id))["state"] == "completed"
        assert source.rows.keys() <= (await one.canonical()).keys()


async def test_without_windows_two_runs_have_to_miss_a_record(database_url: str, tmp_path: Path) -> None:
    """H10: one that moves from where was not read to where was read is not gone; what two runs did not see is."""
    source = ScriptedSource(stones(200), has_windows=False)
    async with scripted_harvest(database_url, tmp_path, source) as one:
        await completed(one)
        run_id = await one.planned(full=True)
        while not (await partitions(one, run_id))["partition-0"]["completed"]:
            await make_turn(one, run_id, "partition-0")
        del source.rows["k00003"]
        source.rows["k00199"]["price"] = 5
        await one.finish()
        run = await one.run(run_id)
        assert (run["state"], run["deleted"]) == ("completed", 0)
        assert await one.db.fetchval("SELECT seen_run FROM raw_record WHERE key = 'k00199'") != run_id
        assert (await one.canonical()).keys() == {"k00003", *source.rows}
        assert [(await completed(one, full=True))["deleted"] for _ in range(2)] == [0, 1]
        assert (await one.canonical()).keys() == source.rows.keys()


@pytest.mark.parametrize(("count", "nulls", "is_one_value"), [(150, 10, True), (300, 290, False)])
async def test_what_cannot_be_cut_is_one_part(
    database_url: str, tmp_path: Path, count: int, nulls: int, is_one_value: bool
) -> None:
    """H3: one value, or hardly any values, beside records without one: everything at once, and nothing twice."""
    source = ScriptedSource(stones(count))
    for number, row in enumerate(source.rows.values()):
        if number < nulls:
            row["price"] = None
        elif is_one_value:
            row["price"] = 700
    async with scripted_harvest(database_url, tmp_path, source) as one:
        run = await completed(one)
        [part] = (await partitions(one, run["run_id"])).values()
        assert (part["kind"], part["counted"], part["seen"]) == ("all", count, count)
        assert (await one.canonical()).keys() == source.rows.keys()


@pytest.mark.parametrize("expires", [1, 100], ids=["once", "always"])
async def test_a_cursor_that_ran_out_begins_a_new_pass(database_url: str, tmp_path: Path, expires: int) -> None:
    """H16: as often as there may be passes; then the partition has failed."""
    source, left = CursorSource(stones(70)), expires

    async def expire(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        nonlocal left
        if position.cursor is not None and left:
            left -= 1
            raise SourceRefused("SOURCE_REFUSED", "410: that cursor is gone")

    source.before_page = expire
    changes: dict[str, Any] = {"partitions": ONE_PART, "pages_per_turn": 1, "limits": {"passes": 3}}
    async with scripted_harvest(database_url, tmp_path, source, **changes) as one:
        run_id = await one.planned()
        await drained(one, WORK_ITEMS, within=20)
        [part] = (await partitions(one, run_id)).values()
        if expires == 1:
            assert (part["status"], part["scan"], part["told"], part["seen"]) == ("completed", 2, 70, 70)
        else:
            assert (part["status"], source.pages.count(PagePosition(0))) == ("failed", 3)
            assert "410" in part["error_message"]
            assert await one.db.fetchval("SELECT watermark FROM harvest_feed WHERE feed = $1", FEED) is None
