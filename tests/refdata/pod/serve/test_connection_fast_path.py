"""R17: a head that was read before is not read again, and nobody can tell: same bytes, same answer."""

import re
from collections.abc import Sequence
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.refdata.pod.serve.connection import ParsedHeaders
from tests.refdata.pod.harness import PodHarness
from tests.refdata.pod.raw_client import ACME, LOCAL, asking, connected

A, B = f"{ACME}/items/a", f"{ACME}/items/b"
GLOBEX = ACME.replace("acme", "globex")
KEYS = ["a", "b", "a.b", "a-b_c~d", ".", "..", "~", "a b", "a%", "%61", "é", "a/b", "a?b", "x" * 480, "x" * 481]
HELD = {key: f"item {number}" for number, key in enumerate(KEYS)}

plain = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # requests only read: one pod serves them all
)
raw_keys = st.one_of(
    st.sampled_from(KEYS).map(str.encode),
    st.sampled_from(KEYS).map(lambda key: quote(key, safe="").encode()),
    st.binary(max_size=6),
    st.sampled_from(
        [b"a ", b" a", b"a\t", b"a\0", b"a\x7f", b"a?", b"a#", b"a;", b"a/", b"/a", b"", b"a HTTP/1.1", b"%00"]
    ),
)
folders = st.sampled_from(
    [
        *[f"{ACME}/items"] * 6,
        f"{GLOBEX}/items",
        f"http://localhost{ACME}/items",
        f"//localhost{ACME}/items",
        ACME.replace("acme", "%61cme") + "/items",
        ACME.replace("acme", "ACME") + "/items",
        f"/v1/..{ACME}/items",
        f"/{ACME}/items",
        f"{ACME}/items/",
        f"{ACME}/ITEMS",
        ACME,
    ]
).map(str.encode)
methods = st.sampled_from(
    [*[b"GET "] * 6, b"get ", b"HEAD ", b"POST ", b"GET  ", b"GET\t", b" GET ", b"\r\nGET ", b"GE"]
)
versions = st.sampled_from(
    [
        *[b" HTTP/1.1"] * 6,
        b" HTTP/1.0",
        b" HTTP/2.0",
        b" HTTP/0.9",
        b"  HTTP/1.1",
        b" HTTP/1.1 ",
        b" http/1.1",
        b"",
        b"\t",
    ]
)
heads = st.sampled_from(
    [*[b"\r\nHost: localhost\r\n\r\n"] * 6, b"\nHost: localhost\r\n\r\n", b"\r\r\nHost: localhost\r\n\r\n"]
)
requests = st.tuples(methods, folders, st.just(b"/"), raw_keys, versions, heads).map(b"".join)

# What a client may send packet by packet; each is whole, or the beginning or the end of something.
packets = st.sampled_from(
    [
        *[asking(A), asking(B)] * 3,
        asking(A) + asking(B),
        asking(A) + asking(B)[:-2] + b"X: ",
        asking(A) + asking(B, LOCAL, f"Content-Length: {len(asking(A))}"),
        asking(A) + b"GET ",
        b"\r\n",
        b"\r\n" + asking(A),
        f"GET {B} HTTP/1.1\r\n".encode() + asking(A),
        f"GET {B} HTTP/1.1\r\n".encode(),
        f"GET {B} HTTP/1.1".encode(),
        b"\r\nHost: localhost\r\n\r\n",
        b"Host: localhost\r\n\r\n",
        asking(A)[:-2],
        b"X: ",
        asking(B, LOCAL, f"Content-Length: {len(asking(A))}"),
        asking(B, LOCAL, "Transfer-Encoding: chunked"),
        b"%x\r\n" % len(asking(A)),
        b"0\r\n\r\n",
        asking(f"{ACME}/items/none"),
        asking(A, LOCAL, "X-Min-Version: 1"),
        asking(A, LOCAL, "Accept: */*", "Connection: keep-alive"),
    ]
)


class Forgetful(dict[bytes, ParsedHeaders]):
    """Heads that are never known again."""

    def __setitem__(self, head: bytes, known: ParsedHeaders) -> None:
        pass


@pytest.fixture
async def filled(pod: PodHarness) -> PodHarness:
    for tenant, items in (("acme", HELD), ("globex", {"a": "of globex"})):
        version = await pod.put("LOOSE", items, tenant)
        await pod.holds("LOOSE", version, tenant)
    return pod


async def _said(pod: PodHarness, sent: Sequence[bytes]) -> bytes:
    """All that comes back for what is *sent*, but for what is never the same twice."""
    async with connected(pod.address) as raw:
        await raw.drip(sent)
        raw.writer.write_eof()
        said = await raw.rest()
    return re.sub(rb"[0-9a-f]{32}|Date: [^\r]*|X-Data-Age: \d+\r\n", b"", said)


async def _is_told_the_same(pod: PodHarness, sent: Sequence[bytes]) -> None:
    pod.server.parsed_headers = Forgetful()
    cold = await _said(pod, sent)
    pod.server.parsed_headers = {}
    while not pod.server.parsed_headers:  # so that the next may be answered straight
        assert await _said(pod, [asking(A)])
    assert await _said(pod, sent) == cold
    assert await _said(pod, sent) == cold


@plain
@given(request=requests)
@example(request=asking(A))
@example(request=asking(f"{ACME}/items/" + "x" * 480))
@example(request=asking(f"{ACME}/items/a.b"))
@example(request=asking(f"{ACME}/items/%61"))
@example(request=asking(f"{ACME}/items/a?b"))
@example(request=asking(f"{ACME}/items/a b"))
async def test_a_first_line_means_the_same_on_either_way(filled: PodHarness, request: bytes) -> None:
    """R17: whatever stands in it: spaces, controls, another method or version, an absolute address, any key."""
    await _is_told_the_same(filled, [request])


@plain
@given(sent=st.lists(packets, max_size=5))
@example(sent=[asking(A) + asking(B)[:-2] + b"X: ", asking(B)])
@example(sent=[asking(A) + asking(B, LOCAL, f"Content-Length: {len(asking(A))}"), asking(A)])
@example(sent=[b"\r\n" + asking(A), f"GET {B} HTTP/1.1\r\n".encode() + asking(A)])
async def test_packets_mean_the_same_on_either_way(filled: PodHarness, sent: list[bytes]) -> None:
    """R17: the middle of a request is never taken for a whole one, nor anything for a head that is none."""
    await _is_told_the_same(filled, sent)


async def test_an_empty_line_ahead_teaches_nothing_wrong(filled: PodHarness) -> None:
    """R17: a request behind an empty line is good; one with a request for its first header is 400, before and after."""
    async with connected(filled.address) as raw:
        assert (await raw.ask(b"\r\n" + asking(A))).status == 200
        assert (await raw.ask(f"GET {B} HTTP/1.1\r\n".encode() + asking(A))).status == 400


async def test_the_straight_way_is_taken(filled: PodHarness) -> None:
    """R17: else the tests above would compare nothing."""
    async with connected(filled.address) as raw:
        first = await raw.ask(asking(A))
        before = filled.server.hits
        assert (await raw.ask(asking(A))).meaning == first.meaning
        assert filled.server.hits + filled.server._counters[0] > before
        assert b"\r\nHost: localhost\r\n\r\n" in filled.server.parsed_headers


async def test_a_warm_connection_sees_every_version(filled: PodHarness) -> None:
    """R18: what is committed is answered from the next request on; a version that is not yet held is waited for."""
    async with connected(filled.address) as raw:
        for number in range(5):
            version = await filled.put("LOOSE", {"a": number})
            barrier = asking(A, LOCAL, f"X-Min-Version: {version}")
            for request in (barrier, barrier, asking(A), asking(A)):
                answer = await raw.ask(request)
                assert (answer.body, answer.headers["x-dict-version"]) == (b"%d" % number, str(version))
        ahead = asking(A, LOCAL, f"X-Min-Version: {version + 1}")
        assert [(await raw.ask(ahead)).status for _ in range(3)] == [409] * 3


async def test_more_heads_than_are_remembered(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: a client that sends another head each time makes the pod hold no more than so many."""
    monkeypatch.setattr("penstock.refdata.pod.serve.server._PARSED_HEADERS_LIMIT", 10)
    async with connected(filled.address) as raw:
        for number in range(50):
            assert (await raw.ask(asking(A, LOCAL, f"X-Any: {number}"))).status == 200
            assert len(filled.server.parsed_headers) <= 10
