"""HTTP client that sends exactly the given bytes to a pod and reads the raw response."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import orjson

from penstock.refdata.pod.ipc import DocumentReply
from tests.refdata.pod.harness import PodHarness
from tests.support.wait import becomes

ACME = "/v1/tenants/acme/dictionaries/LOOSE"
LOCAL = "Host: localhost"
_TIMEOUT = 20.0  # seconds; reached only if the pod does not answer
_NO_BODY = (204, 304)


class RawReply(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]  # by name in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def code(self) -> str:
        """Return the code of a problem."""
        assert self.headers["content-type"] == "application/problem+json"
        return str(self.json["code"])

    @property
    def is_last(self) -> bool:
        return self.headers.get("connection") == "close"

    @property
    def meaning(self) -> tuple[int, dict[str, str], Any]:
        """Return the response without its values that differ every time."""
        unlike = ("date", "x-request-id", "x-data-age")
        headers = {name: value for name, value in self.headers.items() if name not in unlike}
        is_problem = headers.get("content-type") == "application/problem+json" and self.body
        return self.status, headers, {**self.json, "request_id": ""} if is_problem else self.body


class RawConnection:
    """A connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, request: bytes) -> RawReply:
        self.writer.write(request)
        return await self.reply(is_head=request.startswith(b"HEAD"))

    def resume_reading(self) -> None:
        """Resume reading on a narrow connection."""
        self.writer.transport.resume_reading()  # type: ignore[attr-defined] # a stream's

    async def send_pieces(self, pieces: Iterable[bytes]) -> None:
        """Send *pieces* so that the pod receives each separately: it runs in this loop and reads once in two turns."""
        for piece in pieces:
            self.writer.write(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def reply(self, *, is_head: bool = False) -> RawReply:
        """Read the next response."""
        async with asyncio.timeout(_TIMEOUT):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
            pairs = [line.split(": ", 1) for line in lines]
            headers = {name.lower(): value for name, value in pairs}
            assert len(headers) == len(pairs), f"a header came twice: {head}"
            assert first.startswith("HTTP/1.1 ")
            status = int(first.split(" ")[1])
            body = b"" if is_head or status in _NO_BODY else await self._body(headers)
            return RawReply(status, headers, body)

    async def chunk(self) -> bytes:
        """Read the next chunk of a stream; it is empty at the end."""
        async with asyncio.timeout(_TIMEOUT):
            size = int(await self.reader.readline(), 16)
            data = await self.reader.readexactly(size + 2)
            assert data.endswith(b"\r\n")
            return data[:-2]

    async def rest(self) -> bytes:
        """Read until the pod closes the connection."""
        async with asyncio.timeout(_TIMEOUT):
            return await self.reader.read()

    async def head(self) -> bytes:
        """Read the headers of a response with a chunked body."""
        async with asyncio.timeout(_TIMEOUT):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            assert "transfer-encoding" not in headers
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self.reader.read()
        body = b""
        while piece := await self.chunk():
            body += piece
        return body


@asynccontextmanager
async def connected(address: str, *, is_narrow: bool = False) -> AsyncIterator[RawConnection]:
    """Open a connection to the pod at *address*; a narrow one has a small receive buffer."""
    host, _, port = address.removeprefix("http://").partition(":")
    sock = socket.socket()
    if is_narrow:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**20)
    if is_narrow:
        writer.transport.pause_reading()  # type: ignore[attr-defined] # a stream's
    try:
        yield RawConnection(reader, writer)
    finally:
        writer.transport.abort()


def make_request(path: str, *headers: str, method: str = "GET", http: str = "1.1", body: bytes = b"") -> bytes:
    """Return a request; without *headers* it has a valid Host."""
    lines = "".join(f"{line}\r\n" for line in headers or (LOCAL,))
    return f"{method} {path} HTTP/{http}\r\n{lines}\r\n".encode("latin-1") + body


async def send_once(address: str, request: bytes) -> RawReply:
    """Return the response to *request* on a new connection."""
    async with connected(address) as raw:
        return await raw.ask(request)


async def wait_until_blocked(pod: PodHarness) -> asyncio.Transport:
    """Return the transport of the only connection whose client does not read, when the pod cannot write to it."""
    found: list[asyncio.Transport] = []

    async def is_stuck() -> bool:
        found[:] = [
            connection._transport for connection in pod.server._connections if not connection._can_write.is_set()
        ]
        return bool(found)

    await becomes(is_stuck, "the pod cannot write to the client")
    return found[0]


class SlowPage:
    """A document of the pod whose response waits for the test."""

    path = "/slow"

    def __init__(self, pod: PodHarness) -> None:
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self._others = pod.pod.request_handler._pages
        pod.pod.request_handler._pages = self._page

    async def _page(self, path: str) -> DocumentReply:
        if path != self.path:
            return await self._others(path)
        self.is_asked.set()
        await self.may_answer.wait()
        return DocumentReply(200, "text/plain", b"at last")
