"""R21: what serving processes ask the loader of their pod, over a socket between the two."""

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

PATIENCE = 30.0
LARGE = 20 * 1024 * 1024


class Linked:
    """Both ends."""

    def __init__(self, link: LoaderConnection, taking: "asyncio.Task[None]", loader: "asyncio.Task[None]") -> None:
        self.link = link
        self.taking = taking
        self.loader = loader


@asynccontextmanager
async def linked(answer: Callable[[LoaderRequest], Awaitable[LoaderReply]]) -> AsyncIterator[Linked]:
    """A loader that answers like *answer*, and who asks it."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    loader = asyncio.create_task(serve_requests(ours, answer))
    link = await LoaderConnection.open(theirs)
    taking = asyncio.create_task(link.receive_replies())
    try:
        yield Linked(link, taking, loader)
    finally:
        await cancel_and_wait(taking)
        await link.close()
        await cancel_and_wait(loader)


async def echo(question: LoaderRequest) -> LoaderReply:
    assert isinstance(question, DocumentRequest)
    return DocumentReply(200, "text/plain", question.path.encode())


async def ask(link: LoaderConnection, path: str, patience: float = PATIENCE) -> str:
    answer = await link.request(DocumentRequest(path), patience)
    assert isinstance(answer, DocumentReply)
    return answer.body.decode()


async def test_answers_come_in_any_order_each_to_its_question() -> None:
    """R21: nobody waits behind another's barrier, and nobody gets another's answer."""
    total = 500
    asked: dict[str, asyncio.Event] = {}
    all_asked = asyncio.Event()

    async def answer(question: LoaderRequest) -> LoaderReply:
        assert isinstance(question, DocumentRequest)
        asked[question.path] = asyncio.Event()
        if len(asked) == total:
            all_asked.set()
        await asked[question.path].wait()
        return await echo(question)

    async with linked(answer) as both:
        order: list[str] = []

        async def note(path: str) -> None:
            assert await ask(both.link, path) == path
            order.append(path)

        asking = [asyncio.create_task(note(str(number))) for number in range(total)]
        await all_asked.wait()
        expected = [str(number) for number in reversed(range(total))]
        for path, task in zip(expected, reversed(asking), strict=True):
            asked[path].set()
            await task
        assert order == expected


@pytest.mark.parametrize(
    "answer",
    [
        LoadedReply(),
        ItemsReply(VersionStamp(2**62, 2**62), {"ключ": '{"n":1}', "": "null"}),
        RefusedReply(409, "VERSION_NOT_COMMITTED", "not yet", "ask later", 7),
        RefusedReply(503, "TOO_MANY_WAITERS", "too many"),
        DocumentReply(503, "application/json", bytes(range(256))),
    ],
)
async def test_every_kind_of_answer_comes_as_it_was_given(answer: LoaderReply) -> None:
    """R21: also the questions."""
    questions: list[LoaderRequest] = [
        BarrierRequest("acme", "LOOSE", 2**62, "items", ["a,b", "ключ"]),
        LoadRequest("acme", "ключ"),
        DocumentRequest("/docs"),
    ]
    heard: list[LoaderRequest] = []

    async def given(question: LoaderRequest) -> LoaderReply:
        heard.append(question)
        return answer

    async with linked(given) as both:
        for question in questions:
            assert await both.link.request(question, PATIENCE) == answer
    assert heard == questions


async def test_large_answers_come_whole_among_small_ones() -> None:
    """R21: many items from the primary are one answer."""

    async def answer(question: LoaderRequest) -> LoaderReply:
        assert isinstance(question, DocumentRequest)
        is_large = question.path.startswith("large")
        return ItemsReply(VersionStamp(1, 1), {"k": question.path[-1] * LARGE}) if is_large else await echo(question)

    async with linked(answer) as both:
        large = [
            asyncio.create_task(both.link.request(DocumentRequest(f"large {number}"), PATIENCE)) for number in range(3)
        ]
        small = [asyncio.create_task(ask(both.link, f"small {number}")) for number in range(50)]
        for number, task in enumerate(large):
            assert await task == ItemsReply(VersionStamp(1, 1), {"k": str(number) * LARGE})
        assert [await task for task in small] == [f"small {number}" for number in range(50)]


async def test_who_asks_waits_no_longer_than_it_wants() -> None:
    """R21: an answer that comes too late is nobody's, and the next question gets its own."""
    may_answer = asyncio.Event()

    async def answer(question: LoaderRequest) -> LoaderReply:
        if question == DocumentRequest("slow"):
            await may_answer.wait()
        return await echo(question)

    async with linked(answer) as both:
        with pytest.raises(Transient) as refused:
            await ask(both.link, "slow", 0.01)
        assert (refused.value.code, refused.value.status) == ("LOADER_UNRESPONSIVE", 503)
        may_answer.set()
        assert await ask(both.link, "next") == "next"
        assert both.link._waiting == {}


async def test_who_goes_away_leaves_nothing_behind() -> None:
    """R21: a client that hangs up takes its question along."""
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def answer(question: LoaderRequest) -> LoaderReply:
        is_asked.set()
        await may_answer.wait()
        return await echo(question)

    async with linked(answer) as both:
        asking = asyncio.create_task(both.link.request(DocumentRequest("gone"), PATIENCE))
        await is_asked.wait()
        asking.cancel()
        await asyncio.wait([asking])
        may_answer.set()
        assert await ask(both.link, "next") == "next"
        assert both.link._waiting == {}


class Silent:
    """Never answers."""

    def __init__(self) -> None:
        self.is_asked, self.is_cancelled = asyncio.Event(), asyncio.Event()

    async def answer(self, question: LoaderRequest) -> LoaderReply:
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.is_cancelled.set()
        return LoadedReply()


async def test_a_loader_that_ends_cancels_what_is_under_way() -> None:
    """R21: its end closes the link, so that whoever serves notices; who asked is refused in time."""
    silent = Silent()
    async with linked(silent.answer) as both:
        asking = asyncio.create_task(both.link.request(DocumentRequest("under way"), 1.0))
        await silent.is_asked.wait()
        await cancel_and_wait(both.loader)
        async with asyncio.timeout(PATIENCE):
            await silent.is_cancelled.wait()
            await asyncio.wait([both.taking])
        with pytest.raises(Transient):
            await asking


async def test_a_question_to_a_loader_that_is_gone_is_refused() -> None:
    """R21: 503, whether the link's end was noticed or not, and however often it is asked."""
    async with linked(echo) as both:
        assert await ask(both.link, "first") == "first"
        await cancel_and_wait(both.loader)
        for path in ("unnoticed", "second", "third"):
            with pytest.raises(Transient) as refused:
                await ask(both.link, path, 0.05)
            assert refused.value.code == "LOADER_UNRESPONSIVE"
        await asyncio.wait([both.taking])
        with pytest.raises(Transient):
            await ask(both.link, "noticed", 0.05)


async def test_a_server_that_goes_ends_its_questions() -> None:
    """R21: what a dead serving process asked is not worked on any longer."""
    silent = Silent()
    async with linked(silent.answer) as both:
        asking = asyncio.create_task(both.link.request(DocumentRequest("under way"), PATIENCE))
        await silent.is_asked.wait()
        await cancel_and_wait(both.taking)
        await both.link.close()
        async with asyncio.timeout(PATIENCE):
            await silent.is_cancelled.wait()
            await asyncio.wait([both.loader])
        asking.cancel()
        await asyncio.wait([asking])
