"""A source that does as a test says: it lies, pauses, stalls and moves, at the very moment a test needs it to."""

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
from penstock.harvest.feed.reader import RecordReader
from penstock.harvest.feed.recipe import FeedMapping
from penstock.harvest.fetch.partitions import work_item
from penstock.harvest.fetch.worker import ATTEMPTS
from penstock.harvest.model import PagePosition, PartitionKind, PartitionRange, RecordPage, TimeWindow
from penstock.kernel.bus import BusDelivery, DeliveryPolicy
from penstock.kernel.tasks.outcome import Outcome
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.kernel.work.worker import Worker, handle_each
from tests.harvest.stepper import FEED, HarvestStepper, feed, harvest_stepper
from tests.support.types import Json

OLD = "2020-01-01T00:00:00+00:00"
ONE_PART = {"least": 1_000, "count": 4}


def stones(count: int) -> dict[str, Json]:
    """Records that have not changed for long, by key, each of a price of its own."""
    certificate = {"shape": "ROUND", "carats": 1}
    return {
        key: {"id": key, "price": number * 10, "updatedAt": OLD, "diamond": {"certificate": dict(certificate)}}
        for number, key in enumerate(f"k{number:05}" for number in range(count))
    }


async def _nothing(*_asked: object) -> None:
    """What a source does that is left alone."""


@dataclass
class ScriptedSource:
    """Gives its *rows*; what it is told to do, it does before it counts, and before and after it takes a page."""

    rows: dict[str, Json]
    has_windows: bool = True
    gives_upto: int | None = None  # nothing beyond this offset, whatever it counts
    heeds_offset: bool = True
    before_count: Callable[[PartitionRange, TimeWindow], Awaitable[None]] = _nothing
    before_page: Callable[[PartitionRange, TimeWindow, PagePosition], Awaitable[None]] = _nothing
    after_page: Callable[[PartitionRange, TimeWindow, PagePosition], Awaitable[None]] = _nothing
    pages: list[PagePosition] = field(default_factory=list)  # that were asked for
    is_seekable: bool = True

    async def count(self, range_: PartitionRange, window: TimeWindow) -> int:
        await self.before_count(range_, window)
        return len(self._selected(range_, window))

    async def fetch(self, range_: PartitionRange, window: TimeWindow, position: PagePosition, limit: int) -> RecordPage:
        self.pages.append(position)
        await self.before_page(range_, window, position)
        page = self._page(self._selected(range_, window)[: self.gives_upto], position, limit)
        await self.after_page(range_, window, position)
        return page

    def _page(self, rows: list[Json], position: PagePosition, limit: int) -> RecordPage:
        start = position.offset if self.heeds_offset else 0
        found = [json.dumps(row).encode() for row in rows[start : start + limit]]
        return RecordPage(found, PagePosition(position.offset + len(found)) if found else None)

    def _selected(self, range_: PartitionRange, window: TimeWindow) -> list[Json]:
        rows = [row for row in self.rows.values() if _is_in(row, range_)]
        if self.has_windows:
            rows = [row for row in rows if _changed(row, window)]
        return sorted(rows, key=lambda row: (row["price"] or 0, str(row["id"])))


@dataclass
class CursorSource(ScriptedSource):
    """Its pages come one after another."""

    is_seekable: bool = False

    def _page(self, rows: list[Json], position: PagePosition, limit: int) -> RecordPage:
        start = int(position.cursor or 0)
        found = [json.dumps(row).encode() for row in rows[start : start + limit]]
        is_last = start + limit >= len(rows)
        return RecordPage(found, None if is_last else PagePosition(position.offset + len(found), str(start + limit)))


def half_without_shape() -> ScriptedSource:
    """A source half of whose records cannot be mapped."""
    source = ScriptedSource(stones(200))
    for row in list(source.rows.values())[::2]:
        del row["diamond"]["certificate"]["shape"]
    return source


def _is_in(row: Json, range_: PartitionRange) -> bool:
    price = row["price"]
    if range_.kind is PartitionKind.NULL:
        return price is None
    # As many do: without a bound there is no filter, and so those without a value are among them.
    if range_.lower is None and range_.upper is None:
        return True
    above = range_.lower is None or (price is not None and price >= range_.lower)
    return price is not None and above and (range_.upper is None or price < range_.upper)


def _changed(row: Json, window: TimeWindow) -> bool:
    moment = datetime.fromisoformat(row["updatedAt"])
    return (window.after is None or moment > window.after) and (window.upto is None or moment <= window.upto)


def use(one: HarvestStepper, sources: Mapping[str, ScriptedSource], **changes: Any) -> FeedRegistry:
    """Configure feeds over *sources* anew, *changes* and all, as a rollout does."""
    url = one.source.url
    section = HarvestSection.model_validate({"feeds": {name: feed(url, **changes) for name in sources}})
    feeds = FeedRegistry(
        {
            name: Feed(
                name,
                section.feeds[name],
                source,
                RecordReader(section.feeds[name]),
                FeedMapping.of(section.feeds[name]),
            )
            for name, source in sources.items()
        }
    )
    one.section = one.harvest.section = section
    know(one, feeds)
    return feeds


def know(one: HarvestStepper, feeds: FeedRegistry) -> None:
    """Have the workers know these feeds and no others."""
    one.planner._feeds = one.fetcher._feeds = one.consolidator._feeds = feeds


@asynccontextmanager
async def scripted_harvest(
    url: str, folder: Path, *sources: ScriptedSource, **changes: Any
) -> AsyncIterator[HarvestStepper]:
    """A harvest turned by hand over one source, or some; the feed of the first is `FEED`."""
    async with harvest_stepper(url, folder, records=1) as one:
        names = [FEED, *(f"{FEED}-{number}" for number in range(2, len(sources) + 1))]
        use(one, dict(zip(names, sources, strict=True)), **changes)
        yield one


async def drained(one: HarvestStepper, topic: str, *, within: int = 40) -> list[Outcome | None]:
    """What became of all messages of a topic, delivered one by one; there has to be an end *within* so many."""
    outcomes: list[Outcome | None] = []
    for _ in range(within):
        came = await one.deliver(topic)
        if not came:
            return outcomes
        outcomes += came
    raise AssertionError(f"after {within} messages of {topic} there are more: {outcomes[-3:]}")


async def work_on_what_is_due(one: HarvestStepper, topic: str) -> int:
    """Handle the messages of a topic that are due, as a worker does; how many there were."""
    async with one.bus.subscribe(topic, worker="due", policy=DeliveryPolicy(max_attempts=ATTEMPTS)) as queue:
        return await Worker(queue, handle_each(one._handlers()[topic], queue, concurrency=4), Telemetry()).drain()


async def make_turn(one: HarvestStepper, run_id: UUID, name: str) -> Outcome:
    """One turn at a partition, wherever it stands."""
    part = (await partitions(one, run_id))[name]
    item = work_item(run_id, name, part["next_offset"], part["scan"], "test")
    return await one.fetcher.handle(BusDelivery(item, 1, 0, 0, 0))


async def partitions(one: HarvestStepper, run_id: UUID) -> dict[str, asyncpg.Record]:
    """The partitions of a run by name, and who works on them."""
    query = """
        SELECT p.*, w.status, w.error_message FROM partition_progress p
        LEFT JOIN worker_runs w USING (run_id, partition_id) WHERE p.run_id = $1 ORDER BY p.partition_id
    """
    return {row["partition_id"]: row for row in await one.db.fetch(query, run_id)}


async def end_pauses(one: HarvestStepper) -> int:
    """Let the time of all pauses pass; how many partitions go on."""
    # By more than the clocks of server and process may differ.
    query = "UPDATE partition_progress SET waits_until = now() - interval '1 minute' WHERE waits_until IS NOT NULL"
    await one.db.execute(query)
    return await one.fetcher.unpark()


async def alerts(one: HarvestStepper) -> list[str]:
    return [row["code"] for row in await one.db.fetch("SELECT code FROM harvest_alert ORDER BY id")]


async def completed(one: HarvestStepper, *, full: bool = False) -> asyncpg.Record:
    """A run from its beginning to its good end."""
    run_id = await one.planned(full=full)
    await one.finish()
    run = await one.run(run_id)
    assert run["state"] == "completed", run
    return run
