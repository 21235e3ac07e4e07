"""The periodic work of harvest. The rescuer sends work again whose message killed its workers or was lost by the bus.

A message that is only late is no harm: it is found to be a duplicate when it comes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

import msgspec
import structlog

from penstock.harvest import store
from penstock.harvest.alerts import AlertCode, AlertSender, AlertSeverity, raise_alert
from penstock.harvest.config import HarvestSection
from penstock.harvest.consolidate.worker import Consolidator
from penstock.harvest.contract import CONSOLIDATIONS, PLANS, WORK_ITEMS, PlanMessage
from penstock.harvest.fetch.partitions import consolidation, hurry, work_item
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
_LOOK = timedelta(seconds=5)
_TELL = timedelta(seconds=1)
_PRUNE = timedelta(minutes=10)
_UNPARK = timedelta(seconds=1)
_BECALMED = timedelta(hours=1)
_PATIENCE = 6  # times as long, while the bus still has messages: what is slow is not lost
_GIVEN_UP = f"STALLED: nothing came of it, although its message was sent {RESCUES + 1} times"


class RunRescuer:
    """Looks now and then for what stands still."""

    def __init__(
        self, db: Database, bus: Bus, planner: Planner, fetcher: Fetcher, consolidator: Consolidator, after: timedelta
    ) -> None:
        self._db = db
        self._bus = bus
        self._planner = planner
        self._fetcher = fetcher
        self._consolidator = consolidator
        self._after = after

    async def look(self) -> None:
        """Send again what stands still for too long; give up what was sent often enough."""
        await self._plans(await self._stalled_before(PLANS))
        await self._partitions(await self._stalled_before(WORK_ITEMS))
        await self._consolidations(await self._stalled_before(CONSOLIDATIONS))
        await self._tell_becalmed()

    async def _stalled_before(self, topic: str) -> datetime:
        patience = _PATIENCE if await self._bus.backlog(topic) else 1
        return self._db.clock.now() - self._after * patience

    async def _plans(self, before: datetime) -> None:
        for row in await self._db.fetch(SQL["stalled_plans"], before):
            if row["rescues"] >= RESCUES:
                await self._planner.fail(row["run_id"], _GIVEN_UP)
                continue
            plan = msgspec.json.encode(PlanMessage(row["run_id"], row["feed"], row["trace_id"]))
            message = BusMessage(PLANS, row["feed"], plan)
            await self._again(message, "rescue_plan", row["run_id"], self._db.clock.now(), row["rescues"])

    async def _partitions(self, before: datetime) -> None:
        for row in await self._db.fetch(SQL["stalled_partitions"], before):
            run_id, name = row["run_id"], row["partition_id"]
            if row["rescues"] >= RESCUES:
                await self._fetcher.fail(run_id, name, _GIVEN_UP, rescues=RESCUES)
                continue
            item = work_item(run_id, name, row["next_offset"], row["scan"], row["trace_id"])
            await self._again(item, "rescue_partition", run_id, name, self._db.clock.now(), row["rescues"])

    async def _consolidations(self, before: datetime) -> None:
        for row in await self._db.fetch(SQL["stalled_consolidations"], before):
            async with self._db.connection() as connection:
                run = await store.run(connection, row["run_id"])
            if run is not None and row["rescues"] >= RESCUES:
                await self._consolidator.fail(run, _GIVEN_UP)
                continue
            message = consolidation(row["run_id"], row["trace_id"], force=row["is_forced"])
            await self._again(message, "rescue_run", row["run_id"], self._db.clock.now(), row["rescues"])

    async def _again(self, message: BusMessage, statement: str, *key: object) -> None:
        async with self._db.transaction() as tx:
            if await tx.fetchval(SQL[statement], *key) is None:
                return  # another process was quicker, or it moved on
            await self._bus.publish([message], tx=tx)
        structlog.get_logger().warning("work_rescued", topic=message.topic, key=message.key)
        await hurry(self._bus)

    async def _tell_becalmed(self) -> None:
        """H15: a source may ask for one pause after another: that is no failure, but somebody should know."""
        before = self._db.clock.now() - _BECALMED
        for row in await self._db.fetch(SQL["becalmed"], before, AlertCode.NO_PROGRESS):
            async with self._db.transaction() as tx:
                still = f"has kept no page for {format_duration(_BECALMED)}; it goes on waiting."
                message, now = f"Run {row['run_id']} of {row['feed']} {still}", self._db.clock.now()
                await raise_alert(
                    tx, row["feed"], row["run_id"], AlertCode.NO_PROGRESS, AlertSeverity.WARNING, message, now
                )


@contextmanager
def _alone(feed: str) -> Iterator[None]:
    """What is wrong with one feed does not hold up the others."""
    try:
        yield
    except PenstockError as error:
        structlog.get_logger().warning("harvest_not_started", feed=feed, code=error.code, error=error.message)


def chores(
    harvest: Harvest,
    section: HarvestSection,
    db: Database,
    fetcher: Fetcher,
    rescuer: RunRescuer,
    metrics: HarvestMetrics,
) -> list[tuple[str, PeriodicTask, timedelta]]:
    """Return the periodic tasks of harvest, each with its name and its interval."""
    alert_sender = AlertSender(db, section.alerts)

    async def start_what_is_due() -> None:
        for name, feed in section.feeds.items():
            if feed.every is not None:
                with _alone(name):
                    await harvest.start_due(name, feed.every, feed.full_every)

    async def tell_alerts() -> None:
        metrics.untold(await alert_sender.tell())

    async def forget_old_runs() -> None:
        while await store.prune_runs(db, db.clock.now() - section.retention):
            pass

    async def show_watermarks() -> None:
        # Whichever process completed the run: every process shows them, from its start on.
        metrics.known_up_to(await store.feed_watermarks(db, list(section.feeds)))

    return [
        ("harvest schedule", start_what_is_due, _LOOK),
        ("harvest rescue", rescuer.look, _LOOK),
        ("harvest parked", fetcher.unpark, _UNPARK),
        ("harvest alerts", tell_alerts, _TELL),
        ("harvest watermarks", show_watermarks, _LOOK),
        ("harvest retention", forget_old_runs, _PRUNE),
    ]
