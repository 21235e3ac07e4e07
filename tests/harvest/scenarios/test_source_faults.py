"""A source that fails: runs complete all the same, or fail in a way that can be mended, and nothing is doubled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic
from uuid import UUID

import pytest

from penstock.harvest.contract import CONSOLIDATIONS, PLANS, WORK_ITEMS, HarvestRunState
from penstock.harvest.simulator.faults import Faults
from penstock.kernel.bus import BusDelivery
from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import Conflict, Invalid, NotFound
from penstock.kernel.tasks.outcome import Failed, Outcome
from tests.harvest.harness import (
    COUNT,
    PAGE,
    HarvestHarness,
    delivered,
    harvest_harness,
    planned,
    tapped,
)
from tests.harvest.scenarios.worker_process import HarvestWorkerProcess
from tests.support.types import Json
from tests.support.wait import becomes

EACH = {
    "429": Faults(rate_429=0.05, retry_after=1),
    "500": Faults(rate_500=0.2),
    "timeout": Faults(rate_timeout=0.1),
    "short": Faults(rate_short=0.2),
    "garbage": Faults(rate_garbage=0.1),
    "cut": Faults(rate_cut=0.1),
}
ALL = Faults(
    rate_429=0.02, retry_after=0, rate_500=0.1, rate_timeout=0.05, rate_short=0.2, rate_garbage=0.05, rate_cut=0.05
)
DOWN = Faults(rate_500=1)
AT_ONCE = {"stalled_after": 0.000001}


@pytest.fixture
async def harness(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestHarness]:
    async with harvest_harness(database_url, tmp_path, call={"timeout": 0.3}) as harness:
        yield harness


@pytest.mark.parametrize("kind", [*EACH, "all"])
async def test_a_run_completes_in_spite_of_faults(harness: HarvestHarness, kind: str) -> None:
    """H15, H16: whatever the source does now and then, the run ends with all of its records, each counted once."""
    harness.source.set_faults(EACH.get(kind, ALL))
    async with harness.working():
        run = await harness.completed()
    given = set(harness.source.stats()["faults"])
    assert len(given) > 3 if kind == "all" else given == {kind}
    await harness.is_whole(run["run_id"])
    await harness.equals_truth()
    assert await harness.seen(run["run_id"]) == run["heatmap"]["total"] == len(harness.source.truth())


async def test_a_pause_holds_for_all_processes(harness: HarvestHarness, tmp_path: Path) -> None:
    """H15: after a 429 with Retry-After no process asks for anything until it is over; then they go on."""
    asked, times = tapped(harness.source), []

    def throttle(path: str, number: int) -> None:
        times.append(monotonic())
        throttles = path == PAGE and number == 4
        harness.source.set_faults(Faults(rate_429=1, retry_after=2) if throttles else Faults())

    asked.act = throttle
    other = HarvestWorkerProcess(harness.settings, tmp_path / "log")
    async with harness.working():
        run = await harness.completed()
    other.kill()
    assert harness.source.stats()["faults"] == {"429": 1}
    paused_at = times[[path for path, _ in asked.requests].index(PAGE) :][3]  # may be off by what was asked at once
    in_pause = [at for at in times if paused_at + 0.7 < at < paused_at + 1.9]
    assert in_pause == []  # the other process looks twice a second
    assert max(times) > paused_at + 1.9
    await harness.is_whole(run["run_id"])
    await harness.equals_truth()


@pytest.mark.full
async def test_a_pause_is_nobodys_failure(database_url: str, tmp_path: Path) -> None:
    """H6, H15: a source that throttles more often than a message is redelivered costs no partition its attempts."""
    async with harvest_harness(database_url, tmp_path, call={"attempts": 1}) as harness, harness.working():
        asked, throttled = tapped(harness.source), Faults(rate_429=1, retry_after=0)
        asked.act = lambda path, number: harness.source.set_faults(
            throttled if path == PAGE and number < 80 else Faults()
        )
        await harness.is_whole((await harness.completed())["run_id"])
        await harness.is_quiet()
        await harness.equals_truth()


async def failed_on_the_way(harness: HarvestHarness, after: int = 6) -> UUID:
    """A run whose source goes down after some pages."""
    asked = tapped(harness.source)
    asked.act = lambda path, number: harness.source.set_faults(DOWN) if path == PAGE and number > after else None
    run_id = await harness.start()
    await harness.ended(run_id, HarvestRunState.CONSOLIDATION_SKIPPED)
    asked.act = None
    harness.source.set_faults()
    return run_id


@asynccontextmanager
async def failing(database_url: str, folder: Path) -> AsyncIterator[HarvestHarness]:
    async with harvest_harness(database_url, folder, call={"attempts": 1}) as harness, harness.working():
        yield harness


async def test_a_source_that_is_down_fails_partitions(database_url: str, tmp_path: Path) -> None:
    """H5, H6, H11: four deliveries, then a dead letter, a skipped consolidation, an alert, and no watermark."""
    async with failing(database_url, tmp_path) as harness:
        run_id = await failed_on_the_way(harness)
        run, partitions = await harness.run(run_id), await harness.partitions(run_id)
        failed = [part for part in partitions if part["status"] == "failed"]
        assert run["completed_workers"] + run["failed_workers"] == run["expected_workers"]
        assert run["failed_workers"] == len(failed) > 1
        assert all("SOURCE_ERROR" in part["error_message"] for part in failed)

        async def all_set_aside() -> bool:  # a message is settled after what its worker committed
            return len(await harness.dead_letters()) == len(failed)

        await becomes(all_set_aside, "a dead letter for each partition that failed")
        letters = await harness.dead_letters()
        assert sorted(letter.message.key for letter in letters) == [
            f"{run_id}/{part['partition_id']}" for part in failed
        ]
        assert {letter.attempts for letter in letters} == {4}
        assert all("SOURCE_ERROR" in letter.reason for letter in letters)
        assert await harness.alerts() == [("CONSOLIDATION_SKIPPED", "ERROR")]
        assert await is_unmoved(harness, run)
        assert (await harness.published(run_id))[CONSOLIDATIONS] == 0
        assert await harness.canonical() == {}


async def is_unmoved(harness: HarvestHarness, run: Json) -> bool:
    """Whether the run left no watermark anywhere."""
    watermarks = run["watermark_after"], run["completed_at"], await harness.watermark(), await harness.blob()
    return watermarks == (None, None, None, None)


async def test_failed_partitions_are_taken_up_where_they_stopped(database_url: str, tmp_path: Path) -> None:
    """H11: `retry` fetches no page again that was kept, and the run ends as if nothing had been."""
    async with failing(database_url, tmp_path) as harness:
        run_id = await failed_on_the_way(harness)
        stopped = {
            (part["lower_bound"], part["upper_bound"]): part["next_offset"] for part in await harness.partitions(run_id)
        }
        assert any(stopped.values())
        asked = tapped(harness.source)
        names = await harness.harvest.retry(run_id, "somebody")
        run = await harness.ended(run_id)
        first: dict[tuple[int | None, int | None], int] = {}
        for page in asked.of(PAGE):
            place = _bound(page.get("price_from")), _bound(page.get("price_below"))
            first[place] = min(int(page["offset"]), first.get(place, 1_000))
        assert len(first) == len(names)
        assert first.items() <= stopped.items()
        assert (run["completed_workers"], run["failed_workers"]) == (run["expected_workers"], 0)
        assert await harness.moves("harvest.partition", f"{run_id}/{names[0]}") == ["failed", "running", "completed"]
        assert (await harness.published(run_id))[CONSOLIDATIONS] == 1
        await harness.equals_truth()
        await harness.has_watermark(run)
        assert await harness.seen(run_id) == len(harness.source.truth())
        with pytest.raises(Conflict, match="nothing of"):
            await harness.harvest.retry(run_id, "somebody")
        with pytest.raises(NotFound):
            await harness.harvest.retry(run_id, "somebody", "partition-99")


def _bound(text: str | None) -> int | None:
    return None if text is None else int(text)


async def test_a_failed_run_is_not_in_the_way_of_the_next(database_url: str, tmp_path: Path) -> None:
    """H11: the next run takes the same data again; the failed one cannot be taken up after that."""
    async with failing(database_url, tmp_path) as harness:
        failed = await failed_on_the_way(harness)
        run = await harness.completed()
        assert (run["run_type"], run["watermark_before"]) == ("full", None)
        await harness.is_whole(run["run_id"])
        await harness.equals_truth()
        for act in (harness.harvest.retry(failed, "x"), harness.harvest.force(failed, "x", "why not")):
            with pytest.raises(Conflict, match="later run"):
                await act


async def test_force_consolidates_in_spite_of_failures(database_url: str, tmp_path: Path) -> None:
    """H5: what was fetched is served, who wanted it is kept, and the watermark stays where it was."""
    async with failing(database_url, tmp_path) as harness:
        run_id = await failed_on_the_way(harness)
        with pytest.raises(Invalid):
            await harness.harvest.force(run_id, "somebody", " ")
        await harness.harvest.force(run_id, "somebody", "the supplier knows")
        run = await harness.ended(run_id)
        assert (run["forced_by"], run["forced_because"]) == ("somebody", "the supplier knows")
        assert ("RUN_FORCED", "WARNING") in await harness.alerts()
        assert (await harness.watermark(), await harness.blob(), run["watermark_after"], run["deleted"]) == (None,) * 4
        fetched = await harness.raw()
        assert 0 < len(fetched) < len(harness.source.truth())
        assert (await harness.canonical()).keys() == fetched.keys()
        assert (await harness.completed())["run_type"] == "full"
        await harness.equals_truth()


async def test_cancel_stops_a_run(database_url: str, tmp_path: Path) -> None:
    """H11: partitions not at their end count as failed, a turn under way comes to nothing, the next run completes."""
    async with harvest_harness(database_url, tmp_path) as harness, harness.working():
        asked, begun = tapped(harness.source), asyncio.Event()
        harness.source.set_faults(Faults(latency_ms=100))
        asked.act = lambda path, number: begun.set() if path == PAGE and number > 5 else None
        run_id = await harness.start()
        await begun.wait()
        await harness.harvest.cancel(run_id, "somebody", "too slow")
        run = await harness.run(run_id)
        assert run["state"] == "consolidation_skipped"
        assert run["completed_workers"] + run["failed_workers"] == run["expected_workers"]
        before = await harness.partitions(run_id)
        await harness.is_quiet()
        assert await harness.partitions(run_id) == before
        assert {part["error_message"] for part in before} <= {None, "CANCELLED: by somebody: too slow"}
        with pytest.raises(Conflict):
            await harness.harvest.cancel(run_id, "somebody")
        harness.source.set_faults()
        await harness.is_whole((await harness.completed())["run_id"])
        await harness.equals_truth()


async def test_a_plan_can_be_cancelled(harness: HarvestHarness) -> None:
    """H11: a run that is not planned yet never begins."""
    run_id = await harness.start()
    await harness.harvest.cancel(run_id, "somebody")
    async with harness.working():
        await harness.is_quiet()
    assert await harness.state(run_id) == "failed"
    assert (await harness.published(run_id))[WORK_ITEMS] == 0


async def test_a_source_that_cannot_be_counted_fails_the_plan(database_url: str, tmp_path: Path) -> None:
    """H2, H6: after four deliveries the plan has failed, somebody is told, and another run may be asked for."""
    async with harvest_harness(database_url, tmp_path, call={"attempts": 1}) as harness, harness.working():
        harness.source.set_faults(DOWN)
        run_id = await harness.start()
        assert (await harness.ended(run_id, None))["state"] == "failed"
        assert await harness.alerts() == [("PLAN_FAILED", "ERROR")]
        await becomes(lambda: has_letters(harness, 1), "the plan is set aside")
        harness.source.set_faults()
        await harness.is_whole((await harness.completed())["run_id"])


async def has_letters(harness: HarvestHarness, count: int) -> bool:
    return len(await harness.dead_letters()) == count


async def test_a_source_that_pages_but_does_not_count_is_no_endless_run(database_url: str, tmp_path: Path) -> None:
    """H6, H16: without the recount a partition has no end; that fails it, after four deliveries like any failure."""
    async with harvest_harness(database_url, tmp_path, call={"attempts": 1}) as harness, harness.working():
        asked = tapped(harness.source)
        asked.act = lambda path, _number: setattr(asked, "refuses", COUNT if path == PAGE else asked.refuses)
        run_id = await harness.start()
        run = await harness.ended(run_id, HarvestRunState.CONSOLIDATION_SKIPPED)
        assert run["failed_workers"] == run["expected_workers"]
        asked.act, asked.refuses = None, ""
        await harness.harvest.retry(run_id, "somebody")
        await harness.ended(run_id)
        await harness.equals_truth()


async def set_aside(_delivery: BusDelivery) -> Outcome:
    return Failed("its workers died or froze 4 times")


@pytest.mark.parametrize("times", [1, 3])
async def test_a_partition_whose_message_is_gone_is_sent_again(database_url: str, tmp_path: Path, times: int) -> None:
    """H4: what the bus set aside is sent again, up to three times; then it goes on as if nothing had been."""
    async with harvest_harness(database_url, tmp_path, harvest=AT_ONCE) as harness, harness.parts() as parts:
        run_id, items = await planned(harness, parts)
        for item in items[1:]:
            await parts.fetcher.handle(delivered(item))
        while await harness.handled(WORK_ITEMS, parts.fetcher.handle):
            pass
        await parts.rescuer.look()
        for _ in range(times - 1):
            assert await harness.handled(WORK_ITEMS, set_aside) == 1
            await parts.rescuer.look()
        while await harness.handled(WORK_ITEMS, parts.fetcher.handle):
            pass
        await harness.handled(CONSOLIDATIONS, parts.consolidator.handle)
        await harness.is_whole(run_id)
        await harness.equals_truth()


async def test_a_partition_that_kills_its_workers_is_given_up(database_url: str, tmp_path: Path) -> None:
    """H5: after three rescues it has failed, the run is skipped, and somebody is told."""
    async with harvest_harness(database_url, tmp_path, harvest=AT_ONCE) as harness, harness.parts() as parts:
        run_id, items = await planned(harness, parts)
        for item in items[1:]:
            await parts.fetcher.handle(delivered(item))
        while await harness.handled(WORK_ITEMS, parts.fetcher.handle):
            pass
        for _ in range(3):
            await parts.rescuer.look()
            assert await harness.handled(WORK_ITEMS, set_aside) == 1
        await parts.rescuer.look()
        run = await harness.run(run_id)
        assert (run["state"], run["failed_workers"]) == ("consolidation_skipped", 1)
        assert "STALLED" in (await harness.partitions(run_id))[0]["error_message"]
        assert await harness.alerts() == [("CONSOLIDATION_SKIPPED", "ERROR")]
        await parts.rescuer.look()
        assert await harness.run(run_id) == run


@pytest.mark.parametrize("topic", [PLANS, CONSOLIDATIONS])
async def test_lost_plans_and_consolidations_are_sent_again_and_given_up(
    database_url: str, tmp_path: Path, topic: str
) -> None:
    """H11: neither a plan nor a consolidation hangs for its message; either fails after three rescues."""
    async with harvest_harness(database_url, tmp_path, harvest=AT_ONCE) as harness, harness.parts() as parts:
        run_id = await harness.start()
        if topic == CONSOLIDATIONS:
            await harness.handled(PLANS, parts.planner.handle)
            while await harness.handled(WORK_ITEMS, parts.fetcher.handle):
                pass
        for _ in range(4):
            assert await harness.handled(topic, set_aside) == 1
            await parts.rescuer.look()
        assert await harness.state(run_id) == "failed"
        assert [severity for _, severity in await harness.alerts()] == ["ERROR"]
        if topic == CONSOLIDATIONS:
            await harness.harvest.retry(run_id, "somebody")
            await harness.handled(topic, parts.consolidator.handle)
            await harness.has_watermark(await harness.ended(run_id))
            await harness.equals_truth()


async def test_what_waits_for_a_paused_source_is_not_sent_again(harness: HarvestHarness) -> None:
    """H15: the longest pause there is makes no partition stand still."""
    clock = harness.db.clock = ManualClock(harness.db.clock.now())
    async with harness.parts() as parts:
        run_id = await harness.start()
        await harness.handled(PLANS, parts.planner.handle)
        harness.source.set_faults(Faults(rate_429=1, retry_after=600))
        await harness.handled(WORK_ITEMS, parts.fetcher.handle)
        told = await harness.published(run_id)
        clock.advance(timedelta(minutes=10))
        await parts.rescuer.look()
        assert await harness.published(run_id) == told
        assert {part["rescues"] for part in await harness.partitions(run_id)} == {0}
