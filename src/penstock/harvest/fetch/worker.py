"""H4: the worker. A message is a turn at a partition; what it fetched and the next message are one transaction."""

import asyncio
from datetime import datetime, timedelta
from uuid import UUID

import msgspec
import structlog

from penstock.harvest import store
from penstock.harvest.contract import HarvestRunState, PartitionState, WorkMessage, read
from penstock.harvest.feed.feeds import FeedRegistry
from penstock.harvest.fetch import partitions, raw_store
from penstock.harvest.fetch.completeness import CompletenessVerdict, PassCounts, is_clean, judge
from penstock.harvest.fetch.partitions import (
    EndedPartition,
    HarvestPosition,
    PartitionTask,
    end_partitions,
    hurry,
    work_item,
)
from penstock.harvest.fetch.turn import FetchTurn, take_turn
from penstock.harvest.metrics import HarvestMetrics
from penstock.harvest.model import RUN, PagePosition
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from penstock.harvest.store import SQL
from penstock.kernel.bus import Bus, BusDelivery
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.errors import Transient
from penstock.kernel.ids import new_id
from penstock.kernel.tasks.outcome import Done, Failed, Outcome, Retry

ATTEMPTS = 4  # H6: redelivered at most 3 times
LONGEST_WAIT = timedelta(minutes=1)  # of a message that is put back: those behind it wait as long
_SHORTEST_PARK = timedelta(seconds=1)
_STATES = {CompletenessVerdict.COMPLETE: PartitionState.COMPLETED, CompletenessVerdict.FAILED: PartitionState.FAILED}


class Fetcher:
    """Works on partitions, whoever worked on them before."""

    def __init__(self, db: Database, bus: Bus, feeds: FeedRegistry, metrics: HarvestMetrics, worker: str) -> None:
        self._db = db
        self._bus = bus
        self._feeds = feeds
        self._metrics = metrics
        self._worker = worker
        self._stopping = asyncio.Event()
        self._log = structlog.get_logger().bind(part="harvest")

    def stop(self) -> None:
        """End turns at their next page."""
        self._stopping.set()

    async def handle(self, delivery: BusDelivery) -> Outcome:
        """One turn at the partition a message is about, unless it was made already."""
        item = read(delivery.message.value, WorkMessage)
        async with self._db.connection() as connection:
            task = await partitions.task(connection, item.run_id, item.partition_id)
        if task is None or not _is_due(task, item):
            return Done()
        try:
            failure = await self._turn(task)
        except Transient:
            raise  # the database's trouble, and nobody's failure
        except SourceFailed as failed:
            failure = failed
        except Exception as error:  # noqa: BLE001 - an edge: the partition must not hang for a mistake of ours
            self._log.exception("turn_crashed", run=str(task.run_id), partition=task.partition_id)
            failure = SourceFailed("INTERNAL", f"{type(error).__name__}: {error}")
        return Done() if failure is None else await self._put_back(task, failure, delivery.attempt)

    async def _turn(self, task: PartitionTask) -> SourceFailed | None:
        """One turn, kept; why nothing came of it, when it did."""
        began, feed = self._db.clock.now(), self._feeds.get(task.feed)
        turn = await take_turn(feed, task, self._stopping)
        if not turn.has_progress:
            return turn.failure or SourcePaused("STOPPED", "the worker was stopped")
        found, rejects = feed.reader.read(turn.raws)
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            held = await partitions.hold(tx, task.run_id, task.partition_id)
            if held is None or not _is_same(held, task):
                return None  # somebody else made this turn while we did
            kept, refused = await raw_store.keep(tx, task, found, now)
            aside = [*rejects, *refused]
            await raw_store.reject(tx, task, aside, now)
            await self._advance(tx, task, turn, PassCounts.after(task, len(turn.raws), len(aside), kept), began)
        self._metrics.fetched(task.feed, len(turn.pages), len(turn.raws), len(aside))
        await hurry(self._bus)
        return None

    async def _advance(
        self, tx: Connection, task: PartitionTask, turn: FetchTurn, done: PassCounts, began: datetime
    ) -> None:
        """Move the partition on as its pass is judged, with the message for whoever goes on."""
        now, passes = self._db.clock.now(), self._feeds.get(task.feed).section.limits.passes
        verdict, error = judge(task, done, turn.ending, passes)
        step = HarvestPosition(
            turn.position, task.scan, task.counted, done.told, done.seen, done.missed, task.was_clean
        )
        if turn.ending is not None and verdict is not CompletenessVerdict.COMPLETE:
            step = HarvestPosition(PagePosition(), task.scan + 1, turn.ending.count, was_clean=is_clean(task, done))
        await partitions.advance(tx, task, step, now, is_complete=verdict is CompletenessVerdict.COMPLETE)
        if task.run_state is HarvestRunState.CREATED:
            await store.move_run(tx, task.run_id, HarvestRunState.CREATED, "begin", self._worker, now)
        one = EndedPartition(task.partition_id, _STATES.get(verdict, PartitionState.RUNNING), done.seen, error)
        message = work_item(task.run_id, task.partition_id, step.position.offset, step.scan, task.trace_id)
        payload = msgspec.json.decode(message.value)
        row_id = new_id(self._db.clock)
        await partitions.note_work(tx, task.run_id, one, row_id, self._worker, now, payload=payload, began=began)
        if one.status is PartitionState.RUNNING:
            await self._bus.publish([message], tx=tx)
        else:
            await end_partitions(tx, self._bus, task.feed, task.run_id, task.trace_id, [one], self._worker, now)

    async def _put_back(self, task: PartitionTask, failure: SourceFailed, attempt: int) -> Outcome:
        """Nothing came of the turn: try again later, or give the partition up."""
        self._metrics.failed(task.feed, failure.code)
        if isinstance(failure, SourcePaused):
            return await self._park(task, failure.after or _SHORTEST_PARK)
        if isinstance(failure, SourceRefused) and task.position.cursor is not None:
            return await self._begin_again(task, failure)
        if attempt < ATTEMPTS and not isinstance(failure, SourceRefused):
            return Retry(str(failure), after=failure.after and min(failure.after, LONGEST_WAIT))
        await self.fail(task.run_id, task.partition_id, str(failure), expected=task)
        return Failed(str(failure))

    async def _park(self, task: PartitionTask, pause: timedelta) -> Outcome:
        """H15: the partition waits in its row: a message that waits would hold up those of other feeds."""
        until = self._db.clock.now() + max(pause, _SHORTEST_PARK)
        await self._db.execute(SQL["park"], task.run_id, task.partition_id, task.position.offset, until)
        return Done()

    async def unpark(self) -> int:
        """Send the messages of partitions whose pause is over; how many."""
        async with self._db.transaction() as tx:
            rows = await tx.fetch(SQL["unpark"], self._db.clock.now())
            await self._bus.publish([work_item(*row) for row in rows], tx=tx)
        if rows:
            await hurry(self._bus)
        return len(rows)

    async def _begin_again(self, task: PartitionTask, refused: SourceRefused) -> Outcome:
        """A cursor may have run out: then a new pass is needed, as long as there may be one."""
        if task.scan >= self._feeds.get(task.feed).section.limits.passes:
            await self.fail(task.run_id, task.partition_id, str(refused), expected=task)
            return Failed(str(refused))
        async with self._db.transaction() as tx:
            held = await partitions.hold(tx, task.run_id, task.partition_id)
            if held is not None and _is_same(held, task):
                step = HarvestPosition(PagePosition(), task.scan + 1, task.counted)
                await partitions.advance(tx, task, step, self._db.clock.now())
                message = work_item(task.run_id, task.partition_id, 0, step.scan, task.trace_id)
                await self._bus.publish([message], tx=tx)
        await hurry(self._bus)
        return Done()

    async def fail(
        self, run_id: UUID, partition_id: str, error: str, *, expected: PartitionTask | None = None, rescues: int = 0
    ) -> None:
        """Give a partition up, unless it moved on meanwhile."""
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            task = await partitions.hold(tx, run_id, partition_id)
            if task is None or not _is_open(task) or task.rescues < rescues:
                return
            if expected is not None and not _is_same(task, expected):
                return
            if task.run_state is HarvestRunState.CREATED:
                await store.move_run(tx, run_id, HarvestRunState.CREATED, "begin", self._worker, now)
            one = EndedPartition(partition_id, PartitionState.FAILED, task.seen, error)
            await partitions.note_work(tx, run_id, one, new_id(self._db.clock), self._worker, now)
            await end_partitions(tx, self._bus, task.feed, run_id, task.trace_id, [one], self._worker, now)
        self._log.error("partition_failed", run=str(run_id), partition=partition_id, error=error)
        await hurry(self._bus)


def _is_open(task: PartitionTask) -> bool:
    fetching = task.run_state in RUN.groups["fetching"]
    return fetching and not task.completed and task.status in (None, PartitionState.RUNNING)


def _is_due(task: PartitionTask, item: WorkMessage) -> bool:
    """H4: matching → process; completed → skip; other → skip as duplicate."""
    return _is_open(task) and (task.position.offset, task.scan) == (item.offset, item.scan)


def _is_same(held: PartitionTask, task: PartitionTask) -> bool:
    return _is_open(held) and (held.position, held.scan) == (task.position, task.scan)
