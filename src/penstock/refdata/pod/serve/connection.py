"""One client of a pod: HTTP/1.1 over httptools, answered from memory at once, or when that takes longer, in order."""

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

HEAD_SECONDS = 10.0
IDLE_SECONDS = 75.0
PARTING_SECONDS = 1.0  # at the end: until then a request of a kept connection may be on its way
STUCK_SECONDS = 30.0
_WAITING_LIMIT = 128  # requests that came before those ahead of them were answered


class StreamedBody(NamedTuple):
    """An answer that is sent piece by piece; its rest is what comes before the first."""

    rest: bytes
    pieces: AsyncGenerator[bytes, None]
    is_endless: bool = False


class ResponseHead(NamedTuple):
    """What headers mean that nobody has to read again."""

    authorization: bytes | None
    least: int  # the version that is asked for


class ServerContext(Protocol):
    """What the connections of a process share."""

    front: Router
    now: float  # monotonic, as of a moment ago
    hits: int
    heads: dict[bytes, ResponseHead]  # headers that were read before
    ends_at: float  # from then on nobody connects any more

    def joined(self, connection: "PodConnection") -> bool:
        """Whether there is room for one more."""

    def left(self, connection: "PodConnection") -> None: ...

    def count(self, status: int) -> None: ...

    def learn(self, request: PodRequest) -> None:
        """Remember what the headers of *request* mean."""

    async def settle(self, request: PodRequest) -> HandlerResponse | StreamedBody:
        """Do what an answer needs, and give it; PenstockError when there is none."""


class PodConnection(asyncio.Protocol):
    """Reads requests, writes answers in their order, and bounds what a client can make it hold."""

    def __init__(self, house: ServerContext) -> None:
        self._house = house
        self._front = house.front
        self._waiting: deque[PodRequest] = deque()
        self._task: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._refusal: PenstockError | None = None  # the last thing it will be told
        self._is_closing = self._has_ended = self._is_feeding = False
        self._since = monotonic()  # since when it is as it is
        self._unsent = 0
        self._reader = RequestReader(self._take)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment] # a stream's
        if not self._house.joined(self):
            self._refuse(Transient("TOO_MANY_CONNECTIONS", "this pod has no room for one more", hint="try again"))

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._is_closing = True
        self._may_write.set()
        if self._task is not None:
            self._task.cancel()
        self._house.left(self)

    def data_received(self, data: bytes) -> None:
        is_between = self._reader.is_between
        is_free = self._task is None and not self._waiting and not self._is_closing
        if is_between and is_free and self._answer_straight(data):
            return
        if self._refusal is not None or self._is_closing:
            return  # it is read to its end, so that the refusal is not lost on the way
        if is_between:
            self._since = monotonic()
        try:
            self._reader.feed(data)
        except PenstockError as error:
            self._refuse(error)

    def _answer_straight(self, data: bytes) -> bool:
        """The straight way: an item of a version that is held, asked for under a head that was read before.

        Clients that stay send the same headers again and again. What the parser once found a whole head without a body
        need not be read a second time: only the first line is, and only if it is a plain one.
        """
        house, front = self._house, self._front
        end = data.find(b"\r\n")
        head = house.heads.get(data[end:])
        if head is None or data[:4] != b"GET " or data[end - 9 : end] != b" HTTP/1.1":
            return False
        if front.cells[0] != front.sequence:
            front.renew()
        path, _, key = data[4 : end - 9].rpartition(b"/")
        entry = front.entries.get(path)
        grant = front.grants.get(head.authorization)
        if (
            entry is None
            or grant is None
            or grant.until < front.now
            or head.least > entry.version
            or (grant.tenant != entry.tenant and not grant.is_operator)
            or not (key.isalnum() or key.translate(None, b"-_.~").isalnum())
            or len(key) > layout.LONGEST
            or (value := front.view.txn.get(entry.prefix + key)) is None
        ):
            return False
        self._transport.write(entry.opening + value)
        house.hits += 1
        self._since = house.now
        if front.is_draining:
            self._close()
        return True

    def eof_received(self) -> bool:
        """Whoever asked and then hung up its side still gets its answers, those that have an end."""
        self._has_ended = True
        return not self._is_feeding and (self._task is not None or bool(self._waiting))

    def pause_writing(self) -> None:
        self._may_write.clear()
        self._transport.pause_reading()
        self._since = monotonic()

    def resume_writing(self) -> None:
        self._may_write.set()
        self._go_on()
        if self._may_write.is_set() and len(self._waiting) <= _WAITING_LIMIT:
            self._transport.resume_reading()

    def _take(self, request: PodRequest) -> None:
        """A request: it is answered when those before it are."""
        self._waiting.append(request)
        if len(self._waiting) > _WAITING_LIMIT:
            self._transport.pause_reading()
        self._go_on()

    def sweep(self, now: float) -> None:
        """Let go of whoever is too slow, or says nothing any more."""
        unsent = self._transport.get_write_buffer_size()
        if unsent < self._unsent:
            self._since = now  # slowly, but it reads
        self._unsent = unsent
        for_long = now - self._since
        if self._is_closing or self._refusal is not None or not self._may_write.is_set():
            if for_long > STUCK_SECONDS:
                self._transport.abort()
        elif self._task is None and not self._reader.is_between and for_long > HEAD_SECONDS:
            self._refuse(RequestTimeout("REQUEST_TIMEOUT", f"a request is sent within {HEAD_SECONDS:g} s"))
        elif self._task is None and (for_long > IDLE_SECONDS or self._has_parted(now)):
            self._close()

    def _has_parted(self, now: float) -> bool:
        return now - max(self._since, self._house.ends_at) > PARTING_SECONDS

    def abort(self) -> None:
        self._transport.abort()

    def _go_on(self) -> None:
        while self._task is None and not self._is_closing and self._may_write.is_set():
            if not self._waiting:
                if self._refusal is not None:
                    self._tell_refusal()
                elif self._has_ended:
                    self._close()
                return
            request = self._waiting.popleft()
            self._serve(request)
            if len(self._waiting) == _WAITING_LIMIT and self._may_write.is_set():
                self._transport.resume_reading()

    def _serve(self, request: PodRequest) -> None:
        try:
            found = self._front.answer(request)
        except PenstockError as error:
            self._send(handlers.problem(error, request), request)
        except Exception:  # noqa: BLE001 - the edge
            self._send(handlers.bug(request), request)
        else:
            if isinstance(found, HandlerResponse):
                self._send(found, request)
                if request.head and found.status == 200:
                    self._house.learn(request)
            else:
                self._task = asyncio.create_task(self._settle(request), name="request")

    async def _settle(self, request: PodRequest) -> None:
        try:
            answer = await self._house.settle(request)
            if isinstance(answer, StreamedBody):
                await self._stream(answer, request)
            else:
                self._send(answer, request)
        except PenstockError as error:
            self._send(handlers.problem(error, request), request)
        except Exception:  # noqa: BLE001 - the edge
            self._send(handlers.bug(request), request)
        finally:
            self._task, self._since = None, monotonic()
        self._go_on()

    def _send(self, answer: HandlerResponse, request: PodRequest) -> None:
        keeps = request.keeps_alive and not self._front.is_draining
        rest = layout.head_of(answer.rest) if request.is_head else answer.rest
        self._transport.write(self._opening(answer.status, request, keeps) + rest)
        self._house.count(answer.status)
        if not keeps:
            self._close()

    async def _stream(self, answer: StreamedBody, request: PodRequest) -> None:
        """In chunks; to a client of old until the connection is closed."""
        framing = b"" if request.is_old else b"Transfer-Encoding: chunked\r\n"
        keeps = request.keeps_alive and not request.is_old
        opening = self._opening(200, request, keeps)
        self._transport.write(opening + answer.rest + framing + b"\r\n")
        self._house.count(200)
        self._is_feeding = answer.is_endless
        try:
            if not request.is_head and not await self._send_pieces(answer.pieces, is_old=request.is_old):
                return
        except Exception as error:  # noqa: BLE001 - half an answer is out: only a broken connection can tell the client
            structlog.get_logger().warning("stream_broken", error=str(error))
            self._transport.abort()
            return
        finally:
            self._is_feeding = False
            await answer.pieces.aclose()
        if not keeps or self._front.is_draining:
            self._close()

    async def _send_pieces(self, pieces: AsyncGenerator[bytes, None], *, is_old: bool) -> bool:
        """Whether all of them were sent: who hangs up gets no more."""
        async for piece in pieces:
            await self._may_write.wait()
            if self._is_closing:
                return False
            self._transport.write(piece if is_old else b"%x\r\n%b\r\n" % (len(piece), piece))
        if not is_old:
            self._transport.write(b"0\r\n\r\n")
        return True

    def _opening(self, status: int, request: PodRequest, keeps: bool) -> bytes:
        opening = responses.line(status) + self._front.date
        if not keeps:
            return opening + b"Connection: close\r\n"
        return opening + b"Connection: keep-alive\r\n" if request.is_old else opening

    def _refuse(self, error: PenstockError) -> None:
        """The last answer of this connection, after those that are due before."""
        if self._refusal is None:
            self._refusal, self._since = error, monotonic()
            self._go_on()

    def _tell_refusal(self) -> None:
        error = self._refusal
        if error is not None and not self._transport.is_closing():
            rest = responses.problem(error, None)
            opening = responses.line(error.status) + self._front.date + b"Connection: close\r\n"
            self._transport.write(opening + rest)
            self._house.count(error.status)
            self._is_closing = True
            # Not closed at once: what the client still sends would be answered by a reset, and the refusal lost.
            self._transport.write_eof()

    def _close(self) -> None:
        self._is_closing, self._since = True, monotonic()
        self._transport.close()
