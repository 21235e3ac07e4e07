"""H17: the local source as a server, in this process and for this machine only."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from typing import Any

import orjson

from penstock.harvest.simulator.dataset import Changed, Dataset, Order, Prices
from penstock.harvest.simulator.faults import NO_FAULTS, STILL, Churn, Dealer, Faults, Rates
from penstock.harvest.simulator.graphql import Tokens
from penstock.harvest.simulator.protocol import Connection
from penstock.harvest.simulator.routes import Routes
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import Conflict, Invalid


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What the source serves, and how badly."""

    records: int = 500_000
    seed: int = 7
    prices: Prices = Prices.HEAVY
    order: Order = Order.PRICE
    host: str = "127.0.0.1"
    port: int = 0
    username: str = "demo@example.com"
    password: str = "demo"  # noqa: S105 - it guards made-up records
    token_lifetime: timedelta = timedelta(hours=6)
    faults: Faults = NO_FAULTS
    churn: Rates = STILL


class LocalSource:
    """A source that runs: where it is, and what a test may do to it."""

    def __init__(self, url: str, routes: Routes) -> None:
        self.url = url
        self._routes = routes

    def set_faults(self, faults: Faults = NO_FAULTS) -> None:
        """Fail as *faults* say from now on."""
        self._routes.dealer.set(faults)

    def change(self, updates: int = 0, inserts: int = 0, deletes: int = 0) -> Changed:
        """Change random records, at once."""
        return self._routes.dataset.change(updates, inserts, deletes)

    def set_churn(self, rates: Rates = STILL) -> None:
        """Change records all the time, so many a second."""
        self._routes.churn.set(rates)

    def truth(self) -> dict[str, dict[str, Any]]:
        """All records as they are now, by id."""
        found = map(orjson.loads, self._routes.dataset.truth())
        return {record["id"]: record for record in found}

    def changed_ids_since(self, moment: datetime) -> set[str]:
        """The records there are that came or changed after *moment*."""
        return self._routes.dataset.ids_after(moment)

    def stats(self) -> dict[str, Any]:
        """As `GET /admin/stats` tells them."""
        return self._routes.stats()


@asynccontextmanager
async def local_source(options: LocalOptions | None = None, clock: Clock | None = None) -> AsyncIterator[LocalSource]:
    """A source that listens, until the block ends; then all its connections are cut."""
    options, clock = options or LocalOptions(), clock or SystemClock()
    check_host(options.host)
    dataset = Dataset(options.records, options.seed, options.prices, options.order, clock)
    tokens = Tokens(options.username, options.password, options.token_lifetime, clock)
    routes = Routes(dataset, Dealer(options.faults, options.seed), tokens, Churn(dataset))
    connections: set[Connection] = set()
    server = await _listen(options, routes, connections)
    routes.churn.set(options.churn)
    try:
        yield LocalSource(_url(server), routes)
    finally:
        routes.churn.stop()
        server.close()
        for connection in list(connections):
            connection.abort()
        await server.wait_closed()


def check_host(host: str) -> None:
    """Invalid unless *host* is this machine's own: who knows the address may change and delete everything."""
    try:
        is_own = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        is_own = False
    if not is_own:
        raise Invalid("NOT_LOOPBACK", f"the local source does not listen on {host}", hint="take 127.0.0.1")


async def _listen(options: LocalOptions, routes: Routes, connections: set[Connection]) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(lambda: Connection(routes, connections), options.host, options.port)
    except OSError as error:
        said = f"cannot listen on {options.host}:{options.port}: {error.strerror or error}"
        raise Conflict("PORT_IN_USE", said, hint="take another --port; 0 takes a free one") from error


def _url(server: asyncio.Server) -> str:
    host, port = server.sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
