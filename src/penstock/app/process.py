"""The process of a program: telemetry, listening socket, health, and an orderly shutdown."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeVar

from fastapi import FastAPI

from penstock.app.apis import PublicApis
from penstock.app.factories import make_telemetry
from penstock.app.http_server import bind_listener, format_address, run_server, serve_until_stopped
from penstock.kernel.db import datadir
from penstock.kernel.http.auth import make_authenticator
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.ids import make_worker_name
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import Settings

T = TypeVar("T")


class Process:
    """The resources of a program; those that it opens are closed in reverse order at the end."""

    def __init__(self, settings: Settings, web: PublicApis, stack: AsyncExitStack, stop: asyncio.Event) -> None:
        self.settings = settings
        self.web = web
        self._stack = stack
        self._stop = stop

    @property
    def telemetry(self) -> Telemetry:
        """Return the telemetry of the process."""
        return self.web.telemetry

    async def open(self, opened: AbstractAsyncContextManager[T]) -> T:
        """Keep *opened* open until the end of the process."""
        return await self._stack.enter_async_context(opened)

    def enter(self, opened: AbstractContextManager[T]) -> T:
        """Keep *opened* open until the end of the process."""
        return self._stack.enter_context(opened)

    def listen(self) -> socket.socket:
        """Bind the port of the API; call it first, so that a port in use is reported at once."""
        return self.enter(bind_listener(self.settings.server.host, self.settings.server.port))

    async def start_server(self, app: FastAPI, sock: socket.socket) -> None:
        """Answer requests on *sock* until the end of the process."""
        await self.open(run_server(app, sock, self.settings.server))

    async def serve(
        self,
        app: FastAPI,
        sock: socket.socket,
        pulse: LivenessPulse,
        on_ready: Callable[[str], None],
        work: AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        """Answer requests on *sock*, and run *work*, until the process is asked to stop; then drain."""
        await self.start_server(app, sock)
        if work is not None:
            await self.open(work)
        await self.wait_for_stop([pulse], lambda: on_ready(format_address(sock)))

    async def wait_for_stop(self, pulses: Sequence[LivenessPulse], on_ready: Callable[[], None]) -> None:
        """Stay ready until the process is asked to stop, then stay unready for the drain delay."""
        await serve_until_stopped(pulses, self.settings.server, self._stop, on_ready)


@asynccontextmanager
async def open_process(
    settings: Settings, stop: asyncio.Event, *, role: str = "", owns_data_dir: bool = False
) -> AsyncIterator[Process]:
    """Yield a process with telemetry and authentication; with *owns_data_dir* the data directory is locked."""
    async with AsyncExitStack() as stack:
        telemetry = stack.enter_context(contextlib.closing(make_telemetry(settings)))
        web = PublicApis(settings, telemetry, make_authenticator(settings.auth))
        if owns_data_dir:
            stack.enter_context(datadir.lock_data_dir(settings.data_dir, make_worker_name(role)))
        yield Process(settings, web, stack, stop)
