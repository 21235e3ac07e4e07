"""The programs that run until they are told to stop: everything in one place, or one role alone."""

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta

import structlog

from penstock.app.apis import Parts, Web, make_api, make_command_api, make_pipeline_api
from penstock.app.factories import make_authenticator, make_telemetry
from penstock.app.http_server import address_of, listening, listening_together, serving, until_stopped
from penstock.app.platform import Platform, RefdataPlatform, open_harvest, open_platform, open_refdata, open_tracking
from penstock.app.process import SELDOM_ASKED, alone, platform_checks, refdata_checks
from penstock.app.reload import reloading
from penstock.app.worker_programs import watching_inboxes
from penstock.flows.api.queries import FlowViews
from penstock.flows.runtime import Ties, flowing, open_flows
from penstock.harvest.api.queries import HarvestViews
from penstock.harvest.runtime import harvesting
from penstock.ingest.api.queries import IngestViews
from penstock.ingest.workspace import workplace
from penstock.kernel.config.sections import EMBEDDED
from penstock.kernel.db import datadir
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Transient
from penstock.kernel.http.health import Check, Pulse
from penstock.kernel.http.middleware import HttpMetrics
from penstock.kernel.ids import worker_name
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.overview.contract import Part
from penstock.overview.events import all_moves
from penstock.refdata.pod.supervisor import open_pod, serving_pod
from penstock.refdata.runtime import ROLES
from penstock.settings import Settings
from penstock.tracking.service import Tracking


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
        await stack.enter_async_context(reloading(settings, refdata.telemetry, refdata))
        pod = await stack.enter_async_context(open_pod(settings, telemetry))
        for role in ROLES.values():
            await stack.enter_async_context(role(refdata))
        is_loaded = await stack.enter_async_context(pod.following(refdata))
        await stack.enter_async_context(serving_pod(pod, query))
        # The pod answers from memory, come what may.
        pulse = _api_pulse(platform, tracking, refdata, dictionaries=pod.check)
        web = Web(settings, telemetry, HttpMetrics(telemetry), authenticator)
        parts = await _open_parts(stack, platform, tracking, refdata, works=True)
        app = make_api(web, pulse, parts)
        await stack.enter_async_context(serving([(app, api)], server))
        await is_loaded.wait()
        addresses = Addresses(address_of(api), query_address)
        await until_stopped([pulse, pod.pulse], server, stop, lambda: on_ready(addresses))
        _end_streams(parts)


async def api(settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """The API of all parts, without those who work, until *stop*."""
    async with AsyncExitStack() as stack:
        telemetry = stack.enter_context(contextlib.closing(make_telemetry(settings)))
        web = Web(settings, telemetry, HttpMetrics(telemetry), make_authenticator(settings))
        if settings.database.url == EMBEDDED:
            stack.enter_context(datadir.owned(settings.data_dir, worker_name("api")))
        socket = stack.enter_context(listening(settings.server.host, settings.server.port))
        platform = await stack.enter_async_context(open_platform(settings, telemetry))
        tracking = await stack.enter_async_context(open_tracking(settings, telemetry, platform.db))
        refdata = await stack.enter_async_context(open_refdata(settings, telemetry, platform))
        await stack.enter_async_context(reloading(settings, telemetry, refdata))
        pulse = _api_pulse(platform, tracking, refdata)
        parts = await _open_parts(stack, platform, tracking, refdata, works=False)
        await stack.enter_async_context(serving([(make_api(web, pulse, parts), socket)], settings.server))
        await until_stopped([pulse], settings.server, stop, lambda: on_ready(address_of(socket)))
        _end_streams(parts)


def _api_pulse(platform: Platform, tracking: Tracking, refdata: RefdataPlatform, **more: Check) -> Pulse:
    """The API cannot do without its databases."""
    checks = {**platform_checks(platform), "tracking": tracking.check, **refdata_checks(refdata), **more}
    return Pulse(checks, needs=["database", "tracking", "refdata"], seldom=SELDOM_ASKED)


def _end_streams(parts: Parts) -> None:
    """Whoever listens to what happens would be waited for otherwise."""
    parts.tracking.stop()
    parts.refdata.stop()
    parts.flows.stop()


async def _open_parts(
    stack: AsyncExitStack, platform: Platform, tracking: Tracking, refdata: RefdataPlatform, *, works: bool
) -> Parts:
    """All that the API shows, with the workers of those parts that have some, if it *works*."""
    settings, telemetry = platform.settings, platform.telemetry
    place = stack.enter_context(workplace(settings, uses_database=True)) if settings.ingest.root is not None else None
    harvest = await stack.enter_async_context(open_harvest(settings, platform))
    flows = await stack.enter_async_context(open_flows(settings, platform))
    if works:
        if place is not None:
            await stack.enter_async_context(watching_inboxes(place, settings, telemetry, platform.db))
        if settings.harvest.feeds:
            await stack.enter_async_context(harvesting(harvest))
        await stack.enter_async_context(flowing(flows, Ties(harvest.harvest, refdata.refdata, tracking, place)))
    return Parts(
        tracking=tracking,
        refdata=refdata.refdata,
        ingest=IngestViews(platform.db, place.tree if place else None, settings.ingest),
        harvest=harvest.harvest,
        feeds=HarvestViews(harvest.db, platform.storage, settings.harvest),
        flows=flows.engine,
        flow_management=flows.management,
        flow_views=FlowViews(platform.db, flows.catalogue),
        flow_live=flows.live,
        all_moves=all_moves(_journals(platform, tracking, refdata), [*tracking.live.bells, *flows.live.bells]),
    )


def _journals(platform: Platform, tracking: Tracking, refdata: RefdataPlatform) -> dict[Part, Database]:
    """Where each part notes its moves: in the platform's database, unless it has one of its own."""
    found = dict.fromkeys(Part, platform.db)
    if platform.settings.tracking.database is not None:
        found[Part.TRACKING] = tracking.db
    if platform.settings.refdata.postgres is not None:
        found[Part.REFDATA] = refdata.db
    return found


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
        await stack.enter_async_context(reloading(settings, telemetry))
        pulse = Pulse({"database": tracking.check}, needs=["database"])
        app = make_pipeline_api(Web(settings, telemetry, HttpMetrics(telemetry), authenticator), pulse, tracking)
        await stack.enter_async_context(serving([(app, socket)], server))
        await until_stopped([pulse], settings.server, stop, lambda: on_ready(address_of(socket)))
        tracking.stop()


async def command_api(settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """R6: the command API alone, until *stop*."""
    async with alone(settings, "command-api") as (stack, web, listening):
        refdata = await stack.enter_async_context(open_refdata(settings, web.telemetry))
        await stack.enter_async_context(reloading(settings, refdata.telemetry, refdata))
        # Without the bus nothing can be taken in; without Redis it can, and is told of later.
        pulse = Pulse(refdata_checks(refdata), needs=["refdata", "refdata bus"])
        app = make_command_api(web, pulse, refdata.refdata)
        await stack.enter_async_context(serving([(app, listening)], settings.server))
        await until_stopped([pulse], settings.server, stop, lambda: on_ready(address_of(listening)))
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
        await below.enter_async_context(reloading(settings, telemetry, refdata))
        is_loaded = await below.enter_async_context(pod.following(refdata))
        await is_loaded.wait()
        await until_stopped([pod.pulse], server, stop, lambda: on_ready(address))


async def _open_at_last(stack: AsyncExitStack, settings: Settings, telemetry: Telemetry) -> RefdataPlatform:
    """R23: refdata, as soon as its PostgreSQL is there."""
    backoff = Backoff(most=timedelta(seconds=5))
    while True:
        try:
            return await stack.enter_async_context(open_refdata(settings, telemetry))
        except Transient as error:
            structlog.get_logger().warning("primary_not_reached", code=error.code, error=error.message)
            await asyncio.sleep(backoff.next().total_seconds())
