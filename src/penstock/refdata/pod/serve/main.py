"""A serving process of a query pod. Started by its loader, which tells it everything over its standard input."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import uvloop

from penstock.app.factories import make_authenticator
from penstock.kernel.http.headers import LOCAL_NAMES
from penstock.kernel.tasks.periodic import repeating
from penstock.kernel.tasks.wait import ended
from penstock.kernel.telemetry.log_level import LOG_LEVEL
from penstock.kernel.telemetry.telemetry import configure_logging
from penstock.refdata.pod.ipc import Link, Show
from penstock.refdata.pod.memory.reader import View
from penstock.refdata.pod.memory.shared_counters import State
from penstock.refdata.pod.serve.router import Front
from penstock.refdata.pod.serve.server import Server
from penstock.settings import Settings

LIVENESS = "/actuator/health/liveness"
LOG_LEVEL_EVERY = timedelta(seconds=1)
_LOOKS_MISSED = 3  # after which the primary counts as out of sight


def main() -> None:
    """Serve until SIGTERM, or until the loader is gone."""
    gc.freeze()  # modules stay for good: nobody need look for garbage among them
    told = orjson.loads(sys.stdin.buffer.read())
    settings = Settings.model_validate(told["settings"])
    configure_logging(settings.telemetry.log_level, settings.telemetry.log_format)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(settings, told))


async def _serve(settings: Settings, told: dict[str, Any]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    for number in (signal.SIGINT, signal.SIGUSR1):  # of the terminal, or to all: the loader was told too, and tells us
        loop.add_signal_handler(number, lambda: None)
    folder, query = Path(told["folder"]), settings.refdata.query
    with View.open(folder, query.memory_limit_mb * 1024 * 1024) as view:
        names = None if settings.auth.jwt else LOCAL_NAMES | {settings.server.host}
        front = Front(view, State(folder), settings.refdata.security.tenant, names, patience_for(settings))
        await _answer(settings, told, front, stopping)


async def _answer(settings: Settings, told: dict[str, Any], front: Front, stopping: asyncio.Event) -> None:
    query = settings.refdata.query
    link = await Link.over(socket.socket(fileno=told["link"]))
    patience = (query.barrier_wait_ms + 2 * query.fallback_timeout_ms) / 1000 + 5
    server = Server(front, link, make_authenticator(settings), told["process"], patience)
    drain = settings.server.drain_timeout.total_seconds()

    async def heed() -> None:
        heed_log_level(front.state)

    answers = asyncio.create_task(link.run(), name="link")
    answers.add_done_callback(lambda _ended: stopping.set())  # without a loader nothing is fresh any more
    await link.ask(Show(LIVENESS), patience)
    with socket.socket(fileno=told["listening"]) as listening:
        async with repeating("log level", heed, LOG_LEVEL_EVERY):
            await server.serve(listening, stopping, drain)
    await ended(answers)
    await link.close()


def heed_log_level(state: State) -> None:
    """Log as much as the loader does."""
    if state.log_level:
        LOG_LEVEL.configure(logging.getLevelName(state.log_level))


def patience_for(settings: Settings) -> float:
    """How long the primary may be unseen before answers say so."""
    return settings.refdata.query.reconcile_every.total_seconds() * _LOOKS_MISSED + 1


if __name__ == "__main__":
    main()
