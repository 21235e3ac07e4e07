"""The REST source: every kind of paging, its requests, and invalid responses."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from penstock.harvest.model import (
    ALWAYS,
    EVERYTHING,
    WITHOUT_VALUE,
    PagePosition,
    PartitionKind,
    PartitionRange,
    RecordPage,
    TimeWindow,
)
from penstock.harvest.sources.port import HarvestSource, SourceFailed
from tests.harvest.sources.conftest import OpenSource
from tests.harvest.sources.scripted_api import ScriptedApi, pages, reply

WINDOW = TimeWindow(
    datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=2))), datetime(2026, 1, 2, microsecond=5, tzinfo=UTC)
)


async def fetch_all(source: HarvestSource, limit: int, most: int = 20) -> list[RecordPage]:
    """Fetch all pages from the first one on."""
    position: PagePosition | None = PagePosition()
    pages: list[RecordPage] = []
    while position is not None:
        pages.append(await source.fetch(EVERYTHING, ALWAYS, position, limit))
        position = pages[-1].next
        assert len(pages) < most
    return pages


def sizes(fetched: list[RecordPage]) -> list[int]:
    return [len(page.records) for page in fetched]


async def test_offset_paging(api: ScriptedApi, rest: OpenSource) -> None:
    """H16: the next page starts at the end of a short page; only an empty page is the last, whatever the total is."""
    api.respond(*pages(3, 1, 3, 0, total=4))
    async with rest() as source:
        assert source.is_seekable
        assert sizes(await fetch_all(source, 3)) == [3, 1, 3, 0]
    assert [query["offset"] for query in api.queries] == ["0", "3", "4", "7"]
    assert {query["limit"] for query in api.queries} == {"3"}


async def test_page_number_paging(api: ScriptedApi, rest: OpenSource) -> None:
    """H14: a short page does not change the numbers of the next pages."""
    api.respond(*pages(3, 1, 2, 0))
    async with rest(paging="page", page_param="p", limit_param="size") as source:
        fetched = await fetch_all(source, 3)
        assert source.is_seekable
    assert sizes(fetched) == [3, 1, 2, 0]
    assert [page.next for page in fetched] == [PagePosition(3), PagePosition(6), PagePosition(9), None]
    assert api.queries == [{"size": "3", "p": str(number)} for number in (1, 2, 3, 4)]


async def test_page_numbers_from_zero(api: ScriptedApi, rest: OpenSource) -> None:
    """H14: with `first_page: 0`, a position within a page is fetched from the start of the page."""
    api.respond(*pages(3))
    async with rest(paging="page", first_page=0) as source:
        page = await source.fetch(EVERYTHING, ALWAYS, PagePosition(7), 3)
    assert api.queries[0]["page"] == "2"
    assert page.next == PagePosition(9)


async def test_cursor_paging(api: ScriptedApi, rest: OpenSource) -> None:
    """H14: each page has the cursor of the next one; a page without a cursor is the last one, empty or not."""
    items = [[{"id": "1"}, {"id": "2"}], [], [{"id": "3"}]]
    cursors = ["a+b&c", 17, None]
    api.respond(*(reply({"items": page, "next": {"at": cursor}}) for page, cursor in zip(items, cursors, strict=True)))
    async with rest(paging="cursor", cursor_param="from", next_cursor="next.at") as source:
        fetched = await fetch_all(source, 2)
        assert not source.is_seekable
    assert [page.next for page in fetched] == [PagePosition(2, "a+b&c"), PagePosition(2, "17"), None]
    assert api.queries == [{"limit": "2"}, {"limit": "2", "from": "a+b&c"}, {"limit": "2", "from": "17"}]


async def test_repeated_cursor_is_invalid(api: ScriptedApi, rest: OpenSource) -> None:
    """H16: a page whose next cursor is its own is an invalid response."""
    api.respond(reply({"items": [{"id": "1"}], "nextCursor": "a"}))
    async with rest(paging="cursor", call={"attempts": 1}) as source:
        with pytest.raises(SourceFailed, match="SOURCE_INVALID_RESPONSE"):
            await source.fetch(EVERYTHING, ALWAYS, PagePosition(1, "a"), 2)


@pytest.mark.parametrize("paging", ["offset", "page"])
async def test_has_more_marks_the_last_page(api: ScriptedApi, rest: OpenSource, paging: str) -> None:
    """H16: `has_more` applies to full and to short pages."""
    responders = [reply({"items": [{"id": "1"}], "meta": {"more": more}}) for more in (True, False)]
    api.respond(*responders)
    async with rest(paging=paging, has_more="meta.more") as source:
        assert sizes(await fetch_all(source, 2)) == [1, 1]


async def test_short_page_is_the_last_one_if_guaranteed(api: ScriptedApi, rest: OpenSource) -> None:
    """H16: with `short_page_ends`, the empty last page is not requested."""
    api.respond(*pages(3, 2))
    async with rest(short_page_ends=True) as source:
        assert sizes(await fetch_all(source, 3)) == [3, 2]


@pytest.mark.parametrize(
    ("range_", "window", "options", "expected"),
    [
        (EVERYTHING, ALWAYS, {}, {}),
        (PartitionRange(lower=100, upper=2500), ALWAYS, {}, {"price_from": "100", "price_below": "2500"}),
        (PartitionRange(upper=0), ALWAYS, {}, {"price_below": "0"}),
        (PartitionRange(lower=5), ALWAYS, {"decimals": 2, "lower_param": "min"}, {"min": "0.05"}),
        (PartitionRange(lower=-10000000000), ALWAYS, {"decimals": 6}, {"price_from": "-10000.000000"}),
        (WITHOUT_VALUE, ALWAYS, {}, {"price_null": "true"}),
        (
            EVERYTHING,
            WINDOW,
            {"params": {"lang": "en & fr"}},
            {
                "lang": "en & fr",
                "updated_after": "2026-01-01T10:00:00.000000Z",
                "updated_upto": "2026-01-02T00:00:00.000005Z",
            },
        ),
        (EVERYTHING, WINDOW, {"after_param": None, "upto_param": None}, {}),
    ],
)
async def test_parameters_of_ranges_and_windows(
    api: ScriptedApi,
    rest: OpenSource,
    range_: PartitionRange,
    window: TimeWindow,
    options: dict[str, Any],
    expected: dict[str, str],
) -> None:
    """H14: a range and a window are sent in the parameters of the source, for a page and for a count."""
    api.respond(reply({"items": [], "total": 12}))
    async with rest(count_path="/records/count", **options) as source:
        assert source.has_windows == ("after_param" not in options)
        await source.fetch(range_, window, PagePosition(), 30)
        assert await source.count(range_, window) == 12
    page, counted = api.queries
    assert page == {"limit": "30", "offset": "0", **expected}
    assert counted == expected


async def test_count_by_the_listing(api: ScriptedApi, rest: OpenSource) -> None:
    """H14: without `count_path`, the total of a listing with one record is the count."""
    api.respond(reply({"data": {"rows": [{"id": "1"}], "of": 77}}))
    async with rest(records="data.rows", total="data.of") as source:
        assert await source.count(PartitionRange(lower=5), ALWAYS) == 77
        assert len((await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 5)).records) == 1
    assert api.queries[0] == {"price_from": "5", "limit": "1", "offset": "0"}


async def test_source_without_a_null_parameter(api: ScriptedApi, rest: OpenSource) -> None:
    """H14: a source that cannot select records without a value gets no request for them."""
    async with rest(null_param=None) as source:
        assert await source.count(PartitionRange(PartitionKind.NULL), ALWAYS) == 0
        assert await source.fetch(PartitionRange(PartitionKind.NULL), ALWAYS, PagePosition(), 30) == RecordPage(
            (), None
        )
    assert api.queries == []


async def test_records_keep_every_digit(api: ScriptedApi, rest: OpenSource) -> None:
    """H14: a record is the unchanged text of the response."""
    records = [b'{"id": "a", "price": 0.10000000000000000000001}', b'{"id":12345678901234567890123, "n": [1, {}]}']
    api.respond(reply(text=b'{"total": 2, "items": [' + b" ,\n".join(records) + b"]}"))
    async with rest() as source:
        assert (await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 30)).records == records


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        (rb'{"a":"x\u0000y"}', rb'{"a":"x\ufffdy"}'),
        (rb'{"a":"\ud800"}', rb'{"a":"\ufffd"}'),
        (rb'{"a":"\ude00\ud83d\ude00\uD83D"}', rb'{"a":"\ufffd\ud83d\ude00\ufffd"}'),
        (rb'{"a":"\\ud800 \\u0000"}', rb'{"a":"\\ud800 \\u0000"}'),
        (b'{"a":"\xe4"}', '{"a":"\N{REPLACEMENT CHARACTER}"}'.encode()),
        ('{"a":"ä😀"}'.encode(), '{"a":"ä😀"}'.encode()),
    ],
)
async def test_unstorable_characters_are_replaced(
    api: ScriptedApi, rest: OpenSource, sent: bytes, stored: bytes
) -> None:
    """H14: only the unstorable characters of a page are replaced."""
    api.respond(reply(text=b'{"items": [' + sent + rb', {"id": "\\b\n\u00e4"}]}'))
    async with rest() as source:
        records = (await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 30)).records
    assert records == [stored, rb'{"id": "\\b\n\u00e4"}']


@pytest.mark.parametrize(
    "body",
    [
        b'{"items": 5}',
        b'{"items": {"id": 1}}',
        b'{"items": null}',
        b'{"total": 3}',
        b"[]",
        b'{"items": [5]}',
        b'{"items": [{"id": 1}, null]}',
        b'{"items": [{"id": 1}, {"id": 2}, {"id": 3}]}',
        b'{"items": [{"id": 1}',
        b"<html>oops</html>",
        b"",
        b'{"items": [' + b"[" * 100_000,
    ],
)
async def test_invalid_page_fails(api: ScriptedApi, rest: OpenSource, body: bytes) -> None:
    """H14: a response without a list of at most the requested number of objects is invalid, and never the last page."""
    api.respond(reply(text=body))
    async with rest(call={"attempts": 1}) as source:
        with pytest.raises(SourceFailed, match="SOURCE_INVALID_RESPONSE") as caught:
            await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 2)
    assert caught.value.code == "SOURCE_INVALID_RESPONSE"


@pytest.mark.parametrize("total", ["x", None, -1, [3], 1.5])
async def test_invalid_count_fails(api: ScriptedApi, rest: OpenSource, total: Any) -> None:
    """H3: a count must be a whole number of at least 0."""
    api.respond(reply({"items": [], "total": total}))
    async with rest(call={"attempts": 1}) as source:
        with pytest.raises(SourceFailed, match="SOURCE_INVALID_RESPONSE"):
            await source.count(EVERYTHING, ALWAYS)


@pytest.mark.parametrize(
    ("options", "body", "problem"),
    [
        (
            {},
            b'{"results": [], "count": 3}',
            "the response has no list of records at `items` (harvest.feeds.feed.source.records): "
            "the response has the keys results, count",
        ),
        (
            {"records": "data.rows"},
            b'{"data": "none"}',
            'list of records at `data.rows` (harvest.feeds.feed.source.records): data is "none"',
        ),
        (
            {"records": "data.rows"},
            b'{"data": {"items": []}}',
            "at `data.rows` (harvest.feeds.feed.source.records): data has the keys items",
        ),
        ({}, b"[]", "at `items` (harvest.feeds.feed.source.records): the response is a list of 0"),
        ({}, b'{"items": {"a": 1}}', "(harvest.feeds.feed.source.records): items is an object with the keys a"),
        (
            {"has_more": "more"},
            b'{"items": [], "more": "yes"}',
            'no boolean at `more` (harvest.feeds.feed.source.has_more): more is "yes"',
        ),
        (
            {"paging": "cursor"},
            b'{"items": [], "nextCursor": [1]}',
            "no text or number at `nextCursor` (harvest.feeds.feed.source.next_cursor): nextCursor is a list of 1",
        ),
        ({}, b'{"items": [5]}', "the response has a record that is not an object: 5"),
    ],
)
async def test_error_of_an_invalid_page_names_the_setting(
    api: ScriptedApi, rest: OpenSource, options: dict[str, Any], body: bytes, problem: str
) -> None:
    """H14: the error has the URL, the setting with the wrong path, and the value or the keys of the response."""
    api.respond(reply(text=body))
    async with rest(call={"attempts": 1}, **options) as source:
        with pytest.raises(SourceFailed) as error:
            await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 2)
    assert error.value.message.startswith(f"GET {api.url}/records: the response has ")
    assert problem in error.value.message


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"count": 3}', "the response has the keys count"),
        (b'{"total": "many"}', 'total is "many"'),
        (b'{"total": null}', "total is null"),
        (b'{"total": -1}', "total is -1"),
        (b'{"total": {"value": 3}}', "total is an object with the keys value"),
    ],
)
async def test_error_of_an_invalid_count_names_the_setting(
    api: ScriptedApi, rest: OpenSource, body: bytes, found: str
) -> None:
    """H3: the error has the setting with the wrong path, and the value of the response."""
    api.respond(reply(text=body))
    async with rest(call={"attempts": 1}) as source:
        with pytest.raises(SourceFailed) as error:
            await source.count(EVERYTHING, ALWAYS)
    expected = "the response has no whole number at `total` (harvest.feeds.feed.source.total): "
    assert error.value.message == f"GET {api.url}/records: {expected}{found}"


async def test_error_of_an_invalid_response_has_no_secret(
    api: ScriptedApi, rest: OpenSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H15: a secret in an invalid response is masked in the error."""
    monkeypatch.setenv("TOKEN", "s3same")
    api.respond(reply({"items": "s3same"}))
    async with rest(call={"attempts": 1}, secret_headers={"Authorization": "env:TOKEN"}) as source:
        with pytest.raises(SourceFailed) as error:
            await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 2)
    assert error.value.message.endswith('items is "***"')
