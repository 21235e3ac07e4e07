"""Work items of a partition: each has one effect, and a turn is one transaction."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from penstock.harvest.contract import CONSOLIDATIONS, WORK_DONE, WORK_ITEMS
from penstock.harvest.fetch.partitions import make_work_item
from penstock.kernel.tasks.outcome import Done, Retry
from tests.harvest.harness import HarvestHarness, harvest_harness, make_delivery, plan_run, take_message


@pytest.fixture
async def harness(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestHarness]:
    async with harvest_harness(database_url, tmp_path, call={"timeout": 0.3}) as harness:
        yield harness


async def test_repeated_messages_change_nothing(harness: HarvestHarness) -> None:
    """H4, H5: a work item that is delivered twice, or late, or for a complete partition, changes nothing."""
    async with harness.open_workers() as parts:
        run_id, items = await plan_run(harness, parts)
        first = make_delivery(items[1])
        assert await asyncio.gather(*(parts.fetcher.handle(first) for _ in range(4))) == [Done()] * 4
        assert (await harness.count_published(run_id))[WORK_ITEMS] == len(items) + 1
        for item in (items[0], *items[2:]):
            await parts.fetcher.handle(make_delivery(item))
        while await harness.handle_messages(WORK_ITEMS, parts.fetcher.handle):
            pass
        before, published = await harness.run(run_id), await harness.count_published(run_id)
        assert (before["state"], published[WORK_DONE], published[CONSOLIDATIONS]) == ("consolidating", len(items), 1)
        old = [
            make_work_item(run_id, part["partition_id"], part["next_offset"], part["scan"], "late")
            for part in await harness.list_partitions(run_id)
        ]
        for item in (*items, *old):
            assert await parts.fetcher.handle(make_delivery(item)) == Done()
        assert (await harness.run(run_id), await harness.count_published(run_id)) == (before, published)
        assert await harness.count_seen(run_id) == len(harness.source.read_truth())
        consolidation = await take_message(harness, CONSOLIDATIONS)
        await asyncio.gather(*(parts.consolidator.handle(make_delivery(consolidation)) for _ in range(2)))
        await harness.check_run(run_id)
        await harness.check_records()


# The commit of a turn fails if its run has one of these states then.
FAIL_TURNS = """
CREATE TABLE fails_at AS SELECT unnest(ARRAY['created', 'workers_running']) AS state;
CREATE FUNCTION fail_turn() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM run_metadata JOIN fails_at USING (state) WHERE run_id = NEW.run_id) THEN
        RAISE 'at the end';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER fail_turn AFTER UPDATE ON partition_progress
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail_turn();
"""


@pytest.mark.full
async def test_turn_is_one_transaction(harness: HarvestHarness) -> None:
    """H4, H5: a turn that fails at its commit leaves no record, no progress, no count and no message."""
    await harness.db.execute(FAIL_TURNS)
    async with harness.open_workers() as parts:
        run_id, items = await plan_run(harness, parts)
        before = await read_effects(harness, run_id)
        for item in items:
            assert isinstance(await parts.fetcher.handle(make_delivery(item)), Retry)
        assert await read_effects(harness, run_id) == before
        await harness.db.execute("DELETE FROM fails_at; INSERT INTO fails_at VALUES ('consolidating')")
        for item in items:
            await parts.fetcher.handle(make_delivery(item))
        while await harness.handle_messages(WORK_ITEMS, parts.fetcher.handle):
            pass
        run, published = await harness.run(run_id), await harness.count_published(run_id)
        assert run["completed_workers"] == published[WORK_DONE] == len(items) - 1
        assert (run["state"], published[CONSOLIDATIONS]) == ("workers_running", 0)
        await harness.db.execute("DELETE FROM fails_at")
        async with harness.run_workers():
            await harness.wait_for_end(run_id)
        await harness.check_run(run_id)
        await harness.check_records()


async def read_effects(harness: HarvestHarness, run_id: UUID) -> tuple[Any, ...]:
    """Return everything that a turn writes."""
    return (
        await harness.run(run_id),
        await harness.list_partitions(run_id),
        await harness.count_published(run_id),
        await harness.read_raw(),
    )
