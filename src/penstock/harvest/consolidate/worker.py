"""H7, H8, H10: the consolidator. It maps the pending records, and completes the run with its watermark or fails it."""

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
from penstock.harvest.alerts import AlertCode, AlertSeverity, log_failed_run, raise_alert
from penstock.harvest.config import ConsolidationMode, ConsolidationSection
from penstock.harvest.consolidate import watermark
from penstock.harvest.consolidate.late_changes import LateChangesStopped, fetch_late_changes
from penstock.harvest.consolidate.sql_compiler import compile_fetch, compile_set
from penstock.harvest.consolidate.watermark import WatermarkNotSaved
from penstock.harvest.contract import ConsolidateMessage, HarvestRunState, HarvestRunType, decode_message
from penstock.harvest.feed.feeds import Feed, FeedRegistry
from penstock.harvest.feed.mapping import FeedMapping, MappedRecord, MappingProblem
from penstock.harvest.fetch.worker import MAX_RETRY_DELAY
from penstock.harvest.metrics import HarvestMetrics
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from penstock.harvest.store import LONG_TIMEOUT, SQL, RunRow
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
_MAX_FRUITLESS = 10  # consecutive walks without a result: concurrent changes cannot be the reason
_log = structlog.get_logger()
T = TypeVar("T")
# Called in the transaction that publishes, with the number of published differences, which may be 0.
OnPublished = Callable[[Connection, str, int], Awaitable[None]]


class ConsolidationResult(NamedTuple):
    """Numbers of consolidated and rejected raw records."""

    consolidated: int = 0
    rejected: int = 0
    is_complete: bool = True  # whether nothing is pending; false if the work was stopped

    def add(self, other: "ConsolidationResult") -> "ConsolidationResult":
        is_complete = self.is_complete and other.is_complete
        return ConsolidationResult(self.consolidated + other.consolidated, self.rejected + other.rejected, is_complete)


# Called in each transaction that consolidates, with its result, so that both are committed together.
Progress = Callable[[Connection, ConsolidationResult], Awaitable[None]]


class _StepResult(NamedTuple):
    """The result of one transaction: the number of rows, the last key, and the consolidated records."""

    taken: int
    last: str | None
    result: ConsolidationResult


@dataclass(frozen=True)
class _ConsolidationJob:
    db: Database
    feed: str
    mapping: FeedMapping
    section: ConsolidationSection
    run_id: UUID
    pricing_version: int
    progress: Progress | None
    stopping: asyncio.Event | None

    @property
    def is_stopping(self) -> bool:
        return self.stopping is not None and self.stopping.is_set()

    async def begin(self, tx: Connection) -> None:
        """Prepare a transaction; raise Transient MAPPING_CHANGED if the feed has another mapping now."""
        await tx.execute(_SQL["force_index_lookups"])
        if await tx.fetchval(_SQL["lock_mapping"], self.feed, self.mapping.digest) is None:
            hint = f"use the same settings of harvest.feeds.{self.feed} in all processes of harvest"
            raise Transient("MAPPING_CHANGED", f"another process uses another mapping of feed {self.feed}", hint=hint)

    async def report_progress(self, tx: Connection, result: ConsolidationResult) -> None:
        if self.progress is not None and (result.consolidated or result.rejected):
            await self.progress(tx, result)


class _Consolidation(Protocol):
    """An implementation of consolidation."""

    limit: int

    async def step(self, after: str) -> _StepResult:
        """Consolidate up to *limit* rows after a key, without rows that another transaction has locked."""


async def apply_mapping(tx: Connection, feed: str, mapping: FeedMapping, now: datetime) -> int:
    """Set the mapping of the feed, whose row the caller has locked, and return the version of its pricing rules.

    If the canonical records were made with another mapping, all records become pending.
    """
    before = await tx.fetchval(_SQL["read_mapping"], feed)
    if before != mapping.digest:
        await tx.execute(_SQL["set_mapping"], feed, mapping.digest)
        if before is not None:  # otherwise no record is consolidated yet, and all are pending
            await enable_all_plans(tx)
            await tx.execute(_SQL["make_all_pending"], feed, timeout=LONG_TIMEOUT)
    latest = await tx.fetchrow(_SQL["read_latest_pricing"], feed)
    if latest is not None and latest["digest"] == mapping.pricing_digest:
        return int(latest["version"])
    version = 1 if latest is None else int(latest["version"]) + 1
    rules = canonical.dumps(mapping.make_pricing_document()).decode()
    await tx.execute(_SQL["insert_pricing"], feed, version, rules, mapping.pricing_digest, now)
    return version


async def consolidate(
    db: Database,
    feed: str,
    mapping: FeedMapping,
    section: ConsolidationSection,
    *,
    run_id: UUID,
    pricing_version: int,
    progress: Progress | None = None,
    stopping: asyncio.Event | None = None,
) -> ConsolidationResult:
    """Consolidate until no record of *feed* is pending; return the part of this call, besides that of others."""
    job = _ConsolidationJob(db, feed, mapping, section, run_id, pricing_version, progress, stopping)
    if section.mode is ConsolidationMode.BATCHES:
        return await _drain(job, _BatchConsolidation(job))
    implementation = _SetConsolidation(job)
    total = ConsolidationResult()
    for result in await gather_or_cancel(_drain(job, implementation) for _ in range(section.set_concurrency)):
        total = total.add(result)
    return total


async def _drain(job: _ConsolidationJob, implementation: _Consolidation) -> ConsolidationResult:
    total, fruitless = ConsolidationResult(), 0
    while not job.is_stopping:
        taken, result = await _walk(job, implementation)
        total = total.add(result)
        if result.consolidated or result.rejected:
            fruitless = 0
            continue
        fruitless += 1 if taken else 0
        if fruitless >= _MAX_FRUITLESS:
            raise Corrupt(
                "RAW_PENDING", f"{taken} pending records of feed {job.feed} have no raw record of their version"
            )
        # Rows locked by others were skipped, and may stay pending: wait for the lock of the first row.
        async with job.db.transaction() as tx:
            first = await tx.fetchval(_SQL["await_first_pending"], job.feed)
        if first is None:
            return total
    return total._replace(is_complete=False)


async def _walk(job: _ConsolidationJob, implementation: _Consolidation) -> tuple[int, ConsolidationResult]:
    """Walk once through the keys. Each step starts after the last key, to skip dead and locked rows."""
    taken, total, after = 0, ConsolidationResult(), ""
    while not job.is_stopping:
        step = await implementation.step(after)
        taken, total = taken + step.taken, total.add(step.result)
        if step.last is None or step.taken < implementation.limit:
            break
        after = step.last
    return taken, total


class _SetConsolidation:
    """The mode `sets`: one statement takes, maps and writes records."""

    def __init__(self, job: _ConsolidationJob) -> None:
        self.limit = job.section.set_size
        self._job = job
        self._statement = compile_set(job.mapping)

    async def step(self, after: str) -> _StepResult:
        job = self._job
        arguments = (job.feed, after, self.limit, job.run_id, job.pricing_version, job.db.clock.now())
        async with job.db.transaction() as tx:
            await job.begin(tx)
            [row] = await tx.fetch(self._statement.text, *arguments, *self._statement.arguments)
            result = ConsolidationResult(row["consolidated"], row["rejected"])
            await job.report_progress(tx, result)
        return _StepResult(row["taken"], row["last"], result)


class _CanonicalRow(NamedTuple):
    """A row of `upsert_canonical`."""

    key: str
    fields: str
    cost: Decimal | None
    price: Decimal | None
    rule: str | None
    version: int
    is_deleted: bool


class _BatchConsolidation:
    """The mode `batches` of the founding document: lock and fetch rows, map them here, upsert on other connections."""

    def __init__(self, job: _ConsolidationJob) -> None:
        self.limit = job.section.batch_size
        self._job = job
        self._fetch = compile_fetch(job.mapping)

    async def step(self, after: str) -> _StepResult:
        job = self._job
        async with job.db.transaction() as tx:
            await job.begin(tx)
            rows = await tx.fetch(self._fetch.text, job.feed, after, self.limit, *self._fetch.arguments)
            current = [row for row in rows if row["texts"] is not None]
            mapped, problems = self._map(current)
            await self._upsert(mapped)
            await self._reject(tx, problems)
            await tx.execute(_SQL["delete_pending"], [row["tid"] for row in current])
            result = ConsolidationResult(len(mapped), len(problems))
            await job.report_progress(tx, result)
        return _StepResult(len(rows), rows[-1]["key"] if rows else None, result)

    def _map(self, rows: Iterable[asyncpg.Record]) -> tuple[list[_CanonicalRow], list[tuple[str, str]]]:
        mapped, problems = [], []
        for row in rows:
            record = self._job.mapping.map(row["texts"])
            if isinstance(record, MappingProblem):
                problems.append((row["key"], record.reason))
            else:
                mapped.append(_make_row(row, record))
        return mapped, problems

    async def _upsert(self, rows: Sequence[_CanonicalRow]) -> None:
        size, slots = self._job.section.upsert_size, asyncio.Semaphore(self._job.section.upsert_concurrency)
        parts = (rows[start : start + size] for start in range(0, len(rows), size))
        await gather_or_cancel(self._upsert_part(part, slots) for part in parts)

    async def _upsert_part(self, rows: Sequence[_CanonicalRow], slots: asyncio.Semaphore) -> None:
        job = self._job
        arguments = (job.feed, job.run_id, job.pricing_version, job.db.clock.now())
        async with slots:
            await job.db.execute(_SQL["upsert_canonical"], *arguments, *map(list, zip(*rows, strict=True)))

    async def _reject(self, tx: Connection, problems: Sequence[tuple[str, str]]) -> None:
        if problems:
            keys, reasons = map(list, zip(*problems, strict=True))
            job = self._job
            await tx.execute(_SQL["insert_rejects"], job.feed, job.run_id, job.db.clock.now(), keys, reasons)


def _make_row(row: asyncpg.Record, mapped: MappedRecord) -> _CanonicalRow:
    # Without the conversion to a float a decimal keeps all digits.
    fields = {
        name: orjson.Fragment(format(value, "f")) if isinstance(value, Decimal) else value
        for name, value in mapped.fields.items()
    }
    text = orjson.dumps(fields).decode()
    return _CanonicalRow(row["key"], text, mapped.cost, mapped.price, mapped.rule, row["version"], row["is_deleted"])


class TooManyRejects(Exception):
    """The run has more rejected records than the limits allow. A retry without changes does not help."""


class Consolidator:
    """Makes canonical records of the raw records of a run, and completes the run."""

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
        """Stop after the current set."""
        self._stopping.set()

    async def handle(self, delivery: BusDelivery) -> Outcome:
        """Consolidate the run of a message, if its state is CONSOLIDATING."""
        item = decode_message(delivery.message.value, ConsolidateMessage)
        async with self._db.connection() as connection:
            run = await store.read_run(connection, item.run_id)
        if run is None or run.state is not HarvestRunState.CONSOLIDATING:
            return Done()
        try:
            return await self._consolidate(run, self._feeds.get(run.feed))
        except SourcePaused as paused:
            return Retry(str(paused), after=paused.after and min(paused.after, MAX_RETRY_DELAY), counts=False)
        except LateChangesStopped:
            return Retry("the consolidator was stopped", counts=False)
        except Transient:
            raise  # an error of the database, not of the run
        except Exception as error:  # noqa: BLE001 - an edge: a bug must not leave the run consolidating forever
            return await self._handle_error(run, error, delivery.attempt)

    async def _consolidate(self, run: RunRow, feed: Feed) -> Outcome:
        is_whole = run.run_type is HarvestRunType.FULL and run.failed == 0
        is_certain = is_whole and await self._fetch_late_changes(run, feed)
        version = await self._apply_mapping(run, feed)

        async def record_progress(tx: Connection, result: ConsolidationResult) -> None:
            now = self._db.clock.now()
            await tx.execute(SQL["count_consolidated"], run.run_id, result.consolidated, result.rejected, now)

        result = await consolidate(
            self._db,
            feed.name,
            feed.mapping,
            feed.section.consolidation,
            run_id=run.run_id,
            pricing_version=version,
            progress=record_progress,
            stopping=self._stopping,
        )
        self._metrics.count_consolidated(feed.name, result.consolidated, result.rejected)
        if not result.is_complete:
            return Retry("the consolidator was stopped", counts=False)
        await self._check_rejects(run, feed)
        if await self._complete(run, feed, is_certain=is_certain):
            return Done()
        return Retry("records became pending before the run was completed", counts=False)

    async def _fetch_late_changes(self, run: RunRow, feed: Feed) -> bool:
        """H10: a failure of the source now prevents deletions; it does not fail the run, which has all records."""
        try:
            return await fetch_late_changes(self._db, feed, run, self._stopping)
        except SourcePaused:
            raise
        except SourceFailed as failed:
            _log.warning("late_changes_fetch_failed", feed=run.feed, run=str(run.run_id), error=str(failed))
            return False

    async def _apply_mapping(self, run: RunRow, feed: Feed) -> int:
        """H7: record the version of the pricing rules in the run, and return it."""
        async with self._db.transaction() as tx:
            await store.lock_feed(tx, run.feed)
            await tx.execute(SQL["allow_long_statements"])
            version = await apply_mapping(tx, run.feed, feed.mapping, self._db.clock.now())
            await tx.execute(SQL["set_pricing_version"], run.run_id, version)
            return version

    async def _check_rejects(self, run: RunRow, feed: Feed) -> None:
        row = await self._db.fetchrow(SQL["count_rejects"], run.run_id)
        if row is None or run.forced_by is not None:
            return
        limits = feed.section.limits
        if row["rejected"] > max(limits.rejects_allowed, limits.max_reject_ratio * row["seen"]):
            limit = f"limits.max_reject_ratio is {limits.max_reject_ratio:g}"
            raise TooManyRejects(f"{row['rejected']} of {row['seen']} records could not be stored or mapped; {limit}")

    async def _complete(self, run: RunRow, feed: Feed, *, is_certain: bool) -> bool:
        """H8: complete the run with its watermark and the copy; return False if records are pending again."""
        async with self._db.transaction() as tx:
            before = await store.lock_feed(tx, run.feed)
            current = await store.read_run(tx, run.run_id, lock=True)
            if current is None or current.state is not HarvestRunState.CONSOLIDATING:
                return True  # another replica has completed it
            if await tx.fetchval(SQL["is_pending"], run.feed):
                return False
            now, is_whole = self._db.clock.now(), current.failed == 0
            deleted = await self._delete(tx, current, feed, is_certain=is_certain) if is_whole else None
            differing = await self._publish(tx, feed)
            # H5: the records of failed partitions were not fetched; the next run must request them again.
            after = model.compute_watermark(current.upper_bound, feed.section.overlap, before) if is_whole else before
            figures = await store.complete_run(tx, run.run_id, self._worker, now, after, deleted)
            if after is not None and is_whole:
                await store.save_watermark(tx, run.feed, run.run_id, after, now)
                # As late as possible, and before the commit: without the copy the transaction is rolled back.
                await watermark.save(self._storage, run.feed, watermark.make_document(after, run.run_id, now))
            if differing is not None:
                # Last: no dictionary is locked during the request to the storage.
                await self._on_published(tx, run.feed, differing)
        self._metrics.count_completed_run(run.feed, run.run_type)
        names = {"feed": run.feed, "run": str(run.run_id), "kind": run.run_type.value}
        _log.info("harvest_run_completed", **names, deleted=deleted or 0, **figures._asdict())
        return True

    async def _publish(self, tx: Connection, feed: Feed) -> int | None:
        """Publish the records to dictionaries, and return the number of differences; None without dictionaries."""
        if not feed.section.dictionaries:
            return None
        await enable_all_plans(tx)
        await tx.execute(SQL["allow_long_statements"])
        return int(await tx.fetchval(SQL["publish_records"], feed.name, timeout=LONG_TIMEOUT))

    async def _delete(self, tx: Connection, run: RunRow, feed: Feed, *, is_certain: bool) -> int | None:
        """H10: delete the records that a whole full run did not see, unless the limit or a doubt prevents it."""
        if run.run_type is not HarvestRunType.FULL:
            return None
        runs = [run.run_id]
        if not feed.source.has_windows:
            # Changes during the run are unknown: only records that two full runs in a row did not see are deleted.
            runs = [row["run_id"] for row in await tx.fetch(SQL["list_runs_since_full"], run.feed, run.run_id)]
            is_certain = True
        await enable_all_plans(tx)
        await tx.execute(SQL["allow_long_statements"])
        row = await tx.fetchrow(SQL["count_live"], run.feed, runs, timeout=LONG_TIMEOUT)
        live, unseen = (row["live"], row["unseen"]) if row and runs else (0, 0)
        if not unseen:
            return 0
        now, limit = self._db.clock.now(), feed.section.limits.max_delete_ratio
        if await tx.fetchval(SQL["has_rejects_without_key"], run.run_id):
            reason = "records without a key were rejected, which may be among them"
        elif not is_certain:
            reason = "the source changed too often to be certain"
        elif unseen > limit * live:
            reason = f"that is more than limits.max_delete_ratio ({limit:.0%})"
        else:
            return int(await tx.fetchval(SQL["soft_delete"], run.feed, runs, now, run.run_id, timeout=LONG_TIMEOUT))
        message = (
            f"Run {run.run_id} of {run.feed} did not see {unseen:,} of {live:,} records; {reason}. None was deleted."
        )
        await raise_alert(tx, run.feed, run.run_id, AlertCode.DELETION_SKIPPED, AlertSeverity.WARNING, message, now)
        return 0

    async def _handle_error(self, run: RunRow, error: Exception, attempt: int) -> Outcome:
        """Return the outcome of a consolidation that *error* has ended; the last attempt fails the run."""
        reason = f"{error.code}: {error.message}" if isinstance(error, PenstockError) else f"{error}"
        if not isinstance(error, (PenstockError, SourceFailed, WatermarkNotSaved, TooManyRejects)):
            _log.error("consolidation_crashed", feed=run.feed, run=str(run.run_id), exc_info=error)
            reason = f"{type(error).__name__}: {error}"
        if attempt < ATTEMPTS and not isinstance(error, (TooManyRejects, SourceRefused)):
            return Retry(reason)
        await self.fail(run, reason, is_critical=isinstance(error, WatermarkNotSaved))
        return Failed(reason)

    async def fail(self, run: RunRow, reason: str, *, is_critical: bool = False) -> None:
        """H8, H12: fail the run with an alert; the watermark does not move."""
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
            with suppress(PenstockError, TimeoutError):  # the storage may still fail; the database is authoritative
                row = await tx.fetchrow(SQL["read_watermark"], run.feed)
                stored = row if row and row["watermark"] else None
                await watermark.restore(self._storage, run.feed, watermark.make_document(*stored) if stored else None)
        self._metrics.count_failure(run.feed, code)
        log_failed_run(run.feed, run.run_id, code, reason)
