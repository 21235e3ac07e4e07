"""The Nivoda source: its token, its queries, its errors."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web

from penstock.harvest.model import ALWAYS, EVERYTHING, WITHOUT_VALUE, PagePosition, PartitionRange, TimeWindow
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from tests.harvest.sources.conftest import OpenSource
from tests.harvest.sources.scripted_api import Responder, ScriptedApi, reply


def token_response(token: str) -> Responder:
    return reply({"data": {"authenticate": {"username_and_password": {"token": token}}}})


def page_response(number: int) -> Responder:
    page = {"items": [{"id": str(index), "price": 100} for index in range(number)], "total_count": 7}
    return reply({"data": {"as": {"diamonds_by_query": page}}})


def count_response(number: int) -> Responder:
    return reply({"data": {"as": {"diamonds_by_query_count": number}}})


def error_response(code: str | None, message: str = "no") -> Responder:
    return reply({"data": None, "errors": [{"message": message, "extensions": {"code": code}}]})


def variables_of(api: ScriptedApi, index: int = -1) -> dict[str, Any]:
    variables: dict[str, Any] = api.bodies[index]["variables"]
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
async def test_filters_of_ranges_and_windows(
    api: ScriptedApi, nivoda: OpenSource, range_: PartitionRange, window: TimeWindow, expected: dict[str, Any]
) -> None:
    """H14: a half-open range is sent with inclusive ends, for a count and for a page."""
    api.respond(token_response("t1"), count_response(7), page_response(2))
    async with nivoda() as source:
        assert source.has_windows
        assert await source.count(range_, window) == 7
        assert variables_of(api) == {"token": "t1", "query": expected}
        page = await source.fetch(range_, window, PagePosition(40), 30)
    assert variables_of(api) == {"token": "t1", "query": expected, "offset": 40, "limit": 30}
    assert [*page.records] == [b'{"id":"0","price":100}', b'{"id":"1","price":100}']
    assert page.next == PagePosition(42)
    assert variables_of(api, 0) == {"username": "buyer@example.com", "password": "s3same"}


async def test_empty_page_is_the_last_one(api: ScriptedApi, nivoda: OpenSource) -> None:
    """H16: only an empty page is the last one."""
    api.respond(token_response("t1"), page_response(0))
    async with nivoda() as source:
        assert (await source.fetch(EVERYTHING, ALWAYS, PagePosition(7), 30)).next is None


async def test_page_size_is_limited(api: ScriptedApi, nivoda: OpenSource) -> None:
    """H14: Nivoda allows at most 50 records per page."""
    api.respond(token_response("t1"), page_response(50))
    async with nivoda() as source:
        page = await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 80)
    assert variables_of(api)["limit"] == 50
    assert page.next == PagePosition(50)


async def test_concurrent_requests_share_a_token(api: ScriptedApi, nivoda: OpenSource) -> None:
    """H14: concurrent requests without a token log in once."""

    async def respond(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await (count_response(1) if "token" in body["variables"] else token_response("t1"))(request)

    api.respond(respond)
    async with nivoda() as source:
        await asyncio.gather(*(source.count(EVERYTHING, ALWAYS) for _ in range(20)))
    assert sum("password" in body["variables"] for body in api.bodies) == 1


async def test_token_is_renewed_in_time(api: ScriptedApi, nivoda: OpenSource) -> None:
    """H14: after `token_for` a new token is requested, before the source rejects the old one."""
    api.respond(token_response("t1"), count_response(1), token_response("t2"), count_response(2))
    async with nivoda(token_for=0.000_001) as source:
        assert [await source.count(EVERYTHING, ALWAYS) for _ in range(2)] == [1, 2]
    assert variables_of(api)["token"] == "t2"


@pytest.mark.parametrize("refusal", [error_response("UNAUTHENTICATED"), reply(status=401)], ids=["graphql", "http"])
async def test_rejected_token_is_renewed(api: ScriptedApi, nivoda: OpenSource, refusal: Responder) -> None:
    """H14: after the rejection of a token the request is repeated with a new one."""
    api.respond(token_response("t1"), count_response(1), refusal, token_response("t2"), count_response(2))
    async with nivoda() as source:
        assert await source.count(EVERYTHING, ALWAYS) == 1
        assert await source.count(EVERYTHING, ALWAYS) == 2
    assert variables_of(api)["token"] == "t2"


async def test_token_is_renewed_once_per_request(api: ScriptedApi, nivoda: OpenSource) -> None:
    """H14: a request that is rejected with a new token fails."""
    api.respond(
        token_response("t1"), error_response("UNAUTHENTICATED"), token_response("t2"), error_response("UNAUTHENTICATED")
    )
    async with nivoda() as source:
        with pytest.raises(SourceRefused, match="SOURCE_UNAUTHORIZED"):
            await source.count(EVERYTHING, ALWAYS)
    assert len(api.bodies) == 4


async def test_wrong_password_fails(api: ScriptedApi, nivoda: OpenSource) -> None:
    """H14: the error does not contain the password, even if the response does."""
    api.respond(error_response("UNAUTHENTICATED", "s3same is not the password"))
    async with nivoda() as source:
        with pytest.raises(SourceRefused, match=r"SOURCE_UNAUTHORIZED: \*\*\* is not") as caught:
            await source.count(EVERYTHING, ALWAYS)
    assert "s3same" not in str(caught.value)
    assert len(api.bodies) == 1


@pytest.mark.parametrize(
    ("responder", "kind", "code"),
    [
        (error_response("GRAPHQL_VALIDATION_FAILED"), SourceRefused, "SOURCE_REFUSED"),
        (error_response("TOO_MANY_REQUESTS"), SourcePaused, "SOURCE_THROTTLED"),
        (error_response("INTERNAL_SERVER_ERROR"), SourceFailed, "SOURCE_ERROR"),
        (error_response(None), SourceFailed, "SOURCE_ERROR"),
        (reply({"errors": [{"message": "t1 is unknown"}]}), SourceFailed, "SOURCE_ERROR"),
        (reply({"data": {"as": None}}), SourceFailed, "SOURCE_INVALID_RESPONSE"),
        (reply({"data": None}), SourceFailed, "SOURCE_INVALID_RESPONSE"),
        (
            reply({"data": {"as": {"diamonds_by_query": {"items": [None]}}}}),
            SourceFailed,
            "SOURCE_INVALID_RESPONSE",
        ),
        (page_response(31), SourceFailed, "SOURCE_INVALID_RESPONSE"),
        (reply(text="<html>"), SourceFailed, "SOURCE_INVALID_RESPONSE"),
    ],
    ids=range(10),
)
async def test_graphql_errors(
    api: ScriptedApi, nivoda: OpenSource, responder: Responder, kind: type[SourceFailed], code: str
) -> None:
    """H14: a GraphQL error, which has the status 200, is a failure, a refusal or a pause."""
    api.respond(token_response("t1"), responder)
    async with nivoda(call={"attempts": 1}) as source:
        with pytest.raises(SourceFailed) as caught:
            await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 30)
    assert type(caught.value) is kind
    assert caught.value.code == code
    assert "t1" not in str(caught.value)
