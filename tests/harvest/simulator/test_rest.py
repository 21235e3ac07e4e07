"""H17: the REST API of the simulator."""

from datetime import timedelta
from typing import Any

import pytest

from penstock.harvest.simulator.dataset import RecordOrder
from penstock.harvest.simulator.server import LocalOptions, LocalSource, run_local_source
from penstock.kernel.clock import ManualClock
from tests.harvest.simulator.client import LocalSourceClient, sort_by_price
from tests.support.types import Json


async def walk(client: LocalSourceClient, paging: str, limit: int, **filters: Any) -> list[Json]:
    """Return the records of all pages, by a kind of paging."""
    records: list[Json] = []
    position: Json = {} if paging == "cursor" else {paging: 0 if paging == "offset" else 1}
    while True:
        page = await client.get("/records", limit=limit, **position, **filters)
        records += page["items"]
        if not page["hasMore"]:
            assert page["nextCursor"] is None
            return records
        if paging == "offset":
            position = {"offset": len(records)}
        elif paging == "page":
            position = {"page": position["page"] + 1}
        else:
            position = {"cursor": page["nextCursor"]}


@pytest.mark.parametrize("paging", ["offset", "page", "cursor"])
async def test_pages_are_complete(client: LocalSourceClient, source: LocalSource, paging: str) -> None:
    """H17: by offset, page or cursor, the pages have all records, sorted by price and id, nulls last."""
    assert await walk(client, paging, 37) == sort_by_price(source.read_truth())


async def test_default_page(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: a page has 30 records by default, the total, whether more follow, and the next cursor."""
    page = await client.get("/records")
    assert page["items"] == sort_by_price(source.read_truth())[:30]
    assert page.keys() == {"items", "total", "hasMore", "nextCursor"}
    assert (page["total"], page["hasMore"]) == (400, True)
    last = await client.get("/records", offset=399)
    assert (len(last["items"]), last["hasMore"], last["nextCursor"]) == (1, False, None)
    assert (await client.get("/records", offset=5_000))["items"] == []


async def test_ranges_are_half_open(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: price_from is inclusive, price_below is exclusive, and a range has no nulls."""
    prices = sorted(record["price"] for record in source.read_truth().values() if record["price"] is not None)
    lower, upper = prices[100], prices[200]
    inside = await walk(client, "offset", 50, price_from=lower, price_below=upper)
    assert [record["price"] for record in inside] == [price for price in prices if lower <= price < upper]
    counts = [
        await client.get("/records/count", **params)
        for params in ({"price_below": lower}, {"price_from": lower}, {"price_null": "true"}, {})
    ]
    below, above, nulls, everything = (count["total"] for count in counts)
    assert (below + above, nulls, everything) == (len(prices), 400 - len(prices), 400)


async def test_windows(client: LocalSourceClient, source: LocalSource, clock: ManualClock) -> None:
    """H17: updated_after is exclusive, updated_upto inclusive."""
    before = clock.now()
    clock.advance(timedelta(seconds=1))
    changed = source.change_records(updates=1)
    moment = source.read_truth()[changed.updated[0]]["updatedAt"]
    assert [
        record["id"] for record in await walk(client, "cursor", 5, updated_after=before.isoformat())
    ] == changed.updated
    assert (await client.get("/records/count", updated_after=moment))["total"] == 0
    assert (await client.get("/records/count", updated_upto=moment))["total"] == 400
    assert (await client.get("/records/count", updated_upto=before.isoformat()))["total"] == 399


async def test_cursor_after_deletions(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: each present record after a cursor is sent once, even if the row of the cursor was deleted."""
    first = await client.get("/records", limit=100)
    seen = {record["id"] for record in first["items"]}
    source.change_records(deletes=300)
    rest = await continue_from(client, first["nextCursor"])
    assert first["items"][-1]["id"] not in source.read_truth()  # with this seed, the row of the cursor was deleted
    assert rest == [record for record in sort_by_price(source.read_truth()) if record["id"] not in seen]


async def continue_from(client: LocalSourceClient, cursor: str | None) -> list[Json]:
    records: list[Json] = []
    while cursor is not None:
        page = await client.get("/records", limit=20, cursor=cursor)
        records += page["items"]
        cursor = page["nextCursor"]
    return records


async def test_pages_can_be_sorted_by_id(clock: ManualClock) -> None:
    """H17: in the order of ids, updates move no row, also within a range."""
    async with (
        run_local_source(LocalOptions(records=200, order=RecordOrder.ID), clock) as source,
        LocalSourceClient.of(source.url) as client,
    ):
        cheap = [
            name
            for name, record in source.read_truth().items()
            if record["price"] is not None and record["price"] < 200_000
        ]
        assert [record["id"] for record in await walk(client, "cursor", 7)] == sorted(source.read_truth())
        assert [record["id"] for record in await walk(client, "offset", 7, price_below=200_000)] == sorted(cheap)


@pytest.mark.parametrize(
    "params",
    [
        {"limit": 0},
        {"limit": 1_001},
        {"limit": "1_0"},
        {"offset": -1},
        {"page": 0},
        {"offset": 1, "page": 1},
        {"cursor": "bm9uZQ"},
        {"cursor": "ä"},
        {"cursor": "aWQ6MQ"},  # of another order
        {"price_from": "cheap"},
        {"price_from": 1.5},
        {"price_null": "yes"},
        {"price_null": "true", "price_from": 1},
        {"updated_after": "2026-01-01T00:00:00"},
        {"updated_upto": "yesterday"},
        {"price": 1},
    ],
)
async def test_invalid_parameters(client: LocalSourceClient, params: Json) -> None:
    """H17: an invalid parameter is an error 400, never ignored."""
    response = await client.get("/records", status=400, **params)
    assert response["error"]["code"] == "BAD_PARAMETER"
