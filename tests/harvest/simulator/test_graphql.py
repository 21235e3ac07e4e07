"""H17: the GraphQL side of the local source, in Nivoda's shape."""

from datetime import timedelta
from typing import Any

import pytest

from penstock.harvest.simulator.server import LocalSource
from penstock.kernel.clock import ManualClock
from tests.harvest.simulator.client import AUTHENTICATE, COUNT, PAGE, LocalSourceClient, in_order


def code_of(told: Any) -> str:
    assert told.keys() == {"errors"}
    code = told["errors"][0]["extensions"]["code"]
    assert isinstance(code, str)
    return code


async def test_pages_by_graphql_are_all_records(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: the same records as by REST, at most 50 a page."""
    token, found = await client.token(), list[Any]()
    while len(found) < 400:
        told = await client.graphql(PAGE, token=token, query={}, offset=len(found), limit=50)
        page = told["data"]["as"]["diamonds_by_query"]
        assert page["total_count"] == 400
        found += page["items"]
    assert found == in_order(source.truth())
    assert code_of(await client.graphql(PAGE, token=token, query={}, offset=0, limit=51)) == "BAD_USER_INPUT"


async def test_both_ends_of_a_dollar_range_belong_to_it(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: from and to are inclusive; has_price: false are the records without a price."""
    token = await client.token()
    prices = sorted(record["price"] for record in source.truth().values() if record["price"] is not None)
    lower, upper = prices[50], prices[90]

    async def count(query: dict[str, Any] | None) -> int:
        told = await client.graphql(COUNT, token=token, query=query)
        number = told["data"]["as"]["diamonds_by_query_count"]
        assert isinstance(number, int)
        return number

    inside = [price for price in prices if lower <= price <= upper]
    assert await count({"dollar_value": {"from": lower, "to": upper}}) == len(inside)
    assert await count({"dollar_value": {"to": upper}}) == sum(price <= upper for price in prices)
    assert await count({"has_price": False}) == 400 - len(prices)
    assert await count({"has_price": True}) == len(prices)
    assert await count(None) == 400


async def test_windows_by_graphql(client: LocalSourceClient, source: LocalSource, clock: ManualClock) -> None:
    """H17: updated_at takes what changed after one moment and not after another."""
    token, before = await client.token(), clock.now().isoformat()
    clock.advance(timedelta(seconds=1))
    changed = source.change(updates=4, inserts=2)
    told = await client.graphql(PAGE, token=token, query={"updated_at": {"after": before}})
    items = told["data"]["as"]["diamonds_by_query"]["items"]
    assert {item["id"] for item in items} == {*changed.updated, *changed.inserted}
    told = await client.graphql(COUNT, token=token, query={"updated_at": {"upto": before}})
    assert told["data"]["as"]["diamonds_by_query_count"] == 396


async def test_only_a_good_token_lets_ask(client: LocalSourceClient, source: LocalSource, clock: ManualClock) -> None:
    """H17: wrong credentials, and tokens that are unknown, expired or called back, are UNAUTHENTICATED."""
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
async def test_a_query_that_is_not_understood_is_refused(client: LocalSourceClient, query: dict[str, Any]) -> None:
    """H17: a filter that is not known is an error, never left out."""
    assert code_of(await client.graphql(COUNT, token=await client.token(), query=query)) == "BAD_USER_INPUT"


async def test_what_is_no_question(client: LocalSourceClient) -> None:
    """H17: another field is an error of GraphQL's, a body that is no JSON one of HTTP's."""
    assert code_of(await client.graphql("query { me { id } }")) == "GRAPHQL_VALIDATION_FAILED"
    async with client.session.post("/graphql", data=b"{") as answer:
        assert answer.status == 400
