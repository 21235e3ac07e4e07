"""R17, R18, R31: all of a dictionary page by page or as a stream, each of one version; and the changes as they come."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.kernel.db import page as paging
from penstock.settings import Settings
from tests.refdata.harness import delete
from tests.refdata.pod.harness import PodHarness, running_pod
from tests.refdata.pod.raw_client import ACME, LOCAL, RawConnection, RawReply, asking, connected, once, stuck
from tests.support.sse import parse_event
from tests.support.wait import becomes

NDJSON = "Accept: application/x-ndjson"
ITEMS = {f"k{number:03}": {"n": number} for number in range(50)}
COUNTRY = "/v1/tenants/acme/dictionaries/COUNTRY"


@pytest.fixture
async def filled(pod: PodHarness) -> PodHarness:
    await _held(pod, ITEMS)
    return pod


async def _held(pod: PodHarness, items: dict[str, Any], code: str = "LOOSE", tenant: str = "acme") -> int:
    return await pod.hold(code, items, tenant)


async def _deleted(pod: PodHarness, *keys: str) -> int:
    await pod.harness.send("LOOSE", *map(delete, keys))
    await pod.harness.apply()
    version = await pod.harness.version("LOOSE")
    await pod.holds("LOOSE", version)
    return version


async def _page(raw: RawConnection, limit: int, cursor: str | None) -> RawReply:
    more = f"&cursor={cursor}" if cursor else ""
    return await raw.ask(asking(f"{ACME}/all?limit={limit}{more}"))


async def test_pages_are_of_the_version_of_the_first(filled: PodHarness) -> None:
    """R17: whatever is put, changed and deleted between them, all pages together are the first one's version."""
    items: dict[str, Any] = {}
    async with connected(filled.address) as raw:
        page = await _page(raw, 7, None)
        version = page.json["version"]
        for step in range(20):
            assert page.headers["x-dict-version"] == str(page.json["version"]) == str(version)
            items |= {item["key"]: item["value"] for item in page.json["items"]}
            if page.json["next"] is None:
                break
            await _held(filled, {f"k{step * 9 % 50:03}": "changed", f"k{step:03}x": "new", "k001": step})
            await _deleted(filled, f"k{step * 3 + 1:03}", f"k{49 - step:03}")
            page = await _page(raw, 7, page.json["next"])
        assert step == 7
        now = (await _page(raw, 1000, None)).json
    assert items == ITEMS
    assert now["version"] > version
    assert now["next"] is None


async def test_pages_have_the_size_asked_for(filled: PodHarness) -> None:
    """R17: each page is full but the last, in order and without repetition; a wrong limit is 400."""
    async with connected(filled.address) as raw:
        for limit in (1, 7, 49, 50, 51, 10_000):
            keys: list[str] = []
            page = (await _page(raw, limit, None)).json
            while page["next"] is not None:
                assert len(page["items"]) == limit
                keys += [item["key"] for item in page["items"]]
                page = (await _page(raw, limit, page["next"])).json
            assert [*keys, *(item["key"] for item in page["items"])] == sorted(ITEMS)
        for bad in ("0", "-1", "10001", "x", "1.5", "", "%C2%B2", "%D9%A1", "9" * 30, "0" * 12):
            refused = await raw.ask(asking(f"{ACME}/all?limit={bad}"))
            assert (refused.status, refused.code, refused.is_last) == (400, "BAD_LIMIT", False), bad


async def test_a_cursor_is_of_one_dictionary(filled: PodHarness) -> None:
    """R17: elsewhere, or made up, it is refused, and never shows anything; the connection goes on."""
    await _held(filled, {"k000": "globex", "k999": "globex"}, tenant="globex")
    await _held(filled, {"RU": {"name": "Ruritania"}}, "COUNTRY")
    async with connected(filled.address) as raw:
        cursor = (await _page(raw, 5, None)).json["next"]
        *mark, place = orjson.loads(_decoded(cursor))
        elsewhere = [
            f"/v1/tenants/{tenant}/dictionaries/LOOSE/all?cursor={cursor}" for tenant in ("globex", "tenant-a")
        ]
        for path in (*elsewhere, f"{COUNTRY}/all?cursor={cursor}"):
            assert (await raw.ask(asking(path))).status in (409, 410), path
        forged = [
            *([mark[0] + step, *mark[1:], place] for step in (-1, 1)),
            *([number, *mark[1:], place] for number in (-1, -2, 2**62, 2**63 - 1, -(2**63))),
            [mark[0], mark[1] + 1, *mark[2:], place],
            [*mark, "zz"],
            [*mark],
            [*mark, 5],
            {"a": 1},
        ]
        for values in forged:
            made_up = paging.encode_cursor(values) if isinstance(values, list) else "eyJhIjoxfQ"
            refused = await raw.ask(asking(f"{ACME}/all?cursor={made_up}"))
            assert (refused.status in (409, 410, 422), refused.is_last) == (True, False), (values, refused)
        for made_up in ("x", "%00", "a" * 5_000, "%FF", "", "W10", "bnVsbA"):
            refused = await raw.ask(asking(f"{ACME}/all?cursor={made_up}"))
            assert (refused.status, refused.code, refused.is_last) == (422, "BAD_CURSOR", False), made_up


async def test_a_forged_place_shows_nothing_but_its_own_version(filled: PodHarness) -> None:
    """R17: whoever makes up where to go on gets items of that dictionary in that version, or nothing."""
    await _held(filled, {"secret": 1}, tenant="globex")
    async with connected(filled.address) as raw:
        cursor = (await _page(raw, 5, None)).json["next"]
        *mark, _ = orjson.loads(_decoded(cursor))
        for place in ("", "00", "01", "ff", "00" + b"k049".hex(), "ff" * 1_400, "00" * 600, "02"):
            page = await raw.ask(asking(f"{ACME}/all?cursor={paging.encode_cursor([*mark, place])}"))
            assert page.status == 200
            assert {item["key"] for item in page.json["items"]} <= ITEMS.keys()


def _decoded(cursor: str) -> bytes:
    return base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))


async def test_a_version_that_is_gone_is_410(filled: PodHarness) -> None:
    """R17: after two full loads its pages are gone, which is said as it is."""
    await _held(filled, {"RU": {"name": "Ruritania"}, "GR": {"name": "Graustark"}}, "COUNTRY")
    async with connected(filled.address) as raw:
        cursor = (await raw.ask(asking(f"{COUNTRY}/all?limit=1"))).json["next"]
        await _held(filled, {"ZE": {"name": "Zenda"}}, "COUNTRY")
        second = await raw.ask(asking(f"{COUNTRY}/all?cursor={cursor}"))
        assert [item["key"] for item in second.json["items"]] == ["RU"]
        await _held(filled, {"ZE": {"name": "Zembla"}}, "COUNTRY")
        gone = await raw.ask(asking(f"{COUNTRY}/all?cursor={cursor}"))
        assert (gone.status, gone.code, gone.is_last) == (410, "VERSION_EXPIRED", False)


async def test_changes_are_remembered_only_for_a_while(filled: PodHarness) -> None:
    """R17: pages of a version that was replaced too long ago are gone."""
    async with connected(filled.address) as raw:
        cursor = (await _page(raw, 5, None)).json["next"]
        filled.pod.memory._page_retention = 0.0
        await _held(filled, {"k000": "once"})
        await _held(filled, {"k000": "twice"})
        assert (await _page(raw, 5, cursor)).status == 410


async def test_all_items_come_as_lines(filled: PodHarness) -> None:
    """R17: NDJSON has just what the pages have, under the same version."""
    async with connected(filled.address) as raw:
        stream = await raw.ask(asking(f"{ACME}/all", LOCAL, NDJSON))
        page = (await _page(raw, 1000, None)).json
        assert stream.headers["content-type"] == "application/x-ndjson"
        assert stream.headers["x-dict-version"] == str(page["version"])
        assert [orjson.loads(line) for line in stream.body.splitlines()] == page["items"]


async def test_a_stream_stays_at_its_version(filled: PodHarness) -> None:
    """R18: whatever is committed while it is read, its lines are those of the version it began with."""
    pad = "x" * 4_000
    for batch in range(6):
        version = await _held(filled, {f"k{number:04}": pad for number in range(batch * 200, batch * 200 + 200)})
    async with connected(filled.address, is_narrow=True) as raw:
        raw.writer.write(asking(f"{ACME}/all", LOCAL, NDJSON))
        await stuck(filled)
        for step in range(3):
            await _held(filled, {f"k{number:04}": step for number in range(0, 1_200, 40)})
        await _deleted(filled, "k1199", "k1198")
        raw.read_on()
        stream = await raw.reply()
    items = [orjson.loads(line) for line in stream.body.splitlines()]
    assert stream.headers["x-dict-version"] == str(version)
    assert {item["key"]: item["value"] for item in items} == {**ITEMS, **{f"k{n:04}": pad for n in range(1_200)}}


async def _events(raw: RawConnection) -> AsyncIterator[tuple[str, int, Any]]:
    """What a feed tells, but for its signs of life."""
    while piece := await raw.chunk():
        if not piece.startswith(b":"):
            event = parse_event(piece.decode())
            yield event["event"], int(event["id"]), orjson.loads(event["data"])


async def test_changes_come_as_they_are_made(filled: PodHarness) -> None:
    """R31: each under its version with the keys it touched, in order."""
    async with connected(filled.address) as raw:
        raw.writer.write(asking(f"{ACME}/changes"))
        assert b"content-type: text/event-stream\r\n" in (await raw.head()).lower()
        feed = _events(raw)
        first = await _held(filled, {"k000": 0, "new, й": 1})
        kind, number, told = await anext(feed)
        assert (kind, number, told["version"], told["since"]) == ("change", first, first, first - 1)
        assert sorted(told["keys"]) == ["k000", "new, й"]
        second = await _deleted(filled, "k001")
        told_then = {"version": second, "since": first, "keys": ["k001"]}
        assert await anext(feed) == ("change", second, told_then)
        assert (await filled.get("LOOSE/version")).version == second


async def test_a_feed_goes_on_where_it_broke_off(filled: PodHarness) -> None:
    """R31: by Last-Event-ID or `since`, of which the header, the newer word, counts; a wrong one is 400."""
    before = (await filled.get("LOOSE/version")).version
    first = await _held(filled, {"k000": 0})
    second = await _held(filled, {"k001": 1})
    for path, headers, expected in [
        ("changes", [f"Last-Event-ID: {before}"], [first, second]),
        (f"changes?since={before}", [], [first, second]),
        (f"changes?since={before}", [f"Last-Event-ID: {first}"], [second]),
    ]:
        async with connected(filled.address) as raw:
            raw.writer.write(asking(f"{ACME}/{path}", LOCAL, *headers))
            await raw.head()
            feed = _events(raw)
            assert [(await anext(feed))[:2] for _ in expected] == [("change", version) for version in expected]
    for bad in ("x", "-1", "1.5", "9" * 30):
        assert (await once(filled.address, asking(f"{ACME}/changes?since={bad}"))).status == 400
        assert (await once(filled.address, asking(f"{ACME}/changes", LOCAL, f"Last-Event-ID: {bad}"))).status == 400


async def test_a_feed_names_keys_however_long_and_gone(filled: PodHarness) -> None:
    """R31: a long key that came and went meanwhile is told by its name, in both changes."""
    key = "\U0001f511" * 500
    before = await _held(filled, {"k000": 0})
    await _held(filled, {key: 1})
    await _deleted(filled, key)
    async with connected(filled.address) as raw:
        raw.writer.write(asking(f"{ACME}/changes?since={before}"))
        await raw.head()
        feed = _events(raw)
        assert [(await anext(feed))[2]["keys"] for _ in range(2)] == [[key], [key]]


async def test_a_feed_says_when_it_does_not_remember(filled: PodHarness) -> None:
    """R31: after a full load, or for a version before memory, `reset`: whoever follows reads anew, and then follows."""
    await _held(filled, {"RU": {"name": "Ruritania"}}, "COUNTRY")
    second = await _held(filled, {"RU": {"name": "Rurik"}}, "COUNTRY")
    async with connected(filled.address) as raw:
        raw.writer.write(asking(f"{COUNTRY}/changes?since={second - 1}"))
        await raw.head()
        feed = _events(raw)
        assert await anext(feed) == ("reset", second, {"version": second})
        third = await _held(filled, {"RU": {"name": "Rurik"}}, "COUNTRY")
        assert await anext(feed) == ("reset", third, {"version": third})


async def test_a_feed_lets_go_of_who_left(filled: PodHarness) -> None:
    """R31: feeds are few: one whose client is gone ends then, not when there is next something to say."""
    async with connected(filled.address) as raw:
        raw.writer.write(asking(f"{ACME}/changes"))
        await raw.head()
        await raw.chunk()
        assert filled.server._streams._open == 1

    async def has_ended() -> bool:
        return filled.server._streams._open == 0

    await becomes(has_ended, "the feed of who left ends", within=5)


async def test_one_stream_too_many_is_told_so(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: 503; pages are still served."""
    monkeypatch.setattr("penstock.refdata.pod.serve.streams._STREAM_LIMIT", 0)
    refused = await once(filled.address, asking(f"{ACME}/all", LOCAL, NDJSON))
    assert (refused.status, refused.code) == (503, "TOO_MANY_STREAMS")
    assert (await once(filled.address, asking(f"{ACME}/all"))).status == 200


async def test_a_pod_that_holds_nothing_yet_says_so(pod_settings: Settings, tmp_path: Path) -> None:
    """R17: all, changes and items of what is not loaded are 503, never empty."""
    async with running_pod(pod_settings, tmp_path, follows=False) as pod:
        for path in ("all", "changes", "items/a", "items?keys=a", "version"):
            refused = await once(pod.address, asking(f"{ACME}/{path}"))
            assert (refused.status, refused.code) == (503, "NOT_LOADED"), path
