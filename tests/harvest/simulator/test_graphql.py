"""H17: the GraphQL API of the simulator, in the form of Nivoda."""

from datetime import timedelta
from typing import Any

import pytest

from penstock.harvest.simulator.server import LocalSource
from penstock.kernel.clock import ManualClock
from tests.harvest.simulator.client import AUTHENTICATE, COUNT, PAGE, LocalSourceClient, sort_by_price


def code_of(response: Any) -> str:
    assert response.keys() == {"errors"}
    code = response["errors"][0]["extensions"]["code"]
    assert isinstance(code, str)
    return code


async def test_pages(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: the pages have the same records as by REST, at most 50 per page."""
    token, records = await client.token(), list[Any]()
    while len(records) < 400:
        response = await client.graphql(PAGE, token=token, query={}, offset=len(records), limit=50)
        page = response["data"]["as"]["diamonds_by_query"]
        assert page["total_count"] == 400
        records += page["items"]
    assert records == sort_by_price(source.read_truth())
    assert code_of(await client.graphql(PAGE, token=token, query={}, offset=0, limit=51)) == "BAD_USER_INPUT"


async def test_dollar_ranges_are_inclusive(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: from and to are inclusive; has_price: false selects the records without a price."""
    token = await client.token()
    prices = sorted(record["price"] for record in source.read_truth().values() if record["price"] is not None)
    lower, upper = prices[50], prices[90]

    async def count(query: dict[str, Any] | None) -> int:
        response = await client.graphql(COUNT, token=token, query=query)
        number = response["data"]["as"]["diamonds_by_query_count"]
        assert isinstance(number, int)
        return number

    inside = [price for price in prices if lower <= price <= upper]
    assert await count({"dollar_value": {"from": lower, "to": upper}}) == len(inside)
    assert await count({"dollar_value": {"to": upper}}) == sum(price <= upper for price in prices)
    assert await count({"has_price": False}) == 400 - len(prices)
    assert await count({"has_price": True}) == len(prices)
    assert await count(None) == 400


async def test_windows(client: LocalSourceClient, source: LocalSource, clock: ManualClock) -> None:
    """H17: updated_at selects changes after one time and not after another."""
    token, before = await client.token(), clock.now().isoformat()
    clock.advance(timedelta(seconds=1))
    changed = source.change_records(updates=4, inserts=2)
    response = await client.graphql(PAGE, token=token, query={"updated_at": {"after": before}})
    items = response["data"]["as"]["diamonds_by_query"]["items"]
    assert {item["id"] for item in items} == {*changed.updated, *changed.inserted}
    response = await client.graphql(COUNT, token=token, query={"updated_at": {"upto": before}})
    assert response["data"]["as"]["diamonds_by_query_count"] == 396


async def test_tokens(client: LocalSourceClient, source: LocalSource, clock: ManualClock) -> None:
    """H17: wrong credentials and unknown, expired or revoked tokens are UNAUTHENTICATED."""
    assert code_of(await client.graphql(AUTHENTICATE, username="demo@example.com", password="x")) == "UNAUTHENTICATED"
    assert code_of(await client.graphql(COUNT, token="x", query={})) == "UNAUTHENTICATED"
    token = await client.token()
    clock.advance(timedelta(hours=6) - timedelta(microseconds=1))
    assert "data" in await client.graphql(COUNT, token=token, query={})
    clock.advance(timedelta(microseconds=1))
    assert code_of(await client.graphql(COUNT, token=token, query={})) == "UNAUTHENTICATED"
    token = await client.token()
    assert await client.post("/admin/expire-tokens", {}) == {"expired": 1}
    assert code_of(await client.graphql(COUNT, token=token, query={})) == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    "query",
    [
        {"shapes": ["ROUND"]},
        {"dollar_value": {"from": "1"}},
        {"has_price": False, "dollar_value": {"from": 1}},
        {"updated_at": {"after": "2026-01-01"}},
    ],
)
async def test_unknown_filter_is_an_error(client: LocalSourceClient, query: dict[str, Any]) -> None:
    """H17: an unknown filter is an error, never ignored."""
    assert code_of(await client.graphql(COUNT, token=await client.token(), query=query)) == "BAD_USER_INPUT"


async def test_invalid_query(client: LocalSourceClient) -> None:
    """H17: an unknown field is a GraphQL error, invalid JSON an HTTP error."""
    assert code_of(await client.graphql("query { me { id } }")) == "GRAPHQL_VALIDATION_FAILED"
    async with client.session.post("/graphql", data=b"{") as response:
        assert response.status == 400
