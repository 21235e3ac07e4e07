"""Processes behind nginx that are replaced one after the other, by others with another configuration."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.deploy.rolling.nginx import Nginx
from tests.deploy.rolling.rolling_clients import Torn, connected
from tests.support.ports import free_port
from tests.support.processes import Server
from tests.support.settings import write_config
from tests.support.types import Json
from tests.support.wait import becomes

Program = Callable[[Path, int], Server]
READINESS = "/actuator/health/readiness"
_LOOK_EVERY = 0.02


class Fleet:
    """Several processes of one role, each in a folder and on a port of its own, which it keeps."""

    def __init__(self, folder: Path, program: Program, size: int) -> None:
        self._folder, self._program = folder, program
        self.ports = [free_port() for _ in range(size)]
        self.running: dict[int, Server] = {}
        self.config: Json = {}

    async def start(self, config: Json) -> None:
        """All of them, ready, with this configuration; those that have another are stopped before."""
        if config != self.config:
            self.close()
            await asyncio.gather(*(self._start(port, config) for port in self.ports))
            self.config = config

    async def roll(self, config: Json, is_in_service: Callable[[int], bool]) -> None:
        """Each in turn: SIGTERM, its end, another in its place; the next one when that is ready and *in service*."""
        assert config != self.config
        for port in self.ports:
            stopped = self.running[port]
            code = await asyncio.to_thread(stopped.stop)
            stopped.__exit__(None, None, None)
            assert code == 0, stopped.log_file.read_text()[-2000:]
            await self._start(port, config)
            await becomes(_always(lambda port=port: is_in_service(port)), f"{port} is in service")  # type: ignore[misc]
        self.config = config

    async def _start(self, port: int, config: Json) -> None:
        folder = self._folder / str(port)
        folder.mkdir(exist_ok=True)
        write_config(folder, config)
        server = self.running[port] = self._program(folder, port)
        await asyncio.to_thread(server.__enter__)

    def close(self) -> None:
        for server in self.running.values():
            server.__exit__(None, None, None)
        self.running.clear()


def _always(holds: Callable[[], bool]) -> Callable[[], Any]:
    async def ask() -> bool:
        return holds()

    return ask


@asynccontextmanager
async def in_front(folder: Path, ports: Sequence[int], *, next: str) -> AsyncIterator[Nginx]:  # noqa: A002
    """An nginx that knows of all, and of nothing that happens to them."""
    nginx = Nginx(folder, next=next)
    nginx.use(ports)
    with nginx:
        yield nginx


class Endpoints:
    """Do what Kubernetes does: ready roles get requests, others are removed, each with a delay."""

    def __init__(self, nginx: Nginx, ports: Sequence[int]) -> None:
        self._nginx, self._ports = nginx, ports
        self.ready: set[int] = set()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            self.ready = {port for port in self._ports if await _is_ready(port)}
            self._nginx.use(self.ready)
            stack.enter_context(self._nginx)
            watch = asyncio.create_task(self._watch())
            try:
                yield
            finally:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch

    async def _watch(self) -> None:
        while True:
            ready = {port for port in self._ports if await _is_ready(port)}
            if ready != self.ready:
                self._nginx.use(ready)
                self.ready = ready
            await asyncio.sleep(_LOOK_EVERY)


async def _is_ready(port: int) -> bool:
    try:
        async with connected(port) as wire:
            return (await wire.ask(READINESS, "Connection: close")).status == 200
    except (OSError, Torn):
        return False
