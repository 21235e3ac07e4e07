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

from penstock.kernel.http.auth import make_authenticator
from penstock.kernel.http.headers import LOCAL_NAMES
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.tasks.wait import cancel_and_wait
from penstock.kernel.telemetry.log_level import LOG_LEVEL
from penstock.kernel.telemetry.telemetry import configure_logging
from penstock.refdata.pod.config import PodConfig
from penstock.refdata.pod.ipc import LoaderConnection, ShowRequest
from penstock.refdata.pod.memory.reader import MemoryView
from penstock.refdata.pod.memory.shared_counters import PodCounters
from penstock.refdata.pod.serve.router import Router
from penstock.refdata.pod.serve.server import PodServer

LIVENESS = "/actuator/health/liveness"
LOG_LEVEL_EVERY = timedelta(seconds=1)


def main() -> None:
    """Serve until SIGTERM, or until the loader is gone."""
    gc.freeze()  # modules stay for good: nobody need look for garbage among them
    told = orjson.loads(sys.stdin.buffer.read())
    config = PodConfig.model_validate(told["config"])
    configure_logging(config.log_level, config.log_format)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(config, told))


async def _serve(config: PodConfig, told: dict[str, Any]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    for number in (signal.SIGINT, signal.SIGUSR1):  # of the terminal, or to all: the loader was told too, and tells us
        loop.add_signal_handler(number, lambda: None)
    folder, query = Path(told["folder"]), config.refdata.query
    with MemoryView.open(folder, query.memory_limit_mb * 1024 * 1024) as view:
        names = None if config.auth.jwt else LOCAL_NAMES | {config.host}
        front = Router(view, PodCounters(folder), config.refdata.security.tenant, names, config.patience)
        await _answer(config, told, front, stopping)


async def _answer(config: PodConfig, told: dict[str, Any], front: Router, stopping: asyncio.Event) -> None:
    query = config.refdata.query
    link = await LoaderConnection.over(socket.socket(fileno=told["link"]))
    patience = (query.barrier_wait_ms + 2 * query.fallback_timeout_ms) / 1000 + 5
    server = PodServer(front, link, make_authenticator(config.auth), told["process"], patience)
    drain = config.drain_seconds

    async def heed() -> None:
        heed_log_level(front.state)

    answers = asyncio.create_task(link.run(), name="link")
    answers.add_done_callback(lambda _ended: stopping.set())  # without a loader nothing is fresh any more
    await link.ask(ShowRequest(LIVENESS), patience)
    with socket.socket(fileno=told["listening"]) as listening:
        async with run_periodically("log level", heed, LOG_LEVEL_EVERY):
            await server.serve(listening, stopping, drain)
    await cancel_and_wait(answers)
    await link.close()


def heed_log_level(state: PodCounters) -> None:
    """Log as much as the loader does."""
    if state.log_level:
        LOG_LEVEL.configure(logging.getLevelName(state.log_level))


if __name__ == "__main__":
    main()
