"""A minimal HTTP client with persistent connections, so that the client of a drill is not its bottleneck."""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools


class RequestFailure(Exception):
    """A request without a response; *kind* is `refused`, `reset` or `timeout`."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Response:
    """A response with the headers that a drill uses."""

    status: int
    version: int | None
    is_from_memory: bool
    body: bytes


class Endpoint:
    """An address of a server or a load balancer, with its idle connections."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 1.0) -> None:
        parts = urlsplit(url)
        self.url = url
        self._prefix = parts.path.rstrip("/")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._address = (parts.hostname or "", parts.port or (443 if self._ssl else 80))
        self._common = f"Host: {parts.netloc.rpartition('@')[2]}\r\n"
        self._common += f"Authorization: Bearer {token}\r\n" if token else ""
        self._timeout = timeout
        self._find_missing_traffic: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        timeout: float | None = None,
    ) -> Response:
        """Return the response with any status; RequestFailure if there is none in time."""
        connection = None
        try:
            async with asyncio.timeout(timeout or self._timeout):
                connection = self._pop_idle() or await self._connect()
                response = await connection.exchange(self._encode(method, path, headers or {}, body))
        except TimeoutError:
            self._drop(connection)
            raise RequestFailure("timeout") from None
        except ConnectionRefusedError:
            raise RequestFailure("refused") from None
        except (OSError, httptools.HttpParserError):
            self._drop(connection)
            raise RequestFailure("reset") from None
        except asyncio.CancelledError:
            self._drop(connection)
            raise
        if connection.is_open:
            self._find_missing_traffic.append(connection)
        return response

    def close(self) -> None:
        """Close the idle connections."""
        while self._find_missing_traffic:
            self._find_missing_traffic.pop().close()

    def _encode(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._common}{lines}{length}\r\n".encode() + body

    def _pop_idle(self) -> "_Connection | None":
        while self._find_missing_traffic:
            connection = self._find_missing_traffic.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, *self._address, ssl=self._ssl)
        return connection

    @staticmethod
    def _drop(connection: "_Connection | None") -> None:
        if connection is not None:
            connection.close()


class _Connection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Response] | None = None
        self._version: int | None = None
        self._begin()

    async def exchange(self, request: bytes) -> Response:
        if self._transport is None:
            raise ConnectionResetError("closed")
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._waiting

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast("asyncio.Transport", transport), True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("closed"))

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"x-dict-version":
            self._version = int(value)
        elif name == b"x-data-source":
            self._is_from_memory = value == b"memory"

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        response = Response(self._parser.get_status_code(), self._version, self._is_from_memory, self._body)
        if not self._parser.should_keep_alive():
            self.close()
        self._begin()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(response)

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._version = None
        self._is_from_memory = False
        self._body = b""

    def _fail(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
