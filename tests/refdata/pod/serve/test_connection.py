"""R17: HTTP/1.1 as it comes over the wire: kept alive, pipelined, cut anywhere, wrong in every way."""

import pytest

from penstock.refdata.pod.serve.http_parser import BODY_LIMIT
from tests.refdata.pod.harness import PodHarness
from tests.refdata.pod.raw_client import ACME, LOCAL, RawReply, SlowPage, asking, connected, once, stuck
from tests.support.wait import becomes

A, B = f"{ACME}/items/a", f"{ACME}/items/b"
NDJSON = "Accept: application/x-ndjson"


@pytest.fixture
async def filled(pod: PodHarness) -> PodHarness:
    """Two items, held."""
    version = await pod.put("LOOSE", {"a": {"n": 1}, "b": {"n": 2}})
    await pod.holds("LOOSE", version)
    return pod


async def test_a_connection_is_kept_alive(filled: PodHarness) -> None:
    """R17: one request after the other, whatever the answers are, and nothing said about closing."""
    async with connected(filled.address) as raw:
        for path, status in [
            (A, 200),
            (f"{ACME}/items/x", 404),
            (B, 200),
            ("/v1/nowhere", 404),
            (f"{ACME}/items", 422),
        ]:
            answer = await raw.ask(asking(path))
            assert (answer.status, "connection" in answer.headers) == (status, False)


async def test_pipelined_requests_are_answered_in_order(filled: PodHarness) -> None:
    """R17: fast ones behind slow ones wait for their turn: a barrier, a page of the loader's, a refusal, a stream."""
    slow = SlowPage(filled)
    min_version = await filled.put("LOOSE", {"c": 3})
    requests = [
        asking(A),
        asking(f"{ACME}/items/x"),
        asking(slow.path),
        asking(B),
        asking(f"{ACME}/items/c", LOCAL, f"X-Min-Version: {min_version}"),
        asking(f"{ACME}/items/c", LOCAL, f"X-Min-Version: {min_version + 1}"),
        asking(f"{ACME}/all", LOCAL, NDJSON),
        asking(A, method="HEAD"),
        asking(A, method="DELETE"),
        asking(f"{ACME}/version"),
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
    """R17: however the packets fall, the answers are the same."""
    requests = [asking(A), asking(f"{ACME}/items/x%C3%A9", LOCAL, "X-Min-Version: 1"), asking("/nowhere")]
    data = b"".join(requests)
    async with connected(filled.address) as raw:
        whole = [(await raw.ask(request)).meaning for request in requests]
        for cut in range(1, len(data)):
            await raw.drip([data[:cut], data[cut:]])
            assert [(await raw.reply()).meaning for _ in requests] == whole, cut
        await raw.drip(data[at : at + 1] for at in range(len(data)))
        assert [(await raw.reply()).meaning for _ in requests] == whole


async def test_hundreds_of_requests_in_one_packet(filled: PodHarness) -> None:
    """R17: also behind a slow one each gets its own answer."""
    slow = SlowPage(filled)
    paths = [A, B, f"{ACME}/items/x", f"{ACME}/items?keys=a"] * 150
    async with connected(filled.address) as raw:
        raw.writer.write(asking(slow.path) + b"".join(map(asking, paths)))
        await slow.is_asked.wait()
        slow.may_answer.set()
        assert (await raw.reply()).body == b"at last"
        answers = [await raw.reply() for _ in paths]
    assert [answer.status for answer in answers] == [200, 200, 404, 200] * 150
    assert {answer.body for answer in answers[::4]} == {b'{"n": 1}'}


async def test_what_a_client_does_not_read_is_not_piled_up(pod: PodHarness) -> None:
    """R17: whoever pipelines requests and reads no answer makes the pod hold a few of them, not all."""
    version = await pod.put("LOOSE", {"big": "x" * 200_000})
    await pod.holds("LOOSE", version)
    async with connected(pod.address, is_narrow=True) as raw:
        raw.writer.write(asking(f"{ACME}/items/big") * 400)
        held = await stuck(pod)
        assert held.get_write_buffer_size() < 10_000_000
        raw.read_on()
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
    """R17: the same status and headers, no body, and the connection goes on."""
    async with connected(filled.address) as raw:
        for path, headers in HEADS:
            got = await raw.ask(asking(path, *headers))
            asked = await raw.ask(asking(path, *headers, method="HEAD"))
            assert _comparable(asked) == _comparable(got), path
            assert (await raw.ask(asking(B))).body == b'{"n": 2}'
        assert (await raw.ask(asking(f"{ACME}/changes", method="HEAD"))).headers["content-type"] == "text/event-stream"
        assert (await raw.ask(asking(B))).body == b'{"n": 2}'


def _comparable(answer: RawReply) -> tuple[int, dict[str, str]]:
    status, headers, _ = answer.meaning
    return status, headers


async def test_a_client_of_old_is_answered_and_let_go(filled: PodHarness) -> None:
    """R17: HTTP/1.0 needs no Host, and its connection ends with the answer, unless it asks for more."""
    for path in (A, f"{ACME}/items/x", f"{ACME}/version"):
        newer = await once(filled.address, asking(path))
        async with connected(filled.address) as raw:
            answer = await raw.ask(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert (answer.status, answer.body[:8], answer.is_last) == (newer.status, newer.body[:8], True)
            assert await raw.rest() == b""
        async with connected(filled.address) as raw:
            for _ in range(3):
                kept = await raw.ask(asking(path, LOCAL, "Connection: keep-alive", http="1.0"))
                assert (kept.status, kept.headers["connection"]) == (newer.status, "keep-alive")


async def test_a_client_of_old_gets_a_stream_until_its_end(filled: PodHarness) -> None:
    """R17: HTTP/1.0 knows no chunks: the end of the connection is the end of the items."""
    async with connected(filled.address) as raw:
        answer = await raw.ask(asking(f"{ACME}/all", LOCAL, NDJSON, "Connection: keep-alive", http="1.0"))
    assert ("transfer-encoding" in answer.headers, answer.is_last) == (False, True)
    assert answer.body == b'{"key":"a","value":{"n": 1}}\n{"key":"b","value":{"n": 2}}\n'


async def test_whoever_says_close_is_let_go(filled: PodHarness) -> None:
    """R17: the last answer says so too, and what comes behind it is not answered."""
    async with connected(filled.address) as raw:
        raw.writer.write(asking(A) + asking(B, LOCAL, "Connection: close") + asking(A))
        answers = [await raw.reply(), await raw.reply()]
        assert [(answer.body, answer.is_last) for answer in answers] == [(b'{"n": 1}', False), (b'{"n": 2}', True)]
        assert await raw.rest() == b""


async def test_whoever_hangs_up_its_side_still_gets_its_answers(filled: PodHarness) -> None:
    """R17: half a connection is enough for what was asked before, fast or slow."""
    slow = SlowPage(filled)
    async with connected(filled.address) as raw:
        raw.writer.write(asking(A) + asking(slow.path) + asking(B))
        raw.writer.write_eof()
        await slow.is_asked.wait()
        slow.may_answer.set()
        assert [(await raw.reply()).body for _ in range(3)] == [b'{"n": 1}', b"at last", b'{"n": 2}']
        assert await raw.rest() == b""
    async with connected(filled.address) as raw:
        raw.writer.write(asking(A)[:-5])
        raw.writer.write_eof()
        assert await raw.rest() == b""


async def test_a_client_that_leaves_takes_nothing_down(filled: PodHarness) -> None:
    """R17: gone in the middle of a question to the loader; the others do not notice."""
    slow = SlowPage(filled)
    async with connected(filled.address) as raw:
        raw.writer.write(asking(slow.path))
        await slow.is_asked.wait()
    slow.may_answer.set()

    async def has_left() -> bool:
        return len(filled.server._connections) <= 1

    await becomes(has_left, "the pod lets go of who left")
    assert (await filled.get("LOOSE/items/a")).json == {"n": 1}


async def test_a_pod_without_room_says_so(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: one connection too many is told to come again."""
    async with connected(filled.address) as raw:
        assert (await raw.ask(asking(A))).status == 200
        monkeypatch.setattr("penstock.refdata.pod.serve.server._CONNECTION_LIMIT", 1)
        async with connected(filled.address) as late:
            refused = await late.reply()
            assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "TOO_MANY_CONNECTIONS", "1")
            assert await late.rest() == b""
        assert (await raw.ask(asking(A))).status == 200


async def test_a_small_body_is_read_past(filled: PodHarness) -> None:
    """R17: nobody needs it; the next request begins behind it, though it looks like one itself."""
    bait = asking(B)
    sized = asking(A, LOCAL, f"Content-Length: {len(bait)}", body=bait)
    chunked = asking(A, LOCAL, "Transfer-Encoding: chunked", body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(bait), bait))
    largest = asking(A, LOCAL, f"Content-Length: {BODY_LIMIT}", body=b"x" * BODY_LIMIT)
    async with connected(filled.address) as raw:
        for request in (sized, chunked, largest):
            raw.writer.write(request + asking(f"{ACME}/items/x"))
            assert [(await raw.reply()).status, (await raw.reply()).status] == [200, 404]
