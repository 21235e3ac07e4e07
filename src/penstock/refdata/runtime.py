"""The roles of refdata, each alone in a process or together with others."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog

from penstock.kernel.bus import Bus, BusDelivery, DeliveryPolicy
from penstock.kernel.bus.workers import run_workers
from penstock.kernel.db.database import Database
from penstock.kernel.ids import make_worker_name
from penstock.kernel.signals import Signals
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.kernel.work.worker import Handler
from penstock.refdata.apply import definitions
from penstock.refdata.apply.applier import CommandApplier, apply_handler
from penstock.refdata.apply.relay import OutboxRelay
from penstock.refdata.commands.commit_waiter import COMMITS
from penstock.refdata.commands.external_topics import TopicMapping, make_adapter_handler
from penstock.refdata.commands.service import Refdata
from penstock.refdata.config import RefdataSection
from penstock.refdata.maintenance import RefdataMaintenance, make_lag_task
from penstock.refdata.metrics import RefdataMetrics


@dataclass(frozen=True)
class RefdataPlatform:
    """The settings, ports and services of the roles of refdata."""

    section: RefdataSection
    telemetry: Telemetry
    db: Database
    bus: Bus
    signals: Signals
    refdata: Refdata
    metrics: RefdataMetrics


Role = Callable[[RefdataPlatform], contextlib.AbstractAsyncContextManager[None]]


@asynccontextmanager
async def run_apply(platform: RefdataPlatform) -> AsyncIterator[None]:
    """R11: apply commands and run the periodic tasks until the end."""
    section, name = platform.section, make_worker_name("apply")
    applier = CommandApplier(
        platform.db,
        platform.refdata.catalogue,
        name,
        max_attempts=section.apply.max_attempts,
        max_items=section.snapshots.max_items,
    )
    dictionaries = platform.refdata.catalogue.list_all()
    for code, error in (await definitions.check_statements(platform.db, dictionaries)).items():
        # Its tables may be created later. Until then its commands fail; those of the others do not.
        structlog.get_logger().error("dictionary_unusable", dictCode=code, error=error)
    await definitions.register_definitions(platform.db, dictionaries, platform.refdata.catalogue.tenants)
    maintenance = RefdataMaintenance(platform.db, platform.bus, platform.refdata, platform.metrics, name)
    async with AsyncExitStack() as stack:
        for task in maintenance.list_periodic_tasks():
            await stack.enter_async_context(run_periodically(*task))
        handler = apply_handler(applier, platform.metrics, platform.telemetry)
        # Several workers: while one waits for PostgreSQL, another one parses commands.
        workers = _run_topic_workers(platform, section.kafka.commands_topic, name, handler, section.apply.workers)
        await stack.enter_async_context(workers)
        yield


@asynccontextmanager
async def run_adapter(platform: RefdataPlatform) -> AsyncIterator[None]:
    """R10: convert the messages of external topics to commands until the end."""
    async with AsyncExitStack() as stack:
        for topic in platform.section.kafka.external_topics:
            handler = make_adapter_handler(platform.refdata, TopicMapping(topic))
            name = make_worker_name("kafka-adapter")
            await stack.enter_async_context(_run_topic_workers(platform, topic.topic, name, handler))
        yield


@asynccontextmanager
async def run_relay(platform: RefdataPlatform) -> AsyncIterator[None]:
    """R15: announce commits to the pods until the end."""
    stopping = asyncio.Event()
    relay = OutboxRelay(platform.db, platform.signals, platform.refdata.notifier, platform.telemetry)
    task = asyncio.create_task(relay.run(stopping), name="relay")
    try:
        yield
    finally:
        stopping.set()
        platform.refdata.notifier.notify(COMMITS)
        await task


@asynccontextmanager
async def _run_topic_workers(
    platform: RefdataPlatform, topic: str, name: str, handler: Handler[BusDelivery], count: int = 1
) -> AsyncIterator[None]:
    """Run *count* workers on *topic* until the end; they finish their messages and return unfinished ones."""
    apply = platform.section.apply
    policy = DeliveryPolicy(lease_for=apply.lease, max_attempts=apply.max_attempts)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(run_periodically(*make_lag_task(platform.bus, topic, platform.metrics)))
        workers = run_workers(
            platform.bus, platform.telemetry, topic, name, lambda _: handler, policy, batch=apply.batch, count=count
        )
        await stack.enter_async_context(workers)
        yield


ROLES: dict[str, Role] = {"apply": run_apply, "kafka-adapter": run_adapter, "relay": run_relay}
