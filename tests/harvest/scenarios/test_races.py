"""Those who come late, come together, or froze in between: none of them undoes what another did."""

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
from penstock.harvest.consolidate.late_changes import LateChangesStopped, sweep
from penstock.harvest.consolidate.worker import ConsolidationResult, consolidate, use_recipe
from penstock.harvest.contract import CONSOLIDATIONS, WORK_ITEMS
from penstock.harvest.feed.recipe import FeedMapping
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
    completed,
    partitions,
    scripted_harvest,
    stones,
)
from tests.harvest.stepper import FEED, HarvestStepper, feed
from tests.support.wait import becomes

LOCKED = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')"


async def somebody_waits(db: Database) -> None:
    """Back when a session of this database waits for another's lock."""

    async def is_so() -> bool:
        return bool(await db.fetchval(LOCKED))

    await becomes(is_so, "somebody waits for a lock")


async def run_of(one: HarvestStepper, run_id: UUID) -> store.RunRow:
    async with one.db.connection() as connection:
        run = await store.run(connection, run_id)
    assert run is not None
    return run


async def test_a_frozen_sweep_does_not_take_records_from_a_later_run(database_url: str, tmp_path: Path) -> None:
    """H10: what a later run has seen is not called seen by an old one, and so not called gone."""
    source, frozen, thawed = ScriptedSource(stones(100)), asyncio.Event(), asyncio.Event()

    async def freeze(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        if not frozen.is_set():
            frozen.set()
            await thawed.wait()

    async with scripted_harvest(database_url, tmp_path, source) as one:
        old = await one.planned()
        source.rows["k00005"] |= {"price": 51, "updatedAt": one.db.clock.now().isoformat()}
        await one.drain(WORK_ITEMS)
        source.after_page = freeze
        stones_feed = one.consolidator._feeds.get(FEED)
        late = asyncio.create_task(sweep(one.db, stones_feed, await run_of(one, old), asyncio.Event()))
        await frozen.wait()
        await one.drain(CONSOLIDATIONS)
        assert (await one.run(old))["state"] == "completed"
        new = await one.planned(full=True)
        await one.drain(WORK_ITEMS)
        thawed.set()
        with pytest.raises(LateChangesStopped):
            await late
        await one.finish()
        run = await one.run(new)
        assert (run["state"], run["deleted"]) == ("completed", 0)
        assert (await one.canonical()).keys() == source.rows.keys()


async def test_a_change_of_recipe_sets_no_pending_version_back(database_url: str, tmp_path: Path) -> None:
    """H7: a record that is kept while all are made pending stays pending as it is kept."""
    source = ScriptedSource(stones(60))
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART) as one:
        first = await completed(one)
        run = await run_of(one, first["run_id"])
        changed = {**source.rows["k00001"], "price": 99, "updatedAt": one.db.clock.now().isoformat()}
        found, _ = one.consolidator._feeds.get(FEED).reader.read([json.dumps(changed).encode()])

        async def make_all_pending() -> None:
            async with one.db.transaction() as tx:
                await tx.execute(worker._SQL["make_all_pending"], FEED)

        async with one.db.transaction() as tx:
            now = one.db.clock.now()
            await raw_store.keep(tx, late_changes._task(run, 1, now), found, now)
            other = asyncio.create_task(make_all_pending())
            await somebody_waits(one.db)
        await other
        query = (
            "SELECT r.version, p.version FROM raw_record r JOIN raw_pending p USING (feed, key) WHERE key = 'k00001'"
        )
        assert tuple(await one.db.fetchrow(query) or ()) == (2, 2)
        await completed(one)
        assert (await one.canonical())["k00001"]["cost"] == Decimal("0.99")


def marked_up(percent: int, mode: str) -> FeedSection:
    rules = {"rules": [{"name": "all", "markup_percent": percent}]}
    sizes = {"mode": mode, "set_size": 50, "sets_at_once": 1, "batch_size": 50}
    return FeedSection.model_validate(feed("http://localhost", pricing=rules, consolidation=sizes))


async def use_section(db: Database, section: FeedSection) -> int:
    async with db.transaction() as tx:
        await store.lock_feed(tx, FEED)
        return await use_recipe(tx, FEED, FeedMapping.of(section), db.clock.now())


async def versions(one: HarvestStepper) -> set[int]:
    return {row["pricing_version"] for row in (await one.canonical()).values()}


@pytest.mark.parametrize("mode", ["sets", "batches"])
async def test_who_has_an_old_recipe_stops(database_url: str, tmp_path: Path, mode: str) -> None:
    """H7: it writes nothing, and counts as no failure; the records are made by the recipe the feed has."""
    old, new = marked_up(20, mode), marked_up(50, mode)
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(200))) as one:
        await completed(one)
        before = await versions(one)
        old_version, new_version = await use_section(one.db, old), await use_section(one.db, new)

        async def make(section: FeedSection, version: int) -> ConsolidationResult:
            told: dict[str, Any] = {"run_id": uuid4(), "pricing_version": version}
            return await consolidate(one.db, FEED, FeedMapping.of(section), section.consolidation, **told)

        with pytest.raises(Transient) as stopped:
            await make(old, old_version)
        assert (stopped.value.code, await versions(one)) == ("MAPPING_CHANGED", before)
        assert await make(new, new_version) == ConsolidationResult(200)
        assert await versions(one) == {new_version}


@pytest.mark.parametrize("mode", ["sets", "batches"])
async def test_a_recipe_changes_between_two_sets(database_url: str, tmp_path: Path, mode: str) -> None:
    """H7: never in the middle of one; all that was made the old way is made again."""
    old, new = marked_up(20, mode), marked_up(50, mode)
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(200))) as one:
        await completed(one)
        old_version = await use_section(one.db, old)
        rollouts: list[asyncio.Task[int]] = []

        async def roll_out(tx: Connection, done: ConsolidationResult) -> None:
            if not rollouts:
                rollouts.append(asyncio.create_task(use_section(one.db, new)))
                await somebody_waits(one.db)

        told: dict[str, Any] = {"run_id": uuid4(), "progress": roll_out}
        with suppress(Transient):  # or it is at its end before the other comes to it
            await consolidate(one.db, FEED, FeedMapping.of(old), old.consolidation, pricing_version=old_version, **told)
        new_version = await rollouts[0]
        await consolidate(
            one.db, FEED, FeedMapping.of(new), new.consolidation, pricing_version=new_version, run_id=uuid4()
        )
        assert await versions(one) == {new_version}
        assert await one.db.fetchval("SELECT count(*) FROM raw_pending") == 0


async def test_who_freezes_in_a_transaction_loses_it(database_url: str, tmp_path: Path) -> None:
    """H4: after its lease; else a partition it holds could neither go on nor be cancelled."""
    async with harvest_harness(database_url, tmp_path, harvest={"lease": 7}) as harness:
        assert await harness.db.fetchval("SHOW idle_in_transaction_session_timeout") == "7s"


class Late(FolderStorage):
    """A storage whose first write comes after that of a later run."""

    newer: bytes | None = None

    async def replace(self, path: str, data: bytes, *, etag: str) -> Any:
        if self.newer is not None:
            newer, self.newer = self.newer, None
            await watermark.save(self, FEED, newer)
        return await super().replace(path, data, etag=etag)


async def test_a_late_save_does_not_undo_a_newer_one(tmp_path: Path) -> None:
    """H8: whoever read before, and writes after, a later run finds that there is nothing left to do."""
    storage, moment = Late(tmp_path), datetime(2026, 1, 1, tzinfo=UTC)
    first, old, new = (
        watermark.document(moment + timedelta(hours=hours), uuid4(), moment + timedelta(hours=hours))
        for hours in (0, 1, 5)
    )
    await watermark.save(storage, FEED, first)
    storage.newer = new
    await watermark.save(storage, FEED, old)
    assert storage.newer is None
    assert (await storage.get(watermark.path(FEED))).data == new


@pytest.mark.full
@pytest.mark.parametrize("is_known", [False, True])
async def test_a_copy_that_is_ahead_is_taken_back(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """H8: a run that failed after its copy was written leaves the copy of the one before, or none."""
    save = watermark.save

    async def save_and_crash(*args: Any) -> None:
        await save(*args)
        raise RuntimeError("the database went away before the commit")

    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(60)), partitions=ONE_PART) as one:
        if is_known:
            await completed(one)
            before = (await one.storage.get(watermark.path(FEED))).data
        monkeypatch.setattr(watermark, "save", save_and_crash)
        run_id = await one.planned()
        await one.finish()
        assert (await one.run(run_id))["state"] == "failed"
        if is_known:
            assert (await one.storage.get(watermark.path(FEED))).data == before
        else:
            with pytest.raises(NotFound):
                await one.storage.get(watermark.path(FEED))


async def test_a_sweep_is_seen_to_go_on_and_can_be_stopped(database_url: str, tmp_path: Path) -> None:
    """H10: however long it takes, nobody takes it for dead; who stops it waits for a page, not for all of them."""
    source, touched = ScriptedSource(stones(100)), []
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART, page_size=5) as one:
        run_id = await one.planned()
        await one.drain(WORK_ITEMS)
        for row in source.rows.values():
            row["updatedAt"] = one.db.clock.now().isoformat()

        async def look(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
            touched.append((await one.run(run_id))["touched_at"])
            await one.db.execute("UPDATE run_metadata SET touched_at = touched_at - interval '1 day'")
            if len(touched) == 4:
                one.consolidator.stop()

        source.before_page = look
        [outcome] = await one.deliver(CONSOLIDATIONS)
        assert isinstance(outcome, Retry)
        assert not outcome.counts
        assert len(touched) == 4
        assert touched == sorted(touched)
        assert (await one.run(run_id))["state"] == "consolidating"


async def test_many_who_look_make_one_rescue(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H4: what several processes see standing still at once is sent again once, and counted once."""
    all_have_looked, again = asyncio.Barrier(4), RunRescuer._again

    async def together(self: RunRescuer, *args: Any) -> None:
        await all_have_looked.wait()
        await again(self, *args)

    monkeypatch.setattr(RunRescuer, "_again", together)
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(200))) as one:
        run_id = await one.planned()
        await one.db.execute("DELETE FROM bus_message")
        await one.db.execute("UPDATE partition_progress SET updated_at = now() - interval '1 hour'")
        await asyncio.gather(*(one.rescuer.look() for _ in range(4)))
        parts = await partitions(one, run_id)
        assert {part["rescues"] for part in parts.values()} == {1}
        assert await one.bus.backlog(WORK_ITEMS) == len(parts)
