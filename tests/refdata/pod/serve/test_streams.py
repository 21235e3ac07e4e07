"""R17, R18, R31: all items in pages or as a stream, each of one version, and the stream of changes."""

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
from tests.refdata.pod.raw_client import (
    ACME,
    LOCAL,
    RawConnection,
    RawReply,
    connected,
    make_request,
    send_once,
    wait_until_blocked,
)
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
    return await pod.put_and_load(code, items, tenant)


async def _deleted(pod: PodHarness, *keys: str) -> int:
    await pod.harness.send("LOOSE", *map(delete, keys))
    await pod.harness.apply()
    version = await pod.harness.version("LOOSE")
    await pod.load("LOOSE", version)
    return version


async def _page(raw: RawConnection, limit: int, cursor: str | None) -> RawReply:
    more = f"&cursor={cursor}" if cursor else ""
    return await raw.ask(make_request(f"{ACME}/all?limit={limit}{more}"))


async def test_pages_are_of_the_version_of_the_first(filled: PodHarness) -> None:
    """R17: all pages have the version of the first page, with puts, changes and deletions in between."""
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
    """R17: every page but the last is full, in order and without repetition; an invalid limit is 400."""
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
            refused = await raw.ask(make_request(f"{ACME}/all?limit={bad}"))
            assert (refused.status, refused.code, refused.is_last) == (400, "BAD_LIMIT", False), bad


async def test_a_cursor_is_of_one_dictionary(filled: PodHarness) -> None:
    """R17: a foreign or forged cursor is refused without data; the connection continues."""
    await _held(filled, {"k000": "globex", "k999": "globex"}, tenant="globex")
    await _held(filled, {"RU": {"name": "Ruritania"}}, "COUNTRY")
    async with connected(filled.address) as raw:
        cursor = (await _page(raw, 5, None)).json["next"]
        *mark, place = orjson.loads(_decoded(cursor))
        elsewhere = [
            f"/v1/tenants/{tenant}/dictionaries/LOOSE/all?cursor={cursor}" for tenant in ("globex", "tenant-a")
        ]
        for path in (*elsewhere, f"{COUNTRY}/all?cursor={cursor}"):
            assert (await raw.ask(make_request(path))).status in (409, 410), path
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
            refused = await raw.ask(make_request(f"{ACME}/all?cursor={made_up}"))
            assert (refused.status in (409, 410, 422), refused.is_last) == (True, False), (values, refused)
        for made_up in ("x", "%00", "a" * 5_000, "%FF", "", "W10", "bnVsbA"):
            refused = await raw.ask(make_request(f"{ACME}/all?cursor={made_up}"))
            assert (refused.status, refused.code, refused.is_last) == (422, "BAD_CURSOR", False), made_up


async def test_a_forged_position_returns_only_items_of_its_version(filled: PodHarness) -> None:
    """R17: a forged position returns items of that dictionary and version, or nothing."""
    await _held(filled, {"secret": 1}, tenant="globex")
    async with connected(filled.address) as raw:
        cursor = (await _page(raw, 5, None)).json["next"]
        *mark, _ = orjson.loads(_decoded(cursor))
        for place in ("", "00", "01", "ff", "00" + b"k049".hex(), "ff" * 1_400, "00" * 600, "02"):
            page = await raw.ask(make_request(f"{ACME}/all?cursor={paging.encode_cursor([*mark, place])}"))
            assert page.status == 200
            assert {item["key"] for item in page.json["items"]} <= ITEMS.keys()


def _decoded(cursor: str) -> bytes:
    return base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))


async def test_an_expired_version_is_410(filled: PodHarness) -> None:
    """R17: after two full loads the pages of a version have expired."""
    await _held(filled, {"RU": {"name": "Ruritania"}, "GR": {"name": "Graustark"}}, "COUNTRY")
    async with connected(filled.address) as raw:
        cursor = (await raw.ask(make_request(f"{COUNTRY}/all?limit=1"))).json["next"]
        await _held(filled, {"ZE": {"name": "Zenda"}}, "COUNTRY")
        second = await raw.ask(make_request(f"{COUNTRY}/all?cursor={cursor}"))
        assert [item["key"] for item in second.json["items"]] == ["RU"]
        await _held(filled, {"ZE": {"name": "Zembla"}}, "COUNTRY")
        gone = await raw.ask(make_request(f"{COUNTRY}/all?cursor={cursor}"))
        assert (gone.status, gone.code, gone.is_last) == (410, "VERSION_EXPIRED", False)


async def test_pages_expire_after_the_retention(filled: PodHarness) -> None:
    """R17: pages of a version that was replaced too long ago have expired."""
    async with connected(filled.address) as raw:
        cursor = (await _page(raw, 5, None)).json["next"]
        filled.pod.memory._page_retention = 0.0
        await _held(filled, {"k000": "once"})
        await _held(filled, {"k000": "twice"})
        assert (await _page(raw, 5, cursor)).status == 410


async def test_all_items_come_as_lines(filled: PodHarness) -> None:
    """R17: NDJSON contains the items of the pages under the same version."""
    async with connected(filled.address) as raw:
        stream = await raw.ask(make_request(f"{ACME}/all", LOCAL, NDJSON))
        page = (await _page(raw, 1000, None)).json
        assert stream.headers["content-type"] == "application/x-ndjson"
        assert stream.headers["x-dict-version"] == str(page["version"])
        assert [orjson.loads(line) for line in stream.body.splitlines()] == page["items"]


async def test_a_stream_stays_at_its_version(filled: PodHarness) -> None:
    """R18: the lines of a stream belong to the version at its start, with commits in between."""
    pad = "x" * 4_000
    for batch in range(6):
        version = await _held(filled, {f"k{number:04}": pad for number in range(batch * 200, batch * 200 + 200)})
    async with connected(filled.address, is_narrow=True) as raw:
        raw.writer.write(make_request(f"{ACME}/all", LOCAL, NDJSON))
        await wait_until_blocked(filled)
        for step in range(3):
            await _held(filled, {f"k{number:04}": step for number in range(0, 1_200, 40)})
        await _deleted(filled, "k1199", "k1198")
        raw.resume_reading()
        stream = await raw.reply()
    items = [orjson.loads(line) for line in stream.body.splitlines()]
    assert stream.headers["x-dict-version"] == str(version)
    assert {item["key"]: item["value"] for item in items} == {**ITEMS, **{f"k{n:04}": pad for n in range(1_200)}}


async def _events(raw: RawConnection) -> AsyncIterator[tuple[str, int, Any]]:
    """Yield the events of a stream without its heartbeats."""
    while piece := await raw.chunk():
        if not piece.startswith(b":"):
            event = parse_event(piece.decode())
            yield event["event"], int(event["id"]), orjson.loads(event["data"])


async def test_changes_are_streamed(filled: PodHarness) -> None:
    """R31: each change is sent with its version and keys, in order."""
    async with connected(filled.address) as raw:
        raw.writer.write(make_request(f"{ACME}/changes"))
        assert b"content-type: text/event-stream\r\n" in (await raw.head()).lower()
        feed = _events(raw)
        first = await _held(filled, {"k000": 0, "new, й": 1})
        kind, number, change = await anext(feed)
        assert (kind, number, change["version"], change["since"]) == ("change", first, first, first - 1)
        assert sorted(change["keys"]) == ["k000", "new, й"]
        second = await _deleted(filled, "k001")
        deletion = {"version": second, "since": first, "keys": ["k001"]}
        assert await anext(feed) == ("change", second, deletion)
        assert (await filled.get("LOOSE/version")).version == second


async def test_a_stream_of_changes_resumes(filled: PodHarness) -> None:
    """R31: Last-Event-ID or `since` resumes the stream, the header takes precedence, and an invalid value is 400."""
    before = (await filled.get("LOOSE/version")).version
    first = await _held(filled, {"k000": 0})
    second = await _held(filled, {"k001": 1})
    for path, headers, expected in [
        ("changes", [f"Last-Event-ID: {before}"], [first, second]),
        (f"changes?since={before}", [], [first, second]),
        (f"changes?since={before}", [f"Last-Event-ID: {first}"], [second]),
    ]:
        async with connected(filled.address) as raw:
            raw.writer.write(make_request(f"{ACME}/{path}", LOCAL, *headers))
            await raw.head()
            feed = _events(raw)
            assert [(await anext(feed))[:2] for _ in expected] == [("change", version) for version in expected]
    for bad in ("x", "-1", "1.5", "9" * 30):
        assert (await send_once(filled.address, make_request(f"{ACME}/changes?since={bad}"))).status == 400
        assert (
            await send_once(filled.address, make_request(f"{ACME}/changes", LOCAL, f"Last-Event-ID: {bad}"))
        ).status == 400


async def test_changes_contain_long_and_deleted_keys(filled: PodHarness) -> None:
    """R31: a long key that was inserted and deleted is in both changes."""
    key = "\U0001f511" * 500
    before = await _held(filled, {"k000": 0})
    await _held(filled, {key: 1})
    await _deleted(filled, key)
    async with connected(filled.address) as raw:
        raw.writer.write(make_request(f"{ACME}/changes?since={before}"))
        await raw.head()
        feed = _events(raw)
        assert [(await anext(feed))[2]["keys"] for _ in range(2)] == [[key], [key]]


async def test_unavailable_changes_cause_a_reset(filled: PodHarness) -> None:
    """R31: after a full load, or for an older version, the stream sends `reset`, and then changes."""
    await _held(filled, {"RU": {"name": "Ruritania"}}, "COUNTRY")
    second = await _held(filled, {"RU": {"name": "Rurik"}}, "COUNTRY")
    async with connected(filled.address) as raw:
        raw.writer.write(make_request(f"{COUNTRY}/changes?since={second - 1}"))
        await raw.head()
        feed = _events(raw)
        assert await anext(feed) == ("reset", second, {"version": second})
        third = await _held(filled, {"RU": {"name": "Rurik"}}, "COUNTRY")
        assert await anext(feed) == ("reset", third, {"version": third})


async def test_a_stream_ends_with_its_client(filled: PodHarness) -> None:
    """R31: the stream of a disconnected client ends at once, not at the next change."""
    async with connected(filled.address) as raw:
        raw.writer.write(make_request(f"{ACME}/changes"))
        await raw.head()
        await raw.chunk()
        assert filled.server._streams._open == 1

    async def has_ended() -> bool:
        return filled.server._streams._open == 0

    await becomes(has_ended, "the stream to end", within=5)


async def test_the_number_of_streams_is_limited(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: a stream above the limit is 503; pages are still served."""
    monkeypatch.setattr("penstock.refdata.pod.serve.streams._STREAM_LIMIT", 0)
    refused = await send_once(filled.address, make_request(f"{ACME}/all", LOCAL, NDJSON))
    assert (refused.status, refused.code) == (503, "TOO_MANY_STREAMS")
    assert (await send_once(filled.address, make_request(f"{ACME}/all"))).status == 200


async def test_a_pod_without_data_returns_503(pod_settings: Settings, tmp_path: Path) -> None:
    """R17: reads of a dictionary that is not loaded are 503, never empty."""
    async with running_pod(pod_settings, tmp_path, follows=False) as pod:
        for path in ("all", "changes", "items/a", "items?keys=a", "version"):
            refused = await send_once(pod.address, make_request(f"{ACME}/{path}"))
            assert (refused.status, refused.code) == (503, "NOT_LOADED"), path
