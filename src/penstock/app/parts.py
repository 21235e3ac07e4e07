"""The parts, each opened on the platform or on its own database."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta

from penstock.app.bridges import renew_dictionaries
from penstock.app.factories import make_bus, make_invalidations
from penstock.app.platform import (
    Platform,
    connect,
    make_journal_retention,
    make_lease_settings,
    make_search_path,
    open_database,
    open_refdata_database,
)
from penstock.app.schema import list_platform_migrations, list_refdata_migrations, list_tracking_migrations
from penstock.flows import runtime as flows_runtime
from penstock.flows.runtime import FlowsPlatform, open_engine
from penstock.harvest.runtime import HarvestPlatform
from penstock.harvest.service import Harvest
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.commands.service import Refdata
from penstock.refdata.dictionaries.catalogue import DictionaryCatalogue
from penstock.refdata.metrics import RefdataMetrics
from penstock.refdata.runtime import RefdataPlatform
from penstock.settings import Settings
from penstock.tracking.runtime import run_tracking
from penstock.tracking.service import Tracking


@asynccontextmanager
async def open_tracking(
    settings: Settings, telemetry: Telemetry, platform: Database | None = None
) -> AsyncIterator[Tracking]:
    """T10: yield tracking on its own database, or else on the *platform*'s, with its tables and periodic tasks."""
    own = settings.tracking.database
    async with AsyncExitStack() as stack:
        shared = platform if own is None else None
        if shared is not None:
            opened = connect(shared.dsn, settings.database, prefers_indexes=True)
        else:
            opened = open_database(settings, own, prefers_indexes=True)
        db = await stack.enter_async_context(opened)
        await migrate.migrate(db, list_tracking_migrations())
        if shared is None:
            await stack.enter_async_context(run_periodically(*make_journal_retention(settings, db)))
        yield await stack.enter_async_context(run_tracking(db, settings.tracking, telemetry))


@asynccontextmanager
async def open_refdata(
    settings: Settings, telemetry: Telemetry, platform: Platform | None = None
) -> AsyncIterator[RefdataPlatform]:
    """R1: yield refdata on its own PostgreSQL, or else on the platform's; the bus is there too, unless it is Kafka."""
    section = settings.refdata
    async with AsyncExitStack() as stack:
        if platform is not None and section.postgres is None:
            plain, bus = platform.db, platform.bus
        else:
            plain = await stack.enter_async_context(open_refdata_database(settings))
            await migrate.migrate(
                plain, list_refdata_migrations() if section.postgres else list_platform_migrations(settings)
            )
            bus = make_bus(settings, plain)
            stack.push_async_callback(bus.close)
            await stack.enter_async_context(run_periodically(*make_journal_retention(settings, plain)))
        db = await stack.enter_async_context(_open_for_commands(plain.dsn, settings))
        signals = make_invalidations(settings, plain)
        stack.push_async_callback(signals.close)
        refdata = await stack.enter_async_context(Refdata.open(db, bus, DictionaryCatalogue(section), section))
        yield RefdataPlatform(section, telemetry, db, bus, signals, refdata, RefdataMetrics(telemetry.registry))


def _open_for_commands(url: str, settings: Settings) -> AbstractAsyncContextManager[Database]:
    """Open the database for commands, whose payloads are not decoded."""
    own = settings.refdata.postgres
    return Database.open(
        url,
        size=own.pool.max_size if own else settings.database.pool_size,
        statement_timeout=settings.database.statement_timeout,
        prefers_indexes=True,
        decodes_json=False,
        settings={
            **make_search_path(settings),
            "standard_conforming_strings": "on",  # the parser of templates assumes it
            **make_lease_settings(settings.refdata.apply.lease),
        },
    )


@asynccontextmanager
async def open_harvest(settings: Settings, platform: Platform) -> AsyncIterator[HarvestPlatform]:
    """Yield harvest on the *platform*'s database, in its own sessions, which prefer indexes."""
    async with open_for_queues(settings, platform, settings.harvest.lease) as db:
        section = settings.harvest
        yield HarvestPlatform(
            section,
            platform.telemetry,
            db,
            platform.bus,
            platform.storage,
            Harvest(db, platform.bus, section),
            settings.database.pool_size,
            renew_dictionaries(section, db.clock),
        )


@asynccontextmanager
async def open_flows(settings: Settings, platform: Platform) -> AsyncIterator[FlowsPlatform]:
    """Yield flows on the *platform*'s database, in its own sessions, which prefer indexes."""
    section = settings.flows
    async with (
        open_for_queues(settings, platform, section.lease, flows_runtime.SESSION) as db,
        open_engine(db, platform.storage, section, platform.telemetry) as flows,
    ):
        yield flows


def open_for_queues(
    settings: Settings, platform: Platform, lease: timedelta, session: Mapping[str, str] | None = None
) -> AbstractAsyncContextManager[Database]:
    """Open the *platform*'s database with sessions that prefer indexes, and lose their locks when they are frozen."""
    given = {**make_lease_settings(lease), **(session or {})}
    return connect(platform.db.dsn, settings.database, prefers_indexes=True, session=given)
