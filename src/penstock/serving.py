"""The programs that run until they are told to stop: everything in one place, or one role alone."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

import structlog

from penstock.app import (
    Platform,
    RefdataPlatform,
    open_database,
    open_harvest,
    open_platform,
    open_refdata,
    open_tracking,
)
from penstock.applications import Parts, Web, make_api, make_app, make_command_api, make_pipeline_api
from penstock.flowing import Ties, flowing, open_flows
from penstock.flows.views import FlowViews
from penstock.harvest.views import HarvestViews
from penstock.harvesting import harvesting
from penstock.ingest.metrics import IngestMetrics
from penstock.ingest.views import IngestViews
from penstock.ingesting import Workplace, forget_old_runs, workplace
from penstock.kernel import datadir
from penstock.kernel.actuator import Check, Pulse
from penstock.kernel.backoff import Backoff
from penstock.kernel.db import Database
from penstock.kernel.errors import BadConfig, Transient
from penstock.kernel.ids import worker_name
from penstock.kernel.middleware import HttpMetrics
from penstock.kernel.periodic import repeating
from penstock.kernel.sections import EMBEDDED
from penstock.kernel.telemetry import Telemetry
from penstock.pods import open_pod, serving_pod
from penstock.ports import make_authenticator, make_telemetry
from penstock.refdata.service import Refdata
from penstock.reloading import reloading
from penstock.roles import ROLES
from penstock.servers import address_of, listening, listening_together, serving, until_stopped
from penstock.settings import Settings
from penstock.tracking.service import Tracking
from penstock.watching import Watcher


@dataclass(frozen=True)
class Addresses:
    """Where a running Penstock listens."""

    api: str
    query: str


async def up(settings: Settings, stop: asyncio.Event, on_ready: Callable[[Addresses], None]) -> None:
    """Run everything until *stop*; *on_ready* is called once requests are answered."""
    server = settings.server
    async with AsyncExitStack() as stack:
        telemetry = stack.enter_context(contextlib.closing(make_telemetry(settings)))
        authenticator = make_authenticator(settings)
        stack.enter_context(datadir.owned(settings.data_dir, worker_name("up")))
        api = stack.enter_context(listening(server.host, server.port))
        processes = settings.refdata.query.processes
        query = stack.enter_context(listening_together(server.host, server.query_port, processes))
        query_address = address_of(query[0])
        platform = await stack.enter_async_context(open_platform(settings, telemetry))
        tracking = await stack.enter_async_context(open_tracking(settings, telemetry, platform.db))
        refdata = await stack.enter_async_context(open_refdata(settings, telemetry, platform))
        await stack.enter_async_context(reloading(refdata))
        pod = await stack.enter_async_context(open_pod(settings, telemetry))
        for role in ROLES.values():
            await stack.enter_async_context(role(refdata))
        is_loaded = await stack.enter_async_context(pod.following(refdata))
        await stack.enter_async_context(serving_pod(pod, query))
        checks = {**_checks(platform), "tracking": tracking.check, **_refdata_checks(refdata)}
        # The API cannot do without its databases; the pod answers from memory, come what may.
        pulse = Pulse({**checks, "dictionaries": pod.check}, needs=["database", "tracking", "refdata"])
        web = Web(settings, telemetry, HttpMetrics(telemetry), authenticator)
        parts = await _open_parts(stack, platform, tracking, refdata.refdata)
        app = make_api(web, pulse, parts)
        await stack.enter_async_context(serving([(app, api)], server))
        await is_loaded.wait()
        addresses = Addresses(address_of(api), query_address)
        await until_stopped([pulse, pod.pulse], stop, lambda: on_ready(addresses))
        tracking.stop()
        refdata.refdata.stop()
        parts.flows.stop()


async def _open_parts(stack: AsyncExitStack, platform: Platform, tracking: Tracking, refdata: Refdata) -> Parts:
    """All that the API shows, with the workers of those parts that have some."""
    settings = platform.settings
    ingest = await stack.enter_async_context(_ingesting(settings, platform.telemetry, platform.db))
    harvest = await stack.enter_async_context(open_harvest(settings, platform))
    if settings.harvest.feeds:
        await stack.enter_async_context(harvesting(harvest))
    flows = await stack.enter_async_context(open_flows(settings, platform))
    ties = Ties(harvest.harvest, refdata, tracking, ingest.place)
    await stack.enter_async_context(flowing(flows, ties))
    return Parts(
        tracking=tracking,
        refdata=refdata,
        ingest=ingest.views,
        harvest=harvest.harvest,
        feeds=HarvestViews(harvest.db, platform.storage, settings.harvest),
        flows=flows.engine,
        flow_management=flows.management,
        flow_views=FlowViews(platform.db, flows.catalogue),
        flow_live=flows.live,
    )


@dataclass(frozen=True)
class _Ingest:
    """What the API shows of ingest, and where its runs are made, if anywhere."""

    views: IngestViews
    place: Workplace | None


@asynccontextmanager
async def _ingesting(settings: Settings, telemetry: Telemetry, db: Database) -> AsyncIterator[_Ingest]:
    """Where a tree is configured, its inboxes are watched meanwhile."""
    if settings.ingest.root is None:
        yield _Ingest(IngestViews(db, None, settings.ingest), None)
        return
    metrics = IngestMetrics(telemetry.registry)
    with workplace(settings, uses_database=True) as place:
        watcher = Watcher(settings, place, metrics, uses_database=True)
        async with watcher.watching(), _forgetting(settings, db):
            yield _Ingest(IngestViews(db, place.tree, settings.ingest), place)


def _forgetting(settings: Settings, db: Database) -> AbstractAsyncContextManager[None]:
    return repeating("ingest retention", lambda: forget_old_runs(settings, db), timedelta(minutes=10))


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

        if uses_database:
            db = await stack.enter_async_context(open_database(settings))
            await stack.enter_async_context(_forgetting(settings, db))
        pulse = Pulse({"tree": tree}, needs=["tree"])
        app = make_app("Penstock ingest", web, pulse)
        await stack.enter_async_context(serving([(app, socket)], settings.server))
        await stack.enter_async_context(watcher.watching())
        await until_stopped([pulse], stop, lambda: on_ready(address_of(socket)))


async def pipeline_apid(settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """T10: the pipeline API alone, until *stop*."""
    server = settings.server
    async with AsyncExitStack() as stack:
        telemetry = stack.enter_context(contextlib.closing(make_telemetry(settings)))
        authenticator = make_authenticator(settings)
        if settings.database.url == EMBEDDED and settings.tracking.database is None:
            stack.enter_context(datadir.owned(settings.data_dir, worker_name("pipeline-apid")))
        socket = stack.enter_context(listening(server.host, server.port))
        tracking = await stack.enter_async_context(open_tracking(settings, telemetry))
        pulse = Pulse({"database": tracking.check}, needs=["database"])
        app = make_pipeline_api(Web(settings, telemetry, HttpMetrics(telemetry), authenticator), pulse, tracking)
        await stack.enter_async_context(serving([(app, socket)], server))
        await until_stopped([pulse], stop, lambda: on_ready(address_of(socket)))
        tracking.stop()


async def command_api(settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """R6: the command API alone, until *stop*."""
    async with _alone(settings, "command-api") as (stack, web, listening):
        refdata = await stack.enter_async_context(open_refdata(settings, web.telemetry))
        await stack.enter_async_context(reloading(refdata))
        # Without the bus nothing can be taken in; without Redis it can, and is told of later.
        pulse = Pulse(_refdata_checks(refdata), needs=["refdata", "refdata bus"])
        app = make_command_api(web, pulse, refdata.refdata)
        await stack.enter_async_context(serving([(app, listening)], settings.server))
        await until_stopped([pulse], stop, lambda: on_ready(address_of(listening)))
        refdata.refdata.stop()


async def query_api(settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """R17: a pod alone, until *stop*. Without PostgreSQL it serves all the same, that it has nothing yet."""
    server, count = settings.server, settings.refdata.query.processes
    async with AsyncExitStack() as stack:
        telemetry = stack.enter_context(contextlib.closing(make_telemetry(settings)))
        make_authenticator(settings)  # what is wrong with it is said here, not by every process
        if settings.database.url == EMBEDDED and settings.refdata.postgres is None:
            stack.enter_context(datadir.owned(settings.data_dir, worker_name("query-api")))
        sockets = stack.enter_context(listening_together(server.host, server.query_port, count))
        address = address_of(sockets[0])
        pod = await stack.enter_async_context(open_pod(settings, telemetry))
        # What it stands on may come late, and must be there until the last reader is served.
        below = await stack.enter_async_context(AsyncExitStack())
        await stack.enter_async_context(serving_pod(pod, sockets))
        structlog.get_logger().info("serving", address=address, processes=count)
        refdata = await _open_at_last(below, settings, telemetry)
        await below.enter_async_context(reloading(refdata))
        is_loaded = await below.enter_async_context(pod.following(refdata))
        await is_loaded.wait()
        await until_stopped([pod.pulse], stop, lambda: on_ready(address))


async def _open_at_last(stack: AsyncExitStack, settings: Settings, telemetry: Telemetry) -> RefdataPlatform:
    """R23: refdata, as soon as its PostgreSQL is there."""
    backoff = Backoff(most=timedelta(seconds=5))
    while True:
        try:
            return await stack.enter_async_context(open_refdata(settings, telemetry))
        except Transient as error:
            structlog.get_logger().warning("primary_not_reached", code=error.code, error=error.message)
            await asyncio.sleep(backoff.next().total_seconds())


async def work(role: str, settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """One role of workers alone, with its health and metrics on a port, until *stop*."""
    if role == "kafka-adapter" and not settings.refdata.kafka.external_topics:
        hint = "name them under refdata.kafka.externalTopics"
        raise BadConfig("NO_EXTERNAL_TOPICS", "there are no topics to adapt", hint=hint)
    async with _alone(settings, role) as (stack, web, listening):
        refdata = await stack.enter_async_context(open_refdata(settings, web.telemetry))
        await stack.enter_async_context(reloading(refdata))
        await stack.enter_async_context(ROLES[role](refdata))
        pulse = Pulse(_refdata_checks(refdata), needs=["refdata"] if role == "relay" else ["refdata", "refdata bus"])
        app = make_app(f"Penstock {role}", web, pulse)
        await stack.enter_async_context(serving([(app, listening)], settings.server))
        await until_stopped([pulse], stop, lambda: on_ready(address_of(listening)))


@asynccontextmanager
async def _alone(settings: Settings, role: str) -> AsyncIterator[tuple[AsyncExitStack, Web, socket.socket]]:
    """How a role of refdata begins that has a process to itself."""
    async with AsyncExitStack() as stack:
        telemetry = stack.enter_context(contextlib.closing(make_telemetry(settings)))
        web = Web(settings, telemetry, HttpMetrics(telemetry), make_authenticator(settings))
        if settings.database.url == EMBEDDED and settings.refdata.postgres is None:
            stack.enter_context(datadir.owned(settings.data_dir, worker_name(role)))
        yield stack, web, stack.enter_context(listening(settings.server.host, settings.server.port))


def _refdata_checks(platform: RefdataPlatform) -> dict[str, Check]:
    checks: dict[str, Check] = {"refdata": platform.refdata.check, "refdata bus": platform.bus.check}
    return {**checks, "refdata signals": platform.signals.check}


def _checks(platform: Platform) -> dict[str, Check]:
    """What this process depends on, each asked by its own check."""
    checks: dict[str, Check] = {"database": platform.db.check, "bus": platform.bus.check}
    return {**checks, "signals": platform.signals.check, "storage": platform.storage.check}


async def work_harvest(settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """H4–H8: the workers of harvest alone, with their health and metrics on a port, until *stop*."""
    if not settings.harvest.feeds:
        raise BadConfig("NO_FEEDS", "there are no feeds to harvest", hint="name them under harvest.feeds")
    async with _standing(settings, "Penstock harvest", ["database", "bus"], stop, on_ready) as (stack, platform):
        harvest = await stack.enter_async_context(open_harvest(settings, platform))
        await stack.enter_async_context(harvesting(harvest))


async def work_flows(
    kinds: Sequence[str], settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    """F17: the workers of flows alone, with their health and metrics on a port, until *stop*."""
    async with _standing(settings, "Penstock flows", ["database", "storage"], stop, on_ready) as (stack, platform):
        tracking = await stack.enter_async_context(open_tracking(settings, platform.telemetry, platform.db))
        refdata = await stack.enter_async_context(open_refdata(settings, platform.telemetry, platform))
        harvest = await stack.enter_async_context(open_harvest(settings, platform))
        place = None
        if settings.ingest.root is not None:
            place = stack.enter_context(workplace(settings, uses_database=True))
        flows = await stack.enter_async_context(open_flows(settings, platform))
        await stack.enter_async_context(flowing(flows, Ties(harvest.harvest, refdata.refdata, tracking, place), kinds))


@asynccontextmanager
async def _standing(
    settings: Settings, title: str, needs: Sequence[str], stop: asyncio.Event, on_ready: Callable[[str], None]
) -> AsyncIterator[tuple[AsyncExitStack, Platform]]:
    """What workers that have a process to themselves stand on; once they are there it serves until *stop*."""
    async with AsyncExitStack() as stack:
        telemetry = stack.enter_context(contextlib.closing(make_telemetry(settings)))
        web = Web(settings, telemetry, HttpMetrics(telemetry), make_authenticator(settings))
        socket = stack.enter_context(listening(settings.server.host, settings.server.port))
        platform = await stack.enter_async_context(open_platform(settings, telemetry))
        yield stack, platform
        pulse = Pulse(_checks(platform), needs=needs)
        await stack.enter_async_context(serving([(make_app(title, web, pulse), socket)], settings.server))
        await until_stopped([pulse], stop, lambda: on_ready(address_of(socket)))
