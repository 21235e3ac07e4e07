"""Work items of a partition: each counts once, and a turn is one transaction."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from penstock.harvest.contract import CONSOLIDATIONS, WORK_DONE, WORK_ITEMS
from penstock.harvest.fetch.partitions import work_item
from penstock.kernel.tasks.outcome import Done, Retry
from tests.harvest.harness import HarvestHarness, delivered, harvest_harness, planned, taken


@pytest.fixture
async def harness(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestHarness]:
    async with harvest_harness(database_url, tmp_path, call={"timeout": 0.3}) as harness:
        yield harness


async def test_a_message_counts_once(harness: HarvestHarness) -> None:
    """H4, H5: a work item that comes twice, at once or late, or for a partition that is done, changes nothing."""
    async with harness.parts() as parts:
        run_id, items = await planned(harness, parts)
        first = delivered(items[1])
        assert await asyncio.gather(*(parts.fetcher.handle(first) for _ in range(4))) == [Done()] * 4
        assert (await harness.published(run_id))[WORK_ITEMS] == len(items) + 1
        for item in (items[0], *items[2:]):
            await parts.fetcher.handle(delivered(item))
        while await harness.handled(WORK_ITEMS, parts.fetcher.handle):
            pass
        before, told = await harness.run(run_id), await harness.published(run_id)
        assert (before["state"], told[WORK_DONE], told[CONSOLIDATIONS]) == ("consolidating", len(items), 1)
        old = [
            work_item(run_id, part["partition_id"], part["next_offset"], part["scan"], "late")
            for part in await harness.partitions(run_id)
        ]
        for item in (*items, *old):
            assert await parts.fetcher.handle(delivered(item)) == Done()
        assert (await harness.run(run_id), await harness.published(run_id)) == (before, told)
        assert await harness.seen(run_id) == len(harness.source.truth())
        consolidation = await taken(harness, CONSOLIDATIONS)
        await asyncio.gather(*(parts.consolidator.handle(delivered(consolidation)) for _ in range(2)))
        await harness.is_whole(run_id)
        await harness.equals_truth()


# A turn fails as it commits, when that would bring its run to one of these states.
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
async def test_a_turn_is_one_transaction(harness: HarvestHarness) -> None:
    """H4, H5: a turn that fails at its very end leaves nothing: no record, no progress, no count, no message."""
    await harness.db.execute(FAIL_TURNS)
    async with harness.parts() as parts:
        run_id, items = await planned(harness, parts)
        before = await standing(harness, run_id)
        for item in items:
            assert isinstance(await parts.fetcher.handle(delivered(item)), Retry)
        assert await standing(harness, run_id) == before
        await harness.db.execute("DELETE FROM fails_at; INSERT INTO fails_at VALUES ('consolidating')")
        for item in items:
            await parts.fetcher.handle(delivered(item))
        while await harness.handled(WORK_ITEMS, parts.fetcher.handle):
            pass
        run, told = await harness.run(run_id), await harness.published(run_id)
        assert run["completed_workers"] == told[WORK_DONE] == len(items) - 1
        assert (run["state"], told[CONSOLIDATIONS]) == ("workers_running", 0)
        await harness.db.execute("DELETE FROM fails_at")
        async with harness.working():
            await harness.ended(run_id)
        await harness.is_whole(run_id)
        await harness.equals_truth()


async def standing(harness: HarvestHarness, run_id: UUID) -> tuple[Any, ...]:
    """All a turn writes."""
    return (
        await harness.run(run_id),
        await harness.partitions(run_id),
        await harness.published(run_id),
        await harness.raw(),
    )
