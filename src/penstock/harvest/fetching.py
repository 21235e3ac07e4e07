"""H4: the worker. A message is a turn at a partition; what it fetched and the next message are one transaction."""

import asyncio
from uuid import UUID

import msgspec
import structlog

from penstock.harvest import records, store
from penstock.harvest.contract import PartitionState, RunState, WorkItem
from penstock.harvest.ending import end_partitions, work_item
from penstock.harvest.feeds import Feeds
from penstock.harvest.metrics import HarvestMetrics
from penstock.harvest.model import RUN, Position
from penstock.harvest.records import Kept, Record, Reject
from penstock.harvest.source import SourceFailed, SourcePaused, SourceRefused
from penstock.harvest.store import Ended, Step, Task
from penstock.harvest.turns import Turn, take_turn
from penstock.kernel.bus import Bus, Delivery
from penstock.kernel.db import Connection, Database
from penstock.kernel.errors import Transient
from penstock.kernel.ids import new_id
from penstock.kernel.outcome import Done, Failed, Outcome, Retry

ATTEMPTS = 4  # H6: redelivered at most 3 times


class Fetcher:
    """Works on partitions, whoever worked on them before."""

    def __init__(self, db: Database, bus: Bus, feeds: Feeds, metrics: HarvestMetrics, worker: str) -> None:
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

    async def handle(self, delivery: Delivery) -> Outcome:
        """One turn at the partition a message is about, unless it was made already."""
        try:
            item = msgspec.json.decode(delivery.message.value, type=WorkItem)
        except msgspec.DecodeError as error:
            return Failed(f"BAD_MESSAGE: no work item: {error}")
        async with self._db.connection() as connection:
            task = await store.task(connection, item.run_id, item.partition_id)
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

    async def _turn(self, task: Task) -> SourceFailed | None:
        """One turn, kept; why nothing came of it, when it did."""
        feed = self._feeds.get(task.feed)
        turn = await take_turn(feed, task, self._stopping)
        if not turn.has_progress:
            return turn.failure or SourcePaused("STOPPED", "the worker was stopped")
        found, rejects = feed.reader.read(turn.raws)
        await self._keep(task, turn, found, rejects)
        return None

    async def _keep(self, task: Task, turn: Turn, found: list[Record], rejects: list[Reject]) -> None:
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            held = await store.hold(tx, task.run_id, task.partition_id)
            if held is None or not _is_same(held, task):
                return  # somebody else made this turn while we did
            kept, refused = await records.keep(tx, task, found, now)
            await records.reject(tx, task.feed, task.run_id, [*rejects, *refused], now)
            step, error = self._step(task, turn, kept)
            if not await store.advance(tx, task, step, now):
                return
            await self._note(tx, task, step, error)
        self._metrics.fetched(task.feed, turn.pages, len(turn.raws), len(rejects) + len(refused))
        await self._bus.relay()

    def _step(self, task: Task, turn: Turn, kept: Kept) -> tuple[Step, str | None]:
        """Where the turn leaves the partition; and why that is a failure, when it is one."""
        seen, missed = task.seen + kept.seen, task.missed + kept.missed
        ending = turn.ending
        if ending is None:
            return Step(turn.position, task.scan, seen, missed, task.counted), None
        held_still = task.counted == seen == ending.count and not ending.changed
        if held_still or (task.scan > 1 and not missed):
            return Step(turn.position, task.scan, seen, missed, task.counted, is_complete=True), None
        passes = self._feeds.get(task.feed).section.limits.passes
        again = Step(Position(), task.scan + 1, 0, 0, ending.count)
        if task.scan < passes:
            return again, None
        return again, (
            f"SOURCE_MOVING: after {passes} passes records still move: {task.counted} counted before, {seen} seen, "
            f"{ending.count} counted after, {ending.changed} changed, {missed} missed by the pass before"
        )

    async def _note(self, tx: Connection, task: Task, step: Step, error: str | None) -> None:
        now = self._db.clock.now()
        if task.run_state is RunState.CREATED:
            await store.move_run(tx, task.run_id, RunState.CREATED, "begin", self._worker, now)
        status = PartitionState.RUNNING
        if step.is_complete or error:
            status = PartitionState.COMPLETED if step.is_complete else PartitionState.FAILED
        same_pass = step.scan == task.scan
        one = Ended(task.partition_id, status, step.seen if same_pass else task.seen, error)
        message = work_item(task.run_id, task.partition_id, step.position.offset, step.scan, task.trace_id)
        payload = msgspec.json.decode(message.value)
        await store.note_work(tx, task.run_id, one, new_id(self._db.clock), self._worker, now, payload)
        if status is PartitionState.RUNNING:
            await self._bus.publish([message], tx=tx)
        else:
            await end_partitions(tx, self._bus, task.feed, task.run_id, task.trace_id, [one], self._worker, now)

    async def _put_back(self, task: Task, failure: SourceFailed, attempt: int) -> Outcome:
        """Nothing came of the turn: try again later, or give the partition up."""
        self._metrics.failed(task.feed, failure.code)
        if isinstance(failure, SourcePaused):
            await self._db.execute(store.SQL["wait_for_source"], task.run_id, task.partition_id, self._db.clock.now())
            return Retry(str(failure), after=failure.after, counts=False)
        if attempt < ATTEMPTS and not isinstance(failure, SourceRefused):
            return Retry(str(failure), after=failure.after)
        await self.fail(task.run_id, task.partition_id, str(failure), expected=task)
        return Failed(str(failure))

    async def fail(self, run_id: UUID, partition_id: str, error: str, *, expected: Task | None = None) -> None:
        """Give a partition up, unless it moved on meanwhile."""
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            task = await store.hold(tx, run_id, partition_id)
            if task is None or not _is_open(task) or (expected is not None and not _is_same(task, expected)):
                return
            if task.run_state is RunState.CREATED:
                await store.move_run(tx, run_id, RunState.CREATED, "begin", self._worker, now)
            one = Ended(partition_id, PartitionState.FAILED, task.seen, error)
            await store.note_work(tx, run_id, one, new_id(self._db.clock), self._worker, now)
            await end_partitions(tx, self._bus, task.feed, run_id, task.trace_id, [one], self._worker, now)
        self._log.error("partition_failed", run=str(run_id), partition=partition_id, error=error)
        await self._bus.relay()


def _is_open(task: Task) -> bool:
    fetching = task.run_state in RUN.groups["fetching"]
    return fetching and not task.completed and task.status in (None, PartitionState.RUNNING)


def _is_due(task: Task, item: WorkItem) -> bool:
    """H4: matching → process; completed → skip; other → skip as duplicate."""
    return _is_open(task) and (task.position.offset, task.scan) == (item.offset, item.scan)


def _is_same(held: Task, task: Task) -> bool:
    return _is_open(held) and (held.position, held.scan) == (task.position, task.scan)
