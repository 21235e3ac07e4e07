"""HTTP server whose responses a test scripts."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ScriptedApi:
    """Gives the answers it was told, one after the other, the last one for ever; and keeps what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, str]] = []  # parameters of each request
        self.bodies: list[Any] = []
        self.headers: list[Mapping[str, str]] = []
        self.ending = asyncio.Event()
        self._answers: deque[Answer] = deque()

    def will(self, *answers: Answer) -> None:
        self._answers = deque(answers)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        self.headers.append(request.headers)
        self.bodies.append(orjson.loads(body) if (body := await request.read()) else None)
        answer = self._answers.popleft() if len(self._answers) > 1 else self._answers[0]
        return await answer(request)


@asynccontextmanager
async def running() -> AsyncIterator[ScriptedApi]:
    api = ScriptedApi()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    server = TestServer(app)
    await server.start_server()
    api.url = str(server.make_url("")).rstrip("/")
    try:
        yield api
    finally:
        api.ending.set()
        await server.close()


def says(document: Any = None, status: int = 200, text: str | bytes | None = None, **headers: str) -> Answer:
    """An answer of JSON, or of any text."""
    body = orjson.dumps(document) if text is None else text

    async def answer(request: web.Request) -> web.StreamResponse:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=body, status=status, headers=given, content_type="application/json")

    return answer


async def cuts(request: web.Request) -> web.StreamResponse:
    """Hang up in the middle of an answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"items": [')
    assert request.transport is not None
    request.transport.abort()
    return response


def never(api: ScriptedApi) -> Answer:
    """No answer, until the test ends."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await api.ending.wait()
        return web.Response()

    return answer


def pages(*sizes: int, total: int | None = None) -> list[Answer]:
    """Pages of so many records, numbered through."""
    found, answers = 0, []
    for size in sizes:
        items = [{"id": str(n)} for n in range(found, found + size)]
        answers.append(says({"items": items, "total": sum(sizes) if total is None else total}))
        found += size
    return answers
