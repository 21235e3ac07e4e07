"""Requests over kept connections, as cheap as Python can make them: whoever measures must not be what is measured."""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools


class NoAnswer(Exception):
    """A request that was not answered; *kind* says how: `refused`, `reset` or `timeout`."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, and of its headers those that matter here."""

    status: int
    version: int | None
    is_from_memory: bool
    body: bytes


class Endpoint:
    """One address: a server, or the balancer before several."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 1.0) -> None:
        parts = urlsplit(url)
        self.url = url
        self._prefix = parts.path.rstrip("/")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._place = (parts.hostname or "", parts.port or (443 if self._ssl else 80))
        self._common = f"Host: {parts.netloc.rpartition('@')[2]}\r\n"
        self._common += f"Authorization: Bearer {token}\r\n" if token else ""
        self._timeout = timeout
        self._idle: list[_Connection] = []

    async def ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        timeout: float | None = None,
    ) -> Answer:
        """The answer, whatever its status; NoAnswer when there is none in time."""
        connection = None
        try:
            async with asyncio.timeout(timeout or self._timeout):
                connection = self._reused() or await self._connected()
                answer = await connection.exchange(self._written(method, path, headers or {}, body))
        except TimeoutError:
            self._drop(connection)
            raise NoAnswer("timeout") from None
        except ConnectionRefusedError:
            raise NoAnswer("refused") from None
        except (OSError, httptools.HttpParserError):
            self._drop(connection)
            raise NoAnswer("reset") from None
        except asyncio.CancelledError:
            self._drop(connection)
            raise
        if connection.is_open:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Let every kept connection go."""
        while self._idle:
            self._idle.pop().close()

    def _written(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        given = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._common}{given}{length}\r\n".encode() + body

    def _reused(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connected(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, *self._place, ssl=self._ssl)
        return connection

    @staticmethod
    def _drop(connection: "_Connection | None") -> None:
        if connection is not None:
            connection.close()


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Answer] | None = None
        self._version: int | None = None
        self._begin()

    async def exchange(self, request: bytes) -> Answer:
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
        lowered = name.lower()
        if lowered == b"x-dict-version":
            self._version = int(value)
        elif lowered == b"x-data-source":
            self._is_from_memory = value == b"memory"

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        answer = Answer(self._parser.get_status_code(), self._version, self._is_from_memory, self._body)
        if not self._parser.should_keep_alive():
            self.close()
        self._begin()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(answer)

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._version = None
        self._is_from_memory = False
        self._body = b""

    def _fail(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
