"""R17: slow, idle and blocked clients are disconnected, and a drain finishes open requests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from penstock.app.http_server import bind_listener
from tests.refdata.pod.harness import PodHarness
from tests.refdata.pod.raw_client import ACME, LOCAL, SlowPage, connected, make_request, wait_until_blocked
from tests.support.wait import becomes

A = f"{ACME}/items/a"
SHORT = 0.05
LoaderRequest = Callable[[], Awaitable[bool]]


@pytest.fixture
async def filled(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> PodHarness:
    """Return a pod with an item that checks its connections often."""
    monkeypatch.setattr("penstock.refdata.pod.serve.server._SWEEP_INTERVAL", 0.0)
    version = await pod.put("LOOSE", {"a": {"n": 1}})
    await pod.load("LOOSE", version)
    return pod


async def test_a_slow_request_is_refused(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: a request that is not complete in time is 408, also a pipelined one."""
    monkeypatch.setattr("penstock.refdata.pod.serve.connection.HEADERS_TIMEOUT", SHORT)
    for start in (b"G", make_request(A)[:-2], make_request(A, LOCAL, "Content-Length: 5", body=b"hell")):
        async with connected(filled.address) as raw, connected(filled.address) as other:
            raw.writer.write(start)
            other.writer.write(make_request(A) + start)
            assert (await other.reply()).status == 200
            for connection in (raw, other):
                refused = await connection.reply()
                assert (refused.status, refused.code, refused.is_last) == (408, "REQUEST_TIMEOUT", True), start
                assert await connection.rest() == b""


async def test_dripping_buys_no_time(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: the limit applies to the whole request, not to single bytes."""
    monkeypatch.setattr("penstock.refdata.pod.serve.connection.HEADERS_TIMEOUT", SHORT)
    async with connected(filled.address) as raw:
        reply = asyncio.create_task(raw.reply())
        await raw.send_pieces([make_request(A)[:-2] + b"X: "])
        while not reply.done():
            await raw.send_pieces([b"y"])
        assert (await reply).status == 408


async def test_an_idle_connection_is_closed(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: an idle connection is closed without a response, with or without earlier requests."""
    async with connected(filled.address) as raw, connected(filled.address) as mute:
        assert (await raw.ask(make_request(A))).status == 200
        assert (await raw.ask(make_request(A))).status == 200
        monkeypatch.setattr("penstock.refdata.pod.serve.connection.IDLE_TIMEOUT", SHORT)
        assert (await raw.rest(), await mute.rest()) == (b"", b"")


async def test_a_waiting_client_is_not_idle(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: while a response is pending or changes are streamed, no timeout of the client applies."""
    for name in ("HEADERS_TIMEOUT", "IDLE_TIMEOUT", "STALLED_TIMEOUT"):
        monkeypatch.setattr(f"penstock.refdata.pod.serve.connection.{name}", SHORT)
    slow = SlowPage(filled)
    async with connected(filled.address) as other, connected(filled.address) as feed, connected(filled.address) as raw:
        feed.writer.write(make_request(f"{ACME}/changes"))
        await feed.head()
        raw.writer.write(make_request(slow.path))
        await slow.is_asked.wait()
        assert await other.rest() == b""  # after the time in which an idle connection is closed
        slow.may_answer.set()
        assert (await raw.reply()).body == b"at last"
        await filled.put("LOOSE", {"a": 2})
        assert await feed.chunk() == b": 1\n\n"
        assert b"event: change" in await feed.chunk()


async def test_a_client_that_does_not_read_is_disconnected(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: a client that does not read responses or a stream is disconnected."""
    for number in range(5):
        version = await filled.put("LOOSE", {f"big{number}": "x" * 800_000})
    await filled.load("LOOSE", version)
    for path in ("items/big0", "all"):
        async with connected(filled.address, is_narrow=True) as raw:
            raw.writer.write(make_request(f"{ACME}/{path}", LOCAL, "Accept: application/x-ndjson") * 10)
            transport = await wait_until_blocked(filled)
            with monkeypatch.context() as patch:
                patch.setattr("penstock.refdata.pod.serve.connection.STALLED_TIMEOUT", SHORT)
                await becomes(_is_aborted(filled, transport), "the connection to be aborted")
    assert (await filled.get("LOOSE/items/a")).status == 200


def _is_aborted(pod: PodHarness, transport: asyncio.Transport) -> LoaderRequest:
    async def is_aborted() -> bool:
        return transport.is_closing() and pod.server._streams._open == 0

    return is_aborted


async def test_a_refused_client_is_disconnected(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: after an error that ends the connection, a client that stays connected is disconnected."""
    async with connected(filled.address) as raw:
        raw.writer.write(b"garbage\r\n\r\n")
        assert (await raw.reply()).status == 400

        async def has_left() -> bool:
            return len(filled.server._connections) <= 1

        monkeypatch.setattr("penstock.refdata.pod.serve.connection.STALLED_TIMEOUT", SHORT)
        await becomes(has_left, "the connection to be closed")


@asynccontextmanager
async def _serving(pod: PodHarness) -> AsyncIterator[tuple[str, asyncio.Event, "asyncio.Task[None]"]]:
    """Serve the pod on an additional port that the test can stop."""
    with bind_listener("127.0.0.1", 0) as sock:
        stopping = asyncio.Event()
        serving = asyncio.create_task(pod.server.serve(sock.dup(), stopping, 20.0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", stopping, serving
        stopping.set()
        await serving


async def test_a_drain_finishes_open_requests(filled: PodHarness) -> None:
    """R17: pending responses are sent, the last with `Connection: close`, streams end, and connections close."""
    slow = SlowPage(filled)
    async with (
        _serving(filled) as (address, stopping, serving),
        connected(address) as waiting,
        connected(address) as warm,
        connected(address) as feed,
        connected(address) as idle,
    ):
        assert {(await warm.ask(make_request(A))).is_last for _ in range(3)} == {False}
        feed.writer.write(make_request(f"{ACME}/changes"))
        await feed.head()
        waiting.writer.write(make_request(slow.path))
        await slow.is_asked.wait()
        stopping.set()
        await becomes(_is_draining(filled), "the pod drains")
        answer = await warm.ask(make_request(A))
        assert (answer.status, answer.json, answer.is_last) == (200, {"n": 1}, True)
        assert await warm.rest() == b""
        assert [await feed.chunk(), await feed.chunk()] == [b": 1\n\n", b""]
        assert await feed.rest() == b""
        slow.may_answer.set()
        last = await waiting.reply()
        assert (last.body, last.is_last) == (b"at last", True)
        assert await idle.rest() == b""
        await serving
        assert not filled.server._connections


def _is_draining(pod: PodHarness) -> LoaderRequest:
    async def is_draining() -> bool:
        return pod.server.router.is_draining

    return is_draining


async def test_a_drain_completes_streams(filled: PodHarness) -> None:
    """R17: a stream of all items is complete during a drain, and then the connection ends."""
    for number in range(6):
        version = await filled.put("LOOSE", {f"big{number}": "x" * 800_000})
    await filled.load("LOOSE", version)
    async with _serving(filled) as (address, stopping, _), connected(address, is_narrow=True) as raw:
        raw.writer.write(make_request(f"{ACME}/all", LOCAL, "Accept: application/x-ndjson"))
        await wait_until_blocked(filled)
        stopping.set()
        await becomes(_is_draining(filled), "the pod drains")
        raw.resume_reading()
        assert (await raw.reply()).body.count(b"\n") == 7
        assert await raw.rest() == b""
