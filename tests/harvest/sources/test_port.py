"""Every source against the simulator: its counts and its records are those of the simulator."""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import orjson
import pytest

from penstock.harvest.config import FeedSection
from penstock.harvest.feed.feeds import open_source
from penstock.harvest.model import ALWAYS, EVERYTHING, WITHOUT_VALUE, PagePosition, PartitionRange, TimeWindow
from penstock.harvest.simulator.faults import Faults
from penstock.harvest.simulator.server import LocalOptions, LocalSource, run_local_source
from penstock.harvest.sources.port import HarvestSource
from penstock.kernel.db.database import Database

REST = {"kind": "rest", "path": "/records", "count_path": "/records/count"}
KINDS: dict[str, dict[str, Any]] = {
    "offset": REST,
    "offset, counted by the listing": {**REST, "count_path": None},
    "page": {**REST, "paging": "page"},
    "cursor": {**REST, "paging": "cursor"},
    "has_more": {**REST, "has_more": "hasMore"},
    "nivoda": {"kind": "nivoda", "username": "demo@example.com", "password": "env:DEMO"},
}
RANGES = [
    PartitionRange(upper=0),
    PartitionRange(lower=0, upper=50_000),
    PartitionRange(lower=50_000, upper=200_000),
    PartitionRange(lower=200_000),
]
Ids = set[str]


@pytest.fixture
async def local() -> AsyncIterator[LocalSource]:
    async with run_local_source(LocalOptions(records=700, seed=3)) as source:
        yield source


@pytest.fixture(params=KINDS)
async def source(
    request: pytest.FixtureRequest, local: LocalSource, harvest_db: Database, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[HarvestSource]:
    monkeypatch.setenv("DEMO", "demo")
    kind = KINDS[request.param]
    url = local.url + ("/graphql" if kind["kind"] == "nivoda" else "")
    call = {"attempts": 10, "break_after": 1_000}
    feed = FeedSection.model_validate({"source": {**kind, "url": url, "call": call}, "key": "id"})
    async with open_source("feed", feed, harvest_db) as source:
        yield source


async def fetch_all(source: HarvestSource, range_: PartitionRange, window: TimeWindow = ALWAYS) -> list[dict[str, Any]]:
    """Fetch all records of a range, from the first page to the last one."""
    records: list[dict[str, Any]] = []
    position: PagePosition | None = PagePosition()
    while position is not None:
        page = await source.fetch(range_, window, position, 30)
        records += map(orjson.loads, page.records)
        position = page.next
    return records


async def check_ids(source: HarvestSource, range_: PartitionRange, window: TimeWindow = ALWAYS) -> Ids:
    """Return the ids in a range, after a check that they are distinct and as many as counted."""
    ids = [record["id"] for record in await fetch_all(source, range_, window)]
    assert len(ids) == len(set(ids)) == await source.count(range_, window)
    return set(ids)


def contains(range_: PartitionRange, price: int | None) -> bool:
    if price is None:
        return False
    return (range_.lower is None or price >= range_.lower) and (range_.upper is None or price < range_.upper)


async def test_all_records(source: HarvestSource, local: LocalSource) -> None:
    """H14: all records are fetched unchanged."""
    assert {record["id"]: record for record in await fetch_all(source, EVERYTHING)} == local.read_truth()
    assert await check_ids(source, EVERYTHING) == set(local.read_truth())


async def test_adjacent_ranges_are_complete(source: HarvestSource, local: LocalSource) -> None:
    """H3: adjacent ranges and the records without a value are all records, each of them once."""
    truth = local.read_truth()
    ids_of_ranges = [await check_ids(source, range_) for range_ in RANGES]
    for range_, ids in zip(RANGES, ids_of_ranges, strict=True):
        assert ids == {key for key, record in truth.items() if contains(range_, record["price"])}
    unpriced = await check_ids(source, WITHOUT_VALUE)
    assert unpriced == {key for key, record in truth.items() if record["price"] is None}
    assert unpriced
    assert sum(map(len, ids_of_ranges)) + len(unpriced) == len(truth)


async def test_adjacent_windows_are_complete(source: HarvestSource, local: LocalSource) -> None:
    """H9: two adjacent windows have all changes of both, each record once."""
    start = max(record["updatedAt"] for record in local.read_truth().values())
    local.change_records(updates=40, inserts=30)
    changed = sorted((r for r in local.read_truth().values() if r["updatedAt"] > start), key=lambda r: r["updatedAt"])
    middle, end = changed[len(changed) // 2]["updatedAt"], changed[-1]["updatedAt"]
    first, second = make_window(start, middle), make_window(middle, end)
    assert await check_ids(source, EVERYTHING, first) == {r["id"] for r in changed if r["updatedAt"] <= middle}
    assert await check_ids(source, EVERYTHING, second) == {r["id"] for r in changed if r["updatedAt"] > middle}
    priced = {r["id"] for r in changed if contains(RANGES[2], r["price"])}
    assert await check_ids(source, RANGES[2], make_window(start, end)) == priced


def make_window(after: str, upto: str) -> TimeWindow:
    return TimeWindow(datetime.fromisoformat(after), datetime.fromisoformat(upto))


async def test_faults_are_retried(source: HarvestSource, local: LocalSource) -> None:
    """H15, H16: despite throttled, failed, aborted and invalid responses, each record is fetched once."""
    local.set_faults(Faults(rate_429=0.03, rate_500=0.1, rate_cut=0.1, rate_garbage=0.1))
    assert await check_ids(source, EVERYTHING) == set(local.read_truth())


async def test_short_pages(source: HarvestSource, local: LocalSource, request: pytest.FixtureRequest) -> None:
    """H16: a source that continues after the last record misses none, unlike one with page numbers."""
    local.set_faults(Faults(rate_short=0.5))
    fetched = {record["id"] for record in await fetch_all(source, EVERYTHING)}
    missing = set(local.read_truth()) - fetched
    is_by_page = request.node.callspec.params["source"] == "page"
    assert bool(missing) == is_by_page  # the recount finds the missing records
