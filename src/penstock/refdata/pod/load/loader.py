"""R19–R24: keep the memory of a pod equal to the primary: receive invalidations, reconcile, load changes."""

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
from penstock.refdata.dictionaries.reader import DictionarySnapshot, make_duplicate_key_error
from penstock.refdata.model import CommitEntry, DictionaryKey, VersionStamp
from penstock.refdata.pod.load.dictionary_state import DictionaryState, LoadLimits, is_permanent
from penstock.refdata.pod.load.metrics import PodMetrics
from penstock.refdata.pod.memory.writer import MemoryWriter
from penstock.refdata.store import to_stamp

_DELTA_KEY_LIMIT = 20_000  # more changed keys cause a full load
_TIMEOUT_LIMIT = 2
_SLOW_SECONDS = 600.0  # duration of full loads for a dictionary whose keys cannot be looked up in time
_RECENT = 60_000_000  # µs
_CHANGES_TIMEOUT = 10.0
_RECONCILE_TIMEOUT = 10.0
_FREE_INTERVAL = 1.0
_LOG_INTERVAL = 1.0  # seconds between two INFO entries for the delta loads of a dictionary
_MIN_STALE_AFTER = 5.0  # seconds
_DICTIONARY_LIMIT = 100_000

_Changes = tuple[VersionStamp, Sequence[CommitEntry], Sequence[str], dict[str, str]]


class LoadResult(NamedTuple):
    """The loaded version, the commits that led to it as far as known, and whether the history was reset."""

    mark: VersionStamp
    commits: Sequence[CommitEntry]
    is_history_reset: bool = False


class DictionaryLoader:
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
        self._timeouts: dict[DictionaryKey, int] = {}  # consecutive
        self._slow_until: dict[DictionaryKey, float] = {}
        self._logged_at: dict[DictionaryKey, float] = {}

    async def __call__(self, state: DictionaryState, *, full: bool) -> VersionStamp:
        start, start_ns = perf_counter(), time_ns()
        try:
            result, kind = await self._load(state, full=full)
        except Exception as error:
            failure = _as_penstock_error(error)
            self._report_failure(state, failure)
            raise failure from error
        self._metrics.duration.labels(state.target.dict_code, kind).observe(perf_counter() - start)
        self._report_load(state.target, result, kind, start_ns, is_first=state.mark is None)
        if result.is_history_reset:
            self._report_history_reset(state, result.mark)
        return result.mark

    async def _load(self, state: DictionaryState, *, full: bool) -> "tuple[LoadResult, str]":
        dictionary, loaded = self._catalogue.get(state.target), state.mark
        is_slow = self._slow_until.get(state.target, 0.0) > monotonic()
        is_delta = dictionary.section.reload_on_event == "DELTA" and not is_slow
        if loaded is not None and not full and is_delta:
            result = await self._load_changes(state.target, loaded, dictionary)
            if result is not None:
                return result, "delta"
        await state.wait_jitter()
        return await self._load_all(state.target, loaded, dictionary), "full"

    async def _load_changes(
        self, target: DictionaryKey, loaded: VersionStamp, dictionary: Dictionary
    ) -> "LoadResult | None":
        """R20: load the changes since *loaded*; None if they are unknown or may be incomplete."""
        try:
            changes = await run_with_timeout(_CHANGES_TIMEOUT, _read_changes(self._db, target, loaded, dictionary))
        except TimeoutError:
            # After one timeout the primary may have been slow. After two, its statement does not look up keys.
            self._timeouts[target] = self._timeouts.get(target, 0) + 1
            if self._timeouts[target] >= _TIMEOUT_LIMIT:
                self._slow_until[target] = monotonic() + _SLOW_SECONDS
            return None
        self._timeouts.pop(target, None)
        if changes is None:
            return None
        mark, commits, keys, items = changes
        deleted = [key for key in keys if key not in items]
        if not dictionary.provider.has_exact_keys and not self._has_same_keys(target, keys, items, deleted):
            return None
        self._memory.change_items(target, mark, puts=items, deletes=deleted)
        return LoadResult(mark, commits)

    def _has_same_keys(
        self, target: DictionaryKey, keys: Sequence[str], items: dict[str, str], deleted: Sequence[str]
    ) -> bool:
        """Return whether the table spells the keys like the commands do.

        A table may spell them differently (upper case, a number). Then the items are not found under the keys of the
        commands, and a deletion does not identify the deleted key of the table. A deletion of a key that never
        existed looks the same.
        """
        return items.keys() <= set(keys) and all(self._memory.has_item(target, key) for key in deleted)

    async def _load_all(
        self, target: DictionaryKey, loaded: VersionStamp | None, dictionary: Dictionary
    ) -> "LoadResult":
        generation = self._memory.begin_generation()
        try:
            async with dictionary.provider.open_snapshot(self._db, target) as snapshot:
                commits = await _read_commits(snapshot, loaded)
                is_history_reset = loaded is not None and not await snapshot.shares_history(loaded)
                count = await self._fill(generation, snapshot)
            mark = snapshot.mark
            self._memory.publish(target, generation, mark, count)
        except BaseException:
            self._memory.discard(generation)
            raise
        return LoadResult(mark, commits, is_history_reset)

    async def _fill(self, generation: int, snapshot: DictionarySnapshot) -> int:
        count = added = 0
        async with aclosing(snapshot.read_all()) as batches:
            async for rows in batches:
                count += len(rows)
                added += self._memory.fill(generation, rows)
        if added < count:
            raise make_duplicate_key_error(snapshot.target)
        return count

    def _report_failure(self, state: DictionaryState, error: PenstockError) -> None:
        target = state.target
        self._metrics.errors.labels(target.dict_code, error.code).inc()
        self._memory.mark_stale(target, monotonic())
        log = structlog.get_logger().bind(tenantId=target.tenant_id, dictCode=target.dict_code, version=state.version)
        log_failure = log.error if is_permanent(error) else log.warning
        if state.error is not None and (state.error.code, state.error.message) == (error.code, error.message):
            log_failure = log.debug  # a retry, every few seconds, that failed like the last one
        log_failure("dictionary_load_failed", code=error.code, error=error.message, hint=error.hint)

    def _report_load(
        self, target: DictionaryKey, result: "LoadResult", kind: str, start: int, *, is_first: bool
    ) -> None:
        """R26: log and measure a load, and add it to the traces of its commits."""
        common: dict[str, Any] = {"tenantId": target.tenant_id, "dictCode": target.dict_code, "kind": kind}
        now, fields = to_stamp(self._db.clock.now()), dict[str, Any]()
        for commit in result.commits:
            fields = {"eventId": str(commit.event_id), "source": commit.source, "version": commit.mark.version}
            # The first load of a pod contains old commits: they do not measure freshness, and their traces are over.
            if not is_first:
                self._metrics.freshness.labels(target.dict_code).observe(max(now - commit.mark.stamp, 0) / 1_000_000)
            if commit.mark.stamp > now - _RECENT:
                self._telemetry.trace("refdata.swap", commit.trace, start, **common, **fields)
            if kind == "delta":
                structlog.get_logger().debug("dictionary_changed", **common, **fields)
        self._log_load(target, {**common, **fields, "version": result.mark.version}, is_delta=kind == "delta")

    def _log_load(self, target: DictionaryKey, fields: dict[str, Any], *, is_delta: bool) -> None:
        """Log full loads, and the delta loads of a dictionary at most once per second; others are logged at DEBUG."""
        log, now, header = structlog.get_logger(), monotonic(), self._memory.get_header(target)
        is_frequent = is_delta and now - self._logged_at.get(target, -_LOG_INTERVAL) < _LOG_INTERVAL
        if not is_frequent:
            self._logged_at[target] = now
        write = log.debug if is_frequent else log.info
        write("dictionary_loaded", **fields, items=header.items if header else 0)

    def _report_history_reset(self, state: DictionaryState, mark: VersionStamp) -> None:
        """R24: log as an error that versions which readers have seen do not exist any more."""
        target = state.target
        self._metrics.resets.labels(target.dict_code).inc()
        structlog.get_logger().error(
            "history_reset_detected",
            tenantId=target.tenant_id,
            dictCode=target.dict_code,
            version=mark.version,
            previousVersion=state.version,
            hint="the primary may have been restored from a backup: send the commands after this version again",
        )


async def _read_changes(
    db: Database, target: DictionaryKey, loaded: VersionStamp, dictionary: Dictionary
) -> _Changes | None:
    """Return the commits after *loaded*, the changed keys, and their items now; None if they are not known."""
    async with dictionary.provider.open_snapshot(db, target) as snapshot:
        commits = await snapshot.list_steps(loaded)
        if commits is None or any(commit.keys is None for commit in commits):
            return None
        keys = sorted({key for commit in commits for key in commit.keys or ()})
        if len(keys) > _DELTA_KEY_LIMIT:
            return None
        items = await snapshot.read_keys(keys) if keys else []
        return None if items is None else (snapshot.mark, commits, keys, dict(items))


async def _read_commits(snapshot: DictionarySnapshot, loaded: VersionStamp | None) -> Sequence[CommitEntry]:
    """Return the commits between *loaded* and the snapshot; for the first load only the last commit."""
    mark = snapshot.mark
    if mark.is_pinned:
        return ()
    return await snapshot.list_commits(loaded.version if loaded else mark.version - 1)


def _as_penstock_error(error: Exception) -> PenstockError:
    """Convert *error*, so that SQL of one dictionary cannot stop the loads of others."""
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, TimeoutError):
        return Transient("DATABASE_SLOW", "the primary does not answer in time")
    return Corrupt("LOAD_FAILED", f"{type(error).__name__}: {error}", hint="fix loadSql or its tables")


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
        self._load = DictionaryLoader(db, catalogue, memory, metrics, telemetry)
        self._states: dict[DictionaryKey, DictionaryState] = {}
        slots = asyncio.Semaphore(section.loads)
        self._limits = LoadLimits(section.debounce_ms / 1000, section.jitter_ms / 1000, slots)
        self._stale_after = max(section.reconcile_every.total_seconds() * 2, _MIN_STALE_AFTER)
        self._reconcile_now = asyncio.Event()
        self._has_reconciled = asyncio.Event()
        self.is_loaded = asyncio.Event()  # set when every dictionary was loaded once

    def list_states(self) -> Sequence[DictionaryState]:
        """Return the states of all dictionaries of this pod."""
        return list(self._states.values())

    @asynccontextmanager
    async def start(self, signals: Signals, name: str) -> AsyncIterator[None]:
        """Follow the primary until the end of the context."""
        tasks = [
            asyncio.create_task(self._listen(signals, name), name="pod signals"),
            asyncio.create_task(self._reconcile_forever(), name="pod reconcile"),
            asyncio.create_task(self._free_memory_forever(), name="pod freeing"),
            asyncio.create_task(self._report_loaded(), name="pod loaded"),
        ]
        every = self._section.reconcile_every

        async def measure_stream_lag() -> None:
            self._metrics.stream_lag.set(await signals.measure_lag())

        try:
            async with run_periodically("stream lag", measure_stream_lag, every):
                yield
        finally:
            for task in tasks:
                await cancel_and_wait(task)
            for state in self.list_states():
                await state.stop()

    def ensure_state(self, target: DictionaryKey) -> DictionaryState:
        """Return the state of *target*, and start its first load if it is new; NotFound, Invalid or Transient."""
        self.catalogue.get(target)
        state = self._states.get(target)
        if state is None:
            if len(self._states) >= _DICTIONARY_LIMIT:
                hint = "list the tenants in refdata.tenants"
                problem = f"this pod already has {_DICTIONARY_LIMIT} dictionaries, the maximum"
                raise Transient("TOO_MANY_DICTIONARIES", problem, hint=hint)
            state = self._states[target] = DictionaryState(target, self._limits, self._load)
            state.request_version(0)
        return state

    def handle_invalidation(self, body: str) -> None:
        """R19: load the announced version; the next reconciliation covers a message that cannot be decoded."""
        try:
            invalidation = INVALIDATIONS.decode(body)
            state = self._states.get(target := DictionaryKey(invalidation.tenant_id, invalidation.dict_code))
            if state is None:
                state = self.ensure_state(target)
        except msgspec.MsgspecError as error:
            structlog.get_logger().warning("invalidation_rejected", error=str(error))
            return
        except PenstockError:  # of a dictionary or tenant that this pod does not serve
            return
        if invalidation.version > state.version:
            state.request_version(invalidation.version)
        elif state.mark is not None and to_stamp(invalidation.committed_at) > state.mark.stamp:
            self._reconcile_now.set()  # R24: a later commit without a higher version: the history was reset

    async def reconcile(self) -> None:
        """R22, R24: compare all versions with those of the primary."""
        await self._drop_removed()
        enabled = {entry.section.code for entry in self.catalogue.list_all() if entry.section.enabled}
        before = {target: state.mark for target, state in self._states.items()}
        try:
            marks = await run_with_timeout(_RECONCILE_TIMEOUT, self._read_versions(list(enabled)))
        except TimeoutError as error:
            problem = "the primary did not return the versions of the dictionaries in time"
            raise Transient("DATABASE_SLOW", problem) from error
        targets = {DictionaryKey(tenant, code) for tenant in self.catalogue.tenants for code in enabled} | set(marks)
        for target in targets:
            try:
                self._compare(self.ensure_state(target), before.get(target), marks.get(target))
            except (NotFound, Transient):  # a tenant that this pod does not serve, or too many dictionaries
                continue
        self.memory.counters.set_primary_seen()

    async def _drop_removed(self) -> None:
        """R1: drop dictionaries that were removed from the configuration."""
        for target in [target for target in self._states if not self._is_configured(target)]:
            await self._states[target].stop()
            self.memory.drop(target)
            del self._states[target]

    async def _read_versions(self, codes: Sequence[str]) -> dict[DictionaryKey, VersionStamp]:
        async with self.db.connection() as connection:
            return await store.read_stamps(connection, codes)

    async def _report_loaded(self) -> None:
        """R23: report that every dictionary is loaded, or failed with an error that only a person can fix."""
        await self._has_reconciled.wait()
        for state in self.list_states():
            await state.wait_until_loaded()
        self.memory.counters.set_loaded()
        self.is_loaded.set()

    def _compare(self, state: DictionaryState, before: VersionStamp | None, mark: VersionStamp | None) -> None:
        """R24: request a load if the primary has another version.

        *before* is the version that was loaded before the primary was read: if the primary has an older one, its
        history was reset.
        """
        primary = mark or VersionStamp(0, 0)
        if state.mark is None or before is None or before != state.mark:
            state.request_version(primary.version)
        elif mark is None or mark.version < before.version or (mark.version == before.version and mark != before):
            state.request_version(0, full=True)
        elif mark.version > before.version:
            state.request_version(mark.version)
        state.retry_now()
        if state.behind_since and monotonic() - state.behind_since > self._stale_after:
            # R23: loads that take too long without an error also leave old data.
            self.memory.mark_stale(state.target, state.behind_since)

    def _is_configured(self, target: DictionaryKey) -> bool:
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
                            self._reconcile_now.set()
                        else:
                            self.handle_invalidation(item.body)
            except Exception:  # noqa: BLE001 - the edge of the task: reconciliation continues, and listening restarts
                structlog.get_logger().exception("invalidation_listener_failed")
                await asyncio.sleep(1)

    async def _reconcile_forever(self) -> None:
        every, log = self._section.reconcile_every.total_seconds(), structlog.get_logger()
        while True:
            self._reconcile_now.clear()
            try:
                await self.reconcile()
                self._has_reconciled.set()
            except PenstockError as error:
                self.memory.counters.set_primary_lost()
                log.warning("primary_lost", code=error.code, error=error.message, effect="reads continue from memory")
            except Exception:
                log.exception("reconciliation_crashed")
            await wait_event(self._reconcile_now, every)

    async def _free_memory_forever(self) -> None:
        while True:
            try:
                while self.memory.free():  # noqa: ASYNC110 - in pieces, so that other tasks can run in between
                    await asyncio.sleep(0)
            except Transient as error:
                structlog.get_logger().error("memory_exhausted", code=error.code, error=error.message)
            await asyncio.sleep(_FREE_INTERVAL)
