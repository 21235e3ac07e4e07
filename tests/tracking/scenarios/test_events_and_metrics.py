"""T17: moves as a stream of events, and the pipeline in Prometheus metrics."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI

from penstock.kernel.states.event_stream import Batch
from penstock.kernel.states.journal import BEGINNING, StoredEntry
from penstock.tracking.service import Tracking
from tests.support.sse import EventStream
from tests.tracking.harness import BASE, FILE, SPLITTER, WORKER, TrackingHarness


async def next_moves(moves: AsyncIterator[Batch], number: int) -> list[tuple[str, str]]:
    """The next so many moves of a stream: whose, and where to."""
    found: list[StoredEntry] = []
    async with asyncio.timeout(20):
        while len(found) < number:
            found += (await anext(moves))[1]
    return [(noted.entry.subject, noted.entry.target) for noted in found]


async def test_moves_are_told_as_they_are_made(api: TrackingHarness, tracking: Tracking) -> None:
    """T17: a watcher hears every move made from its beginning on, in order."""
    async with aclosing(tracking.live.moves(await tracking.live.start_positions(None))) as moves:
        await api.queue_up(WORKER, FILE)
        expected = [(f"{FILE}/0", status) for status in ("started", "done", "started", "done")]
        assert await next_moves(moves, 4) == expected


async def test_a_watcher_goes_on_where_it_left_off(api: TrackingHarness, tracking: Tracking) -> None:
    """T17: from any position on, every move after it is told, once."""
    await api.queue_up(WORKER, FILE, 0, 1)
    async with aclosing(tracking.live.moves((BEGINNING,))) as moves:
        batch: list[StoredEntry] = []
        while len(batch) < 8:
            batch += (await anext(moves))[1]
    whole = [(noted.entry.subject, noted.entry.target) for noted in batch]
    for place in (0, 3, 6):
        async with aclosing(tracking.live.moves((batch[place].position,))) as moves:
            assert await next_moves(moves, 7 - place) == whole[place + 1 :]


class Watcher:
    """`GET /events` of an application: httpx's own transport reads an answer to its end, and this one has none."""

    def __init__(self, app: FastAPI, then: Callable[[], Awaitable[Any]]) -> None:
        self._app, self._then = app, then
        self._bodies: list[str] = []
        self._heard = asyncio.Event()

    async def heard(self) -> str:
        """What came after the first bytes; *then* is done once these are out and before anything else goes on."""
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "query_string": b"",
            "path": f"{BASE}/events",
            "raw_path": f"{BASE}/events".encode(),
            "root_path": "",
            "headers": [(b"host", b"127.0.0.1")],
            "client": None,
            "server": ("127.0.0.1", 80),
        }
        watching = asyncio.create_task(self._app(scope, self._receive, self._send))
        try:
            async with asyncio.timeout(5):
                await self._heard.wait()
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        return "".join(self._bodies[1:])

    async def _receive(self) -> Any:
        await asyncio.Event().wait()  # it asks nothing more, and does not go

    async def _send(self, message: Any) -> None:
        if body := message.get("body"):
            self._bodies.append(body.decode())
            if len(self._bodies) == 1:
                await self._then()
            else:
                self._heard.set()


async def test_a_greeted_watcher_misses_nothing(api: TrackingHarness, app: FastAPI) -> None:
    """T17: whoever has received the beginning of the stream receives every move made after it."""
    watcher = Watcher(app, lambda: api.post("/files/register", filename=FILE, shards=[0]))
    assert FILE in await watcher.heard()


async def test_events_stream_over_http(live: TrackingHarness) -> None:
    """T17: `GET /events` tells moves as server-sent events; Last-Event-ID goes on, filters leave out."""
    async with live.http.stream("GET", "/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = EventStream(answer)
        await live.queue_up(SPLITTER, "a")
        first_id, first = await events.next()
        assert (first["filename"], first["shard"], first["stage"]) == ("a", 0, "event-ingest")
        assert (first["from"], first["to"], first["actor"]) == (None, "started", "operator")
        _, second = await events.next()
        assert (second["from"], second["to"]) == ("started", "done")
    await live.queue_up(WORKER, "b")
    go_on = {"last-event-id": first_id}
    async with live.http.stream("GET", "/events", headers=go_on) as answer:
        events = EventStream(answer)
        told = [await events.next() for _ in range(5)]
    assert [(one["filename"], one["to"]) for _, one in told] == [
        ("a", "done"),
        ("b", "started"),
        ("b", "done"),
        ("b", "started"),
        ("b", "done"),
    ]
    params = {"stage": "shard-splitter", "filename": "b"}
    async with live.http.stream("GET", "/events", headers=go_on, params=params) as answer:
        assert (await EventStream(answer).next())[0] == told[3][0]
    for path, headers, code in (("/events", {"last-event-id": "x"}, "BAD_EVENT_ID"), ("/events?stage=x", {}, None)):
        refused = await live.http.get(path, headers=headers)
        assert refused.status_code == 422
        assert code in (None, refused.json()["code"])
