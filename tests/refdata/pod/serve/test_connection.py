"""R17: HTTP/1.1: persistent connections, pipelining, fragmented and malformed requests."""

import pytest

from penstock.refdata.pod.serve.http_parser import BODY_LIMIT
from tests.refdata.pod.harness import PodHarness
from tests.refdata.pod.raw_client import (
    ACME,
    LOCAL,
    RawReply,
    SlowPage,
    connected,
    make_request,
    send_once,
    wait_until_blocked,
)
from tests.support.wait import becomes

A, B = f"{ACME}/items/a", f"{ACME}/items/b"
NDJSON = "Accept: application/x-ndjson"


@pytest.fixture
async def filled(pod: PodHarness) -> PodHarness:
    """Return a pod with two loaded items."""
    version = await pod.put("LOOSE", {"a": {"n": 1}, "b": {"n": 2}})
    await pod.load("LOOSE", version)
    return pod


async def test_a_connection_is_kept_alive(filled: PodHarness) -> None:
    """R17: a connection serves many requests with any status, without a header Connection."""
    async with connected(filled.address) as raw:
        for path, status in [
            (A, 200),
            (f"{ACME}/items/x", 404),
            (B, 200),
            ("/v1/nowhere", 404),
            (f"{ACME}/items", 422),
        ]:
            answer = await raw.ask(make_request(path))
            assert (answer.status, "connection" in answer.headers) == (status, False)


async def test_pipelined_requests_are_answered_in_order(filled: PodHarness) -> None:
    """R17: fast requests wait for slow ones before them: barriers, documents of the loader, errors and streams."""
    slow = SlowPage(filled)
    min_version = await filled.put("LOOSE", {"c": 3})
    requests = [
        make_request(A),
        make_request(f"{ACME}/items/x"),
        make_request(slow.path),
        make_request(B),
        make_request(f"{ACME}/items/c", LOCAL, f"X-Min-Version: {min_version}"),
        make_request(f"{ACME}/items/c", LOCAL, f"X-Min-Version: {min_version + 1}"),
        make_request(f"{ACME}/all", LOCAL, NDJSON),
        make_request(A, method="HEAD"),
        make_request(A, method="DELETE"),
        make_request(f"{ACME}/version"),
    ]
    async with connected(filled.address) as raw:
        raw.writer.write(b"".join(requests))
        first = [await raw.reply(), await raw.reply()]
        await slow.is_asked.wait()
        slow.may_answer.set()
        answers = [*first, *[await raw.reply(is_head=request.startswith(b"HEAD")) for request in requests[2:]]]
    assert [answer.status for answer in answers] == [200, 404, 200, 200, 200, 409, 200, 200, 405, 200]
    assert [answers[at].body for at in (0, 2, 3, 4)] == [b'{"n": 1}', b"at last", b'{"n": 2}', b"3"]
    assert answers[6].body.count(b"\n") == 3
    assert answers[9].json["version"] == min_version


async def test_requests_may_be_cut_anywhere(filled: PodHarness) -> None:
    """R17: the responses do not depend on the packets of the requests."""
    requests = [
        make_request(A),
        make_request(f"{ACME}/items/x%C3%A9", LOCAL, "X-Min-Version: 1"),
        make_request("/nowhere"),
    ]
    data = b"".join(requests)
    async with connected(filled.address) as raw:
        whole = [(await raw.ask(request)).meaning for request in requests]
        for cut in range(1, len(data)):
            await raw.send_pieces([data[:cut], data[cut:]])
            assert [(await raw.reply()).meaning for _ in requests] == whole, cut
        await raw.send_pieces(data[at : at + 1] for at in range(len(data)))
        assert [(await raw.reply()).meaning for _ in requests] == whole


async def test_hundreds_of_requests_in_one_packet(filled: PodHarness) -> None:
    """R17: each request behind a slow one gets its own response."""
    slow = SlowPage(filled)
    paths = [A, B, f"{ACME}/items/x", f"{ACME}/items?keys=a"] * 150
    async with connected(filled.address) as raw:
        raw.writer.write(make_request(slow.path) + b"".join(map(make_request, paths)))
        await slow.is_asked.wait()
        slow.may_answer.set()
        assert (await raw.reply()).body == b"at last"
        answers = [await raw.reply() for _ in paths]
    assert [answer.status for answer in answers] == [200, 200, 404, 200] * 150
    assert {answer.body for answer in answers[::4]} == {b'{"n": 1}'}


async def test_responses_that_are_not_read_are_not_buffered(pod: PodHarness) -> None:
    """R17: for a client that pipelines and does not read, the pod buffers only a few responses."""
    version = await pod.put("LOOSE", {"big": "x" * 200_000})
    await pod.load("LOOSE", version)
    async with connected(pod.address, is_narrow=True) as raw:
        raw.writer.write(make_request(f"{ACME}/items/big") * 400)
        held = await wait_until_blocked(pod)
        assert held.get_write_buffer_size() < 10_000_000
        raw.resume_reading()
        assert {len((await raw.reply()).body) for _ in range(400)} == {200_002}


HEADS = [
    (A, [LOCAL]),
    (f"{ACME}/items/x", [LOCAL]),
    (f"{ACME}/items?keys=a,x", [LOCAL]),
    (f"{ACME}/all?limit=1", [LOCAL]),
    (f"{ACME}/version", [LOCAL]),
    (f"{ACME}/all", [LOCAL, NDJSON]),
    ("/openapi.json", [LOCAL]),
    (A, [LOCAL, "If-None-Match: *"]),
]


async def test_head_is_get_without_the_body(filled: PodHarness) -> None:
    """R17: HEAD has the status and headers of GET, no body, and keeps the connection."""
    async with connected(filled.address) as raw:
        for path, headers in HEADS:
            got = await raw.ask(make_request(path, *headers))
            asked = await raw.ask(make_request(path, *headers, method="HEAD"))
            assert _comparable(asked) == _comparable(got), path
            assert (await raw.ask(make_request(B))).body == b'{"n": 2}'
        assert (await raw.ask(make_request(f"{ACME}/changes", method="HEAD"))).headers[
            "content-type"
        ] == "text/event-stream"
        assert (await raw.ask(make_request(B))).body == b'{"n": 2}'


def _comparable(answer: RawReply) -> tuple[int, dict[str, str]]:
    status, headers, _ = answer.meaning
    return status, headers


async def test_http_1_0_closes_the_connection(filled: PodHarness) -> None:
    """R17: HTTP/1.0 needs no Host, and the connection ends with the response unless it is kept alive."""
    for path in (A, f"{ACME}/items/x", f"{ACME}/version"):
        newer = await send_once(filled.address, make_request(path))
        async with connected(filled.address) as raw:
            answer = await raw.ask(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert (answer.status, answer.body[:8], answer.is_last) == (newer.status, newer.body[:8], True)
            assert await raw.rest() == b""
        async with connected(filled.address) as raw:
            for _ in range(3):
                kept = await raw.ask(make_request(path, LOCAL, "Connection: keep-alive", http="1.0"))
                assert (kept.status, kept.headers["connection"]) == (newer.status, "keep-alive")


async def test_http_1_0_gets_a_stream_without_chunks(filled: PodHarness) -> None:
    """R17: for HTTP/1.0 the end of the connection is the end of the stream."""
    async with connected(filled.address) as raw:
        answer = await raw.ask(make_request(f"{ACME}/all", LOCAL, NDJSON, "Connection: keep-alive", http="1.0"))
    assert ("transfer-encoding" in answer.headers, answer.is_last) == (False, True)
    assert answer.body == b'{"key":"a","value":{"n": 1}}\n{"key":"b","value":{"n": 2}}\n'


async def test_connection_close_is_respected(filled: PodHarness) -> None:
    """R17: the last response has `Connection: close`, and later requests are not answered."""
    async with connected(filled.address) as raw:
        raw.writer.write(make_request(A) + make_request(B, LOCAL, "Connection: close") + make_request(A))
        answers = [await raw.reply(), await raw.reply()]
        assert [(answer.body, answer.is_last) for answer in answers] == [(b'{"n": 1}', False), (b'{"n": 2}', True)]
        assert await raw.rest() == b""


async def test_a_half_closed_connection_gets_its_responses(filled: PodHarness) -> None:
    """R17: earlier requests are answered, fast or slow."""
    slow = SlowPage(filled)
    async with connected(filled.address) as raw:
        raw.writer.write(make_request(A) + make_request(slow.path) + make_request(B))
        raw.writer.write_eof()
        await slow.is_asked.wait()
        slow.may_answer.set()
        assert [(await raw.reply()).body for _ in range(3)] == [b'{"n": 1}', b"at last", b'{"n": 2}']
        assert await raw.rest() == b""
    async with connected(filled.address) as raw:
        raw.writer.write(make_request(A)[:-5])
        raw.writer.write_eof()
        assert await raw.rest() == b""


async def test_a_disconnect_does_not_affect_others(filled: PodHarness) -> None:
    """R17: a client that disconnects during a request to the loader does not affect other clients."""
    slow = SlowPage(filled)
    async with connected(filled.address) as raw:
        raw.writer.write(make_request(slow.path))
        await slow.is_asked.wait()
    slow.may_answer.set()

    async def has_left() -> bool:
        return len(filled.server._connections) <= 1

    await becomes(has_left, "the connection to be removed")
    assert (await filled.get("LOOSE/items/a")).json == {"n": 1}


async def test_the_number_of_connections_is_limited(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: a connection above the limit gets 503."""
    async with connected(filled.address) as raw:
        assert (await raw.ask(make_request(A))).status == 200
        monkeypatch.setattr("penstock.refdata.pod.serve.server._CONNECTION_LIMIT", 1)
        async with connected(filled.address) as late:
            refused = await late.reply()
            assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "TOO_MANY_CONNECTIONS", "1")
            assert await late.rest() == b""
        assert (await raw.ask(make_request(A))).status == 200


async def test_a_small_body_is_ignored(filled: PodHarness) -> None:
    """R17: a body is skipped, even if it looks like a request."""
    bait = make_request(B)
    sized = make_request(A, LOCAL, f"Content-Length: {len(bait)}", body=bait)
    chunked = make_request(A, LOCAL, "Transfer-Encoding: chunked", body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(bait), bait))
    largest = make_request(A, LOCAL, f"Content-Length: {BODY_LIMIT}", body=b"x" * BODY_LIMIT)
    async with connected(filled.address) as raw:
        for request in (sized, chunked, largest):
            raw.writer.write(request + make_request(f"{ACME}/items/x"))
            assert [(await raw.reply()).status, (await raw.reply()).status] == [200, 404]
