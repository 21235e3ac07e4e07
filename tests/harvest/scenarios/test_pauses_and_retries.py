"""Pauses, retries and patience: what waits holds up nobody else, is not forgotten, and does not wait for ever."""

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
from penstock.harvest.consolidate.worker import Consolidator, _BatchReader
from penstock.harvest.contract import CONSOLIDATIONS, PLANS, WORK_ITEMS
from penstock.harvest.feed.feeds import FeedRegistry
from penstock.harvest.fetch.partitions import consolidation
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
    completed,
    drained,
    end_pauses,
    half_without_shape,
    know,
    partitions,
    scripted_harvest,
    stones,
    use,
    work_on_what_is_due,
)
from tests.harvest.stepper import FEED, HarvestStepper, feed

DAY, HOUR = timedelta(days=1), timedelta(hours=1)


async def test_rejected_records_are_not_forgotten_by_the_next_run(database_url: str, tmp_path: Path) -> None:
    """H11: a run that failed for them leaves them to the next; that fails as well, until they can be mapped."""
    source = half_without_shape()
    async with scripted_harvest(database_url, tmp_path, source) as one:
        for _ in range(2):
            run_id = await one.planned()
            await one.finish()
            run = await one.run(run_id)
            assert (run["state"], run["watermark_after"]) == ("failed", None)
            assert run["error"] == "100 of 200 records could not be kept or mapped"
            assert await one.db.fetchval("SELECT count(*) FROM raw_pending") == 100
        use(one, {FEED: source}, fields={"shape": {"path": "diamond.certificate.shape"}})
        await completed(one)
        assert (await one.canonical()).keys() == source.rows.keys()


async def test_a_pause_of_one_feed_holds_up_no_other(database_url: str, tmp_path: Path) -> None:
    """H15: although their messages share a lane; once it is over the partition goes on where it was."""
    paused, other = ScriptedSource(stones(60)), ScriptedSource(stones(60))

    async def pause(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        if position.offset:
            raise SourcePaused("SOURCE_THROTTLED", "429", after=timedelta(minutes=10))

    changes: dict[str, Any] = {"partitions": ONE_PART, "pages_per_turn": 1}
    async with scripted_harvest(database_url, tmp_path, paused, other, **changes) as one:
        one.bus._partitions = 1
        paused.before_page, before = pause, paused.before_page
        waiting, going = [await one.harvest.start(name, "test") for name in (FEED, f"{FEED}-2")]
        for topic in (PLANS, WORK_ITEMS, CONSOLIDATIONS):
            await work_on_what_is_due(one, topic)
        assert (await one.run(going))["state"] == "completed"
        [part] = (await partitions(one, waiting)).values()
        assert (part["next_offset"], part["status"]) == (30, "running")
        paused.before_page = before
        assert await end_pauses(one) == 1
        for topic in (WORK_ITEMS, CONSOLIDATIONS):
            await work_on_what_is_due(one, topic)
        assert (await one.run(waiting))["state"] == "completed"
        assert paused.pages.count(PagePosition(0)) == 1


@pytest.fixture
async def timed(database_url: str) -> AsyncIterator[Database]:
    """The database, on a clock a test moves."""
    async with Database.open(database_url, clock=ManualClock()) as db:
        yield db


async def cause(db: Database) -> None:
    async with db.transaction() as tx:
        await raise_alert(tx, FEED, None, AlertCode.RUN_FORCED, AlertSeverity.WARNING, "Look.", db.clock.now())


async def test_an_alert_waits_for_its_channel_for_more_than_a_day(timed: Database) -> None:
    """H12: later and later, but never later than an hour."""
    await cause(timed)
    alert_sender = AlertSender(timed, AlertsSection.model_validate({"webhooks": [{"url": "http://127.0.0.1:1/"}]}))
    waits: list[timedelta] = []
    while await alert_sender.tell():
        waits.append(await timed.fetchval("SELECT due_at FROM harvest_alert") - timed.clock.now())
        assert isinstance(timed.clock, ManualClock)
        timed.clock.advance(waits[-1])
    assert sum(waits, timedelta()) > DAY
    assert waits[0] < timedelta(minutes=1)
    assert HOUR / 2 <= max(waits) <= HOUR


async def test_what_was_told_stays_told(timed: Database) -> None:
    """H12: alerts are told one by one: a crash over one of them does not have those before it told twice."""
    alert_sender = AlertSender(timed, AlertsSection())
    told: list[int] = []

    async def crash_over_the_second(alert: Mapping[str, Any]) -> None:
        if told:
            raise RuntimeError("no channel ought to do that")
        told.append(alert["id"])

    alert_sender._channels["odd"] = crash_over_the_second
    for _ in range(2):
        await cause(timed)
    with pytest.raises(RuntimeError):
        await alert_sender.tell()
    rows = await timed.fetch("SELECT id FROM harvest_alert WHERE is_told")
    assert [row["id"] for row in rows] == told


async def working_of(
    monkeypatch: pytest.MonkeyPatch, database_url: str, folder: Path, **told: Any
) -> dict[str, tuple[DeliveryPolicy, int]]:
    """How the role works on each topic: how it is delivered, and by how many workers."""
    found: dict[str, tuple[DeliveryPolicy, int]] = {}

    def noted(*args: Any, count: int, **kept: Any) -> AbstractAsyncContextManager[None]:
        found[args[2]] = args[5], count
        return run_workers(*args, count=count, **kept)

    monkeypatch.setattr(runtime, "run_workers", noted)
    async with harvest_harness(database_url, folder, **told) as harness, harness.working():
        return found


async def test_plans_and_consolidations_are_not_tried_again_at_once(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H12: all attempts within a second would be one attempt; pages are worth a try soon."""
    found = await working_of(monkeypatch, database_url, tmp_path, harvest={"retry_after": 25})
    assert [found[topic][0].first_delay for topic in (PLANS, CONSOLIDATIONS)] == [timedelta(seconds=25)] * 2
    assert found[WORK_ITEMS][0].first_delay < timedelta(seconds=1)


async def test_batches_of_many_feeds_do_not_wait_for_each_other(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H7: as many consolidations as a process has at once complete, though each holds a connection and needs more."""
    many = {"feeds": {f"feed-{number}": feed("http://localhost") for number in range(20)}}
    at_once = (await working_of(monkeypatch, database_url, tmp_path, harvest=many))[CONSOLIDATIONS][1]
    everybody_holds_one, upsert = asyncio.Barrier(at_once), _BatchReader._upsert

    async def upsert_together(self: _BatchReader, made: Any) -> None:
        if made:
            await everybody_holds_one.wait()
        await upsert(self, made)

    monkeypatch.setattr(_BatchReader, "_upsert", upsert_together)
    sources = [ScriptedSource(stones(60)) for _ in range(at_once)]
    changes = {"partitions": ONE_PART, "consolidation": {"mode": "batches", "upsert_size": 10}}
    async with scripted_harvest(database_url, tmp_path, *sources, **changes) as one:
        runs = [await one.harvest.start(name, "test") for name in one.section.feeds]
        for topic in (PLANS, WORK_ITEMS):
            await one.drain(topic)
        handled = (one.consolidator.handle(BusDelivery(consolidation(run_id, "test"), 1, 0, 0, 0)) for run_id in runs)
        async with asyncio.timeout(20):
            assert await asyncio.gather(*handled) == [Done()] * at_once
        assert [(await one.run(run_id))["state"] for run_id in runs] == ["completed"] * max(at_once, 2)


async def test_a_process_that_does_not_know_a_feed_leaves_it_to_others(database_url: str, tmp_path: Path) -> None:
    """H6: while a configuration is rolled out; neither plan nor partition nor consolidation fails for it."""
    source = ScriptedSource(stones(60))
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART) as one:
        knowing, run_id = one.fetcher._feeds, await one.harvest.start(FEED, "test")
        know(one, FeedRegistry({}))
        await is_left(one, PLANS)
        know(one, knowing)
        await one.drain(PLANS)
        know(one, FeedRegistry({}))
        assert await drained(one, WORK_ITEMS) == [Done()]
        [part] = (await partitions(one, run_id)).values()
        assert (part["status"], part["waits_until"] > one.db.clock.now()) == (None, True)
        know(one, knowing)
        assert await end_pauses(one) == 1
        await one.drain(WORK_ITEMS)
        know(one, FeedRegistry({}))
        await is_left(one, CONSOLIDATIONS)
        know(one, knowing)
        await one.finish()
        assert (await one.run(run_id))["state"] == "completed"


async def is_left(one: HarvestStepper, topic: str) -> None:
    """The message of a topic waits for another process, and that does not count."""
    [outcome] = await one.deliver(topic)
    assert isinstance(outcome, Retry)
    assert not outcome.counts
    assert outcome.after is not None


@pytest.mark.full
@pytest.mark.parametrize("fails_first", ["partition", "rejects"])
async def test_what_was_forced_once_is_not_forced_again(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_first: str
) -> None:
    """H5: a retry is judged like any run; who wants it forced says so again."""
    source = half_without_shape()

    async def refuse_the_first(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        if range_.lower is None and range_.kind is PartitionKind.RANGE:
            raise SourceRefused("SOURCE_REFUSED", "400")

    async def crash(*_args: Any, **_told: Any) -> bool:
        raise RuntimeError("a consolidation that comes to nothing")

    async with scripted_harvest(database_url, tmp_path, source) as one:
        run_id = await one.planned()
        before = source.before_page
        if fails_first == "partition":
            source.before_page = refuse_the_first
        await one.finish()
        with monkeypatch.context() as patch:
            patch.setattr(Consolidator, "_complete", crash)
            await one.harvest.force(run_id, "test", "to see")
            await one.finish()
        run = await one.run(run_id)
        assert (run["state"], run["forced_by"]) == ("failed", "test")
        source.before_page = before
        await one.harvest.retry(run_id, "test")
        await one.finish()
        run = await one.run(run_id)
        assert (run["state"], run["forced_by"], run["watermark_after"]) == ("failed", None, None)
        assert run["error"] == "100 of 200 records could not be kept or mapped"


async def test_the_schedule_has_a_full_run_now_and_then(database_url: str, tmp_path: Path) -> None:
    """H2, H10: the first, those after `full_every`, and the one after completed full runs were forgotten."""
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(60)), partitions=ONE_PART) as one:

        async def scheduled() -> str:
            run_id = await one.harvest.start_due(FEED, timedelta(0), DAY)
            assert run_id is not None
            await one.finish()
            return str((await one.run(run_id))["run_type"])

        assert [await scheduled() for _ in range(3)] == ["full", "incremental", "incremental"]
        await one.db.execute("UPDATE run_metadata SET started_at = started_at - interval '1 day'")
        assert [await scheduled() for _ in range(2)] == ["full", "incremental"]
        await one.db.execute("DELETE FROM run_metadata WHERE run_type = 'full'")
        assert [await scheduled() for _ in range(2)] == ["full", "incremental"]
        await one.db.execute("UPDATE run_metadata SET started_at = started_at - interval '1 day'")
        failed = await one.planned(full=True)
        await one.harvest.cancel(failed, "test")
        assert [await scheduled() for _ in range(2)] == ["full", "incremental"]


async def test_a_broker_that_is_away_fails_nobody(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H6: what is committed is sent later; who asked for it is not told that it failed."""
    source = ScriptedSource(stones(60))

    async def refuse(range_: PartitionRange, window: TimeWindow, position: PagePosition) -> None:
        raise SourceRefused("SOURCE_REFUSED", "400")

    async def away(_self: PostgresBus) -> int:
        raise Transient("BUS_DOWN", "the broker does not answer")

    monkeypatch.setattr(PostgresBus, "relay", away)
    source.before_page, before = refuse, source.before_page
    async with scripted_harvest(database_url, tmp_path, source, partitions=ONE_PART) as one:
        run_id = await one.planned()
        await one.drain(WORK_ITEMS)
        assert await one.harvest.retry(run_id, "test") == ["partition-0"]
        await one.harvest.cancel(run_id, "test")
        await one.harvest.force(run_id, "test", "to see")
        await one.finish()
        assert (await one.run(run_id))["state"] == "completed"
        source.before_page = before
        assert await one.harvest.start_due(FEED, timedelta(0), DAY) is not None
        await one.finish()
        assert (await one.canonical()).keys() == source.rows.keys()
