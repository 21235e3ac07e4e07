"""R17: clients that are slow, silent or do not read are let go; a pod that stops finishes what is under way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from penstock.app.http_server import bind_listener
from tests.refdata.pod.harness import PodHarness
from tests.refdata.pod.raw_client import ACME, LOCAL, SlowPage, asking, connected, stuck
from tests.support.wait import becomes

A = f"{ACME}/items/a"
SHORT = 0.05
LoaderRequest = Callable[[], Awaitable[bool]]


@pytest.fixture
async def filled(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> PodHarness:
    """An item, held, in a pod that looks after its clients often."""
    monkeypatch.setattr("penstock.refdata.pod.serve.server._SWEEP_INTERVAL", 0.0)
    version = await pod.put("LOOSE", {"a": {"n": 1}})
    await pod.holds("LOOSE", version)
    return pod


async def test_a_slow_request_is_refused(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: a request that does not come to its end in time is 408, also one that began behind another."""
    monkeypatch.setattr("penstock.refdata.pod.serve.connection.HEADERS_TIMEOUT", SHORT)
    for begun in (b"G", asking(A)[:-2], asking(A, LOCAL, "Content-Length: 5", body=b"hell")):
        async with connected(filled.address) as raw, connected(filled.address) as other:
            raw.writer.write(begun)
            other.writer.write(asking(A) + begun)
            assert (await other.reply()).status == 200
            for one in (raw, other):
                refused = await one.reply()
                assert (refused.status, refused.code, refused.is_last) == (408, "REQUEST_TIMEOUT", True), begun
                assert await one.rest() == b""


async def test_dripping_buys_no_time(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: the time is that of the whole request, not from byte to byte."""
    monkeypatch.setattr("penstock.refdata.pod.serve.connection.HEADERS_TIMEOUT", SHORT)
    async with connected(filled.address) as raw:
        reply = asyncio.create_task(raw.reply())
        await raw.drip([asking(A)[:-2] + b"X: "])
        while not reply.done():
            await raw.drip([b"y"])
        assert (await reply).status == 408


async def test_a_silent_client_is_let_go(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: after a while without a request, whether it ever had one, and without a word."""
    async with connected(filled.address) as raw, connected(filled.address) as mute:
        assert (await raw.ask(asking(A))).status == 200
        assert (await raw.ask(asking(A))).status == 200
        monkeypatch.setattr("penstock.refdata.pod.serve.connection.IDLE_TIMEOUT", SHORT)
        assert (await raw.rest(), await mute.rest()) == (b"", b"")


async def test_whoever_waits_for_an_answer_is_not_silent(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: while the pod owes an answer, or tells changes, no limit of the client's runs."""
    for name in ("HEADERS_TIMEOUT", "IDLE_TIMEOUT", "STALLED_TIMEOUT"):
        monkeypatch.setattr(f"penstock.refdata.pod.serve.connection.{name}", SHORT)
    slow = SlowPage(filled)
    async with connected(filled.address) as other, connected(filled.address) as feed, connected(filled.address) as raw:
        feed.writer.write(asking(f"{ACME}/changes"))
        await feed.head()
        raw.writer.write(asking(slow.path))
        await slow.is_asked.wait()
        assert await other.rest() == b""  # so long that one who says nothing was let go
        slow.may_answer.set()
        assert (await raw.reply()).body == b"at last"
        await filled.put("LOOSE", {"a": 2})
        assert await feed.chunk() == b": 1\n\n"
        assert b"event: change" in await feed.chunk()


async def test_a_client_that_does_not_read_is_cut_off(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: what it asked for is not held for it for ever, be it one answer after the other or a stream."""
    for number in range(5):
        version = await filled.put("LOOSE", {f"big{number}": "x" * 800_000})
    await filled.holds("LOOSE", version)
    for path in ("items/big0", "all"):
        async with connected(filled.address, is_narrow=True) as raw:
            raw.writer.write(asking(f"{ACME}/{path}", LOCAL, "Accept: application/x-ndjson") * 10)
            transport = await stuck(filled)
            with monkeypatch.context() as patch:
                patch.setattr("penstock.refdata.pod.serve.connection.STALLED_TIMEOUT", SHORT)
                await becomes(_is_cut_off(filled, transport), "the pod cuts off who does not read")
    assert (await filled.get("LOOSE/items/a")).status == 200


def _is_cut_off(pod: PodHarness, transport: asyncio.Transport) -> LoaderRequest:
    async def is_cut_off() -> bool:
        return transport.is_closing() and pod.server._streams._open == 0

    return is_cut_off


async def test_a_refused_client_that_stays_is_cut_off(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: a refusal is the last word; who does not hang up then is hung up on."""
    async with connected(filled.address) as raw:
        raw.writer.write(b"garbage\r\n\r\n")
        assert (await raw.reply()).status == 400

        async def has_left() -> bool:
            return len(filled.server._connections) <= 1

        monkeypatch.setattr("penstock.refdata.pod.serve.connection.STALLED_TIMEOUT", SHORT)
        await becomes(has_left, "the pod lets go of who was refused")


@asynccontextmanager
async def _serving(pod: PodHarness) -> AsyncIterator[tuple[str, asyncio.Event, "asyncio.Task[None]"]]:
    """The pod on one more port, which a test can have stopped."""
    with bind_listener("127.0.0.1", 0) as sock:
        stopping = asyncio.Event()
        serving = asyncio.create_task(pod.server.serve(sock.dup(), stopping, 20.0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", stopping, serving
        stopping.set()
        await serving


async def test_a_pod_that_stops_finishes_what_is_under_way(filled: PodHarness) -> None:
    """R17: answers due are given, the last with `Connection: close`, streams end whole, and then everybody is gone."""
    slow = SlowPage(filled)
    async with (
        _serving(filled) as (address, stopping, serving),
        connected(address) as waiting,
        connected(address) as warm,
        connected(address) as feed,
        connected(address) as idle,
    ):
        assert {(await warm.ask(asking(A))).is_last for _ in range(3)} == {False}
        feed.writer.write(asking(f"{ACME}/changes"))
        await feed.head()
        waiting.writer.write(asking(slow.path))
        await slow.is_asked.wait()
        stopping.set()
        await becomes(_is_draining(filled), "the pod drains")
        answer = await warm.ask(asking(A))
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


async def test_a_stream_under_way_is_sent_to_its_end_when_a_pod_stops(filled: PodHarness) -> None:
    """R17: all items are all items; its client learns nothing of the stop but the end of the connection."""
    for number in range(6):
        version = await filled.put("LOOSE", {f"big{number}": "x" * 800_000})
    await filled.holds("LOOSE", version)
    async with _serving(filled) as (address, stopping, _), connected(address, is_narrow=True) as raw:
        raw.writer.write(asking(f"{ACME}/all", LOCAL, "Accept: application/x-ndjson"))
        await stuck(filled)
        stopping.set()
        await becomes(_is_draining(filled), "the pod drains")
        raw.read_on()
        assert (await raw.reply()).body.count(b"\n") == 7
        assert await raw.rest() == b""
