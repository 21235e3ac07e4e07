"""The programs of those who work: one role alone, with its health and metrics on a port."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta

from penstock.app.apis import Web, make_app
from penstock.app.factories import make_authenticator, make_telemetry
from penstock.app.http_server import address_of, listening, serving, until_stopped
from penstock.app.platform import open_database, open_harvest, open_refdata, open_tracking
from penstock.app.process import alone, refdata_checks, standing
from penstock.app.reload import reloading
from penstock.flows.runtime import Ties, flowing, open_flows
from penstock.harvest.runtime import harvesting
from penstock.ingest.metrics import IngestMetrics
from penstock.ingest.watcher import Watcher
from penstock.ingest.workspace import Workplace, forget_old_runs, workplace
from penstock.kernel.db.database import Database
from penstock.kernel.errors import BadConfig
from penstock.kernel.http.health import Check, Pulse
from penstock.kernel.http.middleware import HttpMetrics
from penstock.kernel.tasks.periodic import repeating
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.runtime import ROLES
from penstock.settings import Settings


async def work(role: str, settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """One role of workers alone, with its health and metrics on a port, until *stop*."""
    if role == "kafka-adapter" and not settings.refdata.kafka.external_topics:
        hint = "name them under refdata.kafka.externalTopics"
        raise BadConfig("NO_EXTERNAL_TOPICS", "there are no topics to adapt", hint=hint)
    async with alone(settings, role) as (stack, web, listening):
        refdata = await stack.enter_async_context(open_refdata(settings, web.telemetry))
        await stack.enter_async_context(reloading(settings, refdata.telemetry, refdata))
        await stack.enter_async_context(ROLES[role](refdata))
        pulse = Pulse(refdata_checks(refdata), needs=["refdata"] if role == "relay" else ["refdata", "refdata bus"])
        app = make_app(f"Penstock {role}", web, pulse)
        await stack.enter_async_context(serving([(app, listening)], settings.server))
        await until_stopped([pulse], settings.server, stop, lambda: on_ready(address_of(listening)))


async def work_harvest(settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """H4–H8: the workers of harvest alone, with their health and metrics on a port, until *stop*."""
    if not settings.harvest.feeds:
        raise BadConfig("NO_FEEDS", "there are no feeds to harvest", hint="name them under harvest.feeds")
    async with standing(settings, "Penstock harvest", ["database", "bus"], stop, on_ready) as (stack, platform):
        harvest = await stack.enter_async_context(open_harvest(settings, platform))
        await stack.enter_async_context(harvesting(harvest))
        await stack.enter_async_context(reloading(settings, platform.telemetry))


async def work_flows(
    kinds: Sequence[str], settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    """F17: the workers of flows alone, with their health and metrics on a port, until *stop*."""
    async with standing(settings, "Penstock flows", ["database", "storage"], stop, on_ready) as (stack, platform):
        tracking = await stack.enter_async_context(open_tracking(settings, platform.telemetry, platform.db))
        refdata = await stack.enter_async_context(open_refdata(settings, platform.telemetry, platform))
        await stack.enter_async_context(reloading(settings, platform.telemetry, refdata))
        harvest = await stack.enter_async_context(open_harvest(settings, platform))
        place = None
        if settings.ingest.root is not None:
            place = stack.enter_context(workplace(settings, uses_database=True))
        flows = await stack.enter_async_context(open_flows(settings, platform))
        await stack.enter_async_context(flowing(flows, Ties(harvest.harvest, refdata.refdata, tracking, place), kinds))


async def ingest_watch(
    uses_database: bool, settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    """I23: the watcher alone, with its health and metrics on a port, until *stop*."""
    async with AsyncExitStack() as stack:
        telemetry = stack.enter_context(contextlib.closing(make_telemetry(settings)))
        web = Web(settings, telemetry, HttpMetrics(telemetry), make_authenticator(settings))
        socket = stack.enter_context(listening(settings.server.host, settings.server.port))
        place = stack.enter_context(workplace(settings, uses_database=uses_database))
        watcher = Watcher(settings, place, IngestMetrics(telemetry.registry), uses_database=uses_database)

        async def tree() -> str:
            await asyncio.to_thread(place.tree.suppliers)
            return settings.ingest.root or "."

        checks: dict[str, Check] = {"tree": tree}
        if uses_database:
            db = await stack.enter_async_context(open_database(settings))
            await stack.enter_async_context(_forgetting(settings, db))
            checks["database"] = db.check
        await stack.enter_async_context(reloading(settings, telemetry))
        pulse = Pulse(checks, needs=list(checks))
        app = make_app("Penstock ingest", web, pulse)
        await stack.enter_async_context(serving([(app, socket)], settings.server))
        await stack.enter_async_context(watcher.watching())
        await until_stopped([pulse], settings.server, stop, lambda: on_ready(address_of(socket)))


@asynccontextmanager
async def watching_inboxes(
    place: Workplace, settings: Settings, telemetry: Telemetry, db: Database
) -> AsyncIterator[None]:
    """The inboxes of a tree are watched meanwhile."""
    watcher = Watcher(settings, place, IngestMetrics(telemetry.registry), uses_database=True)
    async with watcher.watching(), _forgetting(settings, db):
        yield


def _forgetting(settings: Settings, db: Database) -> AbstractAsyncContextManager[None]:
    return repeating("ingest retention", lambda: forget_old_runs(settings, db), timedelta(minutes=10))
