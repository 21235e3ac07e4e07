"""R17, R18, R21, R25: what a serving process answers from memory, and whom it has to ask when it cannot."""

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
from penstock.refdata.pod.ipc import AuditRequest, FindRequest, ReachRequest, ShowRequest
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
    address_of,
    keys_of,
    version_of,
)

GRANT_SECONDS = 1.0  # so long a token is not looked at again
_GRANTS = 2_000  # tokens may be long
_READS = (b"GET", b"HEAD")


class Authenticate(NamedTuple):
    """Nobody looked at this token yet."""

    authorization: str | None


class AccessGrant(NamedTuple):
    """Who a token is, and until when that is not asked again. The operator may act for every tenant."""

    until: float
    tenant: object
    is_operator: bool
    principal: Principal


Found = HandlerResponse | Authenticate | AuditRequest | FindRequest | ReachRequest | ShowRequest | StreamResponse


class Router:
    """The memory of the pod as one serving process shows it."""

    def __init__(
        self,
        view: MemoryView,
        state: PodCounters,
        tenants: TenantSection,
        local_names: Collection[str] | None,
        patience: float,
    ) -> None:
        self.view = view
        self.state = state
        self.cells = state.cells
        self.sequence = -1
        self.entries: dict[bytes, ServedDictionary] = {}  # by the path that leads to its items
        self.grants: dict[bytes | None, AccessGrant] = {}
        self.now = 0.0
        self.date = b""
        self.is_draining = False
        self._local_names = local_names
        self._tenants = tenants
        self._patience = patience
        self._age = 0.0
        self._by_target: dict[DictionaryKey, ServedDictionary] = {}
        self.tick()

    def tick(self) -> None:
        """What need not be looked at for every request: the time, and how long the primary is out of sight."""
        is_new_second, self.now = int(self.now) != int(time.time()), time.time()
        age, self._age = self._age, self.state.unseen_for(self._patience)
        if is_new_second:
            self.date = b"Date: %b\r\n" % formatdate(self.now, usegmt=True).encode()
        if is_new_second or bool(age) != bool(self._age):
            self._forget()  # how their answers begin
        if self.state.is_draining and not self.is_draining:
            self.drain()
        if self.cells[0] != self.sequence:  # also when nobody asks: old pages must not be held for ever
            self.renew()

    def drain(self) -> None:
        """Tell every client from now on to go elsewhere."""
        self.is_draining = True
        self._forget()

    def renew(self) -> None:
        """Move on to what the memory is now."""
        self.sequence = self.cells[0]
        self.view.renew()
        self._forget()

    def grant(self, authorization: bytes | None, principal: Principal) -> None:
        """Remember for a moment who a token is."""
        if len(self.grants) >= _GRANTS:
            self.grants.clear()
        tenant = self._tenants.read_tenant(principal, None)
        end = float(principal.claims.get("exp", inf))
        self.grants[authorization] = AccessGrant(
            max(min(self.now + GRANT_SECONDS, end), self.now), tenant, principal.is_operator, principal
        )

    def answer(self, request: PodRequest) -> Found:
        """The answer, or what has to be done for it; PenstockError when it is none."""
        self._gate(request)
        if request.method not in _READS:
            shown = request.method.decode("latin-1")
            raise MethodNotAllowed("METHOD_NOT_ALLOWED", f"{shown} is not taken here", hint="read with GET or HEAD")
        if not request.url.startswith(b"/v1/"):
            return ShowRequest(request.url.partition(b"?")[0].decode("latin-1"))
        address = address_of(request.url)
        grant = self.grants.get(request.headers.get(b"authorization"))
        if grant is None or grant.until < self.now:
            given = request.headers.get(b"authorization")
            return Authenticate(None if given is None else given.decode("latin-1"))
        named = request.headers.get(b"x-tenant-id")
        whom = self._tenants.read_tenant(grant.principal, None if named is None else named.decode("latin-1"))
        grant.principal.require_tenant(address.target.tenant_id, claimed=whom)
        if self.cells[0] != self.sequence:
            self.renew()
        entry = self.entry(address.target)
        return FindRequest(*address.target) if entry is None else self._of(entry, address, request)

    def _of(self, entry: ServedDictionary, address: RequestPath, request: PodRequest) -> Found:
        try:
            least = version_of(request.headers.get(b"x-min-version", b"0"))
        except PenstockError as error:
            return handlers.refusal(
                error, responses.version_headers(entry.shelf.mark, responses.MEMORY, entry.age), request
            )
        if address.what == "audit":
            return AuditRequest(*address.target)
        if entry.version < least:
            return _reach(address, least)
        return handlers.read(self.view, entry, address, request)

    def entry(self, target: DictionaryKey) -> ServedDictionary | None:
        """A dictionary as it is served now; None when it is not in memory."""
        known = self._by_target.get(target)
        if known is not None:
            return known
        shelf = self.view.shelf(target)
        if shelf is None:
            return None
        age = self.age_of(shelf)
        prefix = layout.items_prefix(shelf.generation) + layout.SHORT
        head = responses.data_head(shelf.mark, responses.MEMORY, age)
        opening = responses.line(200) + self.date + (b"Connection: close\r\n" if self.is_draining else b"") + head
        entry = ServedDictionary(target, target.tenant_id, shelf, shelf.version, age, prefix, head, opening)
        self._by_target[target] = entry
        self.entries[b"/v1/tenants/%b/dictionaries/%b/items" % (target[0].encode(), target[1].encode())] = entry
        return entry

    def age_of(self, shelf: DictionaryHeader) -> float:
        """R23: how old its data may be; 0 while it is as good as the primary's."""
        stale = time.monotonic() - shelf.stale_since if shelf.stale_since else 0.0
        return max(self._age, stale)

    def _forget(self) -> None:
        self.entries.clear()
        self._by_target.clear()

    def _gate(self, request: PodRequest) -> None:
        """What every request must be, whatever it asks for."""
        host = request.headers.get(b"host")
        if host is None and not request.is_old:
            raise MalformedRequest("HOST_MISSING", "an HTTP/1.1 request names its host", hint="send the header Host")
        if self._local_names is None:
            return
        refusal = refuse_foreign_page(
            {name: value.decode("latin-1") for name, value in request.headers.items()}, self._local_names
        )
        if refusal is not None:
            raise refusal


def _reach(address: RequestPath, version: int) -> ReachRequest:
    if address.what == "item":
        return ReachRequest(*address.target, version, "items", [address.key.decode()])
    if address.what == "items":
        return ReachRequest(*address.target, version, "items", [key.decode() for key in keys_of(address)])
    return ReachRequest(*address.target, version, "version" if address.what == "version" else "all")
