"""Rows that move, are deleted or return while a run reads them."""

from collections.abc import Callable
from random import Random

import pytest

from penstock.harvest.simulator.server import LocalSource
from tests.harvest.harness import PAGE, HarvestHarness, change_at_page, changed_keys, record_requests
from tests.support.soak import Campaign, examples


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_moving_rows_are_found(harness: HarvestHarness, campaign: Campaign) -> None:
    """H16: while rows change, a full run reads all unchanged rows, and the next two runs read the rest."""
    campaign.counts_items = True
    log, random, repeated = record_requests(harness.source), Random(4), 0
    async with harness.run_workers():
        for _ in range(examples(4, soak=60)):
            log.act = None
            changes = {name: random.randint(0, 12) for name in ("updates", "inserts", "deletes")}
            moments = {len(log.of(PAGE)) + random.randint(1, 20) for _ in range(3)}

            def act(path: str, number: int, moments: set[int] = moments, changes: dict[str, int] = changes) -> None:
                if path == PAGE and number in moments:
                    harness.source.change_records(**changes)

            log.act = act
            run = await harness.complete_run(full=True)
            log.act = None
            repeated += max(part["scan"] for part in await harness.list_partitions(run["run_id"])) > 1
            deleted = set(await harness.read_canonical()) - set(harness.source.read_truth())
            await harness.check_records(but=changed_keys(run, harness), gone=deleted)
            await harness.complete_run()
            await harness.check_records(gone=deleted)
            await harness.complete_run(full=True)
            await harness.check_records()
            campaign.end_round()
    assert repeated


async def test_pass_over_moving_rows_is_repeated(harness: HarvestHarness) -> None:
    """H16: after a deletion between two pages the pass is repeated, so that no other row is lost."""
    log = record_requests(harness.source)
    async with harness.run_workers():
        changes = change_at_page(harness, log, 20, deletes=30)
        run = await harness.complete_run()
        assert changes
        assert max(part["scan"] for part in await harness.list_partitions(run["run_id"])) == 2
        await harness.check_records(gone=changes[0].deleted)
        await harness.check_run(run["run_id"])


async def test_full_run_deletes_missing_records(harness: HarvestHarness) -> None:
    """H10: only a full run deletes records, softly; a record that returns is live again."""
    async with harness.run_workers():
        await harness.complete_run()
        restore = save_state(harness.source)
        deleted = set(harness.source.change_records(deletes=40).deleted)
        run = await harness.complete_run()
        assert (run["run_type"], run["deleted"]) == ("incremental", None)
        assert set(await harness.read_canonical()) - set(harness.source.read_truth()) == deleted
        run = await harness.complete_run(full=True)
        assert run["deleted"] == len(deleted)
        assert set(await harness.read_canonical(deleted=True)) == deleted
        await harness.check_records()
        restore()
        await harness.complete_run(full=True)
        assert await harness.read_canonical(deleted=True) == {}
        await harness.check_records()


def save_state(source: LocalSource) -> Callable[[], None]:
    """Return a function that restores the present records of the source."""
    dataset = source._routes.dataset
    lists = dataset._bodies, dataset._by_price, dataset._by_moment
    saved = [list(rows) for rows in lists]

    def restore() -> None:
        for rows, before in zip(lists, saved, strict=True):
            rows[:] = before  # type: ignore[index]
        dataset._selections.clear()

    return restore


async def test_too_many_missing_records_are_not_deleted(harness: HarvestHarness) -> None:
    """H10: above `max_delete_ratio` nothing is deleted; the run completes with an alert."""
    async with harness.run_workers():
        await harness.complete_run()
        deleted = harness.source.change_records(deletes=61).deleted  # of 300; a fifth is allowed
        run = await harness.complete_run(full=True)
        assert run["deleted"] == 0
        assert await harness.alerts() == [("DELETION_SKIPPED", "WARNING")]
        await harness.check_records(gone=deleted)
        await harness.check_run(run["run_id"])
