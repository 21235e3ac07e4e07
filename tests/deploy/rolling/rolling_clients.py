"""Clients that never stop asking, and count whatever is not a whole answer."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

THINKING = 0.03  # seconds a client is busy with an answer
WITHIN = 20.0


class Torn(Exception):
    """The connection ended in the middle of an answer."""


class Unanswered(Torn):
    """The connection ended before the first byte of an answer."""


class ClientAnswer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_last(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"


class ClientConnection:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host
        self.count = 0

    async def ask(self, path: str, *headers: str, method: str = "GET", body: bytes = b"") -> ClientAnswer:
        """One request and its whole answer."""
        response = await self.begin(path, *headers, method=method, body=body)
        if "transfer-encoding" in response.headers:
            return response._replace(body=b"".join([piece async for piece in self.pieces()]))
        return response._replace(body=await self._exactly(int(response.headers["content-length"])))

    async def begin(self, path: str, *headers: str, method: str = "GET", body: bytes = b"") -> ClientAnswer:
        """One request, and how its answer begins."""
        length = [f"Content-Length: {len(body)}"] if body else []
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}", *length, *headers, "", ""]
        try:
            self._writer.write("\r\n".join(lines).encode() + body)
            first = await self._reader.readline()
        except ConnectionError as error:
            raise Unanswered(repr(error)) from error
        if not first:
            raise Unanswered("closed")
        self.count += 1
        found: dict[str, str] = {}
        while (line := await self._line()) != b"\r\n":
            name, _, value = line.decode().partition(":")
            found[name.lower()] = value.strip()
        return ClientAnswer(int(first.split(b" ")[1]), found, b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The chunks of a body, to the one that says that it was the last."""
        while size := int(await self._line(), 16):
            yield await self._exactly(size)
            await self._line()
        await self._line()

    async def _line(self) -> bytes:
        try:
            return await self._reader.readuntil(b"\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Torn(repr(error)) from error

    async def _exactly(self, size: int) -> bytes:
        try:
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Torn(repr(error)) from error


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[ClientConnection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        yield ClientConnection(reader, writer, f"127.0.0.1:{port}")
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


class Load:
    """What several clients were answered, until it is stopped."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.failures: list[str] = []
        self.answered: Counter[str] = Counter()
        self.sent_again = 0  # GETs on a kept connection that was closed at that moment, as any client does
        self.is_over = False
        self.endless: list[asyncio.Task[None]] = []  # those who follow a feed

    async def staying(self, make: "Callable[[], Request]") -> None:
        """A client that keeps its connection as long as it may."""
        while not self.is_over:
            async with self._counted("connect"), connected(self.port) as connection:
                is_kept = True
                while is_kept and not self.is_over:
                    is_kept = await self._ask(connection, make())
                    await asyncio.sleep(THINKING)

    async def coming(self, make: "Callable[[], Request]") -> None:
        """A client that opens a connection for each request."""
        while not self.is_over:
            async with self._counted("connect"), connected(self.port) as connection:
                await self._ask(connection, make())
            await asyncio.sleep(THINKING)

    async def following(self, path: str) -> None:
        """A client of a feed that resumes where it was; the feed must tell its end."""
        last = "0"
        while not self.is_over:
            async with self._counted("feed"), connected(self.port) as connection:
                stream = await connection.begin(path, f"Last-Event-ID: {last}")
                if stream.status != 200:
                    self.failures.append(f"feed: {stream.status}")
                    continue
                self.answered["feed"] += 1
                async for piece in connection.pieces():
                    for line in piece.decode().splitlines():
                        if line.startswith("id: "):
                            last = line[4:]
                            self.answered["change"] += 1

    async def _ask(self, connection: ClientConnection, request: "Request") -> bool:
        """Whether another request may follow on this connection."""
        async with self._counted(request.kind):
            try:
                async with asyncio.timeout(WITHIN):
                    answer = await connection.ask(*request.lines, method=request.method, body=request.body)
            except Unanswered:
                if connection.count == 0 or request.method != "GET":
                    raise
                self.sent_again += 1
                async with connected(self.port) as another:
                    answer = await another.ask(*request.lines)
                answer.headers["connection"] = "close"
            self._note(request, answer)
            return not answer.is_last
        return False

    def _note(self, request: "Request", answer: ClientAnswer) -> None:
        wrong = "" if answer.status in (200, 202) else answer.body.decode()[:300]
        if not wrong:
            wrong = request.wrong(answer)
        if wrong:
            self.failures.append(f"{request.kind}: {answer.status} {wrong}")
        else:
            self.answered[request.kind] += 1

    @asynccontextmanager
    async def _counted(self, what: str) -> AsyncIterator[None]:
        try:
            yield
        except (Torn, OSError, TimeoutError) as error:
            self.failures.append(f"{what}: {error!r}")


class Request(NamedTuple):
    kind: str
    lines: tuple[str, ...]  # the path, and headers
    wrong: Callable[[ClientAnswer], str]  # what is wrong with an answer, if anything
    method: str = "GET"
    body: bytes = b""


@asynccontextmanager
async def loaded(port: int, begin: Callable[[Load, asyncio.TaskGroup], None]) -> AsyncIterator[Load]:
    """Clients as *begin* has them, for as long as this lasts; then each gets its last answer."""
    load = Load(port)
    async with asyncio.TaskGroup() as group:
        begin(load, group)
        try:
            yield load
        finally:
            load.is_over = True
            for task in load.endless:
                task.cancel()
