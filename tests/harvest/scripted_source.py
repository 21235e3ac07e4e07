"""A source that a test controls: it reports wrong counts, pauses, fails and changes at a chosen request."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg

from penstock.harvest.config import HarvestSection
from penstock.harvest.feed.feeds import Feed, FeedRegistry
from penstock.harvest.feed.mapping import FeedMapping
from penstock.harvest.feed.reader import RecordReader
from penstock.harvest.fetch.partitions import make_work_item
from penstock.harvest.fetch.worker import ATTEMPTS
from penstock.harvest.model import PagePosition, PartitionKind, PartitionRange, RecordPage, TimeWindow
from penstock.kernel.bus import BusDelivery, DeliveryPolicy
from penstock.kernel.tasks.outcome import Outcome
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.kernel.work.worker import Worker, handle_each
from tests.harvest.stepper import FEED, HarvestStepper, feed, harvest_stepper
from tests.support.types import Json

OLD = "2020-01-01T00:00:00+00:00"
ONE_PART = {"min_records": 1_000, "count": 4}


def stones(count: int) -> dict[str, Json]:
    """Return unchanged records by key, each with a different price."""
    certificate = {"shape": "ROUND", "carats": 1}
    return {
        key: {"id": key, "price": number * 10, "updatedAt": OLD, "diamond": {"certificate": dict(certificate)}}
        for number, key in enumerate(f"k{number:05}" for number in range(count))
    }


async def _do_nothing(*_arguments: object) -> None:
    """Do nothing: the default action of a source."""


@dataclass
class ScriptedSource:
    """A source of *rows*, with actions before each count, and before and after each page."""

    rows: dict[str, Json]
    has_windows: bool = True
    sends_upto: int | None = None  # no record beyond this offset, whatever the count is
    ignores_offset: bool = False
    ignores_bounds: bool = False
    ignores_window: bool = False
    before_count: Callable[[PartitionRange, TimeWindow], Awaitable[None]] = _do_nothing
    before_page: Callable[[PartitionRange, TimeWindow, PagePosition], Awaitable[None]] = _do_nothing
    after_page: Callable[[PartitionRange, TimeWindow, PagePosition], Awaitable[None]] = _do_nothing
    pages: list[PagePosition] = field(default_factory=list)  # requested positions
    is_seekable: bool = True

    async def count(self, range_: PartitionRange, window: TimeWindow) -> int:
        await self.before_count(range_, window)
        return len(self._select(range_, window))

    async def fetch(self, range_: PartitionRange, window: TimeWindow, position: PagePosition, limit: int) -> RecordPage:
        self.pages.append(position)
        await self.before_page(range_, window, position)
        page = self._page(self._select(range_, window)[: self.sends_upto], position, limit)
        await self.after_page(range_, window, position)
        return page

    def _page(self, rows: list[Json], position: PagePosition, limit: int) -> RecordPage:
        start = 0 if self.ignores_offset else position.offset
        records = [json.dumps(row).encode() for row in rows[start : start + limit]]
        return RecordPage(records, PagePosition(position.offset + len(records)) if records else None)

    def _select(self, range_: PartitionRange, window: TimeWindow) -> list[Json]:
        rows = [row for row in self.rows.values() if self.ignores_bounds or _is_in(row, range_)]
        if self.has_windows and not self.ignores_window:
            rows = [row for row in rows if _is_in_window(row, window)]
        return sorted(rows, key=lambda row: (row["price"] or 0, str(row["id"])))


@dataclass
class CursorSource(ScriptedSource):
    """A source whose pages need the cursor of the page before."""

    is_seekable: bool = False

    def _page(self, rows: list[Json], position: PagePosition, limit: int) -> RecordPage:
        start = int(position.cursor or 0)
        records = [json.dumps(row).encode() for row in rows[start : start + limit]]
        is_last = start + limit >= len(rows)
        return RecordPage(
            records, None if is_last else PagePosition(position.offset + len(records), str(start + limit))
        )


def half_without_shape() -> ScriptedSource:
    """Return a source with 200 records, half of which cannot be mapped."""
    source = ScriptedSource(stones(200))
    for row in list(source.rows.values())[::2]:
        del row["diamond"]["certificate"]["shape"]
    return source


def _is_in(row: Json, range_: PartitionRange) -> bool:
    price = row["price"]
    if range_.kind is PartitionKind.NULL:
        return price is None
    # Like many APIs: without a bound there is no filter, so that records without a value are included.
    if range_.lower is None and range_.upper is None:
        return True
    above = range_.lower is None or (price is not None and price >= range_.lower)
    return price is not None and above and (range_.upper is None or price < range_.upper)


def _is_in_window(row: Json, window: TimeWindow) -> bool:
    time = datetime.fromisoformat(row["updatedAt"])
    return (window.after is None or time > window.after) and (window.upto is None or time <= window.upto)


def use_sources(stepper: HarvestStepper, sources: Mapping[str, ScriptedSource], **changes: Any) -> FeedRegistry:
    """Replace the feeds by feeds over *sources* with *changes*, like a rollout of new settings."""
    url = stepper.source.url
    section = HarvestSection.model_validate({"feeds": {name: feed(url, **changes) for name in sources}})
    feeds = FeedRegistry(
        {
            name: Feed(
                name,
                section.feeds[name],
                source,
                RecordReader(section.feeds[name]),
                FeedMapping.from_feed(section.feeds[name]),
            )
            for name, source in sources.items()
        }
    )
    stepper.section = stepper.harvest.section = section
    set_feeds(stepper, feeds)
    return feeds


def set_feeds(stepper: HarvestStepper, feeds: FeedRegistry) -> None:
    """Replace the feeds of the workers."""
    stepper.planner._feeds = stepper.fetcher._feeds = stepper.consolidator._feeds = feeds


@asynccontextmanager
async def scripted_harvest(
    url: str, folder: Path, *sources: ScriptedSource, **changes: Any
) -> AsyncIterator[HarvestStepper]:
    """Open a stepper over *sources*; the feed of the first one is `FEED`."""
    async with harvest_stepper(url, folder, records=1) as stepper:
        names = [FEED, *(f"{FEED}-{number}" for number in range(2, len(sources) + 1))]
        use_sources(stepper, dict(zip(names, sources, strict=True)), **changes)
        yield stepper


async def deliver_all(stepper: HarvestStepper, topic: str, *, limit: int = 40) -> list[Outcome | None]:
    """Deliver all messages of a topic one by one, at most *limit*, and return their outcomes."""
    outcomes: list[Outcome | None] = []
    for _ in range(limit):
        delivered = await stepper.deliver(topic)
        if not delivered:
            return outcomes
        outcomes += delivered
    raise AssertionError(f"after {limit} messages of {topic} there are more: {outcomes[-3:]}")


async def handle_due(stepper: HarvestStepper, topic: str) -> int:
    """Handle the due messages of a topic like a worker, and return their number."""
    async with stepper.bus.subscribe(topic, worker="due", policy=DeliveryPolicy(max_attempts=ATTEMPTS)) as queue:
        return await Worker(queue, handle_each(stepper._handlers()[topic], queue, concurrency=4), Telemetry()).drain()


async def make_turn(stepper: HarvestStepper, run_id: UUID, name: str) -> Outcome:
    """Make the next turn at a partition."""
    part = (await list_partitions(stepper, run_id))[name]
    item = make_work_item(run_id, name, part["next_offset"], part["scan"], "test")
    return await stepper.fetcher.handle(BusDelivery(item, 1, 0, 0, 0))


async def list_partitions(stepper: HarvestStepper, run_id: UUID) -> dict[str, asyncpg.Record]:
    """Return the partitions of a run by name, with their work status."""
    query = """
        SELECT p.*, w.status, w.error_message FROM partition_progress p
        LEFT JOIN worker_runs w USING (run_id, partition_id) WHERE p.run_id = $1 ORDER BY p.partition_id
    """
    return {row["partition_id"]: row for row in await stepper.db.fetch(query, run_id)}


async def end_pauses(stepper: HarvestStepper) -> int:
    """End all pauses, and return the number of resumed partitions."""
    # More than the difference between the clocks of server and process.
    query = "UPDATE partition_progress SET paused_until = now() - interval '1 minute' WHERE paused_until IS NOT NULL"
    await stepper.db.execute(query)
    return await stepper.fetcher.resume_paused()


async def list_alerts(stepper: HarvestStepper) -> list[str]:
    return [row["code"] for row in await stepper.db.fetch("SELECT code FROM harvest_alert ORDER BY id")]


async def complete_run(stepper: HarvestStepper, *, full: bool = False) -> asyncpg.Record:
    """Run a harvest to its completion, and return the run."""
    run_id = await stepper.plan_run(full=full)
    await stepper.finish()
    run = await stepper.run(run_id)
    assert run["state"] == "completed", run
    return run
