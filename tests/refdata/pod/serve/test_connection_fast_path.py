"""R17: the fast path without the parser returns the same responses as the parser."""

import re
from collections.abc import Sequence
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.refdata.pod.serve.connection import ParsedHeaders
from tests.refdata.pod.harness import PodHarness
from tests.refdata.pod.raw_client import ACME, LOCAL, connected, make_request

A, B = f"{ACME}/items/a", f"{ACME}/items/b"
GLOBEX = ACME.replace("acme", "globex")
KEYS = ["a", "b", "a.b", "a-b_c~d", ".", "..", "~", "a b", "a%", "%61", "é", "a/b", "a?b", "x" * 480, "x" * 481]
HELD = {key: f"item {number}" for number, key in enumerate(KEYS)}

plain = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # requests only read, so all examples share one pod
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

# Packets of a client: complete requests, and starts and ends of requests.
packets = st.sampled_from(
    [
        *[make_request(A), make_request(B)] * 3,
        make_request(A) + make_request(B),
        make_request(A) + make_request(B)[:-2] + b"X: ",
        make_request(A) + make_request(B, LOCAL, f"Content-Length: {len(make_request(A))}"),
        make_request(A) + b"GET ",
        b"\r\n",
        b"\r\n" + make_request(A),
        f"GET {B} HTTP/1.1\r\n".encode() + make_request(A),
        f"GET {B} HTTP/1.1\r\n".encode(),
        f"GET {B} HTTP/1.1".encode(),
        b"\r\nHost: localhost\r\n\r\n",
        b"Host: localhost\r\n\r\n",
        make_request(A)[:-2],
        b"X: ",
        make_request(B, LOCAL, f"Content-Length: {len(make_request(A))}"),
        make_request(B, LOCAL, "Transfer-Encoding: chunked"),
        b"%x\r\n" % len(make_request(A)),
        b"0\r\n\r\n",
        make_request(f"{ACME}/items/none"),
        make_request(A, LOCAL, "X-Min-Version: 1"),
        make_request(A, LOCAL, "Accept: */*", "Connection: keep-alive"),
    ]
)


class NoParsedHeaders(dict[bytes, ParsedHeaders]):
    """A dictionary of headers that never contains an entry."""

    def __setitem__(self, head: bytes, known: ParsedHeaders) -> None:
        pass


@pytest.fixture
async def filled(pod: PodHarness) -> PodHarness:
    for tenant, items in (("acme", HELD), ("globex", {"a": "of globex"})):
        version = await pod.put("LOOSE", items, tenant)
        await pod.load("LOOSE", version, tenant)
    return pod


async def _read_all(pod: PodHarness, sent: Sequence[bytes]) -> bytes:
    """Return everything that the pod sends for *sent*, without values that differ every time."""
    async with connected(pod.address) as raw:
        await raw.send_pieces(sent)
        raw.writer.write_eof()
        data = await raw.rest()
    return re.sub(rb"[0-9a-f]{32}|Date: [^\r]*|X-Data-Age: \d+\r\n", b"", data)


async def _has_equal_responses(pod: PodHarness, sent: Sequence[bytes]) -> None:
    pod.server.parsed_headers = NoParsedHeaders()
    cold = await _read_all(pod, sent)
    pod.server.parsed_headers = {}
    while not pod.server.parsed_headers:  # so that the next request can use the fast path
        assert await _read_all(pod, [make_request(A)])
    assert await _read_all(pod, sent) == cold
    assert await _read_all(pod, sent) == cold


@plain
@given(request=requests)
@example(request=make_request(A))
@example(request=make_request(f"{ACME}/items/" + "x" * 480))
@example(request=make_request(f"{ACME}/items/a.b"))
@example(request=make_request(f"{ACME}/items/%61"))
@example(request=make_request(f"{ACME}/items/a?b"))
@example(request=make_request(f"{ACME}/items/a b"))
async def test_request_lines_are_equal_on_both_paths(filled: PodHarness, request: bytes) -> None:
    """R17: spaces, controls, methods, versions, absolute addresses and keys have equal responses on both paths."""
    await _has_equal_responses(filled, [request])


@plain
@given(sent=st.lists(packets, max_size=5))
@example(sent=[make_request(A) + make_request(B)[:-2] + b"X: ", make_request(B)])
@example(sent=[make_request(A) + make_request(B, LOCAL, f"Content-Length: {len(make_request(A))}"), make_request(A)])
@example(sent=[b"\r\n" + make_request(A), f"GET {B} HTTP/1.1\r\n".encode() + make_request(A)])
async def test_packets_are_equal_on_both_paths(filled: PodHarness, sent: list[bytes]) -> None:
    """R17: a fragment of a request is never taken for a complete one, and other data never for known headers."""
    await _has_equal_responses(filled, sent)


async def test_an_empty_line_does_not_confuse_the_fast_path(filled: PodHarness) -> None:
    """R17: a request after an empty line is valid; a request line as first header is 400, before and after."""
    async with connected(filled.address) as raw:
        assert (await raw.ask(b"\r\n" + make_request(A))).status == 200
        assert (await raw.ask(f"GET {B} HTTP/1.1\r\n".encode() + make_request(A))).status == 400


async def test_the_fast_path_is_used(filled: PodHarness) -> None:
    """R17: the requests of these tests use the fast path."""
    async with connected(filled.address) as raw:
        first = await raw.ask(make_request(A))
        before = filled.server.hits
        assert (await raw.ask(make_request(A))).meaning == first.meaning
        assert filled.server.hits + filled.server._counters[0] > before
        assert b"\r\nHost: localhost\r\n\r\n" in filled.server.parsed_headers


async def test_a_warm_connection_sees_every_version(filled: PodHarness) -> None:
    """R18: a commit is visible from the next request on, and a version that is not loaded is waited for."""
    async with connected(filled.address) as raw:
        for number in range(5):
            version = await filled.put("LOOSE", {"a": number})
            barrier = make_request(A, LOCAL, f"X-Min-Version: {version}")
            for request in (barrier, barrier, make_request(A), make_request(A)):
                answer = await raw.ask(request)
                assert (answer.body, answer.headers["x-dict-version"]) == (b"%d" % number, str(version))
        ahead = make_request(A, LOCAL, f"X-Min-Version: {version + 1}")
        assert [(await raw.ask(ahead)).status for _ in range(3)] == [409] * 3


async def test_the_number_of_remembered_headers_is_limited(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: a client that sends different headers each time uses a limited amount of memory."""
    monkeypatch.setattr("penstock.refdata.pod.serve.server._PARSED_HEADERS_LIMIT", 10)
    async with connected(filled.address) as raw:
        for number in range(50):
            assert (await raw.ask(make_request(A, LOCAL, f"X-Any: {number}"))).status == 200
            assert len(filled.server.parsed_headers) <= 10
