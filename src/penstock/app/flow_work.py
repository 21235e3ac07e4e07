"""F17: workers of flows that have no database, only the address of a server."""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing

from penstock.app.apis import Web, make_app
from penstock.app.factories import make_authenticator, make_telemetry
from penstock.app.http_server import address_of, listening, serving, until_stopped
from penstock.app.reload import reloading
from penstock.flows import sdk
from penstock.flows.definition.catalogue import Catalogue
from penstock.flows.step import Workers
from penstock.kernel.errors import BadConfig
from penstock.kernel.http.health import Pulse
from penstock.kernel.http.middleware import HttpMetrics
from penstock.settings import Settings


async def work_from_afar(
    url: str, kinds: Sequence[str], settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    """Do steps of the server at *url*, health and metrics on a port, until *stop*; only some *kinds*, when named."""
    section = settings.flows
    workers = _chosen(Catalogue(section).workers, kinds)
    async with AsyncExitStack() as stack:
        telemetry = stack.enter_context(closing(make_telemetry(settings)))
        web = Web(settings, telemetry, HttpMetrics(telemetry), make_authenticator(settings))
        socket = stack.enter_context(listening(settings.server.host, settings.server.port))
        await stack.enter_async_context(reloading(settings, telemetry))
        pulse = Pulse({}, needs=())  # a server that is away is waited for: who works for it is no worse
        app = make_app("Penstock flows", web, pulse)
        await stack.enter_async_context(serving([(app, socket)], settings.server))
        await stack.enter_async_context(
            sdk.working(
                workers,
                url=url,
                token=os.environ.get("PENSTOCK_TOKEN"),
                concurrency=section.work.concurrency,
                lease_for=section.lease,
                drain=settings.server.drain_timeout,
                telemetry=telemetry,
            )
        )
        await until_stopped([pulse], settings.server, stop, lambda: on_ready(address_of(socket)))


def _chosen(known: Sequence[Workers], kinds: Sequence[str]) -> Workers:
    chosen = Workers()
    for workers in known:
        chosen.add(workers)
    if unknown := sorted(set(kinds) - set(chosen.handlers)):
        hint = f"here are: {', '.join(sorted(chosen.handlers)) or 'none'}"
        raise BadConfig("UNKNOWN_KIND", f"nobody here does steps of the kind {unknown[0]}", hint=hint)
    if not chosen.handlers:
        hint = "name modules with workers: --module, or flows.modules"
        raise BadConfig("NO_WORKERS", "there is nobody to do steps", hint=hint)
    for kind in set(chosen.handlers) - set(kinds or chosen.handlers):
        del chosen.handlers[kind]
    return chosen
