"""H17: the simulator as an ASGI application on uvicorn, in this process and for this machine only."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from typing import Any

import orjson
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from penstock.harvest.simulator.dataset import Dataset, DatasetChange, PriceFormat, RecordOrder
from penstock.harvest.simulator.faults import NO_FAULTS, STILL, Churn, FaultInjector, Faults, Rates
from penstock.harvest.simulator.graphql import AccessTokens
from penstock.harvest.simulator.routes import BODY_LIMIT, Routes, SimulatedRequest
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import Conflict, Invalid

_IDLE_SECONDS = 86_400  # an idle connection must not end during a test: a disconnect would be an unintended fault
_SILENT = logging.getLogger("penstock.harvest.simulator.silent")
_SILENT.setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Records, credentials, address and faults of a simulator."""

    records: int = 500_000
    seed: int = 7
    prices: PriceFormat = PriceFormat.HEAVY
    order: RecordOrder = RecordOrder.PRICE
    host: str = "127.0.0.1"
    port: int = 0
    username: str = "demo@example.com"
    password: str = "demo"  # noqa: S105 - it protects generated records
    token_lifetime: timedelta = timedelta(hours=6)
    faults: Faults = NO_FAULTS
    churn: Rates = STILL


class LocalSource:
    """Handle of a running simulator."""

    def __init__(self, url: str, routes: Routes) -> None:
        self.url = url
        self._routes = routes

    def set_faults(self, faults: Faults = NO_FAULTS) -> None:
        """Apply *faults* from now on."""
        self._routes.injector.set(faults)

    def change_records(self, updates: int = 0, inserts: int = 0, deletes: int = 0) -> DatasetChange:
        """Change random records at once."""
        return self._routes.dataset.change_records(updates, inserts, deletes)

    def set_churn(self, rates: Rates = STILL) -> None:
        """Change records in the background at *rates* per second."""
        self._routes.churn.set(rates)

    def read_truth(self) -> dict[str, dict[str, Any]]:
        """Return all present records, by id."""
        records = map(orjson.loads, self._routes.dataset.list_truth())
        return {record["id"]: record for record in records}

    def find_ids_changed_since(self, moment: datetime) -> set[str]:
        """Return the ids of the present records that were inserted or updated after *moment*."""
        return self._routes.dataset.find_ids_after(moment)

    def read_stats(self) -> dict[str, Any]:
        """Return the body of `GET /admin/stats`."""
        return self._routes.read_stats()


@asynccontextmanager
async def run_local_source(
    options: LocalOptions | None = None, clock: Clock | None = None
) -> AsyncIterator[LocalSource]:
    """Run a simulator until the block ends, then abort all connections."""
    options, clock = options or LocalOptions(), clock or SystemClock()
    check_host(options.host)
    dataset = Dataset(options.records, options.seed, options.prices, options.order, clock)
    tokens = AccessTokens(options.username, options.password, options.token_lifetime, clock)
    routes = Routes(dataset, FaultInjector(options.faults, options.seed), tokens, Churn(dataset))
    async with _serve(make_app(routes), options.host, options.port) as url:
        routes.churn.set(options.churn)
        try:
            yield LocalSource(url, routes)
        finally:
            routes.churn.stop()


def check_host(host: str) -> None:
    """Raise Invalid unless *host* is a loopback address: every client may change and delete all records."""
    try:
        is_own = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        is_own = False
    if not is_own:
        raise Invalid(
            "NOT_LOOPBACK", f"the simulator listens on loopback addresses only, not on {host}", hint="use 127.0.0.1"
        )


def make_app(routes: Routes) -> ASGIApp:
    """Return the ASGI application that sends the answers of *routes*."""

    async def serve_request(scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        if body is None:
            return
        answer = routes.answer_request(SimulatedRequest(scope["method"], scope["path"], scope["query_string"], body))
        if answer.delay != 0:
            await _await_disconnect(receive, answer.delay)
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.list_headers()})
        for piece in answer.iterate_pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if not answer.is_cut:  # uvicorn closes the connection if the application returns before the end of an answer
            await send({"type": "http.response.body"})

    return serve_request


async def _read_body(receive: Receive) -> bytes | None:
    """Return the body, or the first part of one that exceeds the limit, or None if the client disconnects."""
    body, more = b"", True
    while more and len(body) <= BODY_LIMIT:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message["body"]
        more = message["more_body"]
    return body


async def _await_disconnect(receive: Receive, seconds: float | None) -> None:
    """Wait until the client disconnects, at most *seconds*. After a disconnect uvicorn ignores the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                pass


class _Connection(HttpToolsProtocol):
    """Connection without log entries: uvicorn logs each cut answer and each aborted request as an error."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState) -> None:
        super().__init__(config, server_state, app_state={})
        self.logger = _SILENT


@asynccontextmanager
async def _serve(app: ASGIApp, host: str, port: int) -> AsyncIterator[str]:
    """Serve *app* and yield the URL.

    `uvicorn.Server` is not used: it polls for the end every 0.1 s and waits for requests, which a time-out never ends.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        http="httptools",
        ws="none",
        proxy_headers=False,
        timeout_keep_alive=_IDLE_SECONDS,
    )
    state = ServerState()
    try:
        server = await asyncio.get_running_loop().create_server(lambda: _Connection(config, state), host, port)
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {os.strerror(error.errno) if error.errno else error}"
        raise Conflict("PORT_IN_USE", message, hint="choose another --port; 0 chooses a free port") from error
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        for task in list(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)
        await server.wait_closed()
