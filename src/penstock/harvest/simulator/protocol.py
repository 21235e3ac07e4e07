"""One client of the local source: HTTP/1.1 over httptools, answered in order."""

import asyncio
from collections import deque
from collections.abc import Iterator

import httptools

from penstock.harvest.simulator.message import BadRequest, Reply, Request, refusal
from penstock.harvest.simulator.routes import Routes

_BODY_LIMIT = 1_000_000


class Connection(asyncio.Protocol):
    """Reads requests and answers them at once, or as late as a fault has it; what came behind waits its turn."""

    def __init__(self, routes: Routes, connections: "set[Connection]") -> None:
        self._routes = routes
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._url = self._body = b""
        self._waiting: deque[Request] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._pieces: Iterator[bytes] | None = None  # what is still to come of the answer that is being sent
        self._keeps_alive = True
        self._is_held = self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment] # a stream's
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._connections.discard(self)
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            answer = refusal(BadRequest("BAD_REQUEST", f"not HTTP as it is spoken here: {error}"))
            self._transport.write(answer.head(keeps_alive=False) + answer.body)
            self._transport.close()

    def pause_writing(self) -> None:
        self._is_full = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_full = False
        self._transport.resume_reading()
        self._send_pieces()
        self._go_on()

    def abort(self) -> None:
        self._transport.abort()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > _BODY_LIMIT:
            raise ValueError(f"a body has at most {_BODY_LIMIT} bytes")

    def on_message_complete(self) -> None:
        parser = self._parser
        path, _, query = self._url.partition(b"?")
        self._waiting.append(Request(parser.get_method(), path, query, self._body, parser.should_keep_alive()))
        self._url = self._body = b""
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._is_free() and not self._transport.is_closing():
            request = self._waiting.popleft()
            reply = self._routes.answer(request)
            if reply.delay == 0:
                self._send(request, reply)
                continue
            self._is_held = True
            if reply.delay is not None:
                self._timer = asyncio.get_running_loop().call_later(reply.delay, self._send_late, request, reply)

    def _is_free(self) -> bool:
        return not self._is_held and not self._is_full and self._pieces is None

    def _send_late(self, request: Request, reply: Reply) -> None:
        self._is_held = False
        self._send(request, reply)
        self._go_on()

    def _send(self, request: Request, reply: Reply) -> None:
        answer, self._keeps_alive = reply.answer, request.keeps_alive and not reply.is_cut
        body = answer.body[: len(answer.body) // 2] if reply.is_cut else answer.body
        self._transport.write(answer.head(request.keeps_alive) + body)
        self._pieces = answer.pieces()
        self._send_pieces()

    def _send_pieces(self) -> None:
        """Go on with an answer, as fast as it is read."""
        for piece in self._pieces or ():
            self._transport.write(piece)
            if self._is_full:
                return
        self._pieces = None
        if not self._keeps_alive:
            self._transport.close()
