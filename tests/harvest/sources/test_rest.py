"""The REST source: every form of paging, and what it asks for."""

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
from tests.harvest.sources.conftest import Opened
from tests.harvest.sources.scripted_api import ScriptedApi, pages, says

WINDOW = TimeWindow(
    datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=2))), datetime(2026, 1, 2, microsecond=5, tzinfo=UTC)
)


async def walked(source: HarvestSource, limit: int, most: int = 20) -> list[RecordPage]:
    """All pages from the first on."""
    position: PagePosition | None = PagePosition()
    found: list[RecordPage] = []
    while position is not None:
        found.append(await source.fetch(EVERYTHING, ALWAYS, position, limit))
        position = found[-1].next
        assert len(found) < most
    return found


def sizes(found: list[RecordPage]) -> list[int]:
    return [len(page.records) for page in found]


async def test_offsets_go_on_behind_what_came(api: ScriptedApi, rest: Opened) -> None:
    """H16: after a short page the next begins where it ended; only an empty one is the end, whatever the total says."""
    api.will(*pages(3, 1, 3, 0, total=4))
    async with rest() as source:
        assert source.is_seekable
        assert sizes(await walked(source, 3)) == [3, 1, 3, 0]
    assert [asked["offset"] for asked in api.asked] == ["0", "3", "4", "7"]
    assert {asked["limit"] for asked in api.asked} == {"3"}


async def test_pages_are_numbered(api: ScriptedApi, rest: Opened) -> None:
    """H14: by page, a short page does not move the numbers."""
    api.will(*pages(3, 1, 2, 0))
    async with rest(paging="page", page_param="p", limit_param="size") as source:
        found = await walked(source, 3)
        assert source.is_seekable
    assert sizes(found) == [3, 1, 2, 0]
    assert [page.next for page in found] == [PagePosition(3), PagePosition(6), PagePosition(9), None]
    assert api.asked == [{"size": "3", "p": str(number)} for number in (1, 2, 3, 4)]


async def test_pages_may_begin_with_zero(api: ScriptedApi, rest: Opened) -> None:
    """H14: `first_page: 0`; and a position within a page is taken from the page's beginning."""
    api.will(*pages(3))
    async with rest(paging="page", first_page=0) as source:
        page = await source.fetch(EVERYTHING, ALWAYS, PagePosition(7), 3)
    assert api.asked[0]["page"] == "2"
    assert page.next == PagePosition(9)


async def test_cursors_lead_on(api: ScriptedApi, rest: Opened) -> None:
    """H14: each page names the next; the one that names none is the last, empty or not."""
    items = [[{"id": "1"}, {"id": "2"}], [], [{"id": "3"}]]
    cursors = ["a+b&c", 17, None]
    api.will(*(says({"items": page, "next": {"at": cursor}}) for page, cursor in zip(items, cursors, strict=True)))
    async with rest(paging="cursor", cursor_param="from", next_cursor="next.at") as source:
        found = await walked(source, 2)
        assert not source.is_seekable
    assert [page.next for page in found] == [PagePosition(2, "a+b&c"), PagePosition(2, "17"), None]
    assert api.asked == [{"limit": "2"}, {"limit": "2", "from": "a+b&c"}, {"limit": "2", "from": "17"}]


async def test_a_cursor_that_stands_still_is_refused(api: ScriptedApi, rest: Opened) -> None:
    """H16: a source that leads in a circle is not followed for ever."""
    api.will(says({"items": [{"id": "1"}], "nextCursor": "a"}))
    async with rest(paging="cursor", call={"attempts": 1}) as source:
        with pytest.raises(SourceFailed, match="SOURCE_INVALID_RESPONSE"):
            await source.fetch(EVERYTHING, ALWAYS, PagePosition(1, "a"), 2)


@pytest.mark.parametrize("paging", ["offset", "page"])
async def test_a_source_may_say_that_no_more_follow(api: ScriptedApi, rest: Opened, paging: str) -> None:
    """H16: `has_more` is believed, on a full page as on a short one."""
    answers = [says({"items": [{"id": "1"}], "meta": {"more": more}}) for more in (True, False)]
    api.will(*answers)
    async with rest(paging=paging, has_more="meta.more") as source:
        assert sizes(await walked(source, 2)) == [1, 1]


async def test_short_pages_end_where_that_is_promised(api: ScriptedApi, rest: Opened) -> None:
    """H16: `short_page_ends` saves the last request."""
    api.will(*pages(3, 2))
    async with rest(short_page_ends=True) as source:
        assert sizes(await walked(source, 3)) == [3, 2]


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
async def test_ranges_and_windows_are_asked_for(
    api: ScriptedApi,
    rest: Opened,
    range_: PartitionRange,
    window: TimeWindow,
    options: dict[str, Any],
    expected: dict[str, str],
) -> None:
    """H14: a range and a window become the source's own parameters, for a page and for a count alike."""
    api.will(says({"items": [], "total": 12}))
    async with rest(count_path="/records/count", **options) as source:
        assert source.has_windows == ("after_param" not in options)
        await source.fetch(range_, window, PagePosition(), 30)
        assert await source.count(range_, window) == 12
    page, counted = api.asked
    assert page == {"limit": "30", "offset": "0", **expected}
    assert counted == expected


async def test_a_listing_can_count(api: ScriptedApi, rest: Opened) -> None:
    """H14: without a place to count, one record is listed, and the total told with it is the count."""
    api.will(says({"data": {"rows": [{"id": "1"}], "of": 77}}))
    async with rest(records="data.rows", total="data.of") as source:
        assert await source.count(PartitionRange(lower=5), ALWAYS) == 77
        assert len((await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 5)).records) == 1
    assert api.asked[0] == {"price_from": "5", "limit": "1", "offset": "0"}


async def test_what_cannot_be_asked_for_is_nothing(api: ScriptedApi, rest: Opened) -> None:
    """H14: a source that cannot list records without a value is not asked; the total shows whether there are any."""
    async with rest(null_param=None) as source:
        assert await source.count(PartitionRange(PartitionKind.NULL), ALWAYS) == 0
        assert await source.fetch(PartitionRange(PartitionKind.NULL), ALWAYS, PagePosition(), 30) == RecordPage(
            (), None
        )
    assert api.asked == []


async def test_records_keep_every_digit(api: ScriptedApi, rest: Opened) -> None:
    """H14: a record is the very text that came."""
    records = [b'{"id": "a", "price": 0.10000000000000000000001}', b'{"id":12345678901234567890123, "n": [1, {}]}']
    api.will(says(text=b'{"total": 2, "items": [' + b" ,\n".join(records) + b"]}"))
    async with rest() as source:
        assert (await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 30)).records == records


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (rb'{"a":"x\u0000y"}', rb'{"a":"x\ufffdy"}'),
        (rb'{"a":"\ud800"}', rb'{"a":"\ufffd"}'),
        (rb'{"a":"\ude00\ud83d\ude00\uD83D"}', rb'{"a":"\ufffd\ud83d\ude00\ufffd"}'),
        (rb'{"a":"\\ud800 \\u0000"}', rb'{"a":"\\ud800 \\u0000"}'),
        (b'{"a":"\xe4"}', '{"a":"\N{REPLACEMENT CHARACTER}"}'.encode()),
        ('{"a":"ä😀"}'.encode(), '{"a":"ä😀"}'.encode()),
    ],
)
async def test_text_no_database_keeps_is_replaced(api: ScriptedApi, rest: Opened, sent: bytes, kept: bytes) -> None:
    """H14: half a character in one record does not cost the page; all the rest stays as it came."""
    api.will(says(text=b'{"items": [' + sent + rb', {"id": "\\b\n\u00e4"}]}'))
    async with rest() as source:
        found = (await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 30)).records
    assert found == [kept, rb'{"id": "\\b\n\u00e4"}']


@pytest.mark.parametrize(
    "answer",
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
async def test_an_answer_that_is_no_page_fails(api: ScriptedApi, rest: Opened, answer: bytes) -> None:
    """H14: what is not a list of at most as many objects as were asked for is garbage, never an end."""
    api.will(says(text=answer))
    async with rest(call={"attempts": 1}) as source:
        with pytest.raises(SourceFailed, match="SOURCE_INVALID_RESPONSE") as caught:
            await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 2)
    assert caught.value.code == "SOURCE_INVALID_RESPONSE"


@pytest.mark.parametrize("total", ["x", None, -1, [3], 1.5])
async def test_a_count_that_is_none_fails(api: ScriptedApi, rest: Opened, total: Any) -> None:
    """H3: a count is a number, or it is no proof."""
    api.will(says({"items": [], "total": total}))
    async with rest(call={"attempts": 1}) as source:
        with pytest.raises(SourceFailed, match="SOURCE_INVALID_RESPONSE"):
            await source.count(EVERYTHING, ALWAYS)
