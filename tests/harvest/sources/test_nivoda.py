"""The Nivoda source: its token, its queries, its errors."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web

from penstock.harvest.model import ALWAYS, EVERYTHING, WITHOUT_VALUE, PagePosition, PartitionRange, TimeWindow
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from tests.harvest.sources.conftest import Opened
from tests.harvest.sources.scripted_api import Answer, ScriptedApi, says


def token(word: str) -> Answer:
    return says({"data": {"authenticate": {"username_and_password": {"token": word}}}})


def items(number: int) -> Answer:
    found = {"items": [{"id": str(n), "price": 100} for n in range(number)], "total_count": 7}
    return says({"data": {"as": {"diamonds_by_query": found}}})


def counts(number: int) -> Answer:
    return says({"data": {"as": {"diamonds_by_query_count": number}}})


def error(code: str | None, message: str = "no") -> Answer:
    return says({"data": None, "errors": [{"message": message, "extensions": {"code": code}}]})


def asked(api: ScriptedApi, place: int = -1) -> dict[str, Any]:
    variables: dict[str, Any] = api.bodies[place]["variables"]
    return variables


@pytest.mark.parametrize(
    ("range_", "window", "expected"),
    [
        (EVERYTHING, ALWAYS, {}),
        (WITHOUT_VALUE, ALWAYS, {"has_price": False}),
        (PartitionRange(lower=0, upper=100), ALWAYS, {"dollar_value": {"from": 0, "to": 99}}),
        (PartitionRange(lower=5), ALWAYS, {"dollar_value": {"from": 5}}),
        (PartitionRange(upper=0), ALWAYS, {"dollar_value": {"to": -1}}),
        (
            PartitionRange(lower=5),
            TimeWindow(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, microsecond=7, tzinfo=UTC)),
            {
                "dollar_value": {"from": 5},
                "updated_at": {"after": "2026-01-01T00:00:00.000000Z", "upto": "2026-01-02T00:00:00.000007Z"},
            },
        ),
    ],
)
async def test_ranges_become_nivodas(
    api: ScriptedApi, nivoda: Opened, range_: PartitionRange, window: TimeWindow, expected: dict[str, Any]
) -> None:
    """H14: a half-open range is asked for with both ends in it, for a count and for a page alike."""
    api.will(token("t1"), counts(7), items(2))
    async with nivoda() as source:
        assert source.has_windows
        assert await source.count(range_, window) == 7
        assert asked(api) == {"token": "t1", "query": expected}
        page = await source.fetch(range_, window, PagePosition(40), 30)
    assert asked(api) == {"token": "t1", "query": expected, "offset": 40, "limit": 30}
    assert [*page.records] == [b'{"id":"0","price":100}', b'{"id":"1","price":100}']
    assert page.next == PagePosition(42)
    assert asked(api, 0) == {"username": "buyer@example.com", "password": "s3same"}


async def test_an_empty_page_is_the_end(api: ScriptedApi, nivoda: Opened) -> None:
    """H16: and only that."""
    api.will(token("t1"), items(0))
    async with nivoda() as source:
        assert (await source.fetch(EVERYTHING, ALWAYS, PagePosition(7), 30)).next is None


async def test_no_more_than_fifty_are_asked_for(api: ScriptedApi, nivoda: Opened) -> None:
    """H14: Nivoda gives at most 50 a page."""
    api.will(token("t1"), items(50))
    async with nivoda() as source:
        page = await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 80)
    assert asked(api)["limit"] == 50
    assert page.next == PagePosition(50)


async def test_one_token_is_asked_for(api: ScriptedApi, nivoda: Opened) -> None:
    """H14: many requests that need a token at the same time share one, and keep it."""

    async def any_answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await (counts(1) if "token" in body["variables"] else token("t1"))(request)

    api.will(any_answer)
    async with nivoda() as source:
        await asyncio.gather(*(source.count(EVERYTHING, ALWAYS) for _ in range(20)))
    assert sum("password" in body["variables"] for body in api.bodies) == 1


async def test_an_old_token_is_replaced_in_time(api: ScriptedApi, nivoda: Opened) -> None:
    """H14: after `token_for` a new one is asked for, before the source refuses the old."""
    api.will(token("t1"), counts(1), token("t2"), counts(2))
    async with nivoda(token_for=0.000_001) as source:
        assert [await source.count(EVERYTHING, ALWAYS) for _ in range(2)] == [1, 2]
    assert asked(api)["token"] == "t2"


@pytest.mark.parametrize("refusal", [error("UNAUTHENTICATED"), says(status=401)], ids=["graphql", "http"])
async def test_a_token_the_source_forgot_is_renewed(api: ScriptedApi, nivoda: Opened, refusal: Answer) -> None:
    """H14: a refused token is replaced, and the request asked again."""
    api.will(token("t1"), counts(1), refusal, token("t2"), counts(2))
    async with nivoda() as source:
        assert await source.count(EVERYTHING, ALWAYS) == 1
        assert await source.count(EVERYTHING, ALWAYS) == 2
    assert asked(api)["token"] == "t2"


async def test_a_token_is_renewed_once(api: ScriptedApi, nivoda: Opened) -> None:
    """H14: whoever is refused with a new token is told so."""
    api.will(token("t1"), error("UNAUTHENTICATED"), token("t2"), error("UNAUTHENTICATED"))
    async with nivoda() as source:
        with pytest.raises(SourceRefused, match="SOURCE_UNAUTHORIZED"):
            await source.count(EVERYTHING, ALWAYS)
    assert len(api.bodies) == 4


async def test_a_wrong_password_is_told(api: ScriptedApi, nivoda: Opened) -> None:
    """H14: and is not in what is told, whatever the source says."""
    api.will(error("UNAUTHENTICATED", "s3same is not the password"))
    async with nivoda() as source:
        with pytest.raises(SourceRefused, match=r"SOURCE_UNAUTHORIZED: \*\*\* is not") as caught:
            await source.count(EVERYTHING, ALWAYS)
    assert "s3same" not in str(caught.value)
    assert len(api.bodies) == 1


@pytest.mark.parametrize(
    ("answer", "kind", "code"),
    [
        (error("GRAPHQL_VALIDATION_FAILED"), SourceRefused, "SOURCE_REFUSED"),
        (error("TOO_MANY_REQUESTS"), SourcePaused, "SOURCE_THROTTLED"),
        (error("INTERNAL_SERVER_ERROR"), SourceFailed, "SOURCE_ERROR"),
        (error(None), SourceFailed, "SOURCE_ERROR"),
        (says({"errors": [{"message": "t1 is strange"}]}), SourceFailed, "SOURCE_ERROR"),
        (says({"data": {"as": None}}), SourceFailed, "SOURCE_INVALID_RESPONSE"),
        (says({"data": None}), SourceFailed, "SOURCE_INVALID_RESPONSE"),
        (says({"data": {"as": {"diamonds_by_query": {"items": [None]}}}}), SourceFailed, "SOURCE_INVALID_RESPONSE"),
        (items(31), SourceFailed, "SOURCE_INVALID_RESPONSE"),
        (says(text="<html>"), SourceFailed, "SOURCE_INVALID_RESPONSE"),
    ],
    ids=range(10),
)
async def test_errors_are_told_for_what_they_are(
    api: ScriptedApi, nivoda: Opened, answer: Answer, kind: type[SourceFailed], code: str
) -> None:
    """H14: a GraphQL error, though it comes with status 200, is a failure, a refusal or a pause."""
    api.will(token("t1"), answer)
    async with nivoda(call={"attempts": 1}) as source:
        with pytest.raises(SourceFailed) as caught:
            await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 30)
    assert type(caught.value) is kind
    assert caught.value.code == code
    assert "t1" not in str(caught.value)
