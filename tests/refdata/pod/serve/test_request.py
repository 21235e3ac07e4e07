"""R17, R21, R31: keys, limits, versions and conditional requests."""

from urllib.parse import quote

import pytest

from penstock.refdata.contract import KEY_LIMIT
from penstock.refdata.pod.serve.request import KEYS_LIMIT
from tests.refdata.pod.harness import PodHarness
from tests.refdata.pod.raw_client import ACME, LOCAL, RawConnection, connected, make_request, send_once

KEYS = [
    "a/b",
    "a b",
    "/",
    ".",
    "..",
    "../..",
    "a.b",
    "a%2Fb",
    "%",
    "100%",
    "a+b",
    "a,b",
    ",",
    "a&b=c",
    "a?b",
    "a#b",
    'quo"te\\',
    "Größe",
    "ключ",
    "鍵",
    "\U0001f511",
    "e\u0301",
    "~-_.",
    "line\nfeed",
    "\x7f",
    "x" * 480,
    "x" * 481,
    "x" * KEY_LIMIT,
    "\U0001f511" * KEY_LIMIT,
    "\U0001f511" * (KEY_LIMIT - 1) + "a",
]


async def _held(pod: PodHarness, items: dict[str, object]) -> int:
    return await pod.put_and_load("LOOSE", items)


async def test_a_key_may_be_any_text(pod: PodHarness) -> None:
    """R17: keys are percent-encoded UTF-8, and each is found alone, with others and in all items."""
    await _held(pod, {key: number for number, key in enumerate(KEYS)})
    async with connected(pod.address) as raw:
        for number, key in enumerate(KEYS):
            for path in (quote(key, safe=""), "".join(f"%{byte:02x}" for byte in key.encode())):
                answer = await raw.ask(make_request(f"{ACME}/items/{path}"))
                assert (answer.status, answer.body) == (200, b"%d" % number), key
        for some in (KEYS[:20], KEYS[20:]):
            asked = "&".join(f"key={quote(key, safe='')}" for key in some)
            several = (await raw.ask(make_request(f"{ACME}/items?{asked}"))).json
            assert several["items"] == {key: KEYS.index(key) for key in some}
        everything = (await raw.ask(make_request(f"{ACME}/all"))).json["items"]
        assert {item["key"]: item["value"] for item in everything} == {key: at for at, key in enumerate(KEYS)}


async def test_a_bad_key_is_refused(pod: PodHarness) -> None:
    """R17: a key that is not UTF-8, badly encoded, too long or with NUL is 400; the connection continues."""
    await _held(pod, {"a": 1})
    over = "x" * (KEY_LIMIT + 1)
    bad = ["%FF", "%C3", "%ED%A0%80", "%C0%AF", "a%00b", over, quote("\U0001f511" * (KEY_LIMIT + 1))]
    async with connected(pod.address) as raw:
        for key in bad:
            for path in (f"items/{key}", f"items?key={key}", f"items?keys=a,{key}"):
                refused = await raw.ask(make_request(f"{ACME}/{path}"))
                assert (refused.status, refused.code, refused.is_last) == (400, "BAD_KEY", False), path
        assert (await raw.ask(make_request(f"{ACME}/items/a"))).body == b"1"


async def test_a_percent_sign_that_encodes_nothing_is_refused(pod: PodHarness) -> None:
    """R17: invalid percent-encoding is 400 instead of another key."""
    await _held(pod, {"%zz": 1})
    async with connected(pod.address) as raw:
        for key in ("%zz", "%", "a%", "a%2", "%2", "%u0041", "%-1"):
            assert (await raw.ask(make_request(f"{ACME}/items/{key}"))).status == 400, key
            assert (await raw.ask(make_request(f"{ACME}/items?key={key}"))).status == 400, key


async def test_several_items_are_asked_for_within_limits(pod: PodHarness) -> None:
    """R17: `keys` and `key` are combined, in order and without repetition; none or too many are refused."""
    version = await _held(pod, {"a": 1, "b": 2, "a,b": 3, "a b": 4})
    async with connected(pod.address) as raw:
        answer = await raw.ask(make_request(f"{ACME}/items?keys=b,a,,x,b&key=a,b&key=a+b&key=a&key=&other=1"))
        assert answer.json == {
            "version": version,
            "items": {"b": 2, "a": 1, "a,b": 3, "a b": 4},
            "missing": ["x"],
        }
        most = ",".join(f"k{number}" for number in range(KEYS_LIMIT))
        assert len((await raw.ask(make_request(f"{ACME}/items?keys={most}"))).json["missing"]) == KEYS_LIMIT
        for query, status in [
            (f"keys={most},a", 422),
            (f"keys={most}&key=a", 422),
            ("", 422),
            ("keys=", 422),
            ("keys=,,&key=", 422),
            ("&".join(["key=a"] * (2 * KEYS_LIMIT + 1)), 400),
        ]:
            assert (await raw.ask(make_request(f"{ACME}/items?{query}"))).status == status, query[:50]
        assert (await raw.ask(make_request(f"{ACME}/items/a"))).body == b"1"


BAD_VERSIONS = ["x", "-1", "+1", "1.0", "1e3", "0x1", "", "1 2", "1,2", "1_0", "\xb2", "9" * 19, "9" * 400, str(2**63)]


async def test_min_version_must_be_a_number(pod: PodHarness) -> None:
    """R21: an invalid X-Min-Version is 400 for every read; the connection continues."""
    version = await _held(pod, {"a": 1})
    async with connected(pod.address) as raw:
        for path in ("items/a", "items?keys=a", "all", "version"):
            for min_version in BAD_VERSIONS:
                refused = await raw.ask(make_request(f"{ACME}/{path}", LOCAL, f"X-Min-Version: {min_version}"))
                assert (refused.status, refused.code, refused.is_last) == (400, "BAD_VERSION", False), min_version
            arabic = make_request(f"{ACME}/{path}", LOCAL, "X-Min-Version: N").replace(b"N\r", "١".encode() + b"\r")
            assert (await raw.ask(arabic)).status == 400
            for good in (0, version, f"{version:019}"):
                answer = await raw.ask(make_request(f"{ACME}/{path}", LOCAL, f"X-Min-Version: {good}"))
                assert (answer.status, answer.headers["x-dict-version"]) == (200, str(version)), good


async def test_a_future_version_is_refused(pod: PodHarness) -> None:
    """R21: a version that is not committed is 409 with the current version, for every read."""
    version = await _held(pod, {"a": 1})
    async with connected(pod.address) as raw:
        for path in ("items/a", "items?keys=a", "all", "version"):
            for min_version in (version + 1, 2**63 - 1):
                refused = await raw.ask(make_request(f"{ACME}/{path}", LOCAL, f"X-Min-Version: {min_version}"))
                assert (refused.status, refused.code) == (409, "VERSION_NOT_COMMITTED")
                assert refused.headers["x-dict-version"] == str(version)


@pytest.mark.parametrize("path", ["items/a", "items?keys=a,x"])
async def test_a_matching_etag_is_not_modified(pod: PodHarness, path: str) -> None:
    """R31: a matching, weak, listed or any tag is 304 with ETag and version; it depends on the content only."""
    version = await _held(pod, {"a": {"n": 1}, "b": 2})
    async with connected(pod.address) as raw:
        tag = (await raw.ask(make_request(f"{ACME}/{path}"))).headers["etag"]
        assert await _statuses(raw, path, tag.removeprefix("W/")) == [304] * 6 + [200] * 4
        later = await _held(pod, {"b": 3})
        assert later > version
        same = await raw.ask(make_request(f"{ACME}/{path}", LOCAL, f"If-None-Match: {tag}"))
        assert (same.status, same.headers["etag"], same.headers["x-dict-version"]) == (304, tag, str(later))
        assert same.headers["x-data-source"] == "memory"
        assert "content-length" not in same.headers
        await _held(pod, {"a": {"n": 2}})
        changed = await raw.ask(make_request(f"{ACME}/{path}", LOCAL, f"If-None-Match: {tag}"))
        assert (changed.status, changed.headers["etag"] == tag) == (200, False)


async def _statuses(raw: RawConnection, path: str, tag: str) -> list[int]:
    has = [tag, f"W/{tag}", f'"x", {tag}', f'{tag},"x"', f'W/"x" ,W/{tag}', "*"]
    has_not = ['"x"', tag.strip('"'), f'"{tag[1:-2]}"', ""]
    return [
        (await raw.ask(make_request(f"{ACME}/{path}", LOCAL, f"If-None-Match: {given}"))).status
        for given in has + has_not
    ]


async def test_a_missing_item_has_no_etag(pod: PodHarness) -> None:
    """R31: a missing item is 404 for any entity tag, and the missing keys are part of the tag of several items."""
    await _held(pod, {"a": 1})
    missing = await send_once(pod.address, make_request(f"{ACME}/items/x", LOCAL, "If-None-Match: *"))
    assert (missing.status, missing.code, missing.headers["x-data-source"]) == (404, "UNKNOWN_KEY", "memory")
    tags = {
        (await send_once(pod.address, make_request(f"{ACME}/items?{query}"))).headers["etag"]
        for query in ("keys=a", "keys=x", "keys=a,x", "keys=x,a", "keys=x,y")
    }
    assert len(tags) == 5


async def test_blanks_around_a_value_are_not_part_of_it(pod: PodHarness) -> None:
    """R21: spaces and tabs around header values are ignored."""
    version = await _held(pod, {"a": 1})
    async with connected(pod.address) as raw:
        tag = (await raw.ask(make_request(f"{ACME}/items/a"))).headers["etag"]
        for before, after in (("", " "), (" ", "  "), ("\t", "\t"), (" \t ", " \t ")):
            request = make_request(f"{ACME}/items/a", LOCAL + after, f"X-Min-Version:{before}{version}{after}")
            assert (await raw.ask(request)).status == 200, (before, after)
            request = make_request(f"{ACME}/items/a", LOCAL, f"If-None-Match:{before}{tag}{after}")
            assert (await raw.ask(request)).status == 304, (before, after)
