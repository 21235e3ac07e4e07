"""H2, H3, H9: the scheduler. It fixes the upper bound, counts the source, and makes the run, its partitions and their
messages in one transaction."""

from time import monotonic
from uuid import UUID

import structlog

from penstock.harvest import store
from penstock.harvest.alerts import AlertCode, AlertSeverity, raise_alert
from penstock.harvest.contract import HarvestRunType, PlanMessage, PlanState, read
from penstock.harvest.feed.feeds import Feed, FeedRegistry
from penstock.harvest.fetch.partitions import hurry, work_item
from penstock.harvest.fetch.worker import ATTEMPTS, LONGEST_WAIT
from penstock.harvest.model import ALWAYS, Heatmap, PartitionRange, TimeWindow
from penstock.harvest.plan.heatmap import UNSTABLE, scan
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from penstock.harvest.store import SQL, PlanRow
from penstock.kernel.bus import Bus, BusDelivery
from penstock.kernel.db.database import Database
from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.tasks.outcome import Done, Failed, Outcome, Retry

_TELL = 0.5  # seconds between notes of how far the counting is


class Planner:
    """Makes runs of what is asked for."""

    def __init__(self, db: Database, bus: Bus, feeds: FeedRegistry, worker: str) -> None:
        self._db = db
        self._bus = bus
        self._feeds = feeds
        self._worker = worker

    async def handle(self, delivery: BusDelivery) -> Outcome:
        """Plan the run a message asks for, unless that was done already."""
        asked = read(delivery.message.value, PlanMessage)
        async with self._db.connection() as connection:
            row = await store.plan(connection, asked.run_id)
        if row is None or row.state is not PlanState.PLANNING:
            return Done()
        try:
            await self._plan(row)
        except Exception as error:  # noqa: BLE001 - an edge: the plan must not hang for a mistake of ours
            return await self._failed(row, error, delivery.attempt)
        return Done()

    async def _plan(self, row: PlanRow) -> None:
        feed = self._feeds.get(row.feed)
        # Before anything is counted: what changes from now on is the next run's.
        upper_bound = self._db.clock.now()
        run_type = _run_type(row, feed)
        window = ALWAYS if run_type is HarvestRunType.FULL else TimeWindow(row.watermark, upper_bound)
        heatmap = await self._count(feed, row, window)
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            if not await store.settle_plan(tx, row.run_id, PlanState.PLANNED, self._worker, now, counts=heatmap.counts):
                return
            names = await store.create_run(tx, row, run_type, upper_bound, heatmap, now)
            await self._bus.publish([work_item(row.run_id, name, 0, 1, row.trace_id) for name in names], tx=tx)
        structlog.get_logger().info(
            "run_planned",
            feed=row.feed,
            run=str(row.run_id),
            type=run_type.value,
            total=heatmap.total,
            parts=len(names),
        )
        await hurry(self._bus)

    async def _count(self, feed: Feed, row: PlanRow, window: TimeWindow) -> Heatmap:
        last = monotonic()

        async def tell(counts: int) -> None:
            nonlocal last
            if monotonic() - last > _TELL:
                last = monotonic()
                await self._db.execute(SQL["count_progress"], row.run_id, counts, self._db.clock.now())

        async def count(range_: PartitionRange) -> int:
            return await feed.source.count(range_, window)

        return await scan(count, feed.section.partitions, progress=tell)

    async def _failed(self, row: PlanRow, error: Exception, attempt: int) -> Outcome:
        if isinstance(error, SourcePaused):
            return Retry(str(error), after=error.after and min(error.after, LONGEST_WAIT), counts=False)
        if isinstance(error, Transient) and error.code != UNSTABLE:
            raise error  # the database's trouble, and nobody's failure
        reason, after = f"{error}", None
        if isinstance(error, SourceFailed):
            after = error.after and min(error.after, LONGEST_WAIT)
        elif isinstance(error, PenstockError):
            reason = f"{error.code}: {error.message}"
        else:
            structlog.get_logger().error("planning_crashed", run=str(row.run_id), exc_info=error)
            reason = f"INTERNAL: {type(error).__name__}: {error}"
        if attempt < ATTEMPTS and not isinstance(error, SourceRefused):
            return Retry(reason, after=after)
        await self.fail(row.run_id, reason)
        return Failed(reason)

    async def fail(self, run_id: UUID, error: str) -> None:
        """No run comes of it, and somebody is told."""
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            row = await store.plan(tx, run_id)
            if row and await store.settle_plan(tx, run_id, PlanState.FAILED, self._worker, now, error=error):
                message = f"Run {run_id} of {row.feed} could not begin: {error}. Watermark NOT advanced."
                await raise_alert(tx, row.feed, run_id, AlertCode.PLAN_FAILED, AlertSeverity.ERROR, message, now)


def _run_type(row: PlanRow, feed: Feed) -> HarvestRunType:
    """H2: full when there is no watermark, or when it is asked for, or when the source knows nothing else."""
    if row.run_type is HarvestRunType.FULL or row.watermark is None or not feed.source.has_windows:
        return HarvestRunType.FULL
    return HarvestRunType.INCREMENTAL
