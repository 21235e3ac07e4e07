"""The roles that serve: everything in one place, or the pipeline API alone."""

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from fastapi import APIRouter, FastAPI
from fastapi.responses import RedirectResponse
from pydantic import BaseModel

from penstock.app import Platform, make_authenticator, make_telemetry, open_platform, open_tracking
from penstock.kernel import actuator, datadir
from penstock.kernel.actuator import Check, Pulse
from penstock.kernel.auth import Authenticator
from penstock.kernel.http import Caller, create_app
from penstock.kernel.ids import worker_name
from penstock.kernel.middleware import HttpMetrics
from penstock.kernel.sections import EMBEDDED
from penstock.kernel.telemetry import Telemetry
from penstock.servers import address_of, listening, serving, until_stopped
from penstock.settings import Settings
from penstock.tracking import api as tracking_api
from penstock.tracking.service import Tracking


@dataclass(frozen=True)
class Addresses:
    """Where a running Penstock listens."""

    api: str
    query: str


@dataclass(frozen=True)
class Web:
    """What every HTTP application of a process shares."""

    settings: Settings
    telemetry: Telemetry
    metrics: HttpMetrics
    authenticator: Authenticator


class Whoami(BaseModel):
    """How the server sees the caller."""

    subject: str
    tenant: str | None
    is_operator: bool


async def up(settings: Settings, stop: asyncio.Event, on_ready: Callable[[Addresses], None]) -> None:
    """Run everything until *stop*; *on_ready* is called once requests are answered."""
    server = settings.server
    async with AsyncExitStack() as stack:
        telemetry = stack.enter_context(contextlib.closing(make_telemetry(settings)))
        authenticator = make_authenticator(settings)
        stack.enter_context(datadir.owned(settings.data_dir, worker_name("up")))
        api = stack.enter_context(listening(server.host, server.port))
        query = stack.enter_context(listening(server.host, server.query_port))
        platform = await stack.enter_async_context(open_platform(settings, telemetry))
        tracking = await stack.enter_async_context(open_tracking(settings, telemetry, platform.db))
        # The API cannot do without its databases; the query server answers from memory, come what may.
        checks = {**_checks(platform), "tracking": tracking.check}
        pulses = [Pulse(checks, needs=["database", "tracking"]), Pulse(checks, needs=[])]
        web = Web(settings, telemetry, HttpMetrics(telemetry), authenticator)
        apps = [(make_api(web, pulses[0], tracking), api), (make_query(web, pulses[1]), query)]
        await stack.enter_async_context(serving(apps, server))
        addresses = Addresses(address_of(api), address_of(query))
        await until_stopped(pulses, stop, lambda: on_ready(addresses))
        tracking.stop()


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


def _checks(platform: Platform) -> dict[str, Check]:
    """What this process depends on, each asked by its own check."""
    checks: dict[str, Check] = {"database": platform.db.check, "bus": platform.bus.check}
    return {**checks, "signals": platform.signals.check, "storage": platform.storage.check}


def make_api(web: Web, pulse: Pulse, tracking: Tracking) -> FastAPI:
    """The API of all parts."""
    app = make_pipeline_api(web, pulse, tracking, title="Penstock")
    app.include_router(_access)
    return app


def make_pipeline_api(web: Web, pulse: Pulse, tracking: Tracking, *, title: str = "Penstock pipeline") -> FastAPI:
    """The API of tracking."""
    app = _make_app(title, web, pulse)
    app.state.tracking = tracking
    app.include_router(tracking_api.routes)

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/docs")

    return app


def make_query(web: Web, pulse: Pulse) -> FastAPI:
    """The query server: how it is, until dictionaries give it something to serve."""
    return _make_app("Penstock query", web, pulse)


def _make_app(title: str, web: Web, pulse: Pulse) -> FastAPI:
    server = web.settings.server
    local_name = server.host if web.settings.auth.jwt is None else None
    app = create_app(
        title, web.telemetry, web.metrics, web.authenticator, body_limit=server.body_limit, local_name=local_name
    )
    app.include_router(actuator.router(pulse, web.telemetry))
    return app


_access = APIRouter(prefix="/api/v1", tags=["access"])


@_access.get("/whoami")
async def whoami(caller: Caller) -> Whoami:
    """Who the server takes you for: the first thing to ask when a token does not work."""
    return Whoami(subject=caller.subject, tenant=caller.tenant, is_operator=caller.is_operator)
