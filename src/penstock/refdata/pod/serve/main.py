"""The serving process of a query pod; the loader starts it and writes its configuration to its standard input."""

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
from penstock.refdata.pod.ipc import DocumentRequest, LoaderConnection
from penstock.refdata.pod.memory.reader import MemoryView
from penstock.refdata.pod.memory.shared_counters import PodCounters
from penstock.refdata.pod.serve.router import Router
from penstock.refdata.pod.serve.server import PodServer

LIVENESS = "/actuator/health/liveness"
LOG_LEVEL_INTERVAL = timedelta(seconds=1)


def main() -> None:
    """Serve until SIGTERM, or until the loader ends."""
    gc.freeze()  # modules are never freed: exclude them from garbage collection
    startup = orjson.loads(sys.stdin.buffer.read())
    config = PodConfig.model_validate(startup["config"])
    configure_logging(config.log_level, config.log_format)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(config, startup))


async def _serve(config: PodConfig, startup: dict[str, Any]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    for number in (signal.SIGINT, signal.SIGUSR1):  # sent to the whole process group: the loader handles them
        loop.add_signal_handler(number, lambda: None)
    folder, query = Path(startup["folder"]), config.refdata.query
    with MemoryView.open(folder, query.memory_limit_mb * 1024 * 1024) as view:
        names = None if config.auth.jwt else LOCAL_NAMES | {config.host}
        router = Router(view, PodCounters(folder), config.refdata.security.tenant, names, config.stale_after)
        await _run_server(config, startup, router, stopping)


async def _run_server(config: PodConfig, startup: dict[str, Any], router: Router, stopping: asyncio.Event) -> None:
    query = config.refdata.query
    loader = await LoaderConnection.open(socket.socket(fileno=startup["loader_socket"]))
    timeout = (query.barrier_wait_ms + 2 * query.fallback_timeout_ms) / 1000 + 5
    server = PodServer(router, loader, make_authenticator(config.auth), startup["process"], timeout)
    drain = config.drain_seconds

    async def update_log_level() -> None:
        apply_log_level(router.counters)

    replies = asyncio.create_task(loader.receive_replies(), name="loader replies")
    replies.add_done_callback(lambda _task: stopping.set())  # without a loader the data cannot be updated
    await loader.request(DocumentRequest(LIVENESS), timeout)
    with socket.socket(fileno=startup["listening"]) as listening:
        async with run_periodically("log level", update_log_level, LOG_LEVEL_INTERVAL):
            await server.serve(listening, stopping, drain)
    await cancel_and_wait(replies)
    await loader.close()


def apply_log_level(counters: PodCounters) -> None:
    """Use the log level of the loader."""
    if counters.log_level:
        LOG_LEVEL.configure(logging.getLevelName(counters.log_level))


if __name__ == "__main__":
    main()
