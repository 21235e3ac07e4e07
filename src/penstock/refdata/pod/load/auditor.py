"""R32: compares what a pod holds with what the primary has, item by item, at one version."""

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
from penstock.refdata.pod.memory.reader import MemoryView, PageCursor

_PAGE, _PAGE_SIZE = 2_000, 16_000_000
_TOLD = 20  # keys of each kind
_TRIES = 3
_COMES_WITHIN = 30.0
Batch = list[tuple[bytes, bytes]]  # places and what lies there


class AuditResult(msgspec.Struct, frozen=True, rename="camel"):
    """What an audit found; some of the keys where they disagree."""

    tenant_id: str
    dict_code: str
    version: int
    items: int
    agrees: bool
    missing: list[str] = []  # in the primary only
    extra: list[str] = []  # in the pod only
    different: list[str] = []


class PodAuditor:
    """Looks at one dictionary at a time: it reads all of it."""

    def __init__(self, loader: PodLoader, metrics: PodMetrics) -> None:
        self._loader = loader
        self._metrics = metrics
        self._looking = asyncio.Lock()

    async def audit(self, target: DictionaryKey) -> AuditResult:
        """Compare; what disagrees is reported, and loaded anew. Transient while another dictionary is looked at."""
        if self._looking.locked():
            raise Transient("AUDIT_BUSY", "a dictionary is being compared already", hint="try again when it is done")
        return await self._audit(self._loader.find(target))

    async def audit_all(self) -> None:
        """Every dictionary that is held, one after the other."""
        for holding in self._loader.holdings():
            if holding.mark is not None:
                try:
                    await self._audit(holding)
                except PenstockError as error:  # the next round looks again
                    about = {"tenantId": holding.target.tenant_id, "dictCode": holding.target.dict_code}
                    structlog.get_logger().warning("audit_failed", code=error.code, error=error.message, **about)

    async def _audit(self, holding: DictionaryState) -> AuditResult:
        code = holding.target.dict_code
        async with self._looking:
            try:
                finding = await self._compare(holding)
            except PenstockError:
                self._metrics.audits.labels(code, "failed").inc()
                raise
        self._metrics.audits.labels(code, "agrees" if finding.agrees else "disagrees").inc()
        if not finding.agrees:
            structlog.get_logger().error("audit_disagrees", **msgspec.to_builtins(finding))
            holding.want(0, at_once=True, anew=True)
        return finding

    async def _compare(self, holding: DictionaryState) -> AuditResult:
        """First as a whole, which is quick; only what disagrees is looked at item by item."""
        for _ in range(_TRIES):
            async with self._primary_at(holding) as snapshot:
                view = self._loader.memory.view()
                has = await _digest(_primary(snapshot))
            with closing(view):  # the transaction must not idle meanwhile
                held = await _digest(_held(view, snapshot))
            if held is not None and held == has:
                return AuditResult(*holding.target, snapshot.mark.version, held[1], agrees=True)
            async with self._primary_at(holding) as snapshot:
                with closing(self._loader.memory.view()) as view:
                    finding = await _differences(view, snapshot)
            if finding is not None:
                return finding
        said = f"{holding.target.dict_code} changes too fast to be compared"
        raise Transient("AUDIT_CHANGING", said, hint="try again when it is quieter")

    @asynccontextmanager
    async def _primary_at(self, holding: DictionaryState) -> AsyncIterator[DictionarySnapshot]:
        """The primary at a version that memory has come to."""
        target, loader = holding.target, self._loader
        async with loader.catalogue.get(target).provider.open_snapshot(loader.db, target) as snapshot:
            if holding.mark != snapshot.mark:
                holding.want(snapshot.mark.version, at_once=True)
            try:
                await run_with_timeout(_COMES_WITHIN, holding.reaches(snapshot.mark.version))
            except TimeoutError as error:
                said = f"the pod does not get to version {snapshot.mark.version}"
                raise Transient("AUDIT_BEHIND", said, hint="its log tells why it cannot load") from error
            yield snapshot


async def _differences(view: MemoryView, snapshot: DictionarySnapshot) -> AuditResult | None:
    """Some of the keys that differ, piece by piece: neither side is held as a whole; None when memory moved on."""
    version = view.at(snapshot.target, snapshot.mark)
    if version is None:
        return None
    items, missing, different, extra = 0, list[str](), list[str](), list[str]()
    async for batch in _primary(snapshot):
        items += len(batch)
        for place, value in batch:
            held = version.get(place)
            if held != value:
                (missing if held is None else different).append(layout.key_of(place, value).decode())
    async for page in _held(view, snapshot):
        keys = [layout.key_of(place, value).decode() for place, value in page or ()]
        there = {key for key, _ in await snapshot.read_existing(keys)} if keys else set()
        extra += [key for key in keys if key not in there]
    agrees = not (missing or different or extra)
    told = [sorted(keys)[:_TOLD] for keys in (missing, extra, different)]
    return AuditResult(*snapshot.target, snapshot.mark.version, items, agrees, *told)


async def _held(view: MemoryView, snapshot: DictionarySnapshot) -> AsyncIterator[Batch | None]:
    at = PageCursor(snapshot.mark)
    while True:
        page = view.page(snapshot.target, at, _PAGE, _PAGE_SIZE)
        yield page
        if not page:
            return
        at = PageCursor(snapshot.mark, page[-1][0])
        await asyncio.sleep(0)  # others have their turn


async def _primary(snapshot: DictionarySnapshot) -> AsyncIterator[Batch]:
    async with aclosing(snapshot.read_all()) as batches:
        async for rows in batches:
            found = [layout.row_of(key, payload) for key, payload in rows]
            yield [(row.place, row.value) for row in found]


async def _digest(batches: "AsyncIterator[Batch | None] | AsyncIterator[Batch]") -> tuple[int, int] | None:
    """A number that is the same for the same items in any order, and how many they are."""
    total = count = 0
    async for batch in batches:
        if batch is None:
            return None
        for place, value in batch:
            total += int.from_bytes(blake2b(len(place).to_bytes(2) + place + value, digest_size=16).digest())
            count += 1
    return total % 2**128, count
