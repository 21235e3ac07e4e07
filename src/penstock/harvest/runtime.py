"""The role of harvest: it plans runs, fetches partitions, consolidates, and looks after what stands still."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from functools import partial

import msgspec
import structlog

from penstock.app.platform import HarvestPlatform
from penstock.harvest import contract, store
from penstock.harvest.alerts import Teller
from penstock.harvest.config import HarvestSection
from penstock.harvest.consolidate.worker import Consolidator, OnPublished
from penstock.harvest.contract import WorkDone
from penstock.harvest.feed.feeds import Feeds
from penstock.harvest.fetch.worker import ATTEMPTS, Fetcher
from penstock.harvest.maintenance import Rescuer
from penstock.harvest.metrics import HarvestMetrics
from penstock.harvest.plan.planner import Planner
from penstock.kernel.bus import Delivering, Delivery, Subscription
from penstock.kernel.clock import Clock
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import PenstockError
from penstock.kernel.ids import worker_name
from penstock.kernel.tasks.outcome import Done, Outcome
from penstock.kernel.tasks.periodic import Chore, repeating
from penstock.kernel.work.worker import Handler, each, working
from penstock.refdata.apply import bump_version
from penstock.refdata.model import Dict

_LOOK = timedelta(seconds=5)
_TELL = timedelta(seconds=1)
_PRUNE = timedelta(minutes=10)
_AT_ONCE = 4  # partitions of one worker: a batch is settled when its slowest is
_MANY = 100
_MOST_DECISIONS = 8
_UNPARK = timedelta(seconds=1)

Handle = Callable[[Delivery], Awaitable[Outcome]]


@asynccontextmanager
async def harvesting(platform: HarvestPlatform) -> AsyncIterator[None]:
    """Work on all feeds, until the end."""
    section, db, bus, name = platform.settings.harvest, platform.db, platform.bus, worker_name("harvest")
    metrics = HarvestMetrics(platform.telemetry.registry)
    metrics.due_every({feed: its.every for feed, its in section.feeds.items()})
    async with AsyncExitStack() as stack:
        feeds = await stack.enter_async_context(Feeds.open(section, db))
        planner = Planner(db, bus, feeds, name)
        fetcher = Fetcher(db, bus, feeds, metrics, name)
        on_published = renewing_dictionaries(section, db.clock)
        consolidator = Consolidator(db, bus, platform.storage, feeds, metrics, name, on_published)
        rescuer = Rescuer(db, bus, planner, fetcher, consolidator, section.stalled_after)
        for chore in _chores(platform, fetcher, rescuer, Teller(db, section.alerts), metrics):
            await stack.enter_async_context(repeating(*chore))
        # One feed's plan must not wait for another's; and each consolidation holds a connection while it needs more.
        decisions = max(1, min(len(section.feeds), platform.settings.database.pool_size // 2, _MOST_DECISIONS))
        later = Delivering(max_attempts=ATTEMPTS, lease_for=section.lease, first_delay=section.retry_after)
        soon = Delivering(max_attempts=ATTEMPTS, lease_for=section.lease)
        for role in (
            _working(platform, contract.PLANS, name, planner.handle, later, count=decisions),
            _working(platform, contract.WORK_ITEMS, name, fetcher.handle, soon, batch=_AT_ONCE, count=section.workers),
            _working(platform, contract.WORK_DONE, name, _note_done(metrics), soon, batch=_MANY),
            _working(platform, contract.CONSOLIDATIONS, name, consolidator.handle, later, count=decisions),
        ):
            await stack.enter_async_context(role)
        stack.callback(fetcher.stop)
        stack.callback(consolidator.stop)
        yield


def renewing_dictionaries(section: HarvestSection, clock: Clock) -> OnPublished:
    """Give the dictionaries that read a feed a version, if and only if its run is completed."""

    async def on_published(tx: Connection, feed: str, records: int) -> None:
        targets = [Dict(one.tenant, one.code) for one in section.feeds[feed].dictionaries]
        await bump_version.renew(tx, targets, source=f"harvest {feed}", items=records, now=clock.now())

    return on_published


def _working(
    platform: HarvestPlatform,
    topic: str,
    name: str,
    handle: Handle,
    delivering: Delivering,
    *,
    batch: int = 1,
    count: int = 1,
) -> AbstractAsyncContextManager[None]:
    def handler_of(queue: Subscription) -> Handler[Delivery]:
        return each(handle, queue, concurrency=batch)

    return working(platform.bus, platform.telemetry, topic, name, handler_of, delivering, batch=batch, count=count)


def _note_done(metrics: HarvestMetrics) -> Handle:
    async def note(delivery: Delivery) -> Outcome:
        """H6: WORK_DONE is for those who watch."""
        done = contract.read(delivery.message.value, WorkDone)
        metrics.partition_ended(done.feed, done.status)
        structlog.get_logger().info("work_done", **msgspec.to_builtins(done))
        return Done()

    return note


@contextmanager
def _alone(feed: str) -> Iterator[None]:
    """What is wrong with one feed does not hold up the others."""
    try:
        yield
    except PenstockError as error:
        structlog.get_logger().warning("harvest_not_started", feed=feed, code=error.code, error=error.message)


def _chores(
    platform: HarvestPlatform, fetcher: Fetcher, rescuer: Rescuer, teller: Teller, metrics: HarvestMetrics
) -> list[tuple[str, Chore, timedelta]]:
    section, db = platform.settings.harvest, platform.db

    async def start_what_is_due() -> None:
        for name, feed in section.feeds.items():
            if feed.every is not None:
                with _alone(name):
                    await platform.harvest.start_due(name, feed.every, feed.full_every)

    async def tell_alerts() -> None:
        metrics.untold(await teller.tell())

    async def forget_old_runs() -> None:
        while await store.prune_runs(db, db.clock.now() - section.retention):
            pass

    return [
        ("harvest schedule", start_what_is_due, _LOOK),
        ("harvest rescue", rescuer.look, _LOOK),
        ("harvest parked", fetcher.unpark, _UNPARK),
        ("harvest alerts", tell_alerts, _TELL),
        ("harvest watermarks", partial(_show_watermarks, platform, metrics), _LOOK),
        ("harvest retention", forget_old_runs, _PRUNE),
    ]


async def _show_watermarks(platform: HarvestPlatform, metrics: HarvestMetrics) -> None:
    """Whoever completed the run: every process knows, and one that starts does not begin with nothing."""
    metrics.known_up_to(await store.feed_watermarks(platform.db, list(platform.settings.harvest.feeds)))
