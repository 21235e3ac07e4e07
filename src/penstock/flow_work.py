"""F17: workers of flows that have no database, only the address of a server."""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import closing

from penstock.flows import sdk
from penstock.flows.catalogue import Catalogue
from penstock.flows.step import Workers
from penstock.kernel.errors import BadConfig
from penstock.ports import make_telemetry
from penstock.reloading import reloading
from penstock.settings import Settings


async def work_from_afar(
    url: str, kinds: Sequence[str], settings: Settings, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    """Do steps of the server at *url* until *stop*; only of some *kinds*, when they are named."""
    section = settings.flows
    workers = _chosen(Catalogue(section).workers, kinds)
    with closing(make_telemetry(settings)) as telemetry:
        async with reloading(settings, telemetry):
            on_ready(url)
            await sdk.serve(
                workers,
                stop,
                url=url,
                token=os.environ.get("PENSTOCK_TOKEN"),
                concurrency=section.work.concurrency,
                lease_for=section.lease,
                drain=settings.server.drain_timeout,
                telemetry=telemetry,
            )


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
