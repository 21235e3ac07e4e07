"""Pauses and retries: waiting work does not delay other work, is not lost, and does not wait forever."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.harvest import runtime
from penstock.harvest.alerts import AlertCode, AlertSender, AlertSeverity, raise_alert
from penstock.harvest.config import AlertsSection
from penstock.harvest.consolidate.worker import Consolidator, _BatchConsolidation
from penstock.harvest.contract import CONSOLIDATIONS, PLANS, WORK_ITEMS
from penstock.harvest.feed.feeds import FeedRegistry
from penstock.harvest.fetch.partitions import make_consolidation
from penstock.harvest.model import PagePosition, PartitionKind, PartitionRange, TimeWindow
from penstock.harvest.sources.port import SourcePaused, SourceRefused
from penstock.kernel.bus import BusDelivery, DeliveryPolicy
from penstock.kernel.bus.postgres import PostgresBus
from penstock.kernel.bus.workers import run_workers
from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Transient
from penstock.kernel.tasks.outcome import Done, Retry
from tests.harvest.harness import harvest_harness
from tests.harvest.scripted_source import (
    ONE_PART,
    ScriptedSource,
    complete_run,
    deliver_all,
    end_pauses,
    half_without_shape,
    handle_due,
    list_partitions,
    scripted_harvest,
    set_feeds,
    stones,
    use_sources,
)
from tests.harvest.stepper import FEED, HarvestStepper, feed

TOO_MANY_REJECTS = "100 of 200 records could not be stored or mapped; limits.max_reject_ratio is 0.01"
DAY, HOUR = timedelta(days=1), timedelta(hours=1)


async def test_rejected_records_stay_pending(database_url: str, tmp_path: Path) -> None:
    """H11: the next run maps the rejected records of a failed run again, and fails until they can be mapped."""
    source = half_without_shape()
    async with scripted_harvest(database_url, tmp_path, source) as stepper:
        for _ in range(2):
            run_id = await stepper.plan_run()
            await stepper.finish()
            run = await stepper.run(run_id)
            assert (run["state"], run["watermark_after"]) == ("failed", None)
            assert run["error"] == TOO_MANY_REJECTS
            assert await stepper.db.fetchval("SELECT count(*) FROM raw_pending") == 100
        use_sources(stepper, {FEED: source}, fields={"shape": {"path": "diamond.certificate.shape"}})
        await complete_run(stepper)
        assert (await stepper.read_canonical()).keys() == source.rows.keys()


async def test_pause_of_a_feed_does_not_delay_other_feeds(database_url: str, tmp_path: Path) -> None:
    """H15: even if their messages share a bus partition; after the pause the partition continues where it stopped."""
    paused, other = ScriptedSource(stones(60)), ScriptedSource(stones(60))

    async def pause(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        if position.offset:
            raise SourcePaused("SOURCE_THROTTLED", "429", after=timedelta(minutes=10))

    changes: dict[str, Any] = {"partitions": ONE_PART, "pages_per_turn": 1}
    async with scripted_harvest(database_url, tmp_path, paused, other, **changes) as stepper:
        stepper.bus._partitions = 1
        paused.before_page, before = pause, paused.before_page
        waiting, running = [await stepper.harvest.start(name, "test") for name in (FEED, f"{FEED}-2")]
        for topic in (PLANS, WORK_ITEMS, CONSOLIDATIONS):
            await handle_due(stepper, topic)
        assert (await stepper.run(running))["state"] == "completed"
        [part] = (await list_partitions(stepper, waiting)).values()
        assert (part["next_offset"], part["status"]) == (30, "running")
        paused.before_page = before
        assert await end_pauses(stepper) == 1
        for topic in (WORK_ITEMS, CONSOLIDATIONS):
            await handle_due(stepper, topic)
        assert (await stepper.run(waiting))["state"] == "completed"
        assert paused.pages.count(PagePosition(0)) == 1


@pytest.fixture
async def timed(database_url: str) -> AsyncIterator[Database]:
    """Yield the database with a clock that the test controls."""
    async with Database.open(database_url, clock=ManualClock()) as db:
        yield db


async def raise_test_alert(db: Database) -> None:
    async with db.transaction() as tx:
        await raise_alert(
            tx, FEED, None, AlertCode.RUN_FORCED, AlertSeverity.WARNING, "Check the feed.", db.clock.now()
        )


async def test_alert_delivery_is_retried_for_more_than_a_day(timed: Database) -> None:
    """H12: the delay grows up to an hour."""
    await raise_test_alert(timed)
    alert_sender = AlertSender(timed, AlertsSection.model_validate({"webhooks": [{"url": "http://127.0.0.1:1/"}]}))
    waits: list[timedelta] = []
    while await alert_sender.send_due():
        waits.append(await timed.fetchval("SELECT due_at FROM harvest_alert") - timed.clock.now())
        assert isinstance(timed.clock, ManualClock)
        timed.clock.advance(waits[-1])
    assert sum(waits, timedelta()) > DAY
    assert waits[0] < timedelta(minutes=1)
    assert HOUR / 2 <= max(waits) <= HOUR


async def test_crash_does_not_repeat_deliveries(timed: Database) -> None:
    """H12: alerts are delivered one by one: a crash does not repeat the deliveries before it."""
    alert_sender = AlertSender(timed, AlertsSection())
    sent: list[int] = []

    async def crash_on_the_second(alert: Mapping[str, Any]) -> None:
        if sent:
            raise RuntimeError("a bug of the channel")
        sent.append(alert["id"])

    alert_sender._channels["odd"] = crash_on_the_second
    for _ in range(2):
        await raise_test_alert(timed)
    with pytest.raises(RuntimeError):
        await alert_sender.send_due()
    rows = await timed.fetch("SELECT id FROM harvest_alert WHERE is_settled")
    assert [row["id"] for row in rows] == sent


async def read_worker_settings(
    monkeypatch: pytest.MonkeyPatch, database_url: str, folder: Path, **options: Any
) -> dict[str, tuple[DeliveryPolicy, int]]:
    """Return the delivery policy and the number of workers of each topic."""
    workers: dict[str, tuple[DeliveryPolicy, int]] = {}

    def record(*args: Any, count: int, **options: Any) -> AbstractAsyncContextManager[None]:
        workers[args[2]] = args[5], count
        return run_workers(*args, count=count, **options)

    monkeypatch.setattr(runtime, "run_workers", record)
    async with harvest_harness(database_url, folder, **options) as harness, harness.run_workers():
        return workers


async def test_retries_of_plans_and_consolidations_are_delayed(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H12: plans and consolidations are retried after `retry_after`, pages within a second."""
    workers = await read_worker_settings(monkeypatch, database_url, tmp_path, harvest={"retry_after": 25})
    assert [workers[topic][0].first_delay for topic in (PLANS, CONSOLIDATIONS)] == [timedelta(seconds=25)] * 2
    assert workers[WORK_ITEMS][0].first_delay < timedelta(seconds=1)


async def test_concurrent_consolidations_do_not_deadlock(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H7: all concurrent consolidations of a process complete, although each holds a connection and needs more."""
    many = {"feeds": {f"feed-{number}": feed("http://localhost") for number in range(20)}}
    count = (await read_worker_settings(monkeypatch, database_url, tmp_path, harvest=many))[CONSOLIDATIONS][1]
    all_connected, upsert = asyncio.Barrier(count), _BatchConsolidation._upsert

    async def upsert_together(self: _BatchConsolidation, rows: Any) -> None:
        if rows:
            await all_connected.wait()
        await upsert(self, rows)

    monkeypatch.setattr(_BatchConsolidation, "_upsert", upsert_together)
    sources = [ScriptedSource(stones(60)) for _ in range(count)]
    changes = {"partitions": ONE_PART, "consolidation": {"mode": "batches", "upsert_size": 10}}
    async with scripted_harvest(database_url, tmp_path, *sources, **changes) as stepper:
        runs = [await stepper.harvest.start(name, "test") for name in stepper.section.feeds]
        for topic in (PLANS, WORK_ITEMS):
            await stepper.drain(topic)
        deliveries = (BusDelivery(make_consolidation(run_id, "test"), 1, 0, 0, 0) for run_id in runs)
        async with asyncio.timeout(20):
            assert await asyncio.gather(*map(stepper.consolidator.handle, deliveries)) == [Done()] * count
        assert [(await stepper.run(run_id))["state"] for run_id in runs] == ["completed"] * max(count, 2)


async def test_work_of_an_unknown_feed_waits_for_another_process(database_url: str, tmp_path: Path) -> None:
    """H6: during a rollout of settings neither plans nor partitions nor consolidations fail."""
    source = ScriptedSource(stones(60))
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART) as stepper:
        feeds, run_id = stepper.fetcher._feeds, await stepper.harvest.start(FEED, "test")
        set_feeds(stepper, FeedRegistry({}))
        await check_waits(stepper, PLANS)
        set_feeds(stepper, feeds)
        await stepper.drain(PLANS)
        set_feeds(stepper, FeedRegistry({}))
        assert await deliver_all(stepper, WORK_ITEMS) == [Done()]
        [part] = (await list_partitions(stepper, run_id)).values()
        assert (part["status"], part["paused_until"] > stepper.db.clock.now()) == (None, True)
        set_feeds(stepper, feeds)
        assert await end_pauses(stepper) == 1
        await stepper.drain(WORK_ITEMS)
        set_feeds(stepper, FeedRegistry({}))
        await check_waits(stepper, CONSOLIDATIONS)
        set_feeds(stepper, feeds)
        await stepper.finish()
        assert (await stepper.run(run_id))["state"] == "completed"


async def check_waits(stepper: HarvestStepper, topic: str) -> None:
    """Check that the message of a topic waits for another process, without counting an attempt."""
    [outcome] = await stepper.deliver(topic)
    assert isinstance(outcome, Retry)
    assert not outcome.counts
    assert outcome.after is not None


@pytest.mark.full
@pytest.mark.parametrize("fails_first", ["partition", "rejects"])
async def test_force_has_no_effect_on_a_retry(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_first: str
) -> None:
    """H5: a retried run is checked like any run."""
    source = half_without_shape()

    async def refuse_first_partition(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        if range_.lower is None and range_.kind is PartitionKind.RANGE:
            raise SourceRefused("SOURCE_REFUSED", "400")

    async def crash(*_args: Any, **_options: Any) -> bool:
        raise RuntimeError("a bug of the consolidation")

    async with scripted_harvest(database_url, tmp_path, source) as stepper:
        run_id = await stepper.plan_run()
        before = source.before_page
        if fails_first == "partition":
            source.before_page = refuse_first_partition
        await stepper.finish()
        with monkeypatch.context() as patch:
            patch.setattr(Consolidator, "_complete", crash)
            await stepper.harvest.force(run_id, "test", "a test")
            await stepper.finish()
        run = await stepper.run(run_id)
        assert (run["state"], run["forced_by"]) == ("failed", "test")
        source.before_page = before
        await stepper.harvest.retry(run_id, "test")
        await stepper.finish()
        run = await stepper.run(run_id)
        assert (run["state"], run["forced_by"], run["watermark_after"]) == ("failed", None, None)
        assert run["error"] == TOO_MANY_REJECTS


async def test_schedule_starts_full_runs_periodically(database_url: str, tmp_path: Path) -> None:
    """H2, H10: full runs are the first one, those after `full_every`, and the one after full runs were pruned."""
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(60)), partitions=ONE_PART) as stepper:

        async def run_scheduled() -> str:
            run_id = await stepper.harvest.start_due(FEED, timedelta(0), DAY)
            assert run_id is not None
            await stepper.finish()
            return str((await stepper.run(run_id))["run_type"])

        assert [await run_scheduled() for _ in range(3)] == ["full", "incremental", "incremental"]
        await stepper.db.execute("UPDATE run_metadata SET started_at = started_at - interval '1 day'")
        assert [await run_scheduled() for _ in range(2)] == ["full", "incremental"]
        await stepper.db.execute("DELETE FROM run_metadata WHERE run_type = 'full'")
        assert [await run_scheduled() for _ in range(2)] == ["full", "incremental"]
        await stepper.db.execute("UPDATE run_metadata SET started_at = started_at - interval '1 day'")
        failed = await stepper.plan_run(full=True)
        await stepper.harvest.cancel(failed, "test")
        assert [await run_scheduled() for _ in range(2)] == ["full", "incremental"]


async def test_unavailable_broker_does_not_fail_requests(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H6: committed messages are published later; the request that wrote them succeeds."""
    source = ScriptedSource(stones(60))

    async def refuse(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        raise SourceRefused("SOURCE_REFUSED", "400")

    async def fail_relay(_self: PostgresBus) -> int:
        raise Transient("BUS_DOWN", "the broker does not answer")

    monkeypatch.setattr(PostgresBus, "relay", fail_relay)
    source.before_page, before = refuse, source.before_page
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART) as stepper:
        run_id = await stepper.plan_run()
        await stepper.drain(WORK_ITEMS)
        assert await stepper.harvest.retry(run_id, "test") == ["partition-0"]
        await stepper.harvest.cancel(run_id, "test")
        await stepper.harvest.force(run_id, "test", "a test")
        await stepper.finish()
        assert (await stepper.run(run_id))["state"] == "completed"
        source.before_page = before
        assert await stepper.harvest.start_due(FEED, timedelta(0), DAY) is not None
        await stepper.finish()
        assert (await stepper.read_canonical()).keys() == source.rows.keys()
