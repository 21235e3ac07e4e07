"""H7, H8, H10: the consolidator. It drains what is pending, and completes the run with its watermark, or fails it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple, Protocol, TypeVar
from uuid import UUID

import asyncpg
import orjson
import structlog

from penstock.harvest import model, store
from penstock.harvest.alerts import AlertCode, AlertSeverity, raise_alert
from penstock.harvest.config import ConsolidationMode, ConsolidationSection
from penstock.harvest.consolidate import watermark
from penstock.harvest.consolidate.late_changes import LateChangesStopped, sweep
from penstock.harvest.consolidate.sql_compiler import compile_fetch, compile_set
from penstock.harvest.consolidate.watermark import WatermarkNotSaved
from penstock.harvest.contract import ConsolidateMessage, HarvestRunState, HarvestRunType, read
from penstock.harvest.feed.feeds import Feed, FeedRegistry
from penstock.harvest.feed.recipe import FeedMapping, MappedRecord, MappingProblem
from penstock.harvest.fetch.worker import LONGEST_WAIT
from penstock.harvest.metrics import HarvestMetrics
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from penstock.harvest.store import AT_EASE, SQL, RunRow
from penstock.kernel import canonical
from penstock.kernel.bus import Bus, BusDelivery
from penstock.kernel.db.database import Connection, Database, enable_all_plans
from penstock.kernel.db.sql import load
from penstock.kernel.errors import Corrupt, PenstockError, Transient
from penstock.kernel.storage import Storage
from penstock.kernel.tasks.outcome import Done, Failed, Outcome, Retry
from penstock.kernel.tasks.wait import gather_or_cancel

_SQL = load("penstock.harvest.consolidate")
ATTEMPTS = 3  # H12
_FRUITLESS = 10  # walks in a row that met only rows whose raw record is not there: nobody is that unlucky
T = TypeVar("T")
# What follows when so many records of a feed were published, in the transaction that publishes them; none may be.
OnPublished = Callable[[Connection, str, int], Awaitable[None]]


class ConsolidationResult(NamedTuple):
    """What became of raw records."""

    consolidated: int = 0
    rejected: int = 0
    is_complete: bool = True  # whether nothing was pending in the end; not so when it was stopped before

    def plus(self, other: "ConsolidationResult") -> "ConsolidationResult":
        is_complete = self.is_complete and other.is_complete
        return ConsolidationResult(self.consolidated + other.consolidated, self.rejected + other.rejected, is_complete)


# Called in each transaction that consolidates, with what this one did: what it writes is as true as the records are.
Progress = Callable[[Connection, ConsolidationResult], Awaitable[None]]


class _PricingStep(NamedTuple):
    """What one transaction did: it took so many rows, up to *last*."""

    taken: int
    last: str | None
    done: ConsolidationResult


@dataclass(frozen=True)
class _ConsolidationJob:
    db: Database
    feed: str
    recipe: FeedMapping
    section: ConsolidationSection
    run_id: UUID
    pricing_version: int
    progress: Progress | None
    stopping: asyncio.Event | None

    @property
    def is_stopping(self) -> bool:
        return self.stopping is not None and self.stopping.is_set()

    async def begin(self, tx: Connection) -> None:
        """What every transaction that consolidates begins with. Who works by an old recipe has to stop."""
        await tx.execute(_SQL["look_up"])
        if await tx.fetchval(_SQL["hold_recipe"], self.feed, self.recipe.digest) is None:
            hint = "processes with different configurations work on this feed"
            raise Transient("MAPPING_CHANGED", f"{self.feed} is made by another recipe meanwhile", hint=hint)

    async def tell(self, tx: Connection, done: ConsolidationResult) -> None:
        if self.progress is not None and (done.consolidated or done.rejected):
            await self.progress(tx, done)


class _ReadStrategy(Protocol):
    """How some pending rows are consolidated."""

    limit: int

    async def step(self, after: str) -> _PricingStep:
        """Consolidate up to *limit* rows after a key, but none that somebody else has locked."""


async def use_recipe(tx: Connection, feed: str, recipe: FeedMapping, now: datetime) -> int:
    """The version of the rules, kept when they are new. If canonical records were made otherwise, all are due again.

    The caller has locked the row of the feed.
    """
    before = await tx.fetchval(_SQL["recipe"], feed)
    if before != recipe.digest:
        await tx.execute(_SQL["change_recipe"], feed, recipe.digest)
        if before is not None:  # else none was ever consolidated, and all are pending anyway
            await enable_all_plans(tx)
            await tx.execute(_SQL["make_all_pending"], feed, timeout=AT_EASE)
    latest = await tx.fetchrow(_SQL["latest_pricing"], feed)
    if latest is not None and latest["digest"] == recipe.pricing_digest:
        return int(latest["version"])
    version = 1 if latest is None else int(latest["version"]) + 1
    rules = canonical.dumps(recipe.pricing_document()).decode()
    await tx.execute(_SQL["add_pricing"], feed, version, rules, recipe.pricing_digest, now)
    return version


async def consolidate(
    db: Database,
    feed: str,
    recipe: FeedMapping,
    section: ConsolidationSection,
    *,
    run_id: UUID,
    pricing_version: int,
    progress: Progress | None = None,
    stopping: asyncio.Event | None = None,
) -> ConsolidationResult:
    """Consolidate until nothing of *feed* is pending: what this call did of it, others may have done the rest."""
    job = _ConsolidationJob(db, feed, recipe, section, run_id, pricing_version, progress, stopping)
    if section.mode is ConsolidationMode.BATCHES:
        return await _drain(job, _BatchReader(job))
    way = _Sets(job)
    total = ConsolidationResult()
    for done in await gather_or_cancel(_drain(job, way) for _ in range(section.sets_at_once)):
        total = total.plus(done)
    return total


async def _drain(job: _ConsolidationJob, way: _ReadStrategy) -> ConsolidationResult:
    total, fruitless = ConsolidationResult(), 0
    while not job.is_stopping:
        taken, done = await _walk(job, way)
        total = total.plus(done)
        if done.consolidated or done.rejected:
            fruitless = 0
            continue
        fruitless += 1 if taken else 0
        if fruitless >= _FRUITLESS:
            raise Corrupt("RAW_PENDING", f"{taken} pending records of {job.feed} are not those that are kept")
        # What others hold was skipped, and may stay pending: wait for whoever holds the first row.
        async with job.db.transaction() as tx:
            first = await tx.fetchval(_SQL["wait"], job.feed)
        if first is None:
            return total
    return total._replace(is_complete=False)


async def _walk(job: _ConsolidationJob, way: _ReadStrategy) -> tuple[int, ConsolidationResult]:
    """Once through the keys. Going on after the last one spares looking again at what is dead or locked before it."""
    taken, total, after = 0, ConsolidationResult(), ""
    while not job.is_stopping:
        step = await way.step(after)
        taken, total = taken + step.taken, total.plus(step.done)
        if step.last is None or step.taken < way.limit:
            break
        after = step.last
    return taken, total


class _Sets:
    """One statement does it all."""

    def __init__(self, job: _ConsolidationJob) -> None:
        self.limit = job.section.set_size
        self._job = job
        self._statement = compile_set(job.recipe)

    async def step(self, after: str) -> _PricingStep:
        job = self._job
        call = (job.feed, after, self.limit, job.run_id, job.pricing_version, job.db.clock.now())
        async with job.db.transaction() as tx:
            await job.begin(tx)
            [row] = await tx.fetch(self._statement.text, *call, *self._statement.arguments)
            done = ConsolidationResult(row["consolidated"], row["rejected"])
            await job.tell(tx, done)
        return _PricingStep(row["taken"], row["last"], done)


class _BatchResult(NamedTuple):
    """A row of `upsert`."""

    key: str
    fields: str
    cost: Decimal | None
    price: Decimal | None
    rule: str | None
    version: int
    is_gone: bool


class _BatchReader:
    """The founding document's way: fetched and locked, mapped here, upserted by other connections, then marked."""

    def __init__(self, job: _ConsolidationJob) -> None:
        self.limit = job.section.batch_size
        self._job = job
        self._fetch = compile_fetch(job.recipe)

    async def step(self, after: str) -> _PricingStep:
        job = self._job
        async with job.db.transaction() as tx:
            await job.begin(tx)
            rows = await tx.fetch(self._fetch.text, job.feed, after, self.limit, *self._fetch.arguments)
            current = [row for row in rows if row["texts"] is not None]
            made, problems = self._map(current)
            await self._upsert(made)
            await self._reject(tx, problems)
            await tx.execute(_SQL["mark"], [row["tid"] for row in current])
            done = ConsolidationResult(len(made), len(problems))
            await job.tell(tx, done)
        return _PricingStep(len(rows), rows[-1]["key"] if rows else None, done)

    def _map(self, rows: Iterable[asyncpg.Record]) -> tuple[list[_BatchResult], list[tuple[str, str]]]:
        made, problems = [], []
        for row in rows:
            found = self._job.recipe.map(row["texts"])
            if isinstance(found, MappingProblem):
                problems.append((row["key"], found.reason))
            else:
                made.append(_made(row, found))
        return made, problems

    async def _upsert(self, made: Sequence[_BatchResult]) -> None:
        size, slots = self._job.section.upsert_size, asyncio.Semaphore(self._job.section.upserts_at_once)
        parts = (made[start : start + size] for start in range(0, len(made), size))
        await gather_or_cancel(self._upsert_some(part, slots) for part in parts)

    async def _upsert_some(self, made: Sequence[_BatchResult], slots: asyncio.Semaphore) -> None:
        job = self._job
        call = (job.feed, job.run_id, job.pricing_version, job.db.clock.now())
        async with slots:
            await job.db.execute(_SQL["upsert"], *call, *map(list, zip(*made, strict=True)))

    async def _reject(self, tx: Connection, problems: Sequence[tuple[str, str]]) -> None:
        if problems:
            keys, reasons = map(list, zip(*problems, strict=True))
            job = self._job
            await tx.execute(_SQL["reject"], job.feed, job.run_id, job.db.clock.now(), keys, reasons)


def _made(row: asyncpg.Record, mapped: MappedRecord) -> _BatchResult:
    # A decimal keeps all its digits: it is written as it is, not by way of a float.
    fields = {
        name: orjson.Fragment(format(value, "f")) if isinstance(value, Decimal) else value
        for name, value in mapped.fields.items()
    }
    text = orjson.dumps(fields).decode()
    return _BatchResult(row["key"], text, mapped.cost, mapped.price, mapped.rule, row["version"], row["is_gone"])


class TooManyRejects(Exception):
    """More records could not be mapped than the limits allow; trying again will not help."""


class Consolidator:
    """Makes canonical records of what a run fetched."""

    def __init__(
        self,
        db: Database,
        bus: Bus,
        storage: Storage,
        feeds: FeedRegistry,
        metrics: HarvestMetrics,
        worker: str,
        on_published: OnPublished,
    ) -> None:
        self._db = db
        self._bus = bus
        self._storage = storage
        self._feeds = feeds
        self._metrics = metrics
        self._worker = worker
        self._on_published = on_published
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End after the set that is being consolidated."""
        self._stopping.set()

    async def handle(self, delivery: BusDelivery) -> Outcome:
        """Consolidate the run a message is about, unless it is not, or not any more, to be consolidated."""
        item = read(delivery.message.value, ConsolidateMessage)
        async with self._db.connection() as connection:
            run = await store.run(connection, item.run_id)
        if run is None or run.state is not HarvestRunState.CONSOLIDATING:
            return Done()
        try:
            return await self._consolidate(run, self._feeds.get(run.feed))
        except SourcePaused as paused:
            return Retry(str(paused), after=paused.after and min(paused.after, LONGEST_WAIT), counts=False)
        except LateChangesStopped:
            return Retry("the consolidator was stopped", counts=False)
        except Transient:
            raise  # the database's trouble, and nobody's failure
        except Exception as error:  # noqa: BLE001 - an edge: whatever it is, the run must not hang for it
            return await self._failed(run, error, delivery.attempt)

    async def _consolidate(self, run: RunRow, feed: Feed) -> Outcome:
        is_whole = run.run_type is HarvestRunType.FULL and run.failed == 0
        is_certain = is_whole and await self._sweep(run, feed)
        version = await self._price(run, feed)

        async def note(tx: Connection, done: ConsolidationResult) -> None:
            now = self._db.clock.now()
            await tx.execute(SQL["note_consolidated"], run.run_id, done.consolidated, done.rejected, now)

        done = await consolidate(
            self._db,
            feed.name,
            feed.recipe,
            feed.section.consolidation,
            run_id=run.run_id,
            pricing_version=version,
            progress=note,
            stopping=self._stopping,
        )
        self._metrics.consolidated(feed.name, done.consolidated, done.rejected)
        if not done.is_complete:
            return Retry("the consolidator was stopped", counts=False)
        await self._judge_rejects(run, feed)
        if await self._complete(run, feed, is_certain=is_certain):
            return Done()
        return Retry("something became pending while it was completed", counts=False)

    async def _sweep(self, run: RunRow, feed: Feed) -> bool:
        """H10: that the source fails now is a reason to delete nothing, not to fail a run that has all it needs."""
        try:
            return await sweep(self._db, feed, run, self._stopping)
        except SourcePaused:
            raise
        except SourceFailed as failed:
            structlog.get_logger().warning("sweep_failed", feed=run.feed, run=str(run.run_id), error=str(failed))
            return False

    async def _price(self, run: RunRow, feed: Feed) -> int:
        """H7: the run keeps the version of the rules it used."""
        async with self._db.transaction() as tx:
            await store.lock_feed(tx, run.feed)
            await tx.execute(SQL["plan_at_ease"])
            version = await use_recipe(tx, run.feed, feed.recipe, self._db.clock.now())
            await tx.execute(SQL["use_pricing"], run.run_id, version)
            return version

    async def _judge_rejects(self, run: RunRow, feed: Feed) -> None:
        row = await self._db.fetchrow(SQL["rejected"], run.run_id)
        if row is None or run.forced_by is not None:
            return
        limits = feed.section.limits
        if row["rejected"] > max(limits.rejects_allowed, limits.max_reject_ratio * row["seen"]):
            raise TooManyRejects(f"{row['rejected']} of {row['seen']} records could not be kept or mapped")

    async def _complete(self, run: RunRow, feed: Feed, *, is_certain: bool) -> bool:
        """H8: the end of the run, its watermark and the copy of it are one; False when something is pending again."""
        async with self._db.transaction() as tx:
            known = await store.lock_feed(tx, run.feed)
            held = await store.run(tx, run.run_id, lock=True)
            if held is None or held.state is not HarvestRunState.CONSOLIDATING:
                return True  # another replica was quicker
            if await tx.fetchval(SQL["is_pending"], run.feed):
                return False
            now, is_whole = self._db.clock.now(), held.failed == 0
            deleted = await self._delete(tx, held, feed, is_certain=is_certain) if is_whole else None
            differing = await self._publish(tx, feed)
            # H5: what failed partitions hold was not fetched; the next run has to ask for it again.
            reached = model.watermark(held.upper_bound, feed.section.overlap, known) if is_whole else known
            await store.complete_run(tx, run.run_id, self._worker, now, reached, deleted)
            if reached is not None and is_whole:
                await store.save_watermark(tx, run.feed, run.run_id, reached, now)
                # Late, and before the commit: without the copy nothing of this has happened.
                await watermark.save(self._storage, run.feed, watermark.document(reached, run.run_id, now))
            if differing is not None:
                # Last: dictionaries are not to be held while a store is written to.
                await self._on_published(tx, run.feed, differing)
        self._metrics.completed(run.feed, run.run_type)
        structlog.get_logger().info("run_completed", feed=run.feed, run=str(run.run_id), deleted=deleted)
        return True

    async def _publish(self, tx: Connection, feed: Feed) -> int | None:
        """Let dictionaries read what the run made, all at once: how many records differ; None when nobody reads it."""
        if not feed.section.dictionaries:
            return None
        await enable_all_plans(tx)
        await tx.execute(SQL["plan_at_ease"])
        return int(await tx.fetchval(SQL["publish"], feed.name, timeout=AT_EASE))

    async def _delete(self, tx: Connection, run: RunRow, feed: Feed, *, is_certain: bool) -> int | None:
        """H10: what a whole full run did not see is gone, unless that is too much to be believed."""
        if run.run_type is not HarvestRunType.FULL:
            return None
        runs = [run.run_id]
        if not feed.source.has_windows:
            # Nothing tells what moved while it was read: gone is what two runs in a row did not see.
            runs = [row["run_id"] for row in await tx.fetch(SQL["runs_since_last_full"], run.feed, run.run_id)]
            is_certain = True
        await enable_all_plans(tx)
        await tx.execute(SQL["plan_at_ease"])
        row = await tx.fetchrow(SQL["standing"], run.feed, runs, timeout=AT_EASE)
        live, unseen = (row["live"], row["unseen"]) if row and runs else (0, 0)
        if not unseen:
            return 0
        now, limit = self._db.clock.now(), feed.section.limits.max_delete_ratio
        if await tx.fetchval(SQL["has_strangers"], run.run_id):
            why = "records without a key were set aside: some of them may be those"
        elif not is_certain:
            why = "the source did not hold still long enough to be sure"
        elif unseen > limit * live:
            why = f"that is more than {limit:.0%}"
        else:
            return int(await tx.fetchval(SQL["soft_delete"], run.feed, runs, now, run.run_id, timeout=AT_EASE))
        message = f"Run {run.run_id} of {run.feed} did not see {unseen:,} of {live:,} records; {why}. None was deleted."
        await raise_alert(tx, run.feed, run.run_id, AlertCode.DELETION_SKIPPED, AlertSeverity.WARNING, message, now)
        return 0

    async def _failed(self, run: RunRow, error: Exception, attempt: int) -> Outcome:
        reason = f"{error.code}: {error.message}" if isinstance(error, PenstockError) else f"{error}"
        if not isinstance(error, (PenstockError, SourceFailed, WatermarkNotSaved, TooManyRejects)):
            structlog.get_logger().error("consolidation_crashed", run=str(run.run_id), exc_info=error)
            reason = f"{type(error).__name__}: {error}"
        if attempt < ATTEMPTS and not isinstance(error, (TooManyRejects, SourceRefused)):
            return Retry(reason)
        await self.fail(run, reason, is_critical=isinstance(error, WatermarkNotSaved))
        return Failed(reason)

    async def fail(self, run: RunRow, reason: str, *, is_critical: bool = False) -> None:
        """H8, H12: the run has failed, the watermark stays, and somebody is told."""
        code = AlertCode.WATERMARK_NOT_SAVED if is_critical else AlertCode.CONSOLIDATION_FAILED
        severity = AlertSeverity.CRITICAL if is_critical else AlertSeverity.ERROR
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            await store.lock_feed(tx, run.feed)
            if not await store.move_run(
                tx, run.run_id, HarvestRunState.CONSOLIDATING, "fail", self._worker, now, reason
            ):
                return
            await tx.execute(SQL["make_rejects_pending"], run.feed, run.run_id)
            message = f"Run {run.run_id} of {run.feed} failed: {reason}. Watermark NOT advanced."
            await raise_alert(tx, run.feed, run.run_id, code, severity, message, now)
            with suppress(PenstockError, TimeoutError):  # it was down a moment ago; the database is the truth
                row = await tx.fetchrow(SQL["watermark"], run.feed)
                known = row if row and row["watermark"] else None
                await watermark.restore(self._storage, run.feed, watermark.document(*known) if known else None)
        self._metrics.failed(run.feed, code)
