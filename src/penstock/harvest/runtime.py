"""The role of harvest: it plans runs, fetches partitions, consolidates, and looks after what stands still."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
import structlog

from penstock.harvest import contract
from penstock.harvest.config import HarvestSection
from penstock.harvest.consolidate.worker import Consolidator, OnPublished
from penstock.harvest.contract import WorkDoneMessage
from penstock.harvest.feed.feeds import FeedRegistry
from penstock.harvest.fetch.worker import ATTEMPTS, Fetcher
from penstock.harvest.maintenance import RunRescuer, chores
from penstock.harvest.metrics import HarvestMetrics
from penstock.harvest.plan.planner import Planner
from penstock.harvest.service import Harvest
from penstock.kernel.bus import Bus, BusDelivery, DeliveryPolicy, Subscription
from penstock.kernel.bus.workers import run_workers
from penstock.kernel.db.database import Database
from penstock.kernel.ids import worker_name
from penstock.kernel.storage import Storage
from penstock.kernel.tasks.outcome import Done, Outcome
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.kernel.work.worker import Handler, handle_each

_AT_ONCE = 4  # partitions of one worker: a batch is settled when its slowest is
_MANY = 100
_MOST_DECISIONS = 8

Handle = Callable[[BusDelivery], Awaitable[Outcome]]


@dataclass(frozen=True)
class HarvestPlatform:
    """The section, the ports and the service that the workers of harvest use."""

    section: HarvestSection
    telemetry: Telemetry
    db: Database
    bus: Bus
    storage: Storage
    harvest: Harvest
    pool_size: int
    on_published: OnPublished


@asynccontextmanager
async def run_harvest(platform: HarvestPlatform) -> AsyncIterator[None]:
    """Work on all feeds, until the end."""
    section, db, bus, name = platform.section, platform.db, platform.bus, worker_name("harvest")
    metrics = HarvestMetrics(platform.telemetry.registry)
    metrics.due_every({feed: its.every for feed, its in section.feeds.items()})
    async with AsyncExitStack() as stack:
        feeds = await stack.enter_async_context(FeedRegistry.open(section, db))
        planner = Planner(db, bus, feeds, name)
        fetcher = Fetcher(db, bus, feeds, metrics, name)
        consolidator = Consolidator(db, bus, platform.storage, feeds, metrics, name, platform.on_published)
        rescuer = RunRescuer(db, bus, planner, fetcher, consolidator, section.stalled_after)
        for chore in chores(platform.harvest, section, db, fetcher, rescuer, metrics):
            await stack.enter_async_context(run_periodically(*chore))
        # One feed's plan must not wait for another's; and each consolidation holds a connection while it needs more.
        decisions = max(1, min(len(section.feeds), platform.pool_size // 2, _MOST_DECISIONS))
        later = DeliveryPolicy(max_attempts=ATTEMPTS, lease_for=section.lease, first_delay=section.retry_after)
        soon = DeliveryPolicy(max_attempts=ATTEMPTS, lease_for=section.lease)
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


def _working(
    platform: HarvestPlatform,
    topic: str,
    name: str,
    handle: Handle,
    policy: DeliveryPolicy,
    *,
    batch: int = 1,
    count: int = 1,
) -> AbstractAsyncContextManager[None]:
    def handler_of(queue: Subscription) -> Handler[BusDelivery]:
        return handle_each(handle, queue, concurrency=batch)

    return run_workers(platform.bus, platform.telemetry, topic, name, handler_of, policy, batch=batch, count=count)


def _note_done(metrics: HarvestMetrics) -> Handle:
    async def note(delivery: BusDelivery) -> Outcome:
        """H6: WORK_DONE is for those who watch."""
        done = contract.read(delivery.message.value, WorkDoneMessage)
        metrics.partition_ended(done.feed, done.status)
        structlog.get_logger().info("work_done", **msgspec.to_builtins(done))
        return Done()

    return note
