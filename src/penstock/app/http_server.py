"""HTTP servers on sockets that were bound before."""

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

_IDLE_SECONDS = 75  # longer than proxies keep a connection: the side that sends requests must close it first
_CLOSE_SECONDS = 1.0  # how long a shutdown waits for clients to close their connections


@contextmanager
def bind_listener(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a listening socket, bound before anything else starts, so that a port in use is reported at once."""
    with _bind_socket(host, port) as listener:
        listener.listen(1024)
        yield listener


@contextmanager
def _bind_socket(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        hint = "correct server.host"
        raise BadConfig("BAD_HOST", f"{host} is not an address of this machine: {error.strerror}", hint=hint) from error
    with socket.socket(family, kind, protocol) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError as error:
            hint = "stop the program that uses the port, or choose another with --port or --query-port"
            raise Conflict("PORT_IN_USE", f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from error
        yield bound


@contextmanager
def bind_shared_listeners(host: str, port: int, count: int) -> Iterator[list[socket.socket]]:
    """Yield *count* sockets on one port, among which the operating system distributes connections.

    They do not listen yet: a client that connects before a process serves its socket would have to wait.
    """
    with ExitStack() as stack:
        with _bind_socket(host, port) as probe:  # without SO_REUSEPORT: an error if another program uses the port
            address = probe.getsockname()
        sockets = [stack.enter_context(socket.socket(probe.family, probe.type, probe.proto)) for _ in range(count)]
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(address)
        yield sockets


@asynccontextmanager
async def run_server(app: FastAPI, sock: socket.socket, section: ServerSection) -> AsyncIterator[None]:
    """Serve *app* on *sock* until the end of the block, then finish the running requests."""
    server = _ApiServer(_make_server_config(app, section))
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve([sock]), name=f"serve {app.title}")
        try:
            yield
        finally:
            server.should_exit = True


async def serve_until_stopped(
    pulses: Sequence[LivenessPulse], section: ServerSection, stop: asyncio.Event, on_ready: Callable[[], None]
) -> None:
    """Be ready until *stop* is set, then unready for the drain delay, so that load balancers stop sending requests."""
    for pulse in pulses:
        pulse.is_serving = True
    on_ready()
    await stop.wait()
    for pulse in pulses:
        pulse.drain()
    delay = section.drain_delay.total_seconds()
    structlog.get_logger().info("stopping", drain_delay_seconds=delay)
    await asyncio.sleep(delay)


def _make_server_config(app: FastAPI, section: ServerSection) -> uvicorn.Config:
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
        """Leave signals to the program, which has more to stop than a server."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no new connection, but answer those that exist: the last response closes the connection."""
        queued = [sock for listener in sockets or () for sock in accept_queued(listener)]
        for server in self.servers:
            server.close()
        for sock in queued:  # connected before the shutdown, so they are served
            await asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, sock)
        until = monotonic() + _CLOSE_SECONDS
        while self.server_state.connections and monotonic() < until:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)

    def _make_protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg] # uvicorn's, which has them
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol


def format_address(listener: socket.socket) -> str:
    """Return the URL of the address that *listener* is bound to."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
