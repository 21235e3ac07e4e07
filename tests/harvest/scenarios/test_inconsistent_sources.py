"""Sources with wrong counts, endless pages or moving records: no record is lost, deleted by mistake or doubled."""

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
    complete_run,
    deliver_all,
    end_pauses,
    list_alerts,
    list_partitions,
    make_turn,
    scripted_harvest,
    stones,
)
from tests.harvest.stepper import FEED


@pytest.mark.parametrize("upto", [30, 0])
async def test_source_with_fewer_records_than_it_counts(database_url: str, tmp_path: Path, upto: int) -> None:
    """H16, H10: after the maximum of passes the run fails; nothing is deleted, and the watermark does not move."""
    source = ScriptedSource(stones(200))
    limits = {"passes": 3, "max_delete_ratio": 1}
    async with scripted_harvest(database_url, tmp_path, source, limits=limits) as stepper:
        first = await complete_run(stepper)
        source.sends_upto, source.pages = upto, []
        run_id = await stepper.plan_run(full=True)
        await stepper.finish()
        run, parts = await stepper.run(run_id), await list_partitions(stepper, run_id)
        short = [part for part in parts.values() if part["kind"] == "range"]
        assert run["state"] == "consolidation_skipped"
        assert {part["error_message"].split(":")[0] for part in short} == {"SOURCE_SHORT"}
        assert source.pages.count(PagePosition(0)) == 3 * len(short) + (len(parts) - len(short))
        assert (await stepper.read_canonical()).keys() == source.rows.keys()
        assert await stepper.db.fetchval("SELECT watermark FROM harvest_feed") == first["watermark_after"]


async def test_wrong_empty_page_is_not_the_end(database_url: str, tmp_path: Path) -> None:
    """H16: the second pass fetches the records that the first pass did not receive."""
    source = ScriptedSource(stones(200))

    async def send_empty_page_once(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        source.sends_upto = 0 if len(source.pages) == 2 else None

    source.before_page = send_empty_page_once
    async with scripted_harvest(database_url, tmp_path, source) as stepper:
        run = await complete_run(stepper)
        parts = await list_partitions(stepper, run["run_id"])
        assert sorted(part["scan"] for part in parts.values()) == [1, 1, 1, 1, 2]
        assert (await stepper.read_canonical()).keys() == source.rows.keys()


@pytest.mark.parametrize("note", ["x" * 3_000, "\0"], ids=["too large", "refused by PostgreSQL"])
async def test_record_that_cannot_be_stored_is_not_deleted(database_url: str, tmp_path: Path, note: str) -> None:
    """H10: a rejected record counts as seen; records that are missing in the source are deleted nevertheless."""
    source = ScriptedSource(stones(200))
    async with scripted_harvest(database_url, tmp_path, source, limits={"record_bytes": 2_000}) as stepper:
        await complete_run(stepper)
        source.rows["k00007"]["note"] = note
        del source.rows["k00150"]
        run = await complete_run(stepper, full=True)
        assert (run["deleted"], run["rejected"]) == (1, 1)
        assert (await stepper.read_canonical()).keys() == source.rows.keys()


async def test_rejects_without_a_key_prevent_deletions(database_url: str, tmp_path: Path) -> None:
    """H10: a rejected record without a key may be any missing record, so nothing is deleted, with an alert."""
    source = ScriptedSource(stones(200))
    async with scripted_harvest(database_url, tmp_path, source) as stepper:
        await complete_run(stepper)
        source.rows["k00007"]["id"] = None
        del source.rows["k00150"]
        run = await complete_run(stepper, full=True)
        assert (run["deleted"], await list_alerts(stepper)) == (0, ["DELETION_SKIPPED"])
        assert {"k00007", "k00150"} <= (await stepper.read_canonical()).keys()
        source.rows["k00007"]["id"] = "k00007"
        assert (await complete_run(stepper, full=True))["deleted"] == 1
        assert (await stepper.read_canonical()).keys() == source.rows.keys()


async def test_endless_pages_fail_the_partition(database_url: str, tmp_path: Path) -> None:
    """H4: a source that ignores the offset fails the partition."""
    source = ScriptedSource(stones(400), ignores_offset=True)
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART, page_size=400) as stepper:
        run_id = await stepper.plan_run()
        await deliver_all(stepper, WORK_ITEMS, limit=10)
        [part] = (await list_partitions(stepper, run_id)).values()
        assert (part["status"], part["error_message"].split(":")[0]) == ("failed", "SOURCE_PAGING_ENDLESS")
        assert (await stepper.run(run_id))["state"] == "consolidation_skipped"


async def test_endless_late_changes_prevent_deletions(database_url: str, tmp_path: Path) -> None:
    """H10: the run completes without deletions and with an alert."""
    source = ScriptedSource(stones(400))
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART, page_size=400) as stepper:
        await complete_run(stepper)
        keys = set(source.rows)
        del source.rows["k00150"]
        run_id = await stepper.plan_run(full=True)
        await stepper.drain(WORK_ITEMS)
        for row in source.rows.values():
            row["updatedAt"] = stepper.db.clock.now().isoformat()
        source.ignores_offset = True
        async with asyncio.timeout(30):
            assert await deliver_all(stepper, CONSOLIDATIONS) == [Done()]
        run = await stepper.run(run_id)
        assert (run["state"], run["deleted"], await list_alerts(stepper)) == ("completed", 0, ["DELETION_SKIPPED"])
        assert (await stepper.read_canonical()).keys() == keys


@pytest.mark.parametrize("pages", [2, 3])
@pytest.mark.parametrize("failure", [SourceFailed, SourceRefused])
async def test_failed_recount_is_repeated(
    database_url: str, tmp_path: Path, pages: int, failure: type[SourceFailed]
) -> None:
    """H4, H6: a failed recount costs attempts, and the last page is fetched again; nothing is doubled."""
    source, limits = CursorSource(stones(70)), {"passes": 2}
    changes: dict[str, Any] = {"partitions": ONE_PART, "pages_per_turn": pages, "limits": limits}

    async def fail(range_: PartitionRange, window: TimeWindow) -> None:
        raise failure("SOURCE_DOWN", "the count failed")

    async with scripted_harvest(database_url, tmp_path, source, **changes) as stepper:
        run_id = await stepper.plan_run()
        source.before_count, before = fail, source.before_count
        outcomes = await deliver_all(stepper, WORK_ITEMS)
        assert isinstance(outcomes[-1], Failed)
        [part] = (await list_partitions(stepper, run_id)).values()
        assert (part["status"], part["received"], part["seen"], part["next_offset"]) == ("failed", 60, 60, 60)
        assert part["error_message"] == "SOURCE_DOWN: the count failed"
        source.before_count = before
        await stepper.harvest.retry(run_id, "test")
        await stepper.finish()
        [part] = (await list_partitions(stepper, run_id)).values()
        assert (part["status"], part["received"], part["seen"]) == ("completed", 70, 70)
        assert (await stepper.run(run_id))["state"] == "completed"
        assert (await stepper.read_canonical()).keys() == source.rows.keys()


async def test_endless_pause_raises_one_alert(database_url: str, tmp_path: Path) -> None:
    """H15: a paused partition never fails; after an hour without a page there is one alert."""
    source = ScriptedSource(stones(60))

    async def pause(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        raise SourcePaused("SOURCE_THROTTLED", "429", after=timedelta(minutes=10))

    source.before_page = pause
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART) as stepper:
        run_id = await stepper.plan_run()
        for _ in range(6):  # more often than a message is delivered
            assert await deliver_all(stepper, WORK_ITEMS, limit=2) == [Done()]
            [part] = (await list_partitions(stepper, run_id)).values()
            assert part["paused_until"] > stepper.db.clock.now() + timedelta(minutes=9)
            assert await stepper.fetcher.resume_paused() == 0
            await stepper.rescuer.rescue()
            assert await stepper.bus.count_backlog(WORK_ITEMS) == 0
            assert await end_pauses(stepper) == 1
        assert await list_alerts(stepper) == []
        await deliver_all(stepper, WORK_ITEMS, limit=2)
        await stepper.db.execute("UPDATE partition_progress SET updated_at = now() - interval '61 minutes'")
        for _ in range(2):
            await stepper.rescuer.rescue()
        assert await list_alerts(stepper) == ["NO_PROGRESS"]
        message = await stepper.db.fetchval("SELECT message FROM harvest_alert")
        assert message.endswith("has stored no page for 60 minutes. It continues to wait.")
        [part] = (await list_partitions(stepper, run_id)).values()
        assert (part["status"], part["rescues"], (await stepper.run(run_id))["state"]) == (None, 0, "created")


async def test_balanced_deletion_and_insertion_are_noticed(database_url: str, tmp_path: Path) -> None:
    """H16: a change within the overlap causes a second pass, even if the clock of the source is behind."""
    source = ScriptedSource(stones(200))
    async with scripted_harvest(database_url, tmp_path, source, overlap=60, pages_per_turn=1) as stepper:
        await complete_run(stepper)
        run_id = await stepper.plan_run(full=True)
        part = (await list_partitions(stepper, run_id))["partition-0"]
        inside = [key for key, row in source.rows.items() if row["price"] < part["upper_bound"]]
        await make_turn(stepper, run_id, "partition-0")
        del source.rows[inside[2]]  # a seen record: the 31st one moves into the page that was read
        late = (stepper.db.clock.now() - timedelta(seconds=10)).isoformat()
        source.rows["new"] = {**source.rows[inside[-1]], "id": "new", "updatedAt": late}
        await stepper.finish()
        assert (await list_partitions(stepper, run_id))["partition-0"]["scan"] > 1
        assert (await stepper.run(run_id))["state"] == "completed"
        assert source.rows.keys() <= (await stepper.read_canonical()).keys()


async def test_without_windows_two_full_runs_must_miss_a_record(database_url: str, tmp_path: Path) -> None:
    """H10: a record that moves between partitions is not deleted; a record that two runs did not see is."""
    source = ScriptedSource(stones(200), has_windows=False)
    async with scripted_harvest(database_url, tmp_path, source) as stepper:
        await complete_run(stepper)
        run_id = await stepper.plan_run(full=True)
        while not (await list_partitions(stepper, run_id))["partition-0"]["completed"]:
            await make_turn(stepper, run_id, "partition-0")
        del source.rows["k00003"]
        source.rows["k00199"]["price"] = 5
        await stepper.finish()
        run = await stepper.run(run_id)
        assert (run["state"], run["deleted"]) == ("completed", 0)
        assert await stepper.db.fetchval("SELECT seen_run FROM raw_record WHERE key = 'k00199'") != run_id
        assert (await stepper.read_canonical()).keys() == {"k00003", *source.rows}
        assert [(await complete_run(stepper, full=True))["deleted"] for _ in range(2)] == [0, 1]
        assert (await stepper.read_canonical()).keys() == source.rows.keys()


@pytest.mark.parametrize(("count", "nulls", "is_one_value"), [(150, 10, True), (300, 290, False)])
async def test_indivisible_source_is_one_partition(
    database_url: str, tmp_path: Path, count: int, nulls: int, is_one_value: bool
) -> None:
    """H3: a source with one value, or hardly any values, is one partition, and no record is read twice."""
    source = ScriptedSource(stones(count))
    for number, row in enumerate(source.rows.values()):
        if number < nulls:
            row["price"] = None
        elif is_one_value:
            row["price"] = 700
    async with scripted_harvest(database_url, tmp_path, source) as stepper:
        run = await complete_run(stepper)
        [part] = (await list_partitions(stepper, run["run_id"])).values()
        assert (part["kind"], part["counted"], part["seen"]) == ("all", count, count)
        assert (await stepper.read_canonical()).keys() == source.rows.keys()


@pytest.mark.parametrize("expires", [1, 100], ids=["once", "always"])
async def test_expired_cursor_starts_a_new_pass(database_url: str, tmp_path: Path, expires: int) -> None:
    """H16: after the maximum of passes the partition fails."""
    source, remaining = CursorSource(stones(70)), expires

    async def expire(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        nonlocal remaining
        if position.cursor is not None and remaining:
            remaining -= 1
            raise SourceRefused("SOURCE_REFUSED", "410: the cursor has expired")

    source.before_page = expire
    changes: dict[str, Any] = {"partitions": ONE_PART, "pages_per_turn": 1, "limits": {"passes": 3}}
    async with scripted_harvest(database_url, tmp_path, source, **changes) as stepper:
        run_id = await stepper.plan_run()
        await deliver_all(stepper, WORK_ITEMS, limit=20)
        [part] = (await list_partitions(stepper, run_id)).values()
        if expires == 1:
            assert (part["status"], part["scan"], part["received"], part["seen"]) == ("completed", 2, 70, 70)
        else:
            assert (part["status"], source.pages.count(PagePosition(0))) == ("failed", 3)
            assert "410" in part["error_message"]
            assert await stepper.db.fetchval("SELECT watermark FROM harvest_feed WHERE feed = $1", FEED) is None
