"""Changes during a full run are fetched before records are deleted."""

from tests.harvest.harness import FEED, HarvestHarness, change_at_page, record_requests


async def test_record_that_moves_between_partitions_is_not_deleted(harness: HarvestHarness) -> None:
    """H10: a record that moves from an unread partition to a read one is fetched before records are deleted."""
    log = record_requests(harness.source)
    async with harness.run_workers():
        await harness.complete_run()
        fetched = 0
        for at in (15, 18, 21):
            changes = change_at_page(harness, log, at, updates=40, deletes=1)
            run = await harness.complete_run(full=True)
            log.act = None
            query = "SELECT count(*) FROM raw_record WHERE feed = $1 AND seen_run = $2 AND seen_in = 'late-changes'"
            fetched += await harness.db.fetchval(query, FEED, run["run_id"])
            assert set(await harness.read_canonical(deleted=True)).isdisjoint(harness.source.read_truth())
            assert set(harness.source.read_truth()) <= set(await harness.read_canonical())
            assert changes
        assert fetched
