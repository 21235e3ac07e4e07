"""The programs that run until they are stopped: all parts in one process, or one role.

Each starts with `open_process` and opens the resources that it needs. A program with an API ends with
`Process.serve`. A program with a pod waits for the stop itself, because the pod has its own servers.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import orjson
import structlog

from penstock.app.apis import Parts, make_api, make_app, make_command_api, make_pipeline_api
from penstock.app.bridges import PartServices, make_part_workers
from penstock.app.http_server import bind_shared_listeners, format_address
from penstock.app.parts import open_flows, open_harvest, open_refdata, open_tracking
from penstock.app.platform import Platform, open_database, open_ingest_workspace, open_platform
from penstock.app.process import Process, open_process
from penstock.app.reload import reload_configuration
from penstock.flows import sdk
from penstock.flows.api.queries import FlowViews
from penstock.flows.definition.catalogue import FlowCatalogue
from penstock.flows.runtime import FlowsPlatform, run_flows
from penstock.flows.step import KindContext, Workers
from penstock.harvest.api.queries import HarvestViews
from penstock.harvest.contract import CONSOLIDATIONS, PLANS, WORK_ITEMS
from penstock.harvest.runtime import HarvestPlatform, run_harvest
from penstock.ingest.api.queries import IngestViews
from penstock.ingest.runtime import run_ingest
from penstock.ingest.watcher import WatchCommand
from penstock.ingest.workspace import IngestWorkspace
from penstock.kernel.config.sections import EMBEDDED
from penstock.kernel.db.database import Database
from penstock.kernel.errors import BadConfig, Transient
from penstock.kernel.http.health import Check, LivenessPulse
from penstock.kernel.status import IssueSeverity
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.overview.contract import Part
from penstock.overview.dead_letters import COMMANDS_REPORTED_FOR, BusTopic
from penstock.overview.events import make_event_history
from penstock.refdata.pod.config import PodConfig
from penstock.refdata.pod.supervisor import open_pod, serve_pod
from penstock.refdata.runtime import ROLES, RefdataPlatform
from penstock.settings import Settings
from penstock.tracking.service import Tracking

EXPENSIVE_CHECKS = ("storage",)  # writes, reads and deletes an object, and some buckets retain deleted objects
OnReady = Callable[[str], None]


@dataclass(frozen=True)
class Addresses:
    """The URLs of a running server."""

    api: str
    query: str


async def run_up(settings: Settings, stop: asyncio.Event, on_ready: Callable[[Addresses], None]) -> None:
    """Run everything until *stop*; *on_ready* is called once requests are answered."""
    server, count = settings.server, settings.refdata.query.processes
    async with open_process(settings, stop, role="up", owns_data_dir=True) as running:
        api = running.listen()
        query = running.enter(bind_shared_listeners(server.host, server.query_port, count))
        addresses = Addresses(format_address(api), format_address(query[0]))
        platform, tracking, refdata = await _open_services(running)
        pod = await running.open(open_pod(make_pod_config(settings), running.telemetry))
        for role in ROLES.values():
            await running.open(role(refdata))
        is_loaded = await running.open(pod.follow_primary(refdata.db, refdata.refdata.catalogue, refdata.signals))
        await running.open(serve_pod(pod, query))
        # The pod answers from memory, also when the other dependencies are down.
        pulse = _make_api_pulse(platform, tracking, refdata, dictionaries=pod.check)
        parts = await _open_parts(running, platform, tracking, refdata, works=True)
        await running.start_server(make_api(running.web, pulse, parts), api)
        await is_loaded.wait()
        await running.wait_for_stop([pulse, pod.pulse], lambda: on_ready(addresses))
        _end_streams(parts)


async def run_api(settings: Settings, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Serve the API of all parts, without workers, until *stop*."""
    owns = settings.database.url == EMBEDDED
    async with open_process(settings, stop, role="api", owns_data_dir=owns) as running:
        sock = running.listen()
        platform, tracking, refdata = await _open_services(running)
        pulse = _make_api_pulse(platform, tracking, refdata)
        parts = await _open_parts(running, platform, tracking, refdata, works=False)
        await running.serve(make_api(running.web, pulse, parts), sock, pulse, on_ready)
        _end_streams(parts)


async def run_pipeline_apid(settings: Settings, stop: asyncio.Event, on_ready: OnReady) -> None:
    """T10: serve the pipeline API alone, until *stop*."""
    owns = settings.database.url == EMBEDDED and settings.tracking.database is None
    async with open_process(settings, stop, role="pipeline-apid", owns_data_dir=owns) as running:
        sock = running.listen()
        tracking = await running.open(open_tracking(settings, running.telemetry))
        await running.open(reload_configuration(settings, running.telemetry))
        pulse = LivenessPulse({"database": tracking.check}, needs=["database"])
        await running.serve(make_pipeline_api(running.web, pulse, tracking), sock, pulse, on_ready)
        tracking.stop()


async def run_command_api(settings: Settings, stop: asyncio.Event, on_ready: OnReady) -> None:
    """R6: serve the command API alone, until *stop*."""
    owns = _is_refdata_embedded(settings)
    async with open_process(settings, stop, role="command-api", owns_data_dir=owns) as running:
        sock = running.listen()
        refdata = await running.open(open_refdata(settings, running.telemetry))
        await running.open(reload_configuration(settings, running.telemetry, refdata))
        # Without the bus no command can be accepted. Without Redis commands are accepted, and announced later.
        pulse = LivenessPulse(make_refdata_checks(refdata), needs=["refdata", "refdata bus"])
        await running.serve(make_command_api(running.web, pulse, refdata.refdata), sock, pulse, on_ready)
        refdata.refdata.stop()


async def run_query_api(settings: Settings, stop: asyncio.Event, on_ready: OnReady) -> None:
    """R17: serve a pod alone, until *stop*. Before PostgreSQL answers for the first time, requests get status 503."""
    server, count = settings.server, settings.refdata.query.processes
    async with open_process(settings, stop, role="query-api", owns_data_dir=_is_refdata_embedded(settings)) as running:
        sockets = running.enter(bind_shared_listeners(server.host, server.query_port, count))
        address = format_address(sockets[0])
        pod = await running.open(open_pod(make_pod_config(settings), running.telemetry))
        # PostgreSQL may start later, and must stay open until the last request is answered.
        resources = await running.open(AsyncExitStack())
        await running.open(serve_pod(pod, sockets))
        structlog.get_logger().info("pod_listening", address=address, processes=count)
        refdata = await _wait_for_refdata(resources, settings, running.telemetry)
        await resources.enter_async_context(reload_configuration(settings, running.telemetry, refdata))
        is_loaded = await resources.enter_async_context(
            pod.follow_primary(refdata.db, refdata.refdata.catalogue, refdata.signals)
        )
        await is_loaded.wait()
        await running.wait_for_stop([pod.pulse], lambda: on_ready(address))


async def run_workers(role: str, settings: Settings, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Run one role of refdata's workers alone, with its health and metrics on a port, until *stop*."""
    if role == "kafka-adapter" and not settings.refdata.kafka.external_topics:
        hint = "list topics in refdata.kafka.externalTopics"
        raise BadConfig("NO_EXTERNAL_TOPICS", "no external topics are configured", hint=hint)
    async with open_process(settings, stop, role=role, owns_data_dir=_is_refdata_embedded(settings)) as running:
        sock = running.listen()
        refdata = await running.open(open_refdata(settings, running.telemetry))
        await running.open(reload_configuration(settings, running.telemetry, refdata))
        await running.open(ROLES[role](refdata))
        pulse = LivenessPulse(
            make_refdata_checks(refdata), needs=["refdata"] if role == "relay" else ["refdata", "refdata bus"]
        )
        await running.serve(make_app(f"Penstock {role}", running.web, pulse), sock, pulse, on_ready)


async def run_harvest_workers(settings: Settings, stop: asyncio.Event, on_ready: OnReady) -> None:
    """H4–H8: run the workers of harvest alone, with their health and metrics on a port, until *stop*."""
    if not settings.harvest.feeds:
        raise BadConfig("NO_FEEDS", "no feeds are configured", hint="configure feeds in harvest.feeds")
    async with open_process(settings, stop) as running:
        sock = running.listen()
        platform = await running.open(open_platform(settings, running.telemetry))
        await running.open(run_harvest(await running.open(open_harvest(settings, platform))))
        await running.open(reload_configuration(settings, running.telemetry))
        pulse = LivenessPulse(make_platform_checks(platform), needs=["database", "bus"], expensive=EXPENSIVE_CHECKS)
        await running.serve(make_app("Penstock harvest", running.web, pulse), sock, pulse, on_ready)


async def run_flow_workers(kinds: Sequence[str], settings: Settings, stop: asyncio.Event, on_ready: OnReady) -> None:
    """F17: run the workers of flows alone, with their health and metrics on a port, until *stop*."""
    async with open_process(settings, stop) as running:
        sock = running.listen()
        platform, tracking, refdata = await _open_services(running)
        harvest = await running.open(open_harvest(settings, platform))
        workspace = _open_workspace(running)
        flows = await running.open(open_flows(settings, platform))
        await _run_flows(running, flows, harvest, refdata, tracking, workspace, kinds)
        pulse = LivenessPulse(make_platform_checks(platform), needs=["database", "storage"], expensive=EXPENSIVE_CHECKS)
        await running.serve(make_app("Penstock flows", running.web, pulse), sock, pulse, on_ready)


async def run_remote_flow_workers(
    url: str, kinds: Sequence[str], settings: Settings, stop: asyncio.Event, on_ready: OnReady
) -> None:
    """F17: execute steps of the server at *url*, without a database, until *stop*; only some *kinds*, when named."""
    section, registered = settings.flows, Workers()
    for workers in FlowCatalogue(section).make_workers(KindContext(section)):
        registered.add(workers)
    chosen = registered.select_kinds(kinds)
    if not chosen.handlers:
        hint = "pass `--module NAME`, or set `flows.modules`"
        raise BadConfig("NO_WORKERS", "no module with workers is configured", hint=hint)
    async with open_process(settings, stop) as running:
        sock = running.listen()
        await running.open(reload_configuration(settings, running.telemetry))
        pulse = LivenessPulse({}, needs=())  # the worker is healthy while it waits for a server that is down
        steps = sdk.run_worker(
            chosen,
            url=url,
            token=os.environ.get("PENSTOCK_TOKEN"),
            concurrency=section.work.concurrency,
            lease_for=section.lease,
            drain=settings.server.drain_timeout,
            telemetry=running.telemetry,
        )
        await running.serve(make_app("Penstock flows", running.web, pulse), sock, pulse, on_ready, steps)


async def run_ingest_watch(uses_database: bool, settings: Settings, stop: asyncio.Event, on_ready: OnReady) -> None:
    """I23: run the watcher alone, with its health and metrics on a port, until *stop*."""
    async with open_process(settings, stop) as running:
        sock = running.listen()
        workspace = running.enter(open_ingest_workspace(settings, uses_database=uses_database))

        async def check_tree() -> str:
            await asyncio.to_thread(workspace.tree.list_suppliers)
            return settings.ingest.root or "."

        checks: dict[str, Check] = {"tree": check_tree}
        db = await running.open(open_database(settings)) if uses_database else None
        if db is not None:
            checks["database"] = db.check
        await running.open(reload_configuration(settings, running.telemetry))
        pulse = LivenessPulse(checks, needs=list(checks))
        command = _run_command(settings, uses_database=uses_database)
        watching = run_ingest(workspace, settings.ingest, command, running.telemetry, db)
        await running.serve(make_app("Penstock ingest", running.web, pulse), sock, pulse, on_ready, watching)


def make_platform_checks(platform: Platform) -> dict[str, Check]:
    """Return the health checks of the four ports."""
    checks: dict[str, Check] = {"database": platform.db.check, "bus": platform.bus.check}
    return {**checks, "signals": platform.signals.check, "storage": platform.storage.check}


def make_refdata_checks(platform: RefdataPlatform) -> dict[str, Check]:
    """Return the health checks of the database, the bus and the signals of refdata."""
    checks: dict[str, Check] = {"refdata": platform.refdata.check, "refdata bus": platform.bus.check}
    return {**checks, "refdata signals": platform.signals.check}


def _make_api_pulse(platform: Platform, tracking: Tracking, refdata: RefdataPlatform, **more: Check) -> LivenessPulse:
    """Return the health of the API, which needs only its databases to be ready."""
    checks = {**make_platform_checks(platform), "tracking": tracking.check, **make_refdata_checks(refdata), **more}
    return LivenessPulse(checks, needs=["database", "tracking", "refdata"], expensive=EXPENSIVE_CHECKS)


def _end_streams(parts: Parts) -> None:
    """End the open event streams, for whose clients the server would wait otherwise."""
    parts.tracking.stop()
    parts.refdata.stop()
    parts.flows.stop()


async def _open_services(running: Process) -> tuple[Platform, Tracking, RefdataPlatform]:
    """Open the platform, tracking and refdata, and reload the configuration when it changes."""
    settings, telemetry = running.settings, running.telemetry
    platform = await running.open(open_platform(settings, telemetry))
    tracking = await running.open(open_tracking(settings, telemetry, platform.db))
    refdata = await running.open(open_refdata(settings, telemetry, platform))
    await running.open(reload_configuration(settings, telemetry, refdata))
    return platform, tracking, refdata


async def _open_parts(
    running: Process, platform: Platform, tracking: Tracking, refdata: RefdataPlatform, *, works: bool
) -> Parts:
    """Open the services behind the API, with *works* also the workers of the parts."""
    settings = running.settings
    workspace = _open_workspace(running)
    harvest = await running.open(open_harvest(settings, platform))
    flows = await running.open(open_flows(settings, platform))
    if works:
        if workspace is not None:
            command = _run_command(settings, uses_database=True)
            await running.open(run_ingest(workspace, settings.ingest, command, running.telemetry, platform.db))
        if settings.harvest.feeds:
            await running.open(run_harvest(harvest))
        await _run_flows(running, flows, harvest, refdata, tracking, workspace)
    return Parts(
        tracking=tracking,
        refdata=refdata.refdata,
        ingest=IngestViews(platform.db, workspace.tree if workspace else None, settings.ingest),
        harvest=harvest.harvest,
        feeds=HarvestViews(harvest.db, platform.storage, settings.harvest),
        flows=flows.engine,
        flow_management=flows.operations,
        flow_views=FlowViews(platform.db, flows.catalogue),
        flow_events=flows.live,
        all_events=make_event_history(
            _find_journals(platform, tracking, refdata), [*tracking.live.notifiers, *flows.live.notifiers]
        ),
        topics=_list_topics(platform, refdata),
        folders=_list_folders(settings),
    )


def _list_topics(platform: Platform, refdata: RefdataPlatform) -> list[BusTopic]:
    """Return the topics whose dead letters are reported, with the next step for each."""
    kafka = refdata.section.kafka
    harvest = "penstock harvest ls; penstock harvest retry RUN"
    rejected = "penstock dict updates TENANT"
    external = "fix the mapping in refdata.kafka.externalTopics or the sender, and have the message sent again"
    return [
        *(BusTopic(platform.bus, topic, harvest) for topic in (PLANS, WORK_ITEMS, CONSOLIDATIONS)),
        BusTopic(refdata.bus, kafka.commands_topic, rejected, IssueSeverity.LATE, COMMANDS_REPORTED_FOR),
        *(BusTopic(refdata.bus, mapping.topic, external) for mapping in kafka.external_topics),
    ]


def _open_workspace(running: Process) -> IngestWorkspace | None:
    settings = running.settings
    return (
        running.enter(open_ingest_workspace(settings, uses_database=True)) if settings.ingest.root is not None else None
    )


async def _run_flows(
    running: Process,
    flows: FlowsPlatform,
    harvest: HarvestPlatform,
    refdata: RefdataPlatform,
    tracking: Tracking,
    workspace: IngestWorkspace | None,
    kinds: Sequence[str] = (),
) -> None:
    settings = running.settings
    section = settings.flows.database
    queries = await running.open(open_database(settings, section)) if section is not None else None
    services = PartServices(harvest.harvest, refdata.refdata, tracking, workspace, settings.ingest.runs_at_once)
    drain = settings.server.drain_timeout
    await running.open(run_flows(flows, make_part_workers(services), queries=queries, drain=drain, kinds=kinds))


def _find_journals(platform: Platform, tracking: Tracking, refdata: RefdataPlatform) -> dict[Part, Database]:
    """Return the database of each part's journal: that of the platform, unless the part has its own."""
    journals = dict.fromkeys(Part, platform.db)
    if platform.settings.tracking.database is not None:
        journals[Part.TRACKING] = tracking.db
    if platform.settings.refdata.postgres is not None:
        journals[Part.REFDATA] = refdata.db
    return journals


def _list_folders(settings: Settings) -> list[Path]:
    """Return the local folders that a process with these settings writes to; some may not exist yet."""
    urls = [settings.ingest.root, settings.storage.url]
    local = [unquote(urlsplit(url).path) for url in urls if url and urlsplit(url).scheme in ("", "file")]
    memory = settings.refdata.query.memory_dir or Path("/dev/shm")  # noqa: S108 - the default of the pod
    return [settings.data_dir, *map(Path, local), memory]


async def _wait_for_refdata(stack: AsyncExitStack, settings: Settings, telemetry: Telemetry) -> RefdataPlatform:
    """R23: open refdata as soon as its PostgreSQL answers."""
    backoff = Backoff(limit=timedelta(seconds=5))
    while True:
        try:
            return await stack.enter_async_context(open_refdata(settings, telemetry))
        except Transient as error:
            structlog.get_logger().warning("primary_unreachable", code=error.code, error=error.message)
            await asyncio.sleep(backoff.compute_next().total_seconds())


def _is_refdata_embedded(settings: Settings) -> bool:
    return settings.database.url == EMBEDDED and settings.refdata.postgres is None


def make_pod_config(settings: Settings) -> PodConfig:
    """Return the settings that the processes of a pod need."""
    return PodConfig(
        refdata=settings.refdata,
        auth=settings.auth,
        data_dir=settings.data_dir,
        host=settings.server.host,
        drain_timeout=settings.server.drain_timeout,
        log_level=settings.telemetry.log_level,
        log_format=settings.telemetry.log_format,
    )


def _run_command(settings: Settings, *, uses_database: bool) -> WatchCommand:
    """Return the command that starts a run of ingest with these settings, including those of the command line."""
    root, config = settings.ingest.root or ".", ["--config", str(settings.file)] if settings.file else []
    if not uses_database:
        return WatchCommand([*config, "--root", root], dict(os.environ))
    own = {
        "PENSTOCK__INGEST__ROOT": orjson.dumps(root).decode(),
        "PENSTOCK__DATA_DIR": str(settings.data_dir.absolute()),
    }
    return WatchCommand(config, {**os.environ, **own})
