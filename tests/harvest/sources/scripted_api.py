"""HTTP server whose responses a test scripts."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

Responder = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ScriptedApi:
    """A server that sends scripted responses in order, repeats the last one, and records the requests."""

    def __init__(self) -> None:
        self.url = ""
        self.queries: list[dict[str, str]] = []  # query parameters of each request
        self.bodies: list[Any] = []
        self.headers: list[Mapping[str, str]] = []
        self.stopped = asyncio.Event()
        self._responders: deque[Responder] = deque()

    def respond(self, *responders: Responder) -> None:
        self._responders = deque(responders)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        self.headers.append(request.headers)
        self.bodies.append(orjson.loads(body) if (body := await request.read()) else None)
        responder = self._responders.popleft() if len(self._responders) > 1 else self._responders[0]
        return await responder(request)


@asynccontextmanager
async def run_api() -> AsyncIterator[ScriptedApi]:
    api = ScriptedApi()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    server = TestServer(app)
    await server.start_server()
    api.url = str(server.make_url("")).rstrip("/")
    try:
        yield api
    finally:
        api.stopped.set()
        await server.close()


def reply(document: Any = None, status: int = 200, text: str | bytes | None = None, **headers: str) -> Responder:
    """Return a responder with a JSON document or with any text."""
    body = orjson.dumps(document) if text is None else text

    async def respond(request: web.Request) -> web.StreamResponse:
        all_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=body, status=status, headers=all_headers, content_type="application/json")

    return respond


async def abort(request: web.Request) -> web.StreamResponse:
    """Close the connection in the middle of a response."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"items": [')
    assert request.transport is not None
    request.transport.abort()
    return response


def no_response(api: ScriptedApi) -> Responder:
    """Return a responder that waits until the test ends."""

    async def respond(request: web.Request) -> web.StreamResponse:
        await api.stopped.wait()
        return web.Response()

    return respond


def pages(*sizes: int, total: int | None = None) -> list[Responder]:
    """Return responders for pages of these sizes, with consecutive ids."""
    first, responders = 0, []
    for size in sizes:
        items = [{"id": str(number)} for number in range(first, first + size)]
        responders.append(reply({"items": items, "total": sum(sizes) if total is None else total}))
        first += size
    return responders
