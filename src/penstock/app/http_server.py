"""HTTP servers on sockets bound beforehand, as many as a role needs."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from time import monotonic

import structlog
import uvicorn
from fastapi import FastAPI

from penstock.kernel.errors import BadConfig, Conflict
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.http.sockets import accept_queued
from penstock.settings import ServerSection

_IDLE_SECONDS = 75  # longer than proxies keep a connection: who closes it first must be the one who sends requests
_PARTING_SECONDS = 1.0


@contextmanager
def bind_listener(host: str, port: int) -> Iterator[socket.socket]:
    """A socket bound before anything else starts, so that a taken port costs nothing."""
    with _bound(host, port) as listener:
        listener.listen(1024)
        yield listener


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        hint = "check server.host"
        raise BadConfig("BAD_HOST", f"{host} is no address of this machine: {error.strerror}", hint=hint) from error
    with socket.socket(family, kind, protocol) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError as error:
            hint = "stop what uses it, or choose another with --port or --query-port; 0 takes a free one"
            raise Conflict("PORT_IN_USE", f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from error
        yield bound


@contextmanager
def bind_shared_listeners(host: str, port: int, count: int) -> Iterator[list[socket.socket]]:
    """Sockets on one port, among which the kernel deals out connections; what others use is taken all the same.

    Nobody can connect before a process serves one of them: whoever came earlier would wait for it to start.
    """
    with ExitStack() as stack:
        with _bound(host, port) as alone:
            address = alone.getsockname()
        sockets = [stack.enter_context(socket.socket(alone.family, alone.type, alone.proto)) for _ in range(count)]
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(address)
        yield sockets


@asynccontextmanager
async def run_server(app: FastAPI, sock: socket.socket, section: ServerSection) -> AsyncIterator[None]:
    """Serve *app* on *sock* until the end, then finish the requests under way."""
    server = _ApiServer(_server_config(app, section))
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve([sock]), name=f"serve {app.title}")
        try:
            yield
        finally:
            server.should_exit = True


async def serve_until_stopped(
    pulses: Sequence[LivenessPulse], section: ServerSection, stop: asyncio.Event, on_ready: Callable[[], None]
) -> None:
    """Serve until *stop*; not ready before, and no longer ready after, when those who come are sent elsewhere."""
    for pulse in pulses:
        pulse.is_serving = True
    structlog.get_logger().info("ready")
    on_ready()
    await stop.wait()
    for pulse in pulses:
        pulse.drain()
    delay = section.drain_delay.total_seconds()
    structlog.get_logger().info("stopping", delay=delay)
    await asyncio.sleep(delay)


def _server_config(app: FastAPI, section: ServerSection) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        http="httptools",
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=int(section.drain_timeout.total_seconds()),
    )


class _ApiServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the program, which has more to stop than a server."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nobody in any more, but do not hang up on whoever is about to ask: it is told with its last answer."""
        waiting = [sock for listener in sockets or () for sock in accept_queued(listener)]
        for server in self.servers:
            server.close()
        for one in waiting:  # whoever had connected is taken in
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, one)
        until = monotonic() + _PARTING_SECONDS
        while self.server_state.connections and monotonic() < until:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg] # uvicorn's own, which has them
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
