"""R21: requests of serving processes to the loader of their pod over a socket pair."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from penstock.kernel.errors import Transient
from penstock.kernel.tasks.wait import cancel_and_wait
from penstock.refdata.model import VersionStamp
from penstock.refdata.pod.ipc import (
    BarrierRequest,
    DocumentReply,
    DocumentRequest,
    ItemsReply,
    LoadedReply,
    LoaderConnection,
    LoaderReply,
    LoaderRequest,
    LoadRequest,
    RefusedReply,
    serve_requests,
)

TIMEOUT = 30.0
LARGE = 20 * 1024 * 1024


class Linked:
    """Both ends of a connection."""

    def __init__(self, link: LoaderConnection, receiver: "asyncio.Task[None]", loader: "asyncio.Task[None]") -> None:
        self.link = link
        self.receiver = receiver
        self.loader = loader


@asynccontextmanager
async def linked(reply: Callable[[LoaderRequest], Awaitable[LoaderReply]]) -> AsyncIterator[Linked]:
    """Yield a loader that handles requests with *answer*, and a connection to it."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    loader = asyncio.create_task(serve_requests(ours, reply))
    link = await LoaderConnection.open(theirs)
    receiver = asyncio.create_task(link.receive_replies())
    try:
        yield Linked(link, receiver, loader)
    finally:
        await cancel_and_wait(receiver)
        await link.close()
        await cancel_and_wait(loader)


async def echo(request: LoaderRequest) -> LoaderReply:
    assert isinstance(request, DocumentRequest)
    return DocumentReply(200, "text/plain", request.path.encode())


async def ask(link: LoaderConnection, path: str, timeout: float = TIMEOUT) -> str:
    reply = await link.request(DocumentRequest(path), timeout)
    assert isinstance(reply, DocumentReply)
    return reply.body.decode()


async def test_replies_match_their_requests() -> None:
    """R21: replies arrive in any order, each for its request."""
    total = 500
    asked: dict[str, asyncio.Event] = {}
    all_asked = asyncio.Event()

    async def reply(request: LoaderRequest) -> LoaderReply:
        assert isinstance(request, DocumentRequest)
        asked[request.path] = asyncio.Event()
        if len(asked) == total:
            all_asked.set()
        await asked[request.path].wait()
        return await echo(request)

    async with linked(reply) as both:
        order: list[str] = []

        async def note(path: str) -> None:
            assert await ask(both.link, path) == path
            order.append(path)

        waiting = [asyncio.create_task(note(str(number))) for number in range(total)]
        await all_asked.wait()
        expected = [str(number) for number in reversed(range(total))]
        for path, task in zip(expected, reversed(waiting), strict=True):
            asked[path].set()
            await task
        assert order == expected


@pytest.mark.parametrize(
    "reply",
    [
        LoadedReply(),
        ItemsReply(VersionStamp(2**62, 2**62), {"ключ": '{"n":1}', "": "null"}),
        RefusedReply(409, "VERSION_NOT_COMMITTED", "not yet", "ask later", 7),
        RefusedReply(503, "TOO_MANY_WAITERS", "too many"),
        DocumentReply(503, "application/json", bytes(range(256))),
    ],
)
async def test_every_kind_of_message_is_transferred(reply: LoaderReply) -> None:
    """R21: all kinds of requests and replies are transferred unchanged."""
    requests: list[LoaderRequest] = [
        BarrierRequest("acme", "LOOSE", 2**62, "items", ["a,b", "ключ"]),
        LoadRequest("acme", "ключ"),
        DocumentRequest("/docs"),
    ]
    received: list[LoaderRequest] = []

    async def handle(request: LoaderRequest) -> LoaderReply:
        received.append(request)
        return reply

    async with linked(handle) as both:
        for request in requests:
            assert await both.link.request(request, TIMEOUT) == reply
    assert received == requests


async def test_large_replies_are_complete() -> None:
    """R21: large replies are complete among small ones."""

    async def reply(request: LoaderRequest) -> LoaderReply:
        assert isinstance(request, DocumentRequest)
        is_large = request.path.startswith("large")
        return ItemsReply(VersionStamp(1, 1), {"k": request.path[-1] * LARGE}) if is_large else await echo(request)

    async with linked(reply) as both:
        large = [
            asyncio.create_task(both.link.request(DocumentRequest(f"large {number}"), TIMEOUT)) for number in range(3)
        ]
        small = [asyncio.create_task(ask(both.link, f"small {number}")) for number in range(50)]
        for number, task in enumerate(large):
            assert await task == ItemsReply(VersionStamp(1, 1), {"k": str(number) * LARGE})
        assert [await task for task in small] == [f"small {number}" for number in range(50)]


async def test_a_request_has_a_timeout() -> None:
    """R21: a late reply is dropped, and the next request gets its own reply."""
    may_answer = asyncio.Event()

    async def reply(request: LoaderRequest) -> LoaderReply:
        if request == DocumentRequest("slow"):
            await may_answer.wait()
        return await echo(request)

    async with linked(reply) as both:
        with pytest.raises(Transient) as refused:
            await ask(both.link, "slow", 0.01)
        assert (refused.value.code, refused.value.status) == ("LOADER_UNRESPONSIVE", 503)
        may_answer.set()
        assert await ask(both.link, "next") == "next"
        assert both.link._waiting == {}


async def test_a_cancelled_request_leaves_no_state() -> None:
    """R21: a cancelled request is removed."""
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def reply(request: LoaderRequest) -> LoaderReply:
        is_asked.set()
        await may_answer.wait()
        return await echo(request)

    async with linked(reply) as both:
        waiting = asyncio.create_task(both.link.request(DocumentRequest("gone"), TIMEOUT))
        await is_asked.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        may_answer.set()
        assert await ask(both.link, "next") == "next"
        assert both.link._waiting == {}


class Silent:
    """A handler that never replies."""

    def __init__(self) -> None:
        self.is_asked, self.is_cancelled = asyncio.Event(), asyncio.Event()

    async def reply(self, request: LoaderRequest) -> LoaderReply:
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.is_cancelled.set()
        return LoadedReply()


async def test_the_end_of_the_loader_ends_requests() -> None:
    """R21: when the loader ends, its handlers are cancelled, the connection closes, and waiting requests fail."""
    silent = Silent()
    async with linked(silent.reply) as both:
        waiting = asyncio.create_task(both.link.request(DocumentRequest("running"), 1.0))
        await silent.is_asked.wait()
        await cancel_and_wait(both.loader)
        async with asyncio.timeout(TIMEOUT):
            await silent.is_cancelled.wait()
            await asyncio.wait([both.receiver])
        with pytest.raises(Transient):
            await waiting


async def test_a_request_to_a_stopped_loader_is_refused() -> None:
    """R21: every request to a stopped loader is 503, before and after the connection is known to be closed."""
    async with linked(echo) as both:
        assert await ask(both.link, "first") == "first"
        await cancel_and_wait(both.loader)
        for path in ("unnoticed", "second", "third"):
            with pytest.raises(Transient) as refused:
                await ask(both.link, path, 0.05)
            assert refused.value.code == "LOADER_UNRESPONSIVE"
        await asyncio.wait([both.receiver])
        with pytest.raises(Transient):
            await ask(both.link, "noticed", 0.05)


async def test_the_end_of_a_serving_process_ends_its_requests() -> None:
    """R21: requests of a dead serving process are cancelled."""
    silent = Silent()
    async with linked(silent.reply) as both:
        waiting = asyncio.create_task(both.link.request(DocumentRequest("running"), TIMEOUT))
        await silent.is_asked.wait()
        await cancel_and_wait(both.receiver)
        await both.link.close()
        async with asyncio.timeout(TIMEOUT):
            await silent.is_cancelled.wait()
            await asyncio.wait([both.loader])
        waiting.cancel()
        await asyncio.wait([waiting])
