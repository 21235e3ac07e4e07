"""R17, R18, R21, R25: the routing of requests: answered from memory, or passed to the authenticator or the loader."""

import time
from collections.abc import Collection
from email.utils import formatdate
from math import inf
from typing import NamedTuple

from penstock.kernel.errors import PenstockError
from penstock.kernel.http.auth import Principal
from penstock.kernel.http.headers import refuse_foreign_page
from penstock.refdata.config import TenantSection
from penstock.refdata.model import DictionaryKey
from penstock.refdata.pod.ipc import AuditRequest, BarrierRequest, DocumentRequest, LoadRequest
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.memory.layout import DictionaryHeader
from penstock.refdata.pod.memory.reader import MemoryView
from penstock.refdata.pod.memory.shared_counters import PodCounters
from penstock.refdata.pod.serve import handlers, responses
from penstock.refdata.pod.serve.handlers import HandlerResponse, ServedDictionary, StreamResponse
from penstock.refdata.pod.serve.request import (
    MalformedRequest,
    MethodNotAllowed,
    PodRequest,
    RequestPath,
    parse_keys,
    parse_path,
    parse_version,
)

GRANT_SECONDS = 1.0  # time until a token is verified again
_GRANT_LIMIT = 2_000  # tokens may be long
_READS = (b"GET", b"HEAD")


class AuthenticationRequest(NamedTuple):
    """A token that is not verified, or not recently."""

    authorization: str | None


class AccessGrant(NamedTuple):
    """The verified owner of a token, until it must be verified again. The operator may act for every tenant."""

    until: float
    tenant: object
    is_operator: bool
    principal: Principal


Routed = (
    HandlerResponse
    | AuthenticationRequest
    | AuditRequest
    | LoadRequest
    | BarrierRequest
    | DocumentRequest
    | StreamResponse
)


class Router:
    """The dictionaries of the pod as one serving process serves them."""

    def __init__(
        self,
        view: MemoryView,
        counters: PodCounters,
        tenants: TenantSection,
        local_names: Collection[str] | None,
        stale_after: float,
    ) -> None:
        self.view = view
        self.counters = counters
        self.cells = counters.cells
        self.sequence = -1
        self.entries: dict[bytes, ServedDictionary] = {}  # by the path of the items
        self.grants: dict[bytes | None, AccessGrant] = {}
        self.now = 0.0
        self.date = b""
        self.is_draining = False
        self._local_names = local_names
        self._tenants = tenants
        self._stale_after = stale_after
        self._age = 0.0
        self._by_target: dict[DictionaryKey, ServedDictionary] = {}
        self.tick()

    def tick(self) -> None:
        """Update the values that change without a request: the time, the age of the data, the state of the pod."""
        is_new_second, self.now = int(self.now) != int(time.time()), time.time()
        age, self._age = self._age, self.counters.measure_primary_unseen(self._stale_after)
        if is_new_second:
            self.date = b"Date: %b\r\n" % formatdate(self.now, usegmt=True).encode()
        if is_new_second or bool(age) != bool(self._age):
            self._clear_entries()  # they contain the date and the age
        if self.counters.is_draining and not self.is_draining:
            self.drain()
        if self.cells[0] != self.sequence:  # also without requests: an old view prevents freeing of memory
            self.refresh()

    def drain(self) -> None:
        """Send `Connection: close` with every response from now on."""
        self.is_draining = True
        self._clear_entries()

    def refresh(self) -> None:
        """Read the current state of the memory from now on."""
        self.sequence = self.cells[0]
        self.view.refresh()
        self._clear_entries()

    def grant(self, authorization: bytes | None, principal: Principal) -> None:
        """Store the owner of a token until it must be verified again."""
        if len(self.grants) >= _GRANT_LIMIT:
            self.grants.clear()
        tenant = self._tenants.read_tenant(principal, None)
        end = float(principal.claims.get("exp", inf))
        self.grants[authorization] = AccessGrant(
            max(min(self.now + GRANT_SECONDS, end), self.now), tenant, principal.is_operator, principal
        )

    def route(self, request: PodRequest) -> Routed:
        """Return the response, or the request that must be served first; errors are PenstockError."""
        self._check_request(request)
        if request.method not in _READS:
            method = request.method.decode("latin-1")
            raise MethodNotAllowed(
                "METHOD_NOT_ALLOWED", f"{method} is not supported", hint="use GET or HEAD; writes go to the command API"
            )
        if not request.url.startswith(b"/v1/"):
            return DocumentRequest(request.url.partition(b"?")[0].decode("latin-1"))
        address = parse_path(request.url)
        grant = self.grants.get(request.headers.get(b"authorization"))
        if grant is None or grant.until < self.now:
            token = request.headers.get(b"authorization")
            return AuthenticationRequest(None if token is None else token.decode("latin-1"))
        requested = request.headers.get(b"x-tenant-id")
        tenant = self._tenants.read_tenant(grant.principal, None if requested is None else requested.decode("latin-1"))
        grant.principal.require_tenant(address.target.tenant_id, claimed=tenant)
        if self.cells[0] != self.sequence:
            self.refresh()
        entry = self.find_entry(address.target)
        return LoadRequest(*address.target) if entry is None else self._route_read(entry, address, request)

    def _route_read(self, entry: ServedDictionary, address: RequestPath, request: PodRequest) -> Routed:
        try:
            min_version = parse_version(request.headers.get(b"x-min-version", b"0"))
        except PenstockError as error:
            return handlers.make_refusal(
                error, responses.encode_version_headers(entry.header.mark, responses.MEMORY, entry.age), request
            )
        if address.resource == "audit":
            return AuditRequest(*address.target)
        if entry.version < min_version:
            return _make_barrier_request(address, min_version)
        return handlers.read_dictionary(self.view, entry, address, request)

    def find_entry(self, target: DictionaryKey) -> ServedDictionary | None:
        """Return a dictionary as it is served now; None if it is not in memory."""
        entry = self._by_target.get(target)
        if entry is not None:
            return entry
        header = self.view.read_header(target)
        if header is None:
            return None
        age = self.measure_data_age(header)
        prefix = layout.make_items_prefix(header.generation) + layout.SHORT
        headers = responses.encode_data_headers(header.mark, responses.MEMORY, age)
        start = (
            responses.get_status_line(200)
            + self.date
            + (b"Connection: close\r\n" if self.is_draining else b"")
            + headers
        )
        entry = ServedDictionary(target, target.tenant_id, header, header.version, age, prefix, headers, start)
        self._by_target[target] = entry
        self.entries[b"/v1/tenants/%b/dictionaries/%b/items" % (target[0].encode(), target[1].encode())] = entry
        return entry

    def measure_data_age(self, header: DictionaryHeader) -> float:
        """R23: return the age of the data in seconds; 0 if it equals the data of the primary."""
        stale = time.monotonic() - header.stale_since if header.stale_since else 0.0
        return max(self._age, stale)

    def _clear_entries(self) -> None:
        self.entries.clear()
        self._by_target.clear()

    def _check_request(self, request: PodRequest) -> None:
        """Check the host of a request, and reject requests of foreign web pages."""
        host = request.headers.get(b"host")
        if host is None and not request.is_http_1_0:
            raise MalformedRequest("HOST_MISSING", "the HTTP/1.1 request has no header Host")
        if self._local_names is None:
            return
        refusal = refuse_foreign_page(
            {name: value.decode("latin-1") for name, value in request.headers.items()}, self._local_names
        )
        if refusal is not None:
            raise refusal


def _make_barrier_request(address: RequestPath, version: int) -> BarrierRequest:
    if address.resource == "item":
        return BarrierRequest(*address.target, version, "items", [address.key.decode()])
    if address.resource == "items":
        return BarrierRequest(*address.target, version, "items", [key.decode() for key in parse_keys(address)])
    return BarrierRequest(*address.target, version, "version" if address.resource == "version" else "all")
