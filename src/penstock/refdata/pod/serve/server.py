"""The server of a serving process: accepts connections, checks their timeouts, and drains at the end."""

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
    BarrierRequest,
    DocumentReply,
    DocumentRequest,
    ItemsReply,
    LoadedReply,
    LoaderConnection,
    LoadRequest,
    RefusedReply,
)
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.memory.shared_counters import PodCounter
from penstock.refdata.pod.serve import handlers, responses
from penstock.refdata.pod.serve.connection import ParsedHeaders, PodConnection, StreamedBody
from penstock.refdata.pod.serve.handlers import HandlerResponse, StreamResponse
from penstock.refdata.pod.serve.request import PodRequest, parse_keys, parse_path
from penstock.refdata.pod.serve.router import AuthenticationRequest, Routed, Router
from penstock.refdata.pod.serve.streams import ActiveStreams

TICK = 0.025
_SWEEP_INTERVAL = 1.0
_CONNECTION_LIMIT = 20_000
_TRIES = 5
_PARSED_HEADERS_LIMIT = 1_000
_AUDIT_TIMEOUT = 600.0
_STATUS_COUNTS = {200: PodCounter.OK, 304: PodCounter.NOT_MODIFIED, 404: PodCounter.NOT_FOUND, 409: PodCounter.CONFLICT}


class PodServer:
    """The state that the connections of one process share."""

    def __init__(
        self, router: Router, loader: LoaderConnection, authenticator: Authenticator, process: int, timeout: float
    ) -> None:
        self.router = router
        self.now = monotonic()
        self.hits = 0
        self.parsed_headers: dict[bytes, ParsedHeaders] = {}
        self.drain_started_at = inf
        self._loader = loader
        self._authenticator = authenticator
        self._timeout = timeout
        self._counters = router.counters.get_process_counters(process)
        self._counters[PodCounter.CONNECTIONS] = 0
        self._connections: set[PodConnection] = set()
        self._changed = asyncio.Event()
        self._sequence = router.sequence
        self._streams = ActiveStreams(router, lambda: self._changed)
        self._tick()

    async def serve(self, listening: socket.socket, stopping: asyncio.Event, drain: float) -> None:
        """Serve until *stopping* is set, then finish open requests within *drain* seconds."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: PodConnection(self), sock=listening, backlog=1024)
        ticks = asyncio.create_task(self._tick_forever(), name="ticks")
        await stopping.wait()
        self.router.drain()
        queued = list(accept_queued(listening))
        server.close()
        for sock in queued:  # clients that are connected but not accepted yet
            await loop.connect_accepted_socket(lambda: PodConnection(self), sock)
        self.drain_started_at, self._streams.is_ending = monotonic(), True
        self._tick()
        with suppress(TimeoutError):
            async with asyncio.timeout(drain):
                while self._connections:
                    await wait_event(self._changed, TICK)
        for connection in list(self._connections):
            connection.abort()
        ticks.cancel()

    def add_connection(self, connection: PodConnection) -> bool:
        self._connections.add(connection)
        self._counters[PodCounter.CONNECTIONS] = len(self._connections)
        return len(self._connections) <= _CONNECTION_LIMIT

    def remove_connection(self, connection: PodConnection) -> None:
        self._connections.discard(connection)
        self._counters[PodCounter.CONNECTIONS] = len(self._connections)

    def count_response(self, status: int) -> None:
        other = PodCounter.CLIENT_ERROR if status < 500 else PodCounter.SERVER_ERROR
        self._counters[_STATUS_COUNTS.get(status, other)] += 1

    def remember_headers(self, request: PodRequest) -> None:
        if len(self.parsed_headers) >= _PARSED_HEADERS_LIMIT:
            self.parsed_headers.clear()
        min_version = request.headers.get(b"x-min-version", b"0")
        token = request.headers.get(b"authorization")
        self.parsed_headers[request.header_bytes] = ParsedHeaders(token, int(min_version))

    async def handle(self, request: PodRequest) -> HandlerResponse | StreamedBody:
        """Return the response, after requests to the authenticator and the loader as needed."""
        for _ in range(_TRIES):
            routed = self.router.route(request)
            if isinstance(routed, HandlerResponse):
                return routed
            response = await self._serve_routed(routed, request)
            if response is not None:
                return response
        raise Transient("DICTIONARY_CHANGING", "the dictionary changed during each of several reads", hint="try again")

    async def _serve_routed(self, routed: Routed, request: PodRequest) -> HandlerResponse | StreamedBody | None:
        """Return the response, or None if the request must be routed again."""
        if isinstance(routed, AuthenticationRequest):
            principal = await self._authenticator.authenticate(routed.authorization)
            self.router.grant(request.headers.get(b"authorization"), principal)
            return None
        if isinstance(routed, StreamResponse):
            pieces = self._streams.open(routed)
            return StreamedBody(await anext(pieces), pieces, is_endless=routed.media_type == responses.EVENTS)
        if isinstance(routed, BarrierRequest):
            self._counters[PodCounter.BARRIER_WAITS] += 1
        assert isinstance(routed, AuditRequest | LoadRequest | BarrierRequest | DocumentRequest)  # noqa: S101 - the remaining types
        try:
            timeout = _AUDIT_TIMEOUT if isinstance(routed, AuditRequest) else self._timeout
            reply = await self._loader.request(routed, timeout)
        except Transient as error:
            reply = RefusedReply(error.status, error.code, error.message, error.hint)
        if isinstance(reply, LoadedReply):
            self.router.refresh()
            return None
        if isinstance(reply, DocumentReply):
            return HandlerResponse(reply.status, responses.encode_document(reply.media_type, reply.body))
        if isinstance(reply, ItemsReply):
            return _make_fallback_response(reply, request)
        return self._make_refusal(reply, routed, request)

    def _make_refusal(
        self,
        reply: RefusedReply,
        routed: AuditRequest | LoadRequest | BarrierRequest | DocumentRequest,
        request: PodRequest,
    ) -> HandlerResponse:
        """R21: return the error of the loader, with a version if the request was for a version."""
        kinds: dict[int, type[PenstockError]] = {kind.status: kind for kind in (NotFound, Conflict, Invalid, Transient)}
        error = kinds.get(reply.status, PenstockError)(reply.code, reply.message, hint=reply.hint)
        if not isinstance(routed, BarrierRequest):
            return HandlerResponse(error.status, responses.encode_problem(error, request.id))
        entry = self.router.find_entry(parse_path(request.url).target)
        if reply.version is not None:
            headers = responses.encode_version_headers(VersionStamp(reply.version, 0), responses.FALLBACK)
        else:
            mark = entry.header.mark if entry else VersionStamp(0, 0)
            headers = responses.encode_version_headers(mark, responses.MEMORY)
        return handlers.make_refusal(error, headers, request)

    async def _tick_forever(self) -> None:
        swept_at = monotonic()
        while True:
            await asyncio.sleep(TICK)
            self._tick()
            if monotonic() - swept_at > _SWEEP_INTERVAL:
                swept_at = monotonic()
                for connection in list(self._connections):
                    connection.sweep(swept_at)

    def _tick(self) -> None:
        router, self.now = self.router, monotonic()
        router.tick()
        self._counters[PodCounter.OK] += self.hits
        self._counters[PodCounter.HEARTBEATS] += 1
        self.hits = 0
        if router.sequence != self._sequence or router.is_draining:
            self._sequence = router.sequence
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()


def _make_fallback_response(reply: ItemsReply, request: PodRequest) -> HandlerResponse:
    """R21: return the items of the primary under their version."""
    address, version = parse_path(request.url), reply.mark.version
    headers = responses.encode_data_headers(reply.mark, responses.FALLBACK)
    if address.resource == "version":
        return handlers.make_version_response(address.target, version, headers)
    if address.resource == "items":
        payloads = {key.encode(): value.encode() for key, value in reply.items.items()}
        return handlers.make_items_response(version, headers, payloads, parse_keys(address), request)
    payload = reply.items.get(address.key.decode())
    response = None if payload is None else layout.encode_response(payload.encode())
    try:
        return handlers.make_item_response(version, headers, address.key, response, request)
    except NotFound as error:
        return handlers.make_refusal(error, responses.encode_version_headers(reply.mark, responses.FALLBACK), request)
