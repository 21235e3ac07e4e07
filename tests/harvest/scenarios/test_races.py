"""Late, concurrent and frozen workers: none of them undoes the work of another."""

import asyncio
import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from penstock.harvest import store
from penstock.harvest.config import FeedSection
from penstock.harvest.consolidate import late_changes, watermark, worker
from penstock.harvest.consolidate.late_changes import LateChangesStopped, fetch_late_changes
from penstock.harvest.consolidate.worker import ConsolidationResult, apply_mapping, consolidate
from penstock.harvest.contract import CONSOLIDATIONS, WORK_ITEMS
from penstock.harvest.feed.mapping import FeedMapping
from penstock.harvest.fetch import raw_store
from penstock.harvest.maintenance import RunRescuer
from penstock.harvest.model import PagePosition, PartitionRange, TimeWindow
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.errors import NotFound, Transient
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.tasks.outcome import Retry
from tests.harvest.harness import harvest_harness
from tests.harvest.scripted_source import (
    ONE_PART,
    ScriptedSource,
    complete_run,
    list_partitions,
    scripted_harvest,
    stones,
)
from tests.harvest.stepper import FEED, HarvestStepper, feed
from tests.support.wait import becomes

LOCKED = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')"


async def wait_for_lock(db: Database) -> None:
    """Return when a session of this database waits for a lock of another session."""

    async def is_waiting() -> bool:
        return bool(await db.fetchval(LOCKED))

    await becomes(is_waiting, "a session waits for a lock")


async def read_run(stepper: HarvestStepper, run_id: UUID) -> store.RunRow:
    async with stepper.db.connection() as connection:
        run = await store.read_run(connection, run_id)
    assert run is not None
    return run


async def test_frozen_worker_does_not_take_records_of_a_later_run(database_url: str, tmp_path: Path) -> None:
    """H10: an old run does not mark records that a later run has seen, so that they are not deleted."""
    source, frozen, thawed = ScriptedSource(stones(100)), asyncio.Event(), asyncio.Event()

    async def freeze(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        if not frozen.is_set():
            frozen.set()
            await thawed.wait()

    async with scripted_harvest(database_url, tmp_path, source) as stepper:
        old = await stepper.plan_run()
        source.rows["k00005"] |= {"price": 51, "updatedAt": stepper.db.clock.now().isoformat()}
        await stepper.drain(WORK_ITEMS)
        source.after_page = freeze
        stones_feed = stepper.consolidator._feeds.get(FEED)
        late = asyncio.create_task(
            fetch_late_changes(stepper.db, stones_feed, await read_run(stepper, old), asyncio.Event())
        )
        await frozen.wait()
        await stepper.drain(CONSOLIDATIONS)
        assert (await stepper.run(old))["state"] == "completed"
        new = await stepper.plan_run(full=True)
        await stepper.drain(WORK_ITEMS)
        thawed.set()
        with pytest.raises(LateChangesStopped):
            await late
        await stepper.finish()
        run = await stepper.run(new)
        assert (run["state"], run["deleted"]) == ("completed", 0)
        assert (await stepper.read_canonical()).keys() == source.rows.keys()


async def test_change_of_mapping_keeps_newer_pending_versions(database_url: str, tmp_path: Path) -> None:
    """H7: a record that is stored while all records become pending stays pending with its new version."""
    source = ScriptedSource(stones(60))
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART) as stepper:
        first = await complete_run(stepper)
        run = await read_run(stepper, first["run_id"])
        changed = {**source.rows["k00001"], "price": 99, "updatedAt": stepper.db.clock.now().isoformat()}
        records, _ = stepper.consolidator._feeds.get(FEED).reader.read([json.dumps(changed).encode()])

        async def make_all_pending() -> None:
            async with stepper.db.transaction() as tx:
                await tx.execute(worker._SQL["make_all_pending"], FEED)

        async with stepper.db.transaction() as tx:
            now = stepper.db.clock.now()
            await raw_store.store_records(tx, late_changes._make_task(run, 1, now), records, now)
            other = asyncio.create_task(make_all_pending())
            await wait_for_lock(stepper.db)
        await other
        query = (
            "SELECT r.version, p.version FROM raw_record r JOIN raw_pending p USING (feed, key) WHERE key = 'k00001'"
        )
        assert tuple(await stepper.db.fetchrow(query) or ()) == (2, 2)
        await complete_run(stepper)
        assert (await stepper.read_canonical())["k00001"]["cost"] == Decimal("0.99")


def make_section(percent: int, mode: str) -> FeedSection:
    rules = {"rules": [{"name": "all", "markup_percent": percent}]}
    sizes = {"mode": mode, "set_size": 50, "set_concurrency": 1, "batch_size": 50}
    return FeedSection.model_validate(feed("http://localhost", pricing=rules, consolidation=sizes))


async def apply_section(db: Database, section: FeedSection) -> int:
    async with db.transaction() as tx:
        await store.lock_feed(tx, FEED)
        return await apply_mapping(tx, FEED, FeedMapping.from_feed(section), db.clock.now())


async def read_versions(stepper: HarvestStepper) -> set[int]:
    return {row["pricing_version"] for row in (await stepper.read_canonical()).values()}


@pytest.mark.parametrize("mode", ["sets", "batches"])
async def test_worker_with_an_old_mapping_stops(database_url: str, tmp_path: Path, mode: str) -> None:
    """H7: a worker with an old mapping writes nothing, and the attempt does not count as a failure of the run."""
    old, new = make_section(20, mode), make_section(50, mode)
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(200))) as stepper:
        await complete_run(stepper)
        before = await read_versions(stepper)
        old_version, new_version = await apply_section(stepper.db, old), await apply_section(stepper.db, new)

        async def run_consolidation(section: FeedSection, version: int) -> ConsolidationResult:
            options: dict[str, Any] = {"run_id": uuid4(), "pricing_version": version}
            return await consolidate(stepper.db, FEED, FeedMapping.from_feed(section), section.consolidation, **options)

        with pytest.raises(Transient) as stopped:
            await run_consolidation(old, old_version)
        assert (stopped.value.code, await read_versions(stepper)) == ("MAPPING_CHANGED", before)
        assert await run_consolidation(new, new_version) == ConsolidationResult(200)
        assert await read_versions(stepper) == {new_version}


@pytest.mark.parametrize("mode", ["sets", "batches"])
async def test_mapping_changes_between_two_sets(database_url: str, tmp_path: Path, mode: str) -> None:
    """H7: the mapping never changes within a set; all records of the old mapping are made again."""
    old, new = make_section(20, mode), make_section(50, mode)
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(200))) as stepper:
        await complete_run(stepper)
        old_version = await apply_section(stepper.db, old)
        rollouts: list[asyncio.Task[int]] = []

        async def roll_out(tx: Connection, result: ConsolidationResult) -> None:
            if not rollouts:
                rollouts.append(asyncio.create_task(apply_section(stepper.db, new)))
                await wait_for_lock(stepper.db)

        options: dict[str, Any] = {"run_id": uuid4(), "progress": roll_out}
        with suppress(Transient):  # unless it ends before the other one starts
            await consolidate(
                stepper.db, FEED, FeedMapping.from_feed(old), old.consolidation, pricing_version=old_version, **options
            )
        new_version = await rollouts[0]
        await consolidate(
            stepper.db, FEED, FeedMapping.from_feed(new), new.consolidation, pricing_version=new_version, run_id=uuid4()
        )
        assert await read_versions(stepper) == {new_version}
        assert await stepper.db.fetchval("SELECT count(*) FROM raw_pending") == 0


async def test_frozen_transaction_is_aborted(database_url: str, tmp_path: Path) -> None:
    """H4: an idle transaction ends after the lease, so that its locked partition can continue or be cancelled."""
    async with harvest_harness(database_url, tmp_path, harvest={"lease": 7}) as harness:
        assert await harness.db.fetchval("SHOW idle_in_transaction_session_timeout") == "7s"


class LateStorage(FolderStorage):
    """A storage whose first write happens after the write of a later run."""

    newer: bytes | None = None

    async def replace(self, path: str, data: bytes, *, etag: str) -> Any:
        if self.newer is not None:
            newer, self.newer = self.newer, None
            await watermark.save(self, FEED, newer)
        return await super().replace(path, data, etag=etag)


async def test_late_save_does_not_replace_a_newer_watermark(tmp_path: Path) -> None:
    """H8: a writer that read before a later run and writes after it changes nothing."""
    storage, moment = LateStorage(tmp_path), datetime(2026, 1, 1, tzinfo=UTC)
    first, old, new = (
        watermark.make_document(moment + timedelta(hours=hours), uuid4(), moment + timedelta(hours=hours))
        for hours in (0, 1, 5)
    )
    await watermark.save(storage, FEED, first)
    storage.newer = new
    await watermark.save(storage, FEED, old)
    assert storage.newer is None
    assert (await storage.get(watermark.make_blob_path(FEED))).data == new


@pytest.mark.full
@pytest.mark.parametrize("has_watermark", [False, True])
async def test_copy_of_a_failed_run_is_restored(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_watermark: bool
) -> None:
    """H8: a run that fails after the write of its copy leaves the copy of the run before, or none."""
    save = watermark.save

    async def save_and_crash(*args: Any) -> None:
        await save(*args)
        raise RuntimeError("the connection was lost before the commit")

    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(60)), partitions=ONE_PART) as stepper:
        if has_watermark:
            await complete_run(stepper)
            before = (await stepper.storage.get(watermark.make_blob_path(FEED))).data
        monkeypatch.setattr(watermark, "save", save_and_crash)
        run_id = await stepper.plan_run()
        await stepper.finish()
        assert (await stepper.run(run_id))["state"] == "failed"
        if has_watermark:
            assert (await stepper.storage.get(watermark.make_blob_path(FEED))).data == before
        else:
            with pytest.raises(NotFound):
                await stepper.storage.get(watermark.make_blob_path(FEED))


async def test_fetch_of_late_changes_reports_progress_and_can_be_stopped(database_url: str, tmp_path: Path) -> None:
    """H10: the run is touched at every page, so it does not count as stalled; a stop takes effect after a page."""
    source, touched = ScriptedSource(stones(100)), []
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART, page_size=5) as stepper:
        run_id = await stepper.plan_run()
        await stepper.drain(WORK_ITEMS)
        for row in source.rows.values():
            row["updatedAt"] = stepper.db.clock.now().isoformat()

        async def check_progress(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
            touched.append((await stepper.run(run_id))["touched_at"])
            await stepper.db.execute("UPDATE run_metadata SET touched_at = touched_at - interval '1 day'")
            if len(touched) == 4:
                stepper.consolidator.stop()

        source.before_page = check_progress
        [outcome] = await stepper.deliver(CONSOLIDATIONS)
        assert isinstance(outcome, Retry)
        assert not outcome.counts
        assert len(touched) == 4
        assert touched == sorted(touched)
        assert (await stepper.run(run_id))["state"] == "consolidating"


async def test_concurrent_rescuers_send_a_message_once(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H4: a message of stalled work that several processes find is sent once and counted once."""
    all_checked, send_again = asyncio.Barrier(4), RunRescuer._send_again

    async def send_together(self: RunRescuer, *args: Any) -> None:
        await all_checked.wait()
        await send_again(self, *args)

    monkeypatch.setattr(RunRescuer, "_send_again", send_together)
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(200))) as stepper:
        run_id = await stepper.plan_run()
        await stepper.db.execute("DELETE FROM bus_message")
        await stepper.db.execute("UPDATE partition_progress SET updated_at = now() - interval '1 hour'")
        await asyncio.gather(*(stepper.rescuer.rescue() for _ in range(4)))
        parts = await list_partitions(stepper, run_id)
        assert {part["rescues"] for part in parts.values()} == {1}
        assert await stepper.bus.count_backlog(WORK_ITEMS) == len(parts)
