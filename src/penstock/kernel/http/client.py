"""Base of the Python clients of the API: requests that return JSON documents, and the errors of the server."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp
import orjson
from yarl import URL

from penstock.kernel.errors import (
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    PenstockError,
    TooLarge,
    Transient,
    Unauthorized,
)
from penstock.kernel.http.connection_error import describe_connection_error

_KINDS: Sequence[type[PenstockError]] = (Invalid, TooLarge, Unauthorized, Forbidden, NotFound, Conflict, Transient)
_BY_STATUS = {kind.status: kind for kind in _KINDS}
_PROBLEM = ("type", "title", "status", "code", "detail", "hint")
_NOT_PENSTOCK = (400, 404, 405, 501)  # an error of a proxy in front of Penstock has another status
Json = dict[str, Any]
_PIECE = 1 << 16


class HttpResponse(NamedTuple):
    """A response of the server with its whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Download(NamedTuple):
    """A response body that is read piece by piece."""

    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]


class ServerEvent(NamedTuple):
    """A server-sent event: its id, its name and its document."""

    id: str
    name: str
    data: Json


class ApiClient:
    """The API of a server under *prefix*.

    Error responses are raised as PenstockError; an unreachable server is Transient.
    """

    def __init__(self, url: str, prefix: str, *, token: str | None = None, timeout: float = 30) -> None:
        self._server = url.rstrip("/")
        self._base = self._server + prefix
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def _get(self, path: str, params: Mapping[str, Any] | None = None) -> Json:
        query = {name: str(value) for name, value in (params or {}).items() if value is not None}
        return await self._call("GET", path, params=query)

    async def _post(self, path: str, **body: Any) -> Json:
        return await self._call("POST", path, {name: value for name, value in body.items() if value is not None})

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        wait: float = 0,
    ) -> Json:
        response = await self._send(method, path, body, params=params, wait=wait)
        return _parse_document(response.body)

    async def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        wait: float = 0,
    ) -> "HttpResponse":
        """Return the response of the server unchanged; raise an error response as a PenstockError."""
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
        all_headers = {"content-type": "application/json", **(headers or {})}
        # A long poll may take as long as requested.
        limit = aiohttp.ClientTimeout(total=self._timeout + wait)
        with self._report_outage():
            async with self._open_session.request(
                method, self._make_address(path, params), data=data, headers=all_headers, timeout=limit
            ) as response:
                result = HttpResponse(response.status, response.headers, await response.read())
        if result.status >= 400:
            raise parse_error(result.status, result.body)
        return result

    @asynccontextmanager
    async def _download(self, path: str, params: Mapping[str, str] | None = None) -> AsyncIterator[Download]:
        """Open the body of a response as a stream; Transient if no byte arrives within the timeout.

        An error of the reader, such as a full disk, is not an error of the server, so only reads are translated.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=self._timeout)
        with self._report_outage():
            response = await self._open_session.get(self._make_address(path, params), timeout=limit)
        async with response:
            if response.status >= 400:
                raise parse_error(response.status, await response.read())
            yield Download(response.headers, self._iterate_pieces(response.content))

    async def _iterate_pieces(self, content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
        with self._report_outage():
            async for piece in content.iter_chunked(_PIECE):
                yield piece

    @asynccontextmanager
    async def _stream(
        self, address: URL, *, silent_for: float, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[AsyncIterator[ServerEvent]]:
        """Open a stream of server-sent events; without a line for *silent_for* seconds it is Transient."""
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=silent_for)
        with self._report_outage():
            async with self._open_session.get(address, timeout=limit, headers=headers) as response:
                if response.status >= 400:
                    raise parse_error(response.status, await response.read())
                yield _iterate_events(response.content)

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the client in `async with`")
        return self._session

    def _make_address(self, path: str, params: Mapping[str, str] | None = None) -> URL:
        return URL(self._base + path, encoded=True).update_query(params or {})

    @contextmanager
    def _report_outage(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            message = f"{self._server} does not answer: {self._describe_error(error)}"
            raise Transient("SERVER_DOWN", message, hint="check that the server runs at this address") from error

    def _describe_error(self, error: Exception) -> str:
        """Return why there was no answer, in words that do not depend on the HTTP library."""
        if isinstance(error, TimeoutError):
            return f"time-out after {self._timeout:g} s"
        return describe_connection_error(error) or type(error).__name__


async def _iterate_events(lines: aiohttp.StreamReader) -> AsyncIterator[ServerEvent]:
    event_id = name = ""
    async for line in lines:
        field, _, value = line.strip().partition(b": ")
        if field == b"id":
            event_id = value.decode()
        elif field == b"event":
            name = value.decode()
        elif field == b"data":
            yield ServerEvent(event_id, name, orjson.loads(value))


def _parse_document(body: bytes) -> Json:
    try:
        document: Json = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        message = "the server answered with text that is not JSON, so it is not a Penstock server"
        raise Invalid("NOT_A_PENSTOCK_SERVER", message, hint="check the address") from error
    return document


def parse_error(status: int, body: bytes) -> PenstockError:
    """Return the error that the server reported with *status* and a body of problem+json."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    problem = document if isinstance(document, dict) else {}
    kind = _BY_STATUS.get(status, Transient if status >= 500 else Invalid)
    if "code" not in problem and status in _NOT_PENSTOCK:
        message = f"the server answered {status} without an error code, so it is not a Penstock server"
        return kind("NOT_A_PENSTOCK_SERVER", message, hint="check the address")
    details = {name: value for name, value in problem.items() if name not in _PROBLEM}
    code, detail = (
        str(problem.get("code", f"HTTP_{status}")),
        str(problem.get("detail", f"the server answered {status}")),
    )
    return kind(code, detail, hint=problem.get("hint"), **details)
