"""H2, H3, H9: the planner. It fixes the upper bound of a run and counts the source. Then it inserts the run, its
partitions and their messages in one transaction."""

from contextlib import suppress
from time import monotonic
from uuid import UUID

import structlog

from penstock.harvest import store
from penstock.harvest.alerts import AlertCode, AlertSeverity, log_failed_run, raise_alert
from penstock.harvest.config import RestSourceSection
from penstock.harvest.contract import HarvestRunType, PlanMessage, PlanState, decode_message
from penstock.harvest.feed.feeds import Feed, FeedRegistry
from penstock.harvest.fetch.partitions import flush_outbox, make_work_item
from penstock.harvest.fetch.worker import ATTEMPTS, MAX_RETRY_DELAY
from penstock.harvest.model import ALWAYS, EVERYTHING, Heatmap, PartitionRange, TimeWindow
from penstock.harvest.plan.heatmap import UNSTABLE, make_heatmap
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from penstock.harvest.store import SQL, PlanRow
from penstock.kernel.bus import Bus, BusDelivery
from penstock.kernel.db.database import Database
from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.tasks.outcome import Done, Failed, Outcome, Retry

_PROGRESS_INTERVAL = 0.5  # seconds
_log = structlog.get_logger()


class Planner:
    """Plans the requested runs."""

    def __init__(self, db: Database, bus: Bus, feeds: FeedRegistry, worker: str) -> None:
        self._db = db
        self._bus = bus
        self._feeds = feeds
        self._worker = worker

    async def handle(self, delivery: BusDelivery) -> Outcome:
        """Plan the run of a message, unless it was planned before."""
        message = decode_message(delivery.message.value, PlanMessage)
        async with self._db.connection() as connection:
            row = await store.read_plan(connection, message.run_id)
        if row is None or row.state is not PlanState.PLANNING:
            return Done()
        try:
            await self._plan(row)
        except Exception as error:  # noqa: BLE001 - an edge: a bug must not leave the plan unfinished forever
            return await self._handle_error(row, error, delivery.attempt)
        return Done()

    async def _plan(self, row: PlanRow) -> None:
        feed = self._feeds.get(row.feed)
        # Before the count: later changes belong to the next run.
        upper_bound = self._db.clock.now()
        run_type = _choose_run_type(row, feed)
        window = ALWAYS if run_type is HarvestRunType.FULL else TimeWindow(row.watermark, upper_bound)
        heatmap = await self._count(feed, row, window)
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            if not await store.settle_plan(tx, row.run_id, PlanState.PLANNED, self._worker, now, counts=heatmap.counts):
                return
            names = await store.insert_run(tx, row, run_type, upper_bound, heatmap, now)
            await self._bus.publish([make_work_item(row.run_id, name, 0, 1, row.trace_id) for name in names], tx=tx)
        figures = {"kind": run_type.value, "records": heatmap.total, "partitions": len(names)}
        _log.info("harvest_run_started", feed=row.feed, run=str(row.run_id), **figures, actor=row.requested_by)
        await flush_outbox(self._bus)
        if run_type is HarvestRunType.INCREMENTAL:
            await self._check_window(feed, row, heatmap.total)

    async def _count(self, feed: Feed, row: PlanRow, window: TimeWindow) -> Heatmap:
        last = monotonic()

        async def report_progress(counts: int) -> None:
            nonlocal last
            if monotonic() - last > _PROGRESS_INTERVAL:
                last = monotonic()
                await self._db.execute(SQL["update_plan_progress"], row.run_id, counts, self._db.clock.now())

        async def count(range_: PartitionRange) -> int:
            return await feed.source.count(range_, window)

        return await make_heatmap(count, feed.section.partitions, progress=report_progress)

    async def _check_window(self, feed: Feed, row: PlanRow, records: int) -> None:
        """Log a warning if an incremental run reads as many records as the source has."""
        if not records:
            return
        with suppress(SourceFailed):
            if records < await feed.source.count(EVERYTHING, ALWAYS):
                return
            setting, hint = "the time of change", None
            if isinstance(feed.section.source, RestSourceSection):
                setting = f"after_param ({feed.section.source.after_param})"
                source = f"harvest.feeds.{feed.name}.source"
                hint = f"set {source}.after_param to a parameter that the source supports, or set after_param: null "
                hint += "and upto_param: null, which makes every run a full run"
            problem = f"the incremental run reads all {records:,} records: the source seems to ignore {setting}"
            _log.warning("incremental_window_ignored", feed=feed.name, run=str(row.run_id), problem=problem, hint=hint)

    async def _handle_error(self, row: PlanRow, error: Exception, attempt: int) -> Outcome:
        """Return the outcome of a plan that *error* has ended; the last attempt fails the run."""
        if isinstance(error, SourcePaused):
            return Retry(str(error), after=error.after and min(error.after, MAX_RETRY_DELAY), counts=False)
        if isinstance(error, Transient) and error.code != UNSTABLE:
            raise error  # an error of the database, not of the run
        reason, after = f"{error}", None
        if isinstance(error, SourceFailed):
            after = error.after and min(error.after, MAX_RETRY_DELAY)
        elif isinstance(error, PenstockError):
            reason = f"{error.code}: {error.message}" + (f" ({error.hint})" if error.hint else "")
        else:
            _log.error("harvest_plan_crashed", feed=row.feed, run=str(row.run_id), exc_info=error)
            reason = f"INTERNAL: {type(error).__name__}: {error}"
        if attempt < ATTEMPTS and not isinstance(error, SourceRefused):
            return Retry(reason, after=after)
        await self.fail(row.run_id, reason)
        return Failed(reason)

    async def fail(self, run_id: UUID, error: str) -> None:
        """Fail the plan with an alert, unless it has ended already."""
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            feed = await store.settle_plan(tx, run_id, PlanState.FAILED, self._worker, now, error=error)
            if feed is None:
                return
            message = f"Run {run_id} of {feed} could not start: {error}. Watermark NOT advanced."
            await raise_alert(tx, feed, run_id, AlertCode.PLAN_FAILED, AlertSeverity.ERROR, message, now)
        log_failed_run(feed, run_id, AlertCode.PLAN_FAILED, error)


def _choose_run_type(row: PlanRow, feed: Feed) -> HarvestRunType:
    """H2: return FULL if requested, without a watermark, or if the source cannot filter by time; else INCREMENTAL."""
    if row.run_type is HarvestRunType.FULL or row.watermark is None or not feed.source.has_windows:
        return HarvestRunType.FULL
    return HarvestRunType.INCREMENTAL
