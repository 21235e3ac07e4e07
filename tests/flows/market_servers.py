"""An image API and an OpenAI-compatible endpoint with scripted answers."""

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
    """A server with scripted answers, by chart or for all; it repeats the last answer and stores the requests."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[Any] = []
        self.headers: list[Mapping[str, str]] = []
        self.paths: list[str] = []
        self.pauses: list[float] = []
        self.received = asyncio.Event()
        self.ending = asyncio.Event()
        self._answers: defaultdict[str, deque[Answer]] = defaultdict(deque)

    def script(self, *answers: Answer, chart: str = "") -> None:
        """Set the answers for *chart*, or the default answers."""
        self._answers[chart] = deque(answers)

    async def pause(self, seconds: float) -> None:
        """Store the seconds instead of sleeping."""
        self.pauses.append(seconds)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.paths.append(request.path)
        self.received.set()
        script = self._answers.get(body.get("id", "")) or self._answers[""]
        answer = script.popleft() if len(script) > 1 else script[0]
        return await answer(self)


@asynccontextmanager
async def market_server() -> AsyncIterator[ScriptedMarketServer]:
    """Run the server."""
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


def make_answer(body: bytes | str = b"", status: int = 200, content_type: str = "image/png", **headers: str) -> Answer:
    """Return an answer; underscores in the names of headers stand for hyphens."""
    data = body.encode() if isinstance(body, str) else body
    extra = {name.replace("_", "-"): value for name, value in headers.items()}

    async def answer(_server: ScriptedMarketServer) -> web.StreamResponse:
        return web.Response(body=data, status=status, headers=extra, content_type=content_type)

    return answer


async def never_answer(server: ScriptedMarketServer) -> web.StreamResponse:
    """Wait until the test has ended."""
    await server.ending.wait()
    return web.Response()


def make_completion(text: object, ending: str = "stop") -> Answer:
    """Return an answer with a chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": ending}
    return make_answer(
        orjson.dumps({"id": "1", "object": "chat.completion", "choices": [choice]}), content_type="application/json"
    )


picture = make_answer(PNG)
