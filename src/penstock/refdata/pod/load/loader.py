"""R19–R24: keeps the memory of a pod as the primary is: hears of changes, looks by itself, loads what is needed."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from time import monotonic, perf_counter, time_ns
from typing import Any, NamedTuple

import msgspec
import structlog

from penstock.kernel.db.database import Database
from penstock.kernel.errors import Corrupt, NotFound, PenstockError, Transient
from penstock.kernel.signals import Resync, Signals
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.tasks.wait import cancel_and_wait, run_with_timeout, wait_event
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata import store
from penstock.refdata.config import QuerySection
from penstock.refdata.contract import INVALIDATIONS
from penstock.refdata.dictionaries.catalogue import Dictionary, DictionaryCatalogue
from penstock.refdata.dictionaries.reader import DictionarySnapshot, duplicate_key_error
from penstock.refdata.model import CommitEntry, DictionaryKey, VersionStamp
from penstock.refdata.pod.load.dictionary_state import DictionaryState, LoadPace, is_lasting
from penstock.refdata.pod.load.metrics import PodMetrics
from penstock.refdata.pod.memory.writer import MemoryWriter
from penstock.refdata.store import to_stamp

_KEYS_FOLLOWED = 20_000  # more, and everything is loaded anew
_TIMEOUTS = 2
_SLOW_FOR = 600.0  # seconds that a dictionary whose keys cannot be looked up in time is loaded whole
_JUST_NOW = 60_000_000  # µs
_CHANGES_WITHIN = 10.0
_LOOK_WITHIN = 10.0
_FREE_EVERY = 1.0
_BEHIND_AFTER = 5.0  # seconds after which a load is late
_MOST_DICTIONARIES = 100_000

_Changes = tuple[VersionStamp, Sequence[CommitEntry], Sequence[str], dict[str, str]]


class _LoadResult(NamedTuple):
    """What is held from now on, the commits that led to it where they are known, and whether they were others."""

    mark: VersionStamp
    steps: Sequence[CommitEntry]
    has_other_past: bool = False


class DictionaryLoads:
    """Loads dictionaries of one primary into one memory."""

    def __init__(
        self,
        db: Database,
        catalogue: DictionaryCatalogue,
        memory: MemoryWriter,
        metrics: PodMetrics,
        telemetry: Telemetry,
    ) -> None:
        self._db = db
        self._catalogue = catalogue
        self._memory = memory
        self._metrics = metrics
        self._telemetry = telemetry
        self._timeouts: dict[DictionaryKey, int] = {}  # in a row
        self._slow_until: dict[DictionaryKey, float] = {}

    async def __call__(self, holding: DictionaryState, *, anew: bool) -> VersionStamp:
        began, began_ns = perf_counter(), time_ns()
        try:
            loaded, kind = await self._load_either(holding, anew=anew)
        except Exception as error:
            known = _known(error)
            self._failed(holding, known)
            raise known from error
        self._metrics.duration.labels(holding.target.dict_code, kind).observe(perf_counter() - began)
        self._tell(holding.target, loaded, kind, began_ns, is_first=holding.mark is None)
        if loaded.has_other_past:
            self._tell_reset(holding, loaded.mark)
        return loaded.mark

    async def _load_either(self, holding: DictionaryState, *, anew: bool) -> "tuple[_LoadResult, str]":
        dictionary, held = self._catalogue.get(holding.target), holding.mark
        is_slow = self._slow_until.get(holding.target, 0.0) > monotonic()
        is_delta = dictionary.section.reload_on_event == "DELTA" and not is_slow
        if held is not None and not anew and is_delta:
            loaded = await self._load_changes(holding.target, held, dictionary)
            if loaded is not None:
                return loaded, "delta"
        await holding.jitter()
        return await self._load_all(holding.target, held, dictionary), "full"

    async def _load_changes(
        self, target: DictionaryKey, held: VersionStamp, dictionary: Dictionary
    ) -> "_LoadResult | None":
        """R20: load what changed since; None when that is not known, or not all there is to it."""
        try:
            changes = await run_with_timeout(_CHANGES_WITHIN, _changes(self._db, target, held, dictionary))
        except TimeoutError:
            # Once, the primary may have been slow. Twice in a row, its statement does not look keys up.
            self._timeouts[target] = self._timeouts.get(target, 0) + 1
            if self._timeouts[target] >= _TIMEOUTS:
                self._slow_until[target] = monotonic() + _SLOW_FOR
            return None
        self._timeouts.pop(target, None)
        if changes is None:
            return None
        mark, steps, keys, found = changes
        gone = [key for key in keys if key not in found]
        if not dictionary.provider.has_exact_keys and not self._is_all(target, keys, found, gone):
            return None
        self._memory.change(target, mark, puts=found, deletes=gone)
        return _LoadResult(mark, steps)

    def _is_all(self, target: DictionaryKey, keys: Sequence[str], found: dict[str, str], gone: Sequence[str]) -> bool:
        """Whether the keys told are the keys there are.

        A table may spell them another way (upper case, a number), and then neither finds them under ours nor, when
        they are deleted, tells which of its own is gone. Whoever deletes what never was there looks the same.
        """
        return found.keys() <= set(keys) and all(self._memory.has(target, key) for key in gone)

    async def _load_all(
        self, target: DictionaryKey, held: VersionStamp | None, dictionary: Dictionary
    ) -> "_LoadResult":
        generation = self._memory.begin()
        try:
            async with dictionary.provider.open_snapshot(self._db, target) as snapshot:
                steps = await _commits(snapshot, held)
                has_other_past = held is not None and not await snapshot.shares_history(held)
                count = await self._fill(generation, snapshot)
            mark = snapshot.mark
            self._memory.publish(target, generation, mark, count)
        except BaseException:
            self._memory.discard(generation)
            raise
        return _LoadResult(mark, steps, has_other_past)

    async def _fill(self, generation: int, snapshot: DictionarySnapshot) -> int:
        count = added = 0
        async with aclosing(snapshot.read_all()) as batches:
            async for rows in batches:
                count += len(rows)
                added += self._memory.fill(generation, rows)
        if added < count:
            raise duplicate_key_error(snapshot.target)
        return count

    def _failed(self, holding: DictionaryState, error: PenstockError) -> None:
        target = holding.target
        self._metrics.errors.labels(target.dict_code, error.code).inc()
        self._memory.mark_stale(target, monotonic())
        log = structlog.get_logger().bind(tenantId=target.tenant_id, dictCode=target.dict_code, version=holding.version)
        told = log.error if is_lasting(error) else log.warning
        told("dictionary_not_loaded", code=error.code, error=error.message, hint=error.hint)

    def _tell(self, target: DictionaryKey, loaded: "_LoadResult", kind: str, began: int, *, is_first: bool) -> None:
        """R26: say what is read from now on, and add it to the traces that led to it."""
        about: dict[str, Any] = {"tenantId": target.tenant_id, "dictCode": target.dict_code, "kind": kind}
        log = structlog.get_logger()
        made: list[dict[str, Any]] = [
            {"eventId": str(step.event_id), "source": step.source, "version": step.mark.version}
            for step in loaded.steps
        ]
        now = to_stamp(self._db.clock.now())
        for step, said in zip(loaded.steps, made, strict=True):
            # A pod that starts loads what was committed long ago: that says nothing of how fresh it is, and is no part
            # of its trace any more.
            if not is_first:
                self._metrics.freshness.labels(target.dict_code).observe(max(now - step.mark.stamp, 0) / 1_000_000)
            if step.mark.stamp > now - _JUST_NOW:
                self._telemetry.trace("refdata.swap", step.trace, began, **about, **said)
            if kind == "delta":
                log.debug("dictionary_changed", **about, **said)
        if kind == "full":
            log.info("dictionary_loaded", **{**about, **(made[-1] if made else {}), "version": loaded.mark.version})

    def _tell_reset(self, holding: DictionaryState, mark: VersionStamp) -> None:
        """R24: loudly: versions that readers were told are no more."""
        target = holding.target
        self._metrics.resets.labels(target.dict_code).inc()
        structlog.get_logger().error(
            "primary_has_another_past",
            tenantId=target.tenant_id,
            dictCode=target.dict_code,
            version=mark.version,
            held=holding.version,
            hint="was it restored from a backup? Versions above this one are lost, unless they are sent again",
        )


async def _changes(db: Database, target: DictionaryKey, held: VersionStamp, dictionary: Dictionary) -> _Changes | None:
    """What changed since *held*: the commits, the keys, and the items that these have now."""
    async with dictionary.provider.open_snapshot(db, target) as snapshot:
        steps = await snapshot.list_steps(held)
        if steps is None or any(step.keys is None for step in steps):
            return None
        keys = sorted({key for step in steps for key in step.keys or ()})
        if len(keys) > _KEYS_FOLLOWED:
            return None
        found = await snapshot.read_keys(keys) if keys else []
        return None if found is None else (snapshot.mark, steps, keys, dict(found))


async def _commits(snapshot: DictionarySnapshot, held: VersionStamp | None) -> Sequence[CommitEntry]:
    """What led to what is loaded; of one that was not held before, its last commit."""
    mark = snapshot.mark
    if mark.is_pinned:
        return ()
    return await snapshot.list_commits(held.version if held else mark.version - 1)


def _known(error: Exception) -> PenstockError:
    """Whatever their SQL does, the other dictionaries go on."""
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, TimeoutError):
        return Transient("DATABASE_SLOW", "the primary does not answer in time")
    return Corrupt("LOAD_FAILED", f"{type(error).__name__}: {error}", hint="mend loadSql or its tables")


class PodLoader:
    """All dictionaries of one pod."""

    def __init__(
        self,
        db: Database,
        catalogue: DictionaryCatalogue,
        memory: MemoryWriter,
        section: QuerySection,
        metrics: PodMetrics,
        telemetry: Telemetry,
    ) -> None:
        self.db = db
        self.catalogue = catalogue
        self.memory = memory
        self._section = section
        self._metrics = metrics
        self._load = DictionaryLoads(db, catalogue, memory, metrics, telemetry)
        self._holdings: dict[DictionaryKey, DictionaryState] = {}
        slots = asyncio.Semaphore(section.loads)
        self._pace = LoadPace(section.debounce_ms / 1000, section.jitter_ms / 1000, slots)
        self._patience = max(section.reconcile_every.total_seconds() * 2, _BEHIND_AFTER)
        self._must_look = asyncio.Event()
        self._has_looked = asyncio.Event()
        self.is_loaded = asyncio.Event()  # every dictionary there is, at least once

    def holdings(self) -> Sequence[DictionaryState]:
        return list(self._holdings.values())

    @asynccontextmanager
    async def running(self, signals: Signals, name: str) -> AsyncIterator[None]:
        """Follow the primary until the end."""
        tasks = [
            asyncio.create_task(self._listen(signals, name), name="pod signals"),
            asyncio.create_task(self._keep_looking(), name="pod reconcile"),
            asyncio.create_task(self._keep_freeing(), name="pod freeing"),
            asyncio.create_task(self._note_loaded(), name="pod loaded"),
        ]
        every = self._section.reconcile_every

        async def show_lag() -> None:
            self._metrics.stream_lag.set(await signals.lag())

        try:
            async with run_periodically("stream lag", show_lag, every):
                yield
        finally:
            for task in tasks:
                await cancel_and_wait(task)
            for holding in self.holdings():
                await holding.end()

    def find(self, target: DictionaryKey) -> DictionaryState:
        """The holding of *target*, begun when it is new; NotFound or Invalid when there can be none."""
        self.catalogue.get(target)
        holding = self._holdings.get(target)
        if holding is None:
            if len(self._holdings) >= _MOST_DICTIONARIES:
                hint = "name the tenants under refdata.tenants"
                raise Transient("TOO_MANY_DICTIONARIES", "this pod holds as many as it may", hint=hint)
            holding = self._holdings[target] = DictionaryState(target, self._pace, self._load)
            holding.want(0)
        return holding

    def hear(self, body: str) -> None:
        """R19: somebody says there is a new version. What is not understood is left to the next look."""
        try:
            told = INVALIDATIONS.decode(body)
            holding = self._holdings.get(target := DictionaryKey(told.tenant_id, told.dict_code))
            if holding is None:
                holding = self.find(target)
        except msgspec.MsgspecError as error:
            structlog.get_logger().warning("invalidation_not_understood", error=str(error))
            return
        except PenstockError:  # of a dictionary or tenant that is not ours
            return
        if told.version > holding.version:
            holding.want(told.version)
        elif holding.mark is not None and to_stamp(told.committed_at) > holding.mark.stamp:
            self._must_look.set()  # R24: committed later, and yet not above what is held: the past has changed

    async def look(self) -> None:
        """R22, R24: compare all versions with the primary's."""
        await self._drop_what_is_gone()
        known = {one.section.code: one for one in self.catalogue.all() if one.section.enabled}
        before = {target: holding.mark for target, holding in self._holdings.items()}
        try:
            marks = await run_with_timeout(_LOOK_WITHIN, self._standings(list(known)))
        except TimeoutError as error:
            raise Transient("DATABASE_SLOW", "the primary does not tell its versions in time") from error
        wanted = {DictionaryKey(tenant, code) for tenant in self.catalogue.tenants for code in known} | set(marks)
        for target in wanted:
            try:
                self._compare(self.find(target), before.get(target), marks.get(target))
            except (NotFound, Transient):  # of a tenant that is not ours, or more than can be held
                continue
        self.memory.state.looked()

    async def _drop_what_is_gone(self) -> None:
        """R1: what is not configured any more is held no more."""
        for gone in [holding for holding in self._holdings if not self._has(holding)]:
            await self._holdings[gone].end()
            self.memory.drop(gone)
            del self._holdings[gone]

    async def _standings(self, codes: Sequence[str]) -> dict[DictionaryKey, VersionStamp]:
        async with self.db.connection() as connection:
            return await store.read_stamps(connection, codes)

    async def _note_loaded(self) -> None:
        """R23: say so when every dictionary there is has been loaded, or only a person can mend it."""
        await self._has_looked.wait()
        for holding in self.holdings():
            await holding.settles()
        self.memory.state.loaded()
        self.is_loaded.set()

    def _compare(self, holding: DictionaryState, before: VersionStamp | None, mark: VersionStamp | None) -> None:
        """R24: what was held *before* the look cannot be later than what it found, but for another past."""
        at = mark or VersionStamp(0, 0)
        if holding.mark is None or before is None or before != holding.mark:
            holding.want(at.version)
        elif mark is None or mark.version < before.version or (mark.version == before.version and mark != before):
            holding.want(0, anew=True)
        elif mark.version > before.version:
            holding.want(mark.version)
        holding.try_again()
        if holding.behind_since and monotonic() - holding.behind_since > self._patience:
            # R23: also who merely does not get on serves old data.
            self.memory.mark_stale(holding.target, holding.behind_since)

    def _has(self, target: DictionaryKey) -> bool:
        try:
            self.catalogue.get(target)
        except PenstockError:
            return False
        return True

    async def _listen(self, signals: Signals, name: str) -> None:
        while True:
            try:
                async with signals.listen(name) as feed:
                    async for item in feed:
                        if isinstance(item, Resync):
                            self._must_look.set()
                        else:
                            self.hear(item.body)
            except Exception:  # noqa: BLE001 - the edge of the task: the looks go on, and it begins again
                structlog.get_logger().exception("pod_listener_broke")
                await asyncio.sleep(1)

    async def _keep_looking(self) -> None:
        every, log = self._section.reconcile_every.total_seconds(), structlog.get_logger()
        while True:
            self._must_look.clear()
            try:
                await self.look()
                self._has_looked.set()
            except PenstockError as error:
                self.memory.state.cut_off()
                log.warning("pod_cut_off", code=error.code, error=error.message, kept="what is in memory")
            except Exception:
                log.exception("pod_look_crashed")
            await wait_event(self._must_look, every)

    async def _keep_freeing(self) -> None:
        while True:
            try:
                while self.memory.free():  # noqa: ASYNC110 - piece by piece: others have their turn between
                    await asyncio.sleep(0)
            except Transient as error:
                structlog.get_logger().error("pod_memory_full", code=error.code, error=error.message)
            await asyncio.sleep(_FREE_EVERY)
