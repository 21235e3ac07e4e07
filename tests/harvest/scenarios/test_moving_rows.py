"""Rows that move, go or come back while a run reads them."""

from collections.abc import Callable
from random import Random

import pytest

from penstock.harvest.simulator.server import LocalSource
from tests.harvest.harness import PAGE, HarvestHarness, changed, changing, tapped
from tests.support.soak import Campaign, examples


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_rows_that_move_are_found(harness: HarvestHarness, campaign: Campaign) -> None:
    """H16: rows move, come and go between pages; what did not change is there, the next two runs do the rest."""
    campaign.counts_items = True
    asked, random, again = tapped(harness.source), Random(4), 0
    async with harness.working():
        for _ in range(examples(4, soak=60)):
            asked.act = None
            changes = {name: random.randint(0, 12) for name in ("updates", "inserts", "deletes")}
            moments = {len(asked.of(PAGE)) + random.randint(1, 20) for _ in range(3)}

            def act(path: str, number: int, moments: set[int] = moments, changes: dict[str, int] = changes) -> None:
                if path == PAGE and number in moments:
                    harness.source.change(**changes)

            asked.act = act
            run = await harness.completed(full=True)
            asked.act = None
            again += max(part["scan"] for part in await harness.partitions(run["run_id"])) > 1
            gone = set(await harness.canonical()) - set(harness.source.truth())
            await harness.equals_truth(but=changed(run, harness), gone=gone)
            await harness.completed()
            await harness.equals_truth(gone=gone)
            await harness.completed(full=True)
            await harness.equals_truth()
            campaign.end_round()
    assert again


async def test_a_pass_over_moving_rows_is_made_again(harness: HarvestHarness) -> None:
    """H16: pages shifted by a row that went are read once more, so no other row is lost between two pages."""
    asked = tapped(harness.source)
    async with harness.working():
        done = changing(harness, asked, 20, deletes=30)
        run = await harness.completed()
        assert done
        assert max(part["scan"] for part in await harness.partitions(run["run_id"])) == 2
        await harness.equals_truth(gone=done[0].deleted)
        await harness.is_whole(run["run_id"])


async def test_a_full_run_deletes_what_is_gone(harness: HarvestHarness) -> None:
    """H10: softly, only after a full run; an incremental one never does; what returns is live again."""
    async with harness.working():
        await harness.completed()
        restore = remembered(harness.source)
        gone = set(harness.source.change(deletes=40).deleted)
        run = await harness.completed()
        assert (run["run_type"], run["deleted"]) == ("incremental", None)
        assert set(await harness.canonical()) - set(harness.source.truth()) == gone
        run = await harness.completed(full=True)
        assert run["deleted"] == len(gone)
        assert set(await harness.canonical(deleted=True)) == gone
        await harness.equals_truth()
        restore()
        await harness.completed(full=True)
        assert await harness.canonical(deleted=True) == {}
        await harness.equals_truth()


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


async def test_too_much_to_be_gone_is_not_believed(harness: HarvestHarness) -> None:
    """H10: over `max_delete_ratio` nothing is deleted, and somebody is told; the run completes."""
    async with harness.working():
        await harness.completed()
        gone = harness.source.change(deletes=61).deleted  # of 300; a fifth is allowed
        run = await harness.completed(full=True)
        assert run["deleted"] == 0
        assert await harness.alerts() == [("DELETION_SKIPPED", "WARNING")]
        await harness.equals_truth(gone=gone)
        await harness.is_whole(run["run_id"])
