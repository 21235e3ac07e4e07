"""A failing source: runs complete nevertheless, or fail and can be retried, and nothing is doubled."""

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
    harvest_harness,
    make_delivery,
    plan_run,
    record_requests,
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
RESCUES_AT_ONCE = {"stalled_after": 0.000001}


@pytest.fixture
async def harness(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestHarness]:
    async with harvest_harness(database_url, tmp_path, call={"timeout": 0.3}) as harness:
        yield harness


@pytest.mark.parametrize("kind", [*EACH, "all"])
async def test_run_completes_despite_faults(harness: HarvestHarness, kind: str) -> None:
    """H15, H16: with any occasional fault, the run completes with all records, each counted once."""
    harness.source.set_faults(EACH.get(kind, ALL))
    async with harness.run_workers():
        run = await harness.complete_run()
    faults = set(harness.source.read_stats()["faults"])
    assert len(faults) > 3 if kind == "all" else faults == {kind}
    await harness.check_run(run["run_id"])
    await harness.check_records()
    assert await harness.count_seen(run["run_id"]) == run["heatmap"]["total"] == len(harness.source.read_truth())


async def test_pause_applies_to_all_processes(harness: HarvestHarness, tmp_path: Path) -> None:
    """H15: after a 429 with Retry-After no process sends a request until the pause is over."""
    log, times = record_requests(harness.source), []

    def throttle(path: str, number: int) -> None:
        times.append(monotonic())
        throttles = path == PAGE and number == 4
        harness.source.set_faults(Faults(rate_429=1, retry_after=2) if throttles else Faults())

    log.act = throttle
    other = HarvestWorkerProcess(harness.settings, tmp_path / "log")
    async with harness.run_workers():
        run = await harness.complete_run()
    other.kill()
    assert harness.source.read_stats()["faults"] == {"429": 1}
    paused_at = times[[path for path, _ in log.requests].index(PAGE) :][3]  # inexact by the concurrent requests
    in_pause = [at for at in times if paused_at + 0.7 < at < paused_at + 1.9]
    assert in_pause == []  # the other process reads the state twice per second
    assert max(times) > paused_at + 1.9
    await harness.check_run(run["run_id"])
    await harness.check_records()


@pytest.mark.full
async def test_pauses_do_not_count_as_attempts(database_url: str, tmp_path: Path) -> None:
    """H6, H15: a source that throttles more often than a message is redelivered does not fail a partition."""
    async with harvest_harness(database_url, tmp_path, call={"attempts": 1}) as harness, harness.run_workers():
        log, throttled = record_requests(harness.source), Faults(rate_429=1, retry_after=0)
        log.act = lambda path, number: harness.source.set_faults(
            throttled if path == PAGE and number < 80 else Faults()
        )
        await harness.check_run((await harness.complete_run())["run_id"])
        await harness.check_quiet()
        await harness.check_records()


async def fail_during_fetch(harness: HarvestHarness, after: int = 6) -> UUID:
    """Run a harvest whose source fails after some pages, and return its id."""
    log = record_requests(harness.source)
    log.act = lambda path, number: harness.source.set_faults(DOWN) if path == PAGE and number > after else None
    run_id = await harness.start()
    await harness.wait_for_end(run_id, HarvestRunState.CONSOLIDATION_SKIPPED)
    log.act = None
    harness.source.set_faults()
    return run_id


@asynccontextmanager
async def open_failing(database_url: str, folder: Path) -> AsyncIterator[HarvestHarness]:
    async with harvest_harness(database_url, folder, call={"attempts": 1}) as harness, harness.run_workers():
        yield harness


async def test_unavailable_source_fails_partitions(database_url: str, tmp_path: Path) -> None:
    """H5, H6, H11: after four deliveries: a dead letter, a skipped consolidation, an alert, and no watermark."""
    async with open_failing(database_url, tmp_path) as harness:
        run_id = await fail_during_fetch(harness)
        run, partitions = await harness.run(run_id), await harness.list_partitions(run_id)
        failed = [part for part in partitions if part["status"] == "failed"]
        assert run["completed_workers"] + run["failed_workers"] == run["expected_workers"]
        assert run["failed_workers"] == len(failed) > 1
        assert all("SOURCE_ERROR" in part["error_message"] for part in failed)

        async def all_dead_lettered() -> bool:  # a message is settled after the commit of its worker
            return len(await harness.dead_letters()) == len(failed)

        await becomes(all_dead_lettered, "a dead letter for each partition that failed")
        letters = await harness.dead_letters()
        assert sorted(letter.message.key for letter in letters) == [
            f"{run_id}/{part['partition_id']}" for part in failed
        ]
        assert {letter.attempts for letter in letters} == {4}
        assert all("SOURCE_ERROR" in letter.reason for letter in letters)
        assert await harness.alerts() == [("CONSOLIDATION_SKIPPED", "ERROR")]
        assert await has_no_watermark(harness, run)
        assert (await harness.count_published(run_id))[CONSOLIDATIONS] == 0
        assert await harness.read_canonical() == {}


async def has_no_watermark(harness: HarvestHarness, run: Json) -> bool:
    """Return whether run, feed and blob have no watermark."""
    watermarks = run["watermark_after"], run["completed_at"], await harness.watermark(), await harness.read_blob()
    return watermarks == (None, None, None, None)


async def test_retry_continues_where_partitions_stopped(database_url: str, tmp_path: Path) -> None:
    """H11: a retry does not fetch stored pages again, and the run completes like any other."""
    async with open_failing(database_url, tmp_path) as harness:
        run_id = await fail_during_fetch(harness)
        stopped = {
            (part["lower_bound"], part["upper_bound"]): part["next_offset"]
            for part in await harness.list_partitions(run_id)
        }
        assert any(stopped.values())
        log = record_requests(harness.source)
        names = await harness.harvest.retry(run_id, "operator")
        run = await harness.wait_for_end(run_id)
        first: dict[tuple[int | None, int | None], int] = {}
        for page in log.of(PAGE):
            bounds = _bound(page.get("price_from")), _bound(page.get("price_below"))
            first[bounds] = min(int(page["offset"]), first.get(bounds, 1_000))
        assert len(first) == len(names)
        assert first.items() <= stopped.items()
        assert (run["completed_workers"], run["failed_workers"]) == (run["expected_workers"], 0)
        assert await harness.list_moves("harvest.partition", f"{run_id}/{names[0]}") == [
            "failed",
            "running",
            "completed",
        ]
        assert (await harness.count_published(run_id))[CONSOLIDATIONS] == 1
        await harness.check_records()
        await harness.check_watermark(run)
        assert await harness.count_seen(run_id) == len(harness.source.read_truth())
        with pytest.raises(Conflict, match="no partition failed"):
            await harness.harvest.retry(run_id, "operator")
        with pytest.raises(NotFound):
            await harness.harvest.retry(run_id, "operator", "partition-99")


def _bound(text: str | None) -> int | None:
    return None if text is None else int(text)


async def test_failed_run_is_superseded_by_the_next(database_url: str, tmp_path: Path) -> None:
    """H11: the next run fetches the same data, and the failed run cannot be retried after that."""
    async with open_failing(database_url, tmp_path) as harness:
        failed = await fail_during_fetch(harness)
        run = await harness.complete_run()
        assert (run["run_type"], run["watermark_before"]) == ("full", None)
        await harness.check_run(run["run_id"])
        await harness.check_records()
        for action in (harness.harvest.retry(failed, "x"), harness.harvest.force(failed, "x", "why not")):
            with pytest.raises(Conflict, match="is later than run"):
                await action


async def test_force_consolidates_despite_failures(database_url: str, tmp_path: Path) -> None:
    """H5: the fetched records are served, the actor is recorded, and the watermark does not move."""
    async with open_failing(database_url, tmp_path) as harness:
        run_id = await fail_during_fetch(harness)
        with pytest.raises(Invalid):
            await harness.harvest.force(run_id, "operator", " ")
        await harness.harvest.force(run_id, "operator", "confirmed by the supplier")
        run = await harness.wait_for_end(run_id)
        assert (run["forced_by"], run["force_reason"]) == ("operator", "confirmed by the supplier")
        assert ("RUN_FORCED", "WARNING") in await harness.alerts()
        assert (await harness.watermark(), await harness.read_blob(), run["watermark_after"], run["deleted"]) == (
            None,
        ) * 4
        fetched = await harness.read_raw()
        assert 0 < len(fetched) < len(harness.source.read_truth())
        assert (await harness.read_canonical()).keys() == fetched.keys()
        assert (await harness.complete_run())["run_type"] == "full"
        await harness.check_records()


async def test_cancel_stops_a_run(database_url: str, tmp_path: Path) -> None:
    """H11: unfinished partitions count as failed, a running turn has no effect, and the next run completes."""
    async with harvest_harness(database_url, tmp_path) as harness, harness.run_workers():
        log, started = record_requests(harness.source), asyncio.Event()
        harness.source.set_faults(Faults(latency_ms=100))
        log.act = lambda path, number: started.set() if path == PAGE and number > 5 else None
        run_id = await harness.start()
        await started.wait()
        await harness.harvest.cancel(run_id, "operator", "too slow")
        run = await harness.run(run_id)
        assert run["state"] == "consolidation_skipped"
        assert run["completed_workers"] + run["failed_workers"] == run["expected_workers"]
        before = await harness.list_partitions(run_id)
        await harness.check_quiet()
        assert await harness.list_partitions(run_id) == before
        assert {part["error_message"] for part in before} <= {None, "CANCELLED: by operator: too slow"}
        with pytest.raises(Conflict):
            await harness.harvest.cancel(run_id, "operator")
        harness.source.set_faults()
        await harness.check_run((await harness.complete_run())["run_id"])
        await harness.check_records()


async def test_plan_can_be_cancelled(harness: HarvestHarness) -> None:
    """H11: a run that is cancelled before it is planned never starts."""
    run_id = await harness.start()
    await harness.harvest.cancel(run_id, "operator")
    async with harness.run_workers():
        await harness.check_quiet()
    assert await harness.read_state(run_id) == "failed"
    assert (await harness.count_published(run_id))[WORK_ITEMS] == 0


async def test_failed_counts_fail_the_plan(database_url: str, tmp_path: Path) -> None:
    """H2, H6: after four deliveries the plan fails with an alert, and another run can be started."""
    async with harvest_harness(database_url, tmp_path, call={"attempts": 1}) as harness, harness.run_workers():
        harness.source.set_faults(DOWN)
        run_id = await harness.start()
        assert (await harness.wait_for_end(run_id, None))["state"] == "failed"
        assert await harness.alerts() == [("PLAN_FAILED", "ERROR")]
        await becomes(lambda: has_dead_letters(harness, 1), "the plan is dead-lettered")
        harness.source.set_faults()
        await harness.check_run((await harness.complete_run())["run_id"])


async def has_dead_letters(harness: HarvestHarness, count: int) -> bool:
    return len(await harness.dead_letters()) == count


async def test_failed_recounts_fail_the_partitions(database_url: str, tmp_path: Path) -> None:
    """H6, H16: a partition without a recount fails after four deliveries, like after any failure."""
    async with harvest_harness(database_url, tmp_path, call={"attempts": 1}) as harness, harness.run_workers():
        log = record_requests(harness.source)
        log.act = lambda path, _number: setattr(log, "refuses", COUNT if path == PAGE else log.refuses)
        run_id = await harness.start()
        run = await harness.wait_for_end(run_id, HarvestRunState.CONSOLIDATION_SKIPPED)
        assert run["failed_workers"] == run["expected_workers"]
        log.act, log.refuses = None, ""
        await harness.harvest.retry(run_id, "operator")
        await harness.wait_for_end(run_id)
        await harness.check_records()


async def dead_letter(_delivery: BusDelivery) -> Outcome:
    return Failed("its workers died or froze 4 times")


@pytest.mark.parametrize("times", [1, 3])
async def test_dead_lettered_partition_is_sent_again(database_url: str, tmp_path: Path, times: int) -> None:
    """H4: a dead-lettered work item is sent again up to three times, and the run completes like any other."""
    async with (
        harvest_harness(database_url, tmp_path, harvest=RESCUES_AT_ONCE) as harness,
        harness.open_workers() as role,
    ):
        run_id, items = await plan_run(harness, role)
        for item in items[1:]:
            await role.fetcher.handle(make_delivery(item))
        while await harness.handle_messages(WORK_ITEMS, role.fetcher.handle):
            pass
        await role.rescuer.rescue()
        for _ in range(times - 1):
            assert await harness.handle_messages(WORK_ITEMS, dead_letter) == 1
            await role.rescuer.rescue()
        while await harness.handle_messages(WORK_ITEMS, role.fetcher.handle):
            pass
        await harness.handle_messages(CONSOLIDATIONS, role.consolidator.handle)
        await harness.check_run(run_id)
        await harness.check_records()


async def test_partition_that_kills_its_workers_fails(database_url: str, tmp_path: Path) -> None:
    """H5: after three rescues the partition fails, and the consolidation is skipped with an alert."""
    async with (
        harvest_harness(database_url, tmp_path, harvest=RESCUES_AT_ONCE) as harness,
        harness.open_workers() as role,
    ):
        run_id, items = await plan_run(harness, role)
        for item in items[1:]:
            await role.fetcher.handle(make_delivery(item))
        while await harness.handle_messages(WORK_ITEMS, role.fetcher.handle):
            pass
        for _ in range(3):
            await role.rescuer.rescue()
            assert await harness.handle_messages(WORK_ITEMS, dead_letter) == 1
        await role.rescuer.rescue()
        run = await harness.run(run_id)
        assert (run["state"], run["failed_workers"]) == ("consolidation_skipped", 1)
        assert "STALLED" in (await harness.list_partitions(run_id))[0]["error_message"]
        assert await harness.alerts() == [("CONSOLIDATION_SKIPPED", "ERROR")]
        await role.rescuer.rescue()
        assert await harness.run(run_id) == run


@pytest.mark.parametrize("topic", [PLANS, CONSOLIDATIONS])
async def test_lost_plans_and_consolidations_are_sent_again(database_url: str, tmp_path: Path, topic: str) -> None:
    """H11: a plan or a consolidation without a message is sent again, and fails after three rescues."""
    async with (
        harvest_harness(database_url, tmp_path, harvest=RESCUES_AT_ONCE) as harness,
        harness.open_workers() as role,
    ):
        run_id = await harness.start()
        if topic == CONSOLIDATIONS:
            await harness.handle_messages(PLANS, role.planner.handle)
            while await harness.handle_messages(WORK_ITEMS, role.fetcher.handle):
                pass
        for _ in range(4):
            assert await harness.handle_messages(topic, dead_letter) == 1
            await role.rescuer.rescue()
        assert await harness.read_state(run_id) == "failed"
        assert [severity for _, severity in await harness.alerts()] == ["ERROR"]
        if topic == CONSOLIDATIONS:
            await harness.harvest.retry(run_id, "operator")
            await harness.handle_messages(topic, role.consolidator.handle)
            await harness.check_watermark(await harness.wait_for_end(run_id))
            await harness.check_records()


async def test_paused_partition_does_not_count_as_stalled(harness: HarvestHarness) -> None:
    """H15: a partition that waits for the longest possible pause is not rescued."""
    clock = harness.db.clock = ManualClock(harness.db.clock.now())
    async with harness.open_workers() as role:
        run_id = await harness.start()
        await harness.handle_messages(PLANS, role.planner.handle)
        harness.source.set_faults(Faults(rate_429=1, retry_after=600))
        await harness.handle_messages(WORK_ITEMS, role.fetcher.handle)
        published = await harness.count_published(run_id)
        clock.advance(timedelta(minutes=10))
        await role.rescuer.rescue()
        assert await harness.count_published(run_id) == published
        assert {part["rescues"] for part in await harness.list_partitions(run_id)} == {0}
