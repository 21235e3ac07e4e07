"""R19–R24: keeps the memory of a pod as the primary is: hears of changes, looks by itself, loads what is needed."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import msgspec
import structlog

from penstock.kernel.db.database import Database
from penstock.kernel.errors import NotFound, PenstockError, Transient
from penstock.kernel.signals import Resync, Signals
from penstock.kernel.tasks.periodic import repeating
from penstock.kernel.tasks.waiting import ended, happens, within
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata import store
from penstock.refdata.config import QuerySection
from penstock.refdata.contract import INVALIDATIONS
from penstock.refdata.dictionaries.catalogue import Catalogue
from penstock.refdata.model import Dict, Mark
from penstock.refdata.pod.load.dictionary_state import Holding, Pace
from penstock.refdata.pod.load.load_dictionary import Loads
from penstock.refdata.pod.load.metrics import PodMetrics
from penstock.refdata.pod.memory.writer import Memory
from penstock.refdata.store import stamp_of

_LOOK_WITHIN = 10.0
_FREE_EVERY = 1.0
_BEHIND_AFTER = 5.0  # seconds after which a load is late
_MOST_DICTIONARIES = 100_000


class Loader:
    """All dictionaries of one pod."""

    def __init__(
        self,
        db: Database,
        catalogue: Catalogue,
        memory: Memory,
        section: QuerySection,
        metrics: PodMetrics,
        telemetry: Telemetry,
    ) -> None:
        self.db = db
        self.catalogue = catalogue
        self.memory = memory
        self._section = section
        self._metrics = metrics
        self._load = Loads(db, catalogue, memory, metrics, telemetry)
        self._holdings: dict[Dict, Holding] = {}
        slots = asyncio.Semaphore(section.loads)
        self._pace = Pace(section.debounce_ms / 1000, section.jitter_ms / 1000, slots)
        self._patience = max(section.reconcile_every.total_seconds() * 2, _BEHIND_AFTER)
        self._must_look = asyncio.Event()
        self._has_looked = asyncio.Event()
        self.is_loaded = asyncio.Event()  # every dictionary there is, at least once

    def holdings(self) -> Sequence[Holding]:
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
            async with repeating("stream lag", show_lag, every):
                yield
        finally:
            for task in tasks:
                await ended(task)
            for holding in self.holdings():
                await holding.end()

    def find(self, target: Dict) -> Holding:
        """The holding of *target*, begun when it is new; NotFound or Invalid when there can be none."""
        self.catalogue.get(target)
        holding = self._holdings.get(target)
        if holding is None:
            if len(self._holdings) >= _MOST_DICTIONARIES:
                hint = "name the tenants under refdata.tenants"
                raise Transient("TOO_MANY_DICTIONARIES", "this pod holds as many as it may", hint=hint)
            holding = self._holdings[target] = Holding(target, self._pace, self._load)
            holding.want(0)
        return holding

    def hear(self, body: str) -> None:
        """R19: somebody says there is a new version. What is not understood is left to the next look."""
        try:
            told = INVALIDATIONS.decode(body)
            holding = self._holdings.get(target := Dict(told.tenant_id, told.dict_code))
            if holding is None:
                holding = self.find(target)
        except msgspec.MsgspecError as error:
            structlog.get_logger().warning("invalidation_not_understood", error=str(error))
            return
        except PenstockError:  # of a dictionary or tenant that is not ours
            return
        if told.version > holding.version:
            holding.want(told.version)
        elif holding.mark is not None and stamp_of(told.committed_at) > holding.mark.stamp:
            self._must_look.set()  # R24: committed later, and yet not above what is held: the past has changed

    async def look(self) -> None:
        """R22, R24: compare all versions with the primary's."""
        await self._drop_what_is_gone()
        known = {one.section.code: one for one in self.catalogue.all() if one.section.enabled}
        before = {target: holding.mark for target, holding in self._holdings.items()}
        try:
            marks = await within(_LOOK_WITHIN, self._standings(list(known)))
        except TimeoutError as error:
            raise Transient("DATABASE_SLOW", "the primary does not tell its versions in time") from error
        wanted = {Dict(tenant, code) for tenant in self.catalogue.tenants for code in known} | set(marks)
        for target in wanted:
            try:
                self._compare(self.find(target), before.get(target), marks.get(target))
            except (NotFound, Transient):  # of a tenant that is not ours, or more than can be held
                continue
        self.memory.state.looked()

    async def _drop_what_is_gone(self) -> None:
        """R1: what is not configured any more is held no more."""
        for gone in [one for one in self._holdings if not self._has(one)]:
            await self._holdings[gone].end()
            self.memory.drop(gone)
            del self._holdings[gone]

    async def _standings(self, codes: Sequence[str]) -> dict[Dict, Mark]:
        async with self.db.connection() as connection:
            return await store.standings(connection, codes)

    async def _note_loaded(self) -> None:
        """R23: say so when every dictionary there is has been loaded, or only a person can mend it."""
        await self._has_looked.wait()
        for holding in self.holdings():
            await holding.settles()
        self.memory.state.loaded()
        self.is_loaded.set()

    def _compare(self, holding: Holding, before: Mark | None, mark: Mark | None) -> None:
        """R24: what was held *before* the look cannot be later than what it found, but for another past."""
        at = mark or Mark(0, 0)
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

    def _has(self, target: Dict) -> bool:
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
            await happens(self._must_look, every)

    async def _keep_freeing(self) -> None:
        while True:
            try:
                while self.memory.free():  # noqa: ASYNC110 - piece by piece: others have their turn between
                    await asyncio.sleep(0)
            except Transient as error:
                structlog.get_logger().error("pod_memory_full", code=error.code, error=error.message)
            await asyncio.sleep(_FREE_EVERY)
