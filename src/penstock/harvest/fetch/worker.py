"""H4: the fetch worker. A message is a turn at a partition; its records and the next message are one transaction."""

import asyncio
from datetime import datetime, timedelta
from uuid import UUID

import msgspec
import structlog

from penstock.harvest import store
from penstock.harvest.alerts import AlertCode, log_failed_run
from penstock.harvest.contract import HarvestRunState, PartitionState, WorkMessage, decode_message
from penstock.harvest.feed.feeds import FeedRegistry
from penstock.harvest.fetch import partitions, raw_store
from penstock.harvest.fetch.completeness import CompletenessVerdict, PassCounts, is_clean, judge_pass
from penstock.harvest.fetch.partitions import (
    EndedPartition,
    HarvestPosition,
    PartitionTask,
    end_partitions,
    flush_outbox,
    make_work_item,
)
from penstock.harvest.fetch.turn import FetchTurn, take_turn
from penstock.harvest.metrics import HarvestMetrics
from penstock.harvest.model import RUN, PagePosition
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from penstock.harvest.store import SQL
from penstock.kernel.bus import Bus, BusDelivery
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.errors import Transient
from penstock.kernel.ids import make_id
from penstock.kernel.tasks.outcome import Done, Failed, Outcome, Retry

ATTEMPTS = 4  # H6: redelivered at most 3 times
MAX_RETRY_DELAY = timedelta(minutes=1)  # a delayed message delays the messages behind it
_MIN_PAUSE = timedelta(seconds=1)
_STATES = {CompletenessVerdict.COMPLETE: PartitionState.COMPLETED, CompletenessVerdict.FAILED: PartitionState.FAILED}
_log = structlog.get_logger()


class Fetcher:
    """Fetches partitions, turn by turn; each turn may run in another process."""

    def __init__(self, db: Database, bus: Bus, feeds: FeedRegistry, metrics: HarvestMetrics, worker: str) -> None:
        self._db = db
        self._bus = bus
        self._feeds = feeds
        self._metrics = metrics
        self._worker = worker
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End turns at their next page."""
        self._stopping.set()

    async def handle(self, delivery: BusDelivery) -> Outcome:
        """Make the turn of a message, unless it was made before."""
        item = decode_message(delivery.message.value, WorkMessage)
        async with self._db.connection() as connection:
            task = await partitions.read_task(connection, item.run_id, item.partition_id)
        if task is None or not _is_due(task, item):
            return Done()
        try:
            failure = await self._make_turn(task)
        except Transient:
            raise  # an error of the database, not of the partition
        except SourceFailed as failed:
            failure = failed
        except Exception as error:  # noqa: BLE001 - an edge: a bug must not leave the partition running forever
            _log.exception("partition_crashed", feed=task.feed, run=str(task.run_id), partition=task.partition_id)
            failure = SourceFailed("INTERNAL", f"{type(error).__name__}: {error}")
        return Done() if failure is None else await self._handle_failure(task, failure, delivery.attempt)

    async def _make_turn(self, task: PartitionTask) -> SourceFailed | None:
        """Make and store a turn, or return the failure of a turn without a page."""
        started, feed = self._db.clock.now(), self._feeds.get(task.feed)
        turn = await take_turn(feed, task, self._stopping)
        if not turn.has_progress:
            return turn.failure or SourcePaused("STOPPED", "the worker was stopped")
        records, rejects = feed.reader.read(turn.raws)
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            current = await partitions.lock_task(tx, task.run_id, task.partition_id)
            if current is None or not _is_same(current, task):
                return None  # another worker has made this turn
            stored, refused = await raw_store.store_records(tx, task, records, now)
            rejects = [*rejects, *refused]
            await raw_store.store_rejects(tx, task, rejects, now)
            counts = PassCounts.from_turn(task, len(turn.raws), len(rejects), stored)
            run_error = await self._advance(tx, task, turn, counts, started)
        self._metrics.count_fetched(task.feed, len(turn.pages), len(turn.raws), len(rejects))
        if run_error:
            log_failed_run(task.feed, task.run_id, AlertCode.CONSOLIDATION_SKIPPED, run_error)
        await flush_outbox(self._bus)
        return None

    async def _advance(
        self, tx: Connection, task: PartitionTask, turn: FetchTurn, counts: PassCounts, started: datetime
    ) -> str | None:
        """Store the progress of a partition with its next message, or end it; return the error of a failed run."""
        now, passes = self._db.clock.now(), self._feeds.get(task.feed).section.limits.passes
        verdict, error = judge_pass(task, counts, turn.ending, passes)
        step = HarvestPosition(
            turn.position, task.scan, task.counted, counts.received, counts.seen, counts.missed, task.was_clean
        )
        if turn.ending is not None and verdict is not CompletenessVerdict.COMPLETE:
            step = HarvestPosition(PagePosition(), task.scan + 1, turn.ending.count, was_clean=is_clean(task, counts))
        await partitions.advance(tx, task, step, now, is_complete=verdict is CompletenessVerdict.COMPLETE)
        if task.run_state is HarvestRunState.CREATED:
            await store.move_run(tx, task.run_id, HarvestRunState.CREATED, "begin", self._worker, now)
        part = EndedPartition(task.partition_id, _STATES.get(verdict, PartitionState.RUNNING), counts.seen, error)
        message = make_work_item(task.run_id, task.partition_id, step.position.offset, step.scan, task.trace_id)
        payload = msgspec.json.decode(message.value)
        row_id = make_id(self._db.clock)
        await partitions.record_work(tx, task.run_id, part, row_id, self._worker, now, payload=payload, started=started)
        if part.status is PartitionState.RUNNING:
            await self._bus.publish([message], tx=tx)
            return None
        return await end_partitions(tx, self._bus, task.feed, task.run_id, task.trace_id, [part], self._worker, now)

    async def _handle_failure(self, task: PartitionTask, failure: SourceFailed, attempt: int) -> Outcome:
        """Pause, restart, retry or fail a partition after a turn without a page."""
        self._metrics.count_failure(task.feed, failure.code)
        if isinstance(failure, SourcePaused):
            return await self._pause(task, failure.after or _MIN_PAUSE)
        if isinstance(failure, SourceRefused) and task.position.cursor is not None:
            return await self._restart_pass(task, failure)
        if attempt < ATTEMPTS and not isinstance(failure, SourceRefused):
            return Retry(str(failure), after=failure.after and min(failure.after, MAX_RETRY_DELAY))
        await self.fail(task.run_id, task.partition_id, str(failure), expected=task)
        return Failed(str(failure))

    async def _pause(self, task: PartitionTask, pause: timedelta) -> Outcome:
        """H15: pause the partition in its row. A waiting message would delay the messages of other feeds."""
        until = self._db.clock.now() + max(pause, _MIN_PAUSE)
        await self._db.execute(SQL["pause_partition"], task.run_id, task.partition_id, task.position.offset, until)
        return Done()

    async def resume_paused(self) -> int:
        """Publish the messages of the partitions whose pause is over, and return their number."""
        async with self._db.transaction() as tx:
            rows = await tx.fetch(SQL["resume_partitions"], self._db.clock.now())
            await self._bus.publish([make_work_item(*row) for row in rows], tx=tx)
        if rows:
            await flush_outbox(self._bus)
        return len(rows)

    async def _restart_pass(self, task: PartitionTask, refused: SourceRefused) -> Outcome:
        """Start another pass after a refused cursor, which may have expired, up to the limit of passes."""
        if task.scan >= self._feeds.get(task.feed).section.limits.passes:
            await self.fail(task.run_id, task.partition_id, str(refused), expected=task)
            return Failed(str(refused))
        async with self._db.transaction() as tx:
            current = await partitions.lock_task(tx, task.run_id, task.partition_id)
            if current is not None and _is_same(current, task):
                step = HarvestPosition(PagePosition(), task.scan + 1, task.counted)
                await partitions.advance(tx, task, step, self._db.clock.now())
                message = make_work_item(task.run_id, task.partition_id, 0, step.scan, task.trace_id)
                await self._bus.publish([message], tx=tx)
        await flush_outbox(self._bus)
        return Done()

    async def fail(
        self, run_id: UUID, partition_id: str, error: str, *, expected: PartitionTask | None = None, rescues: int = 0
    ) -> None:
        """Fail a partition, unless it has made progress since *expected* or has fewer than *rescues* rescues."""
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            task = await partitions.lock_task(tx, run_id, partition_id)
            if task is None or not _is_open(task) or task.rescues < rescues:
                return
            if expected is not None and not _is_same(task, expected):
                return
            if task.run_state is HarvestRunState.CREATED:
                await store.move_run(tx, run_id, HarvestRunState.CREATED, "begin", self._worker, now)
            part = EndedPartition(partition_id, PartitionState.FAILED, task.seen, error)
            await partitions.record_work(tx, run_id, part, make_id(self._db.clock), self._worker, now)
            run_error = await end_partitions(tx, self._bus, task.feed, run_id, task.trace_id, [part], self._worker, now)
        if run_error:
            log_failed_run(task.feed, run_id, AlertCode.CONSOLIDATION_SKIPPED, run_error)
        await flush_outbox(self._bus)


def _is_open(task: PartitionTask) -> bool:
    is_fetching = task.run_state in RUN.groups["fetching"]
    return is_fetching and not task.completed and task.status in (None, PartitionState.RUNNING)


def _is_due(task: PartitionTask, item: WorkMessage) -> bool:
    """H4: matching → process; completed → skip; other → skip as duplicate."""
    return _is_open(task) and (task.position.offset, task.scan) == (item.offset, item.scan)


def _is_same(current: PartitionTask, task: PartitionTask) -> bool:
    return _is_open(current) and (current.position, current.scan) == (task.position, task.scan)
