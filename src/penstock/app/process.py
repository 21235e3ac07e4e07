"""What a role stands on that has a process to itself."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from penstock.app.apis import Web, make_app
from penstock.app.factories import make_authenticator, make_telemetry
from penstock.app.http_server import address_of, listening, serving, until_stopped
from penstock.app.platform import Platform, RefdataPlatform, open_platform
from penstock.kernel.config.sections import EMBEDDED
from penstock.kernel.db import datadir
from penstock.kernel.http.health import Check, Pulse
from penstock.kernel.http.middleware import HttpMetrics
from penstock.kernel.ids import worker_name
from penstock.settings import Settings

SELDOM_ASKED = ("storage",)  # it writes, reads and removes an object, and some buckets keep what is removed


@asynccontextmanager
async def alone(settings: Settings, role: str) -> AsyncIterator[tuple[AsyncExitStack, Web, socket.socket]]:
    """How a role of refdata begins that has a process to itself."""
    async with AsyncExitStack() as stack:
        telemetry = stack.enter_context(contextlib.closing(make_telemetry(settings)))
        web = Web(settings, telemetry, HttpMetrics(telemetry), make_authenticator(settings))
        if settings.database.url == EMBEDDED and settings.refdata.postgres is None:
            stack.enter_context(datadir.owned(settings.data_dir, worker_name(role)))
        yield stack, web, stack.enter_context(listening(settings.server.host, settings.server.port))


@asynccontextmanager
async def standing(
    settings: Settings, title: str, needs: Sequence[str], stop: asyncio.Event, on_ready: Callable[[str], None]
) -> AsyncIterator[tuple[AsyncExitStack, Platform]]:
    """What workers that have a process to themselves stand on; once they are there it serves until *stop*."""
    async with AsyncExitStack() as stack:
        telemetry = stack.enter_context(contextlib.closing(make_telemetry(settings)))
        web = Web(settings, telemetry, HttpMetrics(telemetry), make_authenticator(settings))
        socket = stack.enter_context(listening(settings.server.host, settings.server.port))
        platform = await stack.enter_async_context(open_platform(settings, telemetry))
        yield stack, platform
        pulse = Pulse(platform_checks(platform), needs=needs, seldom=SELDOM_ASKED)
        await stack.enter_async_context(serving([(make_app(title, web, pulse), socket)], settings.server))
        await until_stopped([pulse], settings.server, stop, lambda: on_ready(address_of(socket)))


def platform_checks(platform: Platform) -> dict[str, Check]:
    """What this process depends on, each asked by its own check."""
    checks: dict[str, Check] = {"database": platform.db.check, "bus": platform.bus.check}
    return {**checks, "signals": platform.signals.check, "storage": platform.storage.check}


def refdata_checks(platform: RefdataPlatform) -> dict[str, Check]:
    checks: dict[str, Check] = {"refdata": platform.refdata.check, "refdata bus": platform.bus.check}
    return {**checks, "refdata signals": platform.signals.check}
