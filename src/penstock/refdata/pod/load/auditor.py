"""R32: the comparison of the items in a pod with those of the primary, at one version."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from hashlib import blake2b

import msgspec
import structlog

from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.tasks.wait import run_with_timeout
from penstock.refdata.dictionaries.reader import DictionarySnapshot
from penstock.refdata.model import DictionaryKey
from penstock.refdata.pod.load.dictionary_state import DictionaryState
from penstock.refdata.pod.load.loader import PodLoader
from penstock.refdata.pod.load.metrics import PodMetrics
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.memory.reader import MemoryView, PageCursor, StoredItem

_PAGE, _PAGE_SIZE = 2_000, 16_000_000
_KEY_LIMIT = 20  # reported keys of each kind
_TRIES = 3
_CATCH_UP_TIMEOUT = 30.0
Batch = list[StoredItem]


class AuditResult(msgspec.Struct, frozen=True, rename="camel"):
    """The result of a comparison, with some of the keys that differ."""

    tenant_id: str
    dict_code: str
    version: int
    items: int
    matches: bool
    missing: list[str] = []  # in the primary only
    extra: list[str] = []  # in the pod only
    different: list[str] = []


class PodAuditor:
    """Compares one dictionary at a time, because a comparison reads all of its items."""

    def __init__(self, loader: PodLoader, metrics: PodMetrics) -> None:
        self._loader = loader
        self._metrics = metrics
        self._lock = asyncio.Lock()

    async def audit(self, target: DictionaryKey) -> AuditResult:
        """Compare a dictionary, and reload it on a mismatch; Transient while another comparison is running."""
        if self._lock.locked():
            raise Transient("AUDIT_BUSY", "this pod is already comparing a dictionary", hint="try again in a minute")
        return await self._audit(self._loader.ensure_state(target))

    async def audit_all(self) -> None:
        """Compare all loaded dictionaries, one after the other."""
        for state in self._loader.list_states():
            if state.mark is not None:
                try:
                    await self._audit(state)
                except PenstockError as error:  # the next round compares it again
                    fields = {"tenantId": state.target.tenant_id, "dictCode": state.target.dict_code}
                    structlog.get_logger().warning("audit_failed", code=error.code, error=error.message, **fields)

    async def _audit(self, state: DictionaryState) -> AuditResult:
        code = state.target.dict_code
        async with self._lock:
            try:
                result = await self._compare(state)
            except PenstockError:
                self._metrics.audits.labels(code, "failed").inc()
                raise
        self._metrics.audits.labels(code, "match" if result.matches else "mismatch").inc()
        if not result.matches:
            structlog.get_logger().error("audit_mismatch", **msgspec.to_builtins(result))
            state.request_version(0, immediately=True, full=True)
        return result

    async def _compare(self, state: DictionaryState) -> AuditResult:
        """Compare digests of all items, which is fast; on a mismatch compare item by item."""
        for _ in range(_TRIES):
            async with self._open_primary_snapshot(state) as snapshot:
                view = self._loader.memory.open_view()
                primary_digest = await _compute_digest(_read_primary(snapshot))
            with closing(view):  # after the transaction, so that it does not idle meanwhile
                memory_digest = await _compute_digest(_read_memory(view, snapshot))
            if memory_digest is not None and memory_digest == primary_digest:
                return AuditResult(*state.target, snapshot.mark.version, memory_digest[1], matches=True)
            async with self._open_primary_snapshot(state) as snapshot:
                with closing(self._loader.memory.open_view()) as view:
                    result = await _find_differences(view, snapshot)
            if result is not None:
                return result
        problem = f"{state.target.dict_code} changed during each of {_TRIES} comparisons"
        raise Transient("AUDIT_CHANGING", problem, hint="try again when fewer changes are committed")

    @asynccontextmanager
    async def _open_primary_snapshot(self, state: DictionaryState) -> AsyncIterator[DictionarySnapshot]:
        """Yield a snapshot of the primary at a version that is loaded into memory."""
        target, loader = state.target, self._loader
        async with loader.catalogue.get(target).provider.open_snapshot(loader.db, target) as snapshot:
            if state.mark != snapshot.mark:
                state.request_version(snapshot.mark.version, immediately=True)
            try:
                await run_with_timeout(_CATCH_UP_TIMEOUT, state.wait_for_version(snapshot.mark.version))
            except TimeoutError as error:
                problem = f"the pod did not load version {snapshot.mark.version} within {_CATCH_UP_TIMEOUT:g} s"
                hint = "look for dictionary_load_failed in the log of the pod"
                raise Transient("AUDIT_BEHIND", problem, hint=hint) from error
            yield snapshot


async def _find_differences(view: MemoryView, snapshot: DictionarySnapshot) -> AuditResult | None:
    """Return some of the keys that differ; None if the memory has changed.

    Items are read in batches, so that neither side is in memory as a whole.
    """
    version = view.find_version(snapshot.target, snapshot.mark)
    if version is None:
        return None
    items, missing, different, extra = 0, list[str](), list[str](), list[str]()
    async for batch in _read_primary(snapshot):
        items += len(batch)
        for stored_key, value in batch:
            loaded = version.get(stored_key)
            if loaded != value:
                (missing if loaded is None else different).append(layout.decode_key(stored_key, value).decode())
    async for page in _read_memory(view, snapshot):
        keys = [layout.decode_key(stored_key, value).decode() for stored_key, value in page or ()]
        existing = {key for key, _ in await snapshot.read_existing(keys)} if keys else set()
        extra += [key for key in keys if key not in existing]
    matches = not (missing or different or extra)
    reported = [sorted(keys)[:_KEY_LIMIT] for keys in (missing, extra, different)]
    return AuditResult(*snapshot.target, snapshot.mark.version, items, matches, *reported)


async def _read_memory(view: MemoryView, snapshot: DictionarySnapshot) -> AsyncIterator[Batch | None]:
    cursor = PageCursor(snapshot.mark)
    while True:
        page = view.read_page(snapshot.target, cursor, _PAGE, _PAGE_SIZE)
        yield page
        if not page:
            return
        cursor = PageCursor(snapshot.mark, page[-1][0])
        await asyncio.sleep(0)  # let other tasks run


async def _read_primary(snapshot: DictionarySnapshot) -> AsyncIterator[Batch]:
    async with aclosing(snapshot.read_all()) as batches:
        async for rows in batches:
            items = [layout.encode_item(key, payload) for key, payload in rows]
            yield [(item.stored_key, item.value) for item in items]


async def _compute_digest(batches: "AsyncIterator[Batch | None] | AsyncIterator[Batch]") -> tuple[int, int] | None:
    """Return a digest of the items that does not depend on their order, and their number."""
    total = count = 0
    async for batch in batches:
        if batch is None:
            return None
        for stored_key, value in batch:
            total += int.from_bytes(blake2b(len(stored_key).to_bytes(2) + stored_key + value, digest_size=16).digest())
            count += 1
    return total % 2**128, count
