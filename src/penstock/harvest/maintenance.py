"""Periodic tasks of harvest. The rescuer sends a message again if its work has stalled: workers died, or it was lost.

A message that is only late does no harm: it is recognised as a duplicate.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

import msgspec
import structlog

from penstock.harvest import store
from penstock.harvest.alerts import AlertCode, AlertSender, AlertSeverity, raise_alert
from penstock.harvest.config import HarvestSection
from penstock.harvest.consolidate.worker import Consolidator
from penstock.harvest.contract import CONSOLIDATIONS, PLANS, WORK_ITEMS, PlanMessage
from penstock.harvest.fetch.partitions import flush_outbox, make_consolidation, make_work_item
from penstock.harvest.fetch.worker import Fetcher
from penstock.harvest.metrics import HarvestMetrics
from penstock.harvest.plan.planner import Planner
from penstock.harvest.service import Harvest
from penstock.harvest.store import SQL
from penstock.kernel.bus import Bus, BusMessage
from penstock.kernel.db.database import Database
from penstock.kernel.errors import PenstockError
from penstock.kernel.tasks.periodic import PeriodicTask
from penstock.kernel.text import format_duration

RESCUES = 3
_SECOND = timedelta(seconds=1)
_NO_PROGRESS_AFTER = timedelta(hours=1)
_BUSY_FACTOR = 6  # of the time until a stall, while the bus has other messages: slow is not lost
_GIVEN_UP = f"STALLED: no worker made progress, although the message was sent {RESCUES + 1} times"
_log = structlog.get_logger()


class RunRescuer:
    """Finds stalled plans, partitions and consolidations, and sends their messages again."""

    def __init__(
        self, db: Database, bus: Bus, planner: Planner, fetcher: Fetcher, consolidator: Consolidator, after: timedelta
    ) -> None:
        self._db = db
        self._bus = bus
        self._planner = planner
        self._fetcher = fetcher
        self._consolidator = consolidator
        self._after = after

    async def rescue(self) -> None:
        """Send the messages of stalled work again, and fail work whose message was sent often enough."""
        await self._rescue_plans(await self._compute_stall_limit(PLANS))
        await self._rescue_partitions(await self._compute_stall_limit(WORK_ITEMS))
        await self._rescue_consolidations(await self._compute_stall_limit(CONSOLIDATIONS))
        await self._report_no_progress()

    async def _compute_stall_limit(self, topic: str) -> datetime:
        factor = _BUSY_FACTOR if await self._bus.count_backlog(topic) else 1
        return self._db.clock.now() - self._after * factor

    async def _rescue_plans(self, before: datetime) -> None:
        for row in await self._db.fetch(SQL["list_stalled_plans"], before):
            if row["rescues"] >= RESCUES:
                await self._planner.fail(row["run_id"], _GIVEN_UP)
                continue
            plan = msgspec.json.encode(PlanMessage(row["run_id"], row["feed"], row["trace_id"]))
            message = BusMessage(PLANS, row["feed"], plan)
            await self._send_again(message, "rescue_plan", row["run_id"], self._db.clock.now(), row["rescues"])

    async def _rescue_partitions(self, before: datetime) -> None:
        for row in await self._db.fetch(SQL["list_stalled_partitions"], before):
            run_id, name = row["run_id"], row["partition_id"]
            if row["rescues"] >= RESCUES:
                await self._fetcher.fail(run_id, name, _GIVEN_UP, rescues=RESCUES)
                continue
            item = make_work_item(run_id, name, row["next_offset"], row["scan"], row["trace_id"])
            await self._send_again(item, "rescue_partition", run_id, name, self._db.clock.now(), row["rescues"])

    async def _rescue_consolidations(self, before: datetime) -> None:
        for row in await self._db.fetch(SQL["list_stalled_consolidations"], before):
            async with self._db.connection() as connection:
                run = await store.read_run(connection, row["run_id"])
            if run is not None and row["rescues"] >= RESCUES:
                await self._consolidator.fail(run, _GIVEN_UP)
                continue
            message = make_consolidation(row["run_id"], row["trace_id"], force=row["is_forced"])
            await self._send_again(message, "rescue_run", row["run_id"], self._db.clock.now(), row["rescues"])

    async def _send_again(self, message: BusMessage, statement: str, *key: object) -> None:
        async with self._db.transaction() as tx:
            if await tx.fetchval(SQL[statement], *key) is None:
                return  # another process sent it first, or the work has made progress
            await self._bus.publish([message], tx=tx)
        _log.warning("stalled_work_resent", topic=message.topic, key=message.key)
        await flush_outbox(self._bus)

    async def _report_no_progress(self) -> None:
        """H15: raise an alert for a source that requests one pause after another, which is no failure."""
        before = self._db.clock.now() - _NO_PROGRESS_AFTER
        for row in await self._db.fetch(SQL["list_runs_without_progress"], before, AlertCode.NO_PROGRESS):
            duration = format_duration(_NO_PROGRESS_AFTER)
            message = f"Run {row['run_id']} of {row['feed']} has stored no page for {duration}. It continues to wait."
            code, severity, now = AlertCode.NO_PROGRESS, AlertSeverity.WARNING, self._db.clock.now()
            async with self._db.transaction() as tx:
                await raise_alert(tx, row["feed"], row["run_id"], code, severity, message, now)


@contextmanager
def _log_schedule_errors(feed: str) -> Iterator[None]:
    """Log an error of one feed, so that the other feeds are scheduled."""
    try:
        yield
    except PenstockError as error:
        _log.warning("scheduled_run_failed", feed=feed, code=error.code, error=error.message)


def list_periodic_tasks(
    harvest: Harvest,
    section: HarvestSection,
    db: Database,
    fetcher: Fetcher,
    rescuer: RunRescuer,
    metrics: HarvestMetrics,
) -> Sequence[tuple[str, PeriodicTask, timedelta]]:
    """Return name, task and interval of each periodic task; several processes may run them concurrently."""
    alert_sender = AlertSender(db, section.alerts)

    async def start_due_runs() -> None:
        for name, feed in section.feeds.items():
            if feed.every is not None:
                with _log_schedule_errors(name):
                    await harvest.start_due(name, feed.every, feed.full_every)

    async def send_alerts() -> None:
        metrics.set_undelivered_alerts(await alert_sender.send_due())

    async def prune_runs() -> None:
        while await store.prune_runs(db, db.clock.now() - section.retention):
            pass

    async def update_watermarks() -> None:
        # From the database: another process may have completed the run.
        metrics.set_watermarks(await store.list_watermarks(db, list(section.feeds)))

    return [
        ("harvest schedule", start_due_runs, 5 * _SECOND),
        ("harvest rescue", rescuer.rescue, 5 * _SECOND),
        ("harvest pauses", fetcher.resume_paused, _SECOND),
        ("harvest alerts", send_alerts, _SECOND),
        ("harvest watermarks", update_watermarks, 5 * _SECOND),
        ("harvest retention", prune_runs, timedelta(minutes=10)),
    ]
