"""T17: the stream of events."""

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


async def read_moves(moves: AsyncIterator[Batch], number: int) -> list[tuple[str, str]]:
    """Return subject and target of the next *number* moves of a stream."""
    entries: list[StoredEntry] = []
    async with asyncio.timeout(20):
        while len(entries) < number:
            entries += (await anext(moves))[1]
    return [(stored.entry.subject, stored.entry.target) for stored in entries]


async def test_watcher_receives_moves_in_order(api: TrackingHarness, tracking: Tracking) -> None:
    """T17: a watcher receives every move after its start, in order."""
    async with aclosing(tracking.live.iterate_moves(await tracking.live.find_start_positions(None))) as moves:
        await api.queue_up(WORKER, FILE)
        expected = [(f"{FILE}/0", status) for status in ("started", "done", "started", "done")]
        assert await read_moves(moves, 4) == expected


async def test_watcher_continues_at_a_position(api: TrackingHarness, tracking: Tracking) -> None:
    """T17: a stream from any position contains every later move exactly once."""
    await api.queue_up(WORKER, FILE, 0, 1)
    async with aclosing(tracking.live.iterate_moves((BEGINNING,))) as moves:
        batch: list[StoredEntry] = []
        while len(batch) < 8:
            batch += (await anext(moves))[1]
    whole = [(stored.entry.subject, stored.entry.target) for stored in batch]
    for index in (0, 3, 6):
        async with aclosing(tracking.live.iterate_moves((batch[index].position,))) as moves:
            assert await read_moves(moves, 7 - index) == whole[index + 1 :]


class Watcher:
    """A client of `GET /events`; the transport of httpx would read the endless response to its end."""

    def __init__(self, app: FastAPI, then: Callable[[], Awaitable[Any]]) -> None:
        self._app, self._then = app, then
        self._bodies: list[str] = []
        self._received = asyncio.Event()

    async def read(self) -> str:
        """Return the text after the first bytes; *then* runs right after these were sent."""
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
                await self._received.wait()
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        return "".join(self._bodies[1:])

    async def _receive(self) -> Any:
        await asyncio.Event().wait()  # the client stays connected and sends no more

    async def _send(self, message: Any) -> None:
        if body := message.get("body"):
            self._bodies.append(body.decode())
            if len(self._bodies) == 1:
                await self._then()
            else:
                self._received.set()


async def test_watcher_misses_nothing_after_the_first_bytes(api: TrackingHarness, app: FastAPI) -> None:
    """T17: a client that received the beginning of the stream receives every later move."""
    watcher = Watcher(app, lambda: api.post("/files/register", filename=FILE, shards=[0]))
    assert FILE in await watcher.read()


async def test_events_stream_over_http(live: TrackingHarness) -> None:
    """T17: `GET /events` sends moves as server-sent events; Last-Event-ID continues a stream, and filters apply."""
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
        later = [await events.next() for _ in range(5)]
    assert [(event["filename"], event["to"]) for _, event in later] == [
        ("a", "done"),
        ("b", "started"),
        ("b", "done"),
        ("b", "started"),
        ("b", "done"),
    ]
    params = {"stage": "shard-splitter", "filename": "b"}
    async with live.http.stream("GET", "/events", headers=go_on, params=params) as answer:
        assert (await EventStream(answer).next())[0] == later[3][0]
    for path, headers, code in (("/events", {"last-event-id": "x"}, "BAD_EVENT_ID"), ("/events?stage=x", {}, None)):
        refused = await live.http.get(path, headers=headers)
        assert refused.status_code == 422
        assert code in (None, refused.json()["code"])
