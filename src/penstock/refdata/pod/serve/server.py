"""A serving process of a pod: takes connections, keeps the time for all of them, and drains at the end."""

import asyncio
import socket
from contextlib import suppress
from math import inf
from time import monotonic

from penstock.kernel.errors import Conflict, Invalid, NotFound, PenstockError, Transient
from penstock.kernel.http.auth import Authenticator
from penstock.kernel.http.sockets import accept_queued
from penstock.kernel.tasks.wait import wait_event
from penstock.refdata.model import VersionStamp
from penstock.refdata.pod.ipc import (
    AuditRequest,
    DocumentReply,
    FindRequest,
    ItemsReply,
    LoadedReply,
    LoaderConnection,
    ReachRequest,
    RefusedReply,
    ShowRequest,
)
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.memory.shared_counters import PodCounter
from penstock.refdata.pod.serve import handlers, responses
from penstock.refdata.pod.serve.connection import PodConnection, ResponseHead, StreamedBody
from penstock.refdata.pod.serve.handlers import HandlerResponse, StreamResponse
from penstock.refdata.pod.serve.request import PodRequest, address_of, keys_of
from penstock.refdata.pod.serve.router import Authenticate, Found, Router
from penstock.refdata.pod.serve.streams import ActiveStreams

TICK = 0.025
_SWEEP_EVERY = 1.0
_MOST_CONNECTIONS = 20_000
_TRIES = 5
_HEADS = 1_000
_AUDITED_WITHIN = 600.0
_STATUS_COUNTS = {200: PodCounter.OK, 304: PodCounter.NOT_MODIFIED, 404: PodCounter.NOT_FOUND, 409: PodCounter.CONFLICT}


class PodServer:
    """What the connections of one process share."""

    def __init__(
        self, front: Router, link: LoaderConnection, authenticator: Authenticator, process: int, patience: float
    ) -> None:
        self.front = front
        self.now = monotonic()
        self.hits = 0
        self.heads: dict[bytes, ResponseHead] = {}
        self.ends_at = inf
        self._link = link
        self._authenticator = authenticator
        self._patience = patience
        self._counters = front.state.counters(process)
        self._counters[PodCounter.CONNECTIONS] = 0
        self._connections: set[PodConnection] = set()
        self._changed = asyncio.Event()
        self._seen = front.sequence
        self._streams = ActiveStreams(front, lambda: self._changed)
        self._tick()

    async def serve(self, listening: socket.socket, stopping: asyncio.Event, drain: float) -> None:
        """Answer until *stopping*, then finish what is under way, for *drain* seconds at most."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: PodConnection(self), sock=listening, backlog=1024)
        keeping_time = asyncio.create_task(self._keep_time(), name="time")
        await stopping.wait()
        self.front.drain()
        waiting = list(accept_queued(listening))
        server.close()
        for one in waiting:  # whoever had connected is taken in
            await loop.connect_accepted_socket(lambda: PodConnection(self), one)
        self.ends_at, self._streams.is_ending = monotonic(), True
        self._tick()
        with suppress(TimeoutError):
            async with asyncio.timeout(drain):
                while self._connections:
                    await wait_event(self._changed, TICK)
        for connection in list(self._connections):
            connection.abort()
        keeping_time.cancel()

    def joined(self, connection: PodConnection) -> bool:
        self._connections.add(connection)
        self._counters[PodCounter.CONNECTIONS] = len(self._connections)
        return len(self._connections) <= _MOST_CONNECTIONS

    def left(self, connection: PodConnection) -> None:
        self._connections.discard(connection)
        self._counters[PodCounter.CONNECTIONS] = len(self._connections)

    def count(self, status: int) -> None:
        other = PodCounter.CLIENT_ERROR if status < 500 else PodCounter.SERVER_ERROR
        self._counters[_STATUS_COUNTS.get(status, other)] += 1

    def learn(self, request: PodRequest) -> None:
        if len(self.heads) >= _HEADS:
            self.heads.clear()
        least = request.headers.get(b"x-min-version", b"0")
        self.heads[request.head] = ResponseHead(request.headers.get(b"authorization"), int(least))

    async def settle(self, request: PodRequest) -> HandlerResponse | StreamedBody:
        """Ask whom it takes, until there is an answer."""
        for _ in range(_TRIES):
            found = self.front.answer(request)
            if isinstance(found, HandlerResponse):
                return found
            answer = await self._ask(found, request)
            if answer is not None:
                return answer
        raise Transient("DICTIONARY_CHANGING", "the dictionary changes faster than it can be read", hint="try again")

    async def _ask(self, found: Found, request: PodRequest) -> HandlerResponse | StreamedBody | None:
        """The answer, or None when it is to be looked for once more."""
        if isinstance(found, Authenticate):
            principal = await self._authenticator.authenticate(found.authorization)
            self.front.grant(request.headers.get(b"authorization"), principal)
            return None
        if isinstance(found, StreamResponse):
            pieces = self._streams.begin(found)
            return StreamedBody(await anext(pieces), pieces, is_endless=found.media_type == responses.EVENTS)
        if isinstance(found, ReachRequest):
            self._counters[PodCounter.BARRIER_WAITS] += 1
        assert isinstance(found, AuditRequest | FindRequest | ReachRequest | ShowRequest)  # noqa: S101 - what is left
        try:
            answer = await self._link.ask(found, _AUDITED_WITHIN if isinstance(found, AuditRequest) else self._patience)
        except Transient as error:
            answer = RefusedReply(error.status, error.code, error.message, error.hint)
        if isinstance(answer, LoadedReply):
            self.front.renew()
            return None
        if isinstance(answer, DocumentReply):
            return HandlerResponse(answer.status, responses.document(answer.media_type, answer.body))
        if isinstance(answer, ItemsReply):
            return _from_primary(answer, request)
        return self._refused(answer, found, request)

    def _refused(
        self, answer: RefusedReply, asked: AuditRequest | FindRequest | ReachRequest | ShowRequest, request: PodRequest
    ) -> HandlerResponse:
        """R21: also a refusal tells the version, if it is that of a dictionary."""
        kinds: dict[int, type[PenstockError]] = {kind.status: kind for kind in (NotFound, Conflict, Invalid, Transient)}
        error = kinds.get(answer.status, PenstockError)(answer.code, answer.message, hint=answer.hint)
        if not isinstance(asked, ReachRequest):
            return HandlerResponse(error.status, responses.problem(error, request.id))
        entry = self.front.entry(address_of(request.url).target)
        if answer.version is not None:
            told = responses.version_headers(VersionStamp(answer.version, 0), responses.FALLBACK)
        else:
            told = responses.version_headers(entry.shelf.mark if entry else VersionStamp(0, 0), responses.MEMORY)
        return handlers.refusal(error, told, request)

    async def _keep_time(self) -> None:
        swept_at = monotonic()
        while True:
            await asyncio.sleep(TICK)
            self._tick()
            if monotonic() - swept_at > _SWEEP_EVERY:
                swept_at = monotonic()
                for connection in list(self._connections):
                    connection.sweep(swept_at)

    def _tick(self) -> None:
        front, self.now = self.front, monotonic()
        front.tick()
        self._counters[PodCounter.OK] += self.hits
        self._counters[PodCounter.BEATS] += 1
        self.hits = 0
        if front.sequence != self._seen or front.is_draining:
            self._seen = front.sequence
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()


def _from_primary(found: ItemsReply, request: PodRequest) -> HandlerResponse:
    """R21: what the primary said, under the version it said it for."""
    address, version = address_of(request.url), found.mark.version
    head = responses.data_head(found.mark, responses.FALLBACK)
    if address.what == "version":
        return handlers.version_answer(address.target, version, head)
    if address.what == "items":
        bodies = {key.encode(): value.encode() for key, value in found.items.items()}
        return handlers.items_answer(version, head, bodies, keys_of(address), request)
    body = found.items.get(address.key.decode())
    response = None if body is None else layout.ready_made(body.encode())
    try:
        return handlers.item_answer(version, head, address.key, response, request)
    except NotFound as error:
        return handlers.refusal(error, responses.version_headers(found.mark, responses.FALLBACK), request)
