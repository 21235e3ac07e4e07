"""What changed while a full run was under way is looked for before anything is deleted."""

from tests.harvest.harness import FEED, HarvestHarness, changing, tapped


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
