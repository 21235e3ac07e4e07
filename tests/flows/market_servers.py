"""An image API and an OpenAI-compatible endpoint that answer exactly as a test tells them to."""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

Answer = Callable[["ScriptedMarketServer"], Awaitable[web.StreamResponse]]
TOKEN = "s3cr3t-t0ken"
TOKEN_NAME = "MARKET_TOKEN"
TOKEN_REF = f"env:{TOKEN_NAME}"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)


class ScriptedMarketServer:
    """Gives each chart, or everybody, the answers it was told, the last one for ever; and keeps what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[Any] = []
        self.headers: list[Mapping[str, str]] = []
        self.paths: list[str] = []
        self.pauses: list[float] = []
        self.asked = asyncio.Event()
        self.ending = asyncio.Event()
        self._answers: defaultdict[str, deque[Answer]] = defaultdict(deque)

    def will(self, *answers: Answer, chart: str = "") -> None:
        """Answer so: a certain *chart*, or whatever no other script is for."""
        self._answers[chart] = deque(answers)

    async def pause(self, seconds: float) -> None:
        """In place of sleeping: only what would have been slept is kept."""
        self.pauses.append(seconds)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.paths.append(request.path)
        self.asked.set()
        script = self._answers.get(body.get("id", "")) or self._answers[""]
        answer = script.popleft() if len(script) > 1 else script[0]
        return await answer(self)


@asynccontextmanager
async def market_server() -> AsyncIterator[ScriptedMarketServer]:
    """Such a server, under way."""
    server = ScriptedMarketServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    running = TestServer(app)
    await running.start_server()
    server.url = str(running.make_url("/v1"))
    try:
        yield server
    finally:
        server.ending.set()
        await running.close()


def says(body: bytes | str = b"", status: int = 200, content_type: str = "image/png", **headers: str) -> Answer:
    """This answer; underscores in the names of headers stand for hyphens."""
    data = body.encode() if isinstance(body, str) else body
    given = {name.replace("_", "-"): value for name, value in headers.items()}

    async def answer(_server: ScriptedMarketServer) -> web.StreamResponse:
        return web.Response(body=data, status=status, headers=given, content_type=content_type)

    return answer


async def never(server: ScriptedMarketServer) -> web.StreamResponse:
    """No answer, until the test is over."""
    await server.ending.wait()
    return web.Response()


def writes(text: object, ending: str = "stop") -> Answer:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": ending}
    return says(
        orjson.dumps({"id": "1", "object": "chat.completion", "choices": [choice]}), content_type="application/json"
    )


picture = says(PNG)
