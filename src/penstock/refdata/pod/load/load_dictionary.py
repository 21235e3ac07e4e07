"""R20: how one dictionary is loaded into a pod's memory: what changed where that is known, else all of it."""

from collections.abc import Sequence
from contextlib import aclosing
from time import monotonic, perf_counter, time_ns
from typing import Any, NamedTuple

import structlog

from penstock.kernel.db.database import Database
from penstock.kernel.errors import Corrupt, PenstockError, Transient
from penstock.kernel.tasks.waiting import within
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.dictionaries.catalogue import Catalogue, Dictionary
from penstock.refdata.dictionaries.reader import Snapshot, twice
from penstock.refdata.model import Dict, Mark, Step
from penstock.refdata.pod.load.dictionary_state import Holding, is_lasting
from penstock.refdata.pod.load.metrics import PodMetrics
from penstock.refdata.pod.memory.writer import Memory
from penstock.refdata.store import stamp_of

_KEYS_FOLLOWED = 20_000  # more, and everything is loaded anew
_CHANGES_WITHIN = 10.0
_TIMEOUTS = 2
_SLOW_FOR = 600.0  # seconds that a dictionary whose keys cannot be looked up in time is loaded whole
_JUST_NOW = 60_000_000  # µs
_Changes = tuple[Mark, Sequence[Step], Sequence[str], dict[str, str]]


class _Loaded(NamedTuple):
    """What is held from now on, the commits that led to it where they are known, and whether they were others."""

    mark: Mark
    steps: Sequence[Step]
    has_other_past: bool = False


class Loads:
    """Loads dictionaries of one primary into one memory."""

    def __init__(
        self, db: Database, catalogue: Catalogue, memory: Memory, metrics: PodMetrics, telemetry: Telemetry
    ) -> None:
        self._db = db
        self._catalogue = catalogue
        self._memory = memory
        self._metrics = metrics
        self._telemetry = telemetry
        self._timeouts: dict[Dict, int] = {}  # in a row
        self._slow_until: dict[Dict, float] = {}

    async def __call__(self, holding: Holding, *, anew: bool) -> Mark:
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

    async def _load_either(self, holding: Holding, *, anew: bool) -> "tuple[_Loaded, str]":
        dictionary, held = self._catalogue.get(holding.target), holding.mark
        is_slow = self._slow_until.get(holding.target, 0.0) > monotonic()
        is_delta = dictionary.section.reload_on_event == "DELTA" and not is_slow
        if held is not None and not anew and is_delta:
            loaded = await self._load_changes(holding.target, held, dictionary)
            if loaded is not None:
                return loaded, "delta"
        await holding.jitter()
        return await self._load_all(holding.target, held, dictionary), "full"

    async def _load_changes(self, target: Dict, held: Mark, dictionary: Dictionary) -> "_Loaded | None":
        """R20: load what changed since; None when that is not known, or not all there is to it."""
        try:
            changes = await within(_CHANGES_WITHIN, _changes(self._db, target, held, dictionary))
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
        return _Loaded(mark, steps)

    def _is_all(self, target: Dict, keys: Sequence[str], found: dict[str, str], gone: Sequence[str]) -> bool:
        """Whether the keys told are the keys there are.

        A table may spell them another way (upper case, a number), and then neither finds them under ours nor, when
        they are deleted, tells which of its own is gone. Whoever deletes what never was there looks the same.
        """
        return found.keys() <= set(keys) and all(self._memory.has(target, key) for key in gone)

    async def _load_all(self, target: Dict, held: Mark | None, dictionary: Dictionary) -> "_Loaded":
        generation = self._memory.begin()
        try:
            async with dictionary.provider.snapshot(self._db, target) as snapshot:
                steps = await _commits(snapshot, held)
                has_other_past = held is not None and not await snapshot.shares(held)
                count = await self._fill(generation, snapshot)
            mark = snapshot.mark
            self._memory.publish(target, generation, mark, count)
        except BaseException:
            self._memory.discard(generation)
            raise
        return _Loaded(mark, steps, has_other_past)

    async def _fill(self, generation: int, snapshot: Snapshot) -> int:
        count = added = 0
        async with aclosing(snapshot.all()) as batches:
            async for rows in batches:
                count += len(rows)
                added += self._memory.fill(generation, rows)
        if added < count:
            raise twice(snapshot.target)
        return count

    def _failed(self, holding: Holding, error: PenstockError) -> None:
        target = holding.target
        self._metrics.errors.labels(target.dict_code, error.code).inc()
        self._memory.mark_stale(target, monotonic())
        log = structlog.get_logger().bind(tenantId=target.tenant_id, dictCode=target.dict_code, version=holding.version)
        told = log.error if is_lasting(error) else log.warning
        told("dictionary_not_loaded", code=error.code, error=error.message, hint=error.hint)

    def _tell(self, target: Dict, loaded: "_Loaded", kind: str, began: int, *, is_first: bool) -> None:
        """R26: say what is read from now on, and add it to the traces that led to it."""
        about: dict[str, Any] = {"tenantId": target.tenant_id, "dictCode": target.dict_code, "kind": kind}
        log = structlog.get_logger()
        made = [_made(step) for step in loaded.steps]
        now = stamp_of(self._db.clock.now())
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

    def _tell_reset(self, holding: Holding, mark: Mark) -> None:
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


def _made(step: Step) -> dict[str, Any]:
    """What made a version."""
    return {"eventId": str(step.event_id), "source": step.source, "version": step.mark.version}


async def _changes(db: Database, target: Dict, held: Mark, dictionary: Dictionary) -> _Changes | None:
    """What changed since *held*: the commits, the keys, and the items that these have now."""
    async with dictionary.provider.snapshot(db, target) as snapshot:
        steps = await snapshot.steps_since(held)
        if steps is None or any(step.keys is None for step in steps):
            return None
        keys = sorted({key for step in steps for key in step.keys or ()})
        if len(keys) > _KEYS_FOLLOWED:
            return None
        found = await snapshot.only(keys) if keys else []
        return None if found is None else (snapshot.mark, steps, keys, dict(found))


async def _commits(snapshot: Snapshot, held: Mark | None) -> Sequence[Step]:
    """What led to what is loaded; of one that was not held before, its last commit."""
    mark = snapshot.mark
    if mark.is_pinned:
        return ()
    return await snapshot.commits_after(held.version if held else mark.version - 1)


def _known(error: Exception) -> PenstockError:
    """Whatever their SQL does, the other dictionaries go on."""
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, TimeoutError):
        return Transient("DATABASE_SLOW", "the primary does not answer in time")
    return Corrupt("LOAD_FAILED", f"{type(error).__name__}: {error}", hint="mend loadSql or its tables")
