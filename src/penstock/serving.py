"""`penstock up`: all roles in one process, from the first lock to the last connection."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Annotated

import structlog
import uvicorn
from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import RedirectResponse
from pydantic import BaseModel

from penstock.app import Platform, make_authenticator, make_telemetry, open_platform
from penstock.kernel import actuator, datadir
from penstock.kernel.actuator import Pulse
from penstock.kernel.auth import Authenticator, Principal
from penstock.kernel.errors import BadConfig, Conflict
from penstock.kernel.http import create_app, identifying
from penstock.kernel.ids import worker_name
from penstock.kernel.middleware import HttpMetrics
from penstock.settings import ServerSection, Settings


@dataclass(frozen=True)
class Addresses:
    """Where a running Penstock listens."""

    api: str
    query: str


class Whoami(BaseModel):
    """How the server sees the caller."""

    subject: str
    tenant: str | None
    is_operator: bool


async def up(settings: Settings, stop: asyncio.Event, on_ready: Callable[[Addresses], None]) -> None:
    """Run everything until *stop*; *on_ready* is called once requests are answered."""
    authenticator = make_authenticator(settings)
    with contextlib.closing(make_telemetry(settings)) as telemetry, datadir.owned(settings.data_dir, worker_name("up")):
        server = settings.server
        with _listening(server.host, server.port) as api, _listening(server.host, server.query_port) as query:
            async with open_platform(settings, telemetry) as platform:
                # The API cannot do without its database; the query server answers from memory, come what may.
                pulses = [make_pulse(platform, needs=["database"]), make_pulse(platform, needs=[])]
                metrics = HttpMetrics(telemetry)
                apps = [
                    (make_api(platform, pulses[0], metrics, authenticator), api),
                    (make_query(platform, pulses[1], metrics), query),
                ]
                async with _serving(apps, server):
                    await _until_stopped(pulses, Addresses(_address(api), _address(query)), stop, on_ready)


async def _until_stopped(
    pulses: Sequence[Pulse], addresses: Addresses, stop: asyncio.Event, on_ready: Callable[[Addresses], None]
) -> None:
    for pulse in pulses:
        pulse.is_serving = True
    structlog.get_logger().info("ready", api=addresses.api, query=addresses.query)
    on_ready(addresses)
    await stop.wait()
    for pulse in pulses:
        pulse.is_serving = False
    structlog.get_logger().info("stopping")


def make_pulse(platform: Platform, *, needs: Collection[str]) -> Pulse:
    """What this process depends on, each asked by its own check, and what of it a server *needs* to be ready."""
    checks = {"database": platform.db.check, "bus": platform.bus.check}
    return Pulse({**checks, "signals": platform.signals.check, "storage": platform.storage.check}, needs=needs)


def make_api(platform: Platform, pulse: Pulse, metrics: HttpMetrics, authenticator: Authenticator) -> FastAPI:
    """The API of all parts."""
    app = _make_app("Penstock", platform, pulse, metrics)
    app.include_router(_whoami(authenticator))

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/docs")

    return app


def make_query(platform: Platform, pulse: Pulse, metrics: HttpMetrics) -> FastAPI:
    """The query server: how it is, until dictionaries give it something to serve."""
    return _make_app("Penstock query", platform, pulse, metrics)


def _make_app(title: str, platform: Platform, pulse: Pulse, metrics: HttpMetrics) -> FastAPI:
    settings = platform.settings
    local_name = settings.server.host if settings.auth.jwt is None else None
    app = create_app(title, platform.telemetry, metrics, body_limit=settings.server.body_limit, local_name=local_name)
    app.include_router(actuator.router(pulse, platform.telemetry))
    return app


def _whoami(authenticator: Authenticator) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["access"])

    @routes.get("/whoami")
    async def whoami(caller: Annotated[Principal, Depends(identifying(authenticator))]) -> Whoami:
        """Who the server takes you for: the first thing to ask when a token does not work."""
        return Whoami(subject=caller.subject, tenant=caller.tenant, is_operator=caller.is_operator)

    return routes


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket bound before anything else starts, so that a taken port costs nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        hint = "check server.host"
        raise BadConfig("BAD_HOST", f"{host} is no address of this machine: {error.strerror}", hint=hint) from error
    with socket.socket(family, kind, protocol) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
            listening.listen(1024)
        except OSError as error:
            hint = "stop what uses it, or choose another with --port or --query-port; 0 takes a free one"
            raise Conflict("PORT_IN_USE", f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from error
        yield listening


@asynccontextmanager
async def _serving(apps: Sequence[tuple[FastAPI, socket.socket]], section: ServerSection) -> AsyncIterator[None]:
    """Serve the applications until the end, then finish the requests under way."""
    servers = [_Server(_server_config(app, section)) for app, _ in apps]
    async with asyncio.TaskGroup() as group:
        for server, (app, listening) in zip(servers, apps, strict=True):
            group.create_task(server.serve([listening]), name=f"serve {app.title}")
        try:
            yield
        finally:
            for server in servers:
                server.should_exit = True


def _server_config(app: FastAPI, section: ServerSection) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        http="httptools",
        timeout_graceful_shutdown=int(section.drain_timeout.total_seconds()),
    )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the program, which has more to stop than a server."""
        yield


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
