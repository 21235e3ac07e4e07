"""The connection of a client: HTTP/1.1 over httptools, with responses in the order of the requests."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from time import monotonic
from typing import NamedTuple, Protocol

import structlog

from penstock.kernel.errors import PenstockError, Transient
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.serve import handlers, responses
from penstock.refdata.pod.serve.handlers import HandlerResponse
from penstock.refdata.pod.serve.http_parser import RequestReader
from penstock.refdata.pod.serve.request import PodRequest, RequestTimeout
from penstock.refdata.pod.serve.router import Router

HEADERS_TIMEOUT = 10.0
IDLE_TIMEOUT = 75.0
DRAIN_IDLE_TIMEOUT = 1.0  # in a drain, a request on an idle connection may still arrive for so long
STALLED_TIMEOUT = 30.0
_WAITING_LIMIT = 128  # pipelined requests that wait for the responses to earlier ones


class StreamedBody(NamedTuple):
    """A response that is sent in pieces; *rest* contains the headers after the date."""

    rest: bytes
    pieces: AsyncGenerator[bytes, None]
    is_endless: bool = False


class ParsedHeaders(NamedTuple):
    """The meaning of a block of headers that was parsed before."""

    authorization: bytes | None
    min_version: int


class ServerContext(Protocol):
    """The state that the connections of a process share."""

    router: Router
    now: float  # monotonic, updated with every tick
    hits: int
    parsed_headers: dict[bytes, ParsedHeaders]  # by the bytes of the headers
    drain_started_at: float  # monotonic; infinity before the drain

    def add_connection(self, connection: "PodConnection") -> bool:
        """Register a connection; return whether the limit allows it."""

    def remove_connection(self, connection: "PodConnection") -> None: ...

    def count_response(self, status: int) -> None: ...

    def remember_headers(self, request: PodRequest) -> None:
        """Store the meaning of the headers of *request*."""

    async def handle(self, request: PodRequest) -> HandlerResponse | StreamedBody:
        """Return the response to *request*, which may need the loader; errors are PenstockError."""


class PodConnection(asyncio.Protocol):
    """Reads requests, writes responses in their order, and bounds the memory that a client can use."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server
        self._router = server.router
        self._waiting: deque[PodRequest] = deque()
        self._task: asyncio.Task[None] | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._refusal: PenstockError | None = None  # the last response of this connection
        self._is_closing = self._has_ended = self._is_streaming = False
        self._since = monotonic()  # time of the last activity
        self._unsent = 0
        self._reader = RequestReader(self._enqueue)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment] # a stream's
        if not self._server.add_connection(self):
            self._refuse(
                Transient("TOO_MANY_CONNECTIONS", "this process of the pod has too many connections", hint="try again")
            )

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._is_closing = True
        self._can_write.set()
        if self._task is not None:
            self._task.cancel()
        self._server.remove_connection(self)

    def data_received(self, data: bytes) -> None:
        is_between = self._reader.is_between
        is_free = self._task is None and not self._waiting and not self._is_closing
        if is_between and is_free and self._answer_fast(data):
            return
        if self._refusal is not None or self._is_closing:
            return  # read to the end, because a reset would discard the refusal
        if is_between:
            self._since = monotonic()
        try:
            self._reader.parse_data(data)
        except PenstockError as error:
            self._refuse(error)

    def _answer_fast(self, data: bytes) -> bool:
        """Answer a request for an item in memory without the parser, if its headers were parsed before.

        Clients send the same headers with every request. Once the parser has accepted them as complete headers without
        a body, only the first line is parsed, and only if it is a plain GET.
        """
        server, router = self._server, self._router
        end = data.find(b"\r\n")
        headers = server.parsed_headers.get(data[end:])
        if headers is None or data[:4] != b"GET " or data[end - 9 : end] != b" HTTP/1.1":
            return False
        if router.cells[0] != router.sequence:
            router.refresh()
        path, _, key = data[4 : end - 9].rpartition(b"/")
        entry = router.entries.get(path)
        grant = router.grants.get(headers.authorization)
        if (
            entry is None
            or grant is None
            or grant.until < router.now
            or headers.min_version > entry.version
            or (grant.tenant != entry.tenant and not grant.is_operator)
            or not (key.isalnum() or key.translate(None, b"-_.~").isalnum())
            or len(key) > layout.LONGEST_PLAIN_KEY
            or (value := router.view.txn.get(entry.prefix + key)) is None
        ):
            return False
        self._transport.write(entry.response_start + value)
        server.hits += 1
        self._since = server.now
        if router.is_draining:
            self._close()
        return True

    def eof_received(self) -> bool:
        """Return whether to keep the connection open for the responses to earlier requests."""
        self._has_ended = True
        return not self._is_streaming and (self._task is not None or bool(self._waiting))

    def pause_writing(self) -> None:
        self._can_write.clear()
        self._transport.pause_reading()
        self._since = monotonic()

    def resume_writing(self) -> None:
        self._can_write.set()
        self._serve_waiting()
        if self._can_write.is_set() and len(self._waiting) <= _WAITING_LIMIT:
            self._transport.resume_reading()

    def _enqueue(self, request: PodRequest) -> None:
        """Serve *request* after the earlier ones."""
        self._waiting.append(request)
        if len(self._waiting) > _WAITING_LIMIT:
            self._transport.pause_reading()
        self._serve_waiting()

    def sweep(self, now: float) -> None:
        """Close the connection if its client is too slow or idle."""
        unsent = self._transport.get_write_buffer_size()
        if unsent < self._unsent:
            self._since = now  # the client reads, slowly
        self._unsent = unsent
        idle = now - self._since
        if self._is_closing or self._refusal is not None or not self._can_write.is_set():
            if idle > STALLED_TIMEOUT:
                self._transport.abort()
        elif self._task is None and not self._reader.is_between and idle > HEADERS_TIMEOUT:
            self._refuse(RequestTimeout("REQUEST_TIMEOUT", f"the request was not complete after {HEADERS_TIMEOUT:g} s"))
        elif self._task is None and (idle > IDLE_TIMEOUT or self._is_idle_in_drain(now)):
            self._close()

    def _is_idle_in_drain(self, now: float) -> bool:
        return now - max(self._since, self._server.drain_started_at) > DRAIN_IDLE_TIMEOUT

    def abort(self) -> None:
        self._transport.abort()

    def _serve_waiting(self) -> None:
        while self._task is None and not self._is_closing and self._can_write.is_set():
            if not self._waiting:
                if self._refusal is not None:
                    self._send_refusal()
                elif self._has_ended:
                    self._close()
                return
            request = self._waiting.popleft()
            self._serve(request)
            if len(self._waiting) == _WAITING_LIMIT and self._can_write.is_set():
                self._transport.resume_reading()

    def _serve(self, request: PodRequest) -> None:
        try:
            result = self._router.route(request)
        except PenstockError as error:
            self._send(handlers.make_problem(error, request), request)
        except Exception:  # noqa: BLE001 - the edge
            self._send(handlers.make_internal_error(request), request)
        else:
            if isinstance(result, HandlerResponse):
                self._send(result, request)
                if request.header_bytes and result.status == 200:
                    self._server.remember_headers(request)
            else:
                self._task = asyncio.create_task(self._handle(request), name="request")

    async def _handle(self, request: PodRequest) -> None:
        try:
            response = await self._server.handle(request)
            if isinstance(response, StreamedBody):
                await self._stream(response, request)
            else:
                self._send(response, request)
        except PenstockError as error:
            self._send(handlers.make_problem(error, request), request)
        except Exception:  # noqa: BLE001 - the edge
            self._send(handlers.make_internal_error(request), request)
        finally:
            self._task, self._since = None, monotonic()
        self._serve_waiting()

    def _send(self, response: HandlerResponse, request: PodRequest) -> None:
        keeps_alive = request.keeps_alive and not self._router.is_draining
        rest = layout.read_head(response.rest) if request.is_head else response.rest
        self._transport.write(self._make_response_start(response.status, request, keeps_alive) + rest)
        self._server.count_response(response.status)
        if not keeps_alive:
            self._close()

    async def _stream(self, body: StreamedBody, request: PodRequest) -> None:
        """Send a response in chunks; HTTP/1.0 has no chunks, so that the end of the connection ends the response."""
        framing = b"" if request.is_http_1_0 else b"Transfer-Encoding: chunked\r\n"
        keeps_alive = request.keeps_alive and not request.is_http_1_0
        start = self._make_response_start(200, request, keeps_alive)
        self._transport.write(start + body.rest + framing + b"\r\n")
        self._server.count_response(200)
        self._is_streaming = body.is_endless
        try:
            if not request.is_head and not await self._send_pieces(body.pieces, is_chunked=not request.is_http_1_0):
                return
        except Exception as error:  # noqa: BLE001 - part of the response is sent: the client notices only a broken connection
            structlog.get_logger().warning("stream_broken", error=str(error))
            self._transport.abort()
            return
        finally:
            self._is_streaming = False
            await body.pieces.aclose()
        if not keeps_alive or self._router.is_draining:
            self._close()

    async def _send_pieces(self, pieces: AsyncGenerator[bytes, None], *, is_chunked: bool) -> bool:
        """Return whether all pieces were sent before the client closed the connection."""
        async for piece in pieces:
            await self._can_write.wait()
            if self._is_closing:
                return False
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
        if is_chunked:
            self._transport.write(b"0\r\n\r\n")
        return True

    def _make_response_start(self, status: int, request: PodRequest, keeps_alive: bool) -> bytes:
        start = responses.get_status_line(status) + self._router.date
        if not keeps_alive:
            return start + b"Connection: close\r\n"
        return start + b"Connection: keep-alive\r\n" if request.is_http_1_0 else start

    def _refuse(self, error: PenstockError) -> None:
        """Send *error* as the last response of this connection, after the pending ones."""
        if self._refusal is None:
            self._refusal, self._since = error, monotonic()
            self._serve_waiting()

    def _send_refusal(self) -> None:
        error = self._refusal
        if error is not None and not self._transport.is_closing():
            rest = responses.encode_problem(error, None)
            start = responses.get_status_line(error.status) + self._router.date + b"Connection: close\r\n"
            self._transport.write(start + rest)
            self._server.count_response(error.status)
            self._is_closing = True
            # Not closed yet: data that the client still sends would cause a reset, which discards the refusal.
            self._transport.write_eof()

    def _close(self) -> None:
        self._is_closing, self._since = True, monotonic()
        self._transport.close()
