"""The harvest role: it plans runs, fetches partitions, consolidates, and rescues stalled work."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog

from penstock.harvest import contract
from penstock.harvest.config import HarvestSection
from penstock.harvest.consolidate.worker import Consolidator, OnPublished
from penstock.harvest.contract import PartitionState, WorkDoneMessage
from penstock.harvest.feed.feeds import FeedRegistry
from penstock.harvest.fetch.worker import ATTEMPTS, Fetcher
from penstock.harvest.maintenance import RunRescuer, list_periodic_tasks
from penstock.harvest.metrics import HarvestMetrics
from penstock.harvest.plan.planner import Planner
from penstock.harvest.service import Harvest
from penstock.kernel.bus import Bus, BusDelivery, DeliveryPolicy, Subscription
from penstock.kernel.bus.workers import run_workers
from penstock.kernel.db.database import Database
from penstock.kernel.ids import make_worker_name
from penstock.kernel.storage import Storage
from penstock.kernel.tasks.outcome import Done, Outcome
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.kernel.work.worker import Handler, handle_each

_BATCH = 4  # partitions per worker; a batch is settled with its slowest partition
_EVENT_BATCH = 100
_MAX_DECISIONS = 8
_log = structlog.get_logger()

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
    """Run the workers and the periodic tasks of all feeds until the block ends."""
    section, db, bus, name = platform.section, platform.db, platform.bus, make_worker_name("harvest")
    metrics = HarvestMetrics(platform.telemetry.registry)
    metrics.set_intervals({feed: its.every for feed, its in section.feeds.items()})
    async with AsyncExitStack() as stack:
        feeds = await stack.enter_async_context(FeedRegistry.open(section, db))
        planner = Planner(db, bus, feeds, name)
        fetcher = Fetcher(db, bus, feeds, metrics, name)
        consolidator = Consolidator(db, bus, platform.storage, feeds, metrics, name, platform.on_published)
        rescuer = RunRescuer(db, bus, planner, fetcher, consolidator, section.stalled_after)
        for task in list_periodic_tasks(platform.harvest, section, db, fetcher, rescuer, metrics):
            await stack.enter_async_context(run_periodically(*task))
        # Plans of several feeds run concurrently; each consolidation holds a connection while it needs a second one.
        decisions = max(1, min(len(section.feeds), platform.pool_size // 2, _MAX_DECISIONS))
        delayed = DeliveryPolicy(max_attempts=ATTEMPTS, lease_for=section.lease, first_delay=section.retry_after)
        prompt = DeliveryPolicy(max_attempts=ATTEMPTS, lease_for=section.lease)
        for workers in (
            _run_workers(platform, contract.PLANS, name, planner.handle, delayed, count=decisions),
            _run_workers(
                platform, contract.WORK_ITEMS, name, fetcher.handle, prompt, batch=_BATCH, count=section.workers
            ),
            _run_workers(platform, contract.WORK_DONE, name, _record_ended(metrics), prompt, batch=_EVENT_BATCH),
            _run_workers(platform, contract.CONSOLIDATIONS, name, consolidator.handle, delayed, count=decisions),
        ):
            await stack.enter_async_context(workers)
        stack.callback(fetcher.stop)
        stack.callback(consolidator.stop)
        yield


def _run_workers(
    platform: HarvestPlatform,
    topic: str,
    name: str,
    handle: Handle,
    policy: DeliveryPolicy,
    *,
    batch: int = 1,
    count: int = 1,
) -> AbstractAsyncContextManager[None]:
    def make_handler(queue: Subscription) -> Handler[BusDelivery]:
        return handle_each(handle, queue, concurrency=batch)

    return run_workers(platform.bus, platform.telemetry, topic, name, make_handler, policy, batch=batch, count=count)


def _record_ended(metrics: HarvestMetrics) -> Handle:
    async def record(delivery: BusDelivery) -> Outcome:
        """H6: count and log an ended partition."""
        event = contract.decode_message(delivery.message.value, WorkDoneMessage)
        metrics.count_partition(event.feed, event.status)
        partition = {"feed": event.feed, "run": str(event.run_id), "partition": event.partition_id}
        if event.status is PartitionState.FAILED:
            _log.warning("harvest_partition_failed", **partition, error=event.error)
        else:
            _log.debug("harvest_partition_completed", **partition, records=event.records_processed)
        return Done()

    return record
