"""Where capacity is measured: one PostgreSQL that is started when it is first needed, and what it spends."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psutil

from benchmarks.harness import Bench, Shared
from benchmarks.servers import processor_seconds
from benchmarks.session import Session
from benchmarks.wrk import make_generator
from penstock.app.parts import open_refdata
from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import Settings

TENANT = "bench"
MB = 1_000_000
PER_THOUSAND = 1_000 * 1_000  # seconds of one become milliseconds of a thousand
# Keys of 8 characters; payloads that are no shorter for being squeezed, up to PostgreSQL's 2 KB.
_FILL = """
INSERT INTO dictionary_item (tenant_id, dict_code, item_key, payload, updated_at)
SELECT $1, $2, lpad(n::text, 8, '0'),
       jsonb_build_object('v', substr(repeat(md5(n::text), $4 / 32 + 1), 1, $4 - 10)), now()
FROM generate_series(0, $3 - 1) AS n"""
_STAND = "INSERT INTO dictionary_meta (tenant_id, dict_code, version, updated_at) VALUES ($1, $2, 1, now())"
Measurements = Mapping[str, float]
Run = Callable[[], Awaitable[Measurements]]


@dataclass(frozen=True)
class Sizes:
    """How much of everything capacity is measured with."""

    items: Mapping[int, Sequence[int]]  # numbers of items by payload in bytes; reads are of the largest
    read: Sequence[int]  # payloads
    guarded: Sequence[bool]  # whether reads carry a token and a version
    kept: Sequence[int]  # payloads, in memory and on disk
    loaders: int
    events: int
    rows: int
    chains: int
    records: int
    roles: Sequence[str]
    watched: float  # seconds in which the connections of a role are counted
    seconds: float  # of load, and of rest


@dataclass
class Spent:
    """What PostgreSQL took for something: seconds of the processors, and bytes of its log."""

    seconds: float = 0.0
    wal: float = 0.0

    def for_each(self, count: int) -> Measurements:
        return {"PostgreSQL": self.seconds * PER_THOUSAND / count, "WAL": self.wal / count}


class Place:
    """A PostgreSQL with durable commits, and the databases of dictionaries that were filled in it."""

    def __init__(self, session: Session, sizes: Sizes, stack: AsyncExitStack) -> None:
        self.session = session
        self.sizes = sizes
        self.folder = session.folder
        self.generator = make_generator(session, sizes.seconds)
        self._postgres = session.postgres
        self._stack = stack
        self._url = ""
        self._filled: set[str] = set()

    async def url(self) -> str:
        if not self._url:
            opened = run_embedded_postgres(self._postgres, settings={"max_connections": "400"})
            self._url = await self._stack.enter_async_context(opened)
        return self._url

    async def dictionaries(self, payload: int) -> str:
        """Return a database with the dictionaries of *payload* bytes an item, each named by its number of items."""
        server, name = await self.url(), f"items_{payload}"
        url = urlsplit(server)._replace(path=f"/{name}").geturl()
        if name not in self._filled:
            self._filled.add(name)
            await self._ask(server, f"CREATE DATABASE {name}")
            await _fill(url, payload, self.sizes.items[payload])
        return url

    @asynccontextmanager
    async def spending(self, url: str) -> AsyncIterator[Spent]:
        """What the server spends until the end, on this database and all else it does meanwhile."""
        await self._ask(url, "CHECKPOINT")
        spent, before, place = Spent(), self.seconds(), await self._ask(url, "SELECT pg_current_wal_lsn()")
        yield spent
        spent.seconds = self.seconds() - before
        spent.wal = float(await self._ask(url, "SELECT pg_current_wal_lsn() - $1", place))

    async def disk(self, url: str, **counts: int) -> Measurements:
        """Bytes of each table with its indexes, for each of so many rows."""
        await self._ask(url, "VACUUM")
        query = "SELECT pg_total_relation_size($1::text::regclass)"
        return {table: float(await self._ask(url, query, table)) / count for table, count in counts.items()}

    async def ask(self, url: str, query: str, *args: object) -> float:
        return float(await self._ask(url, query, *args))

    async def _ask(self, url: str, query: str, *args: object) -> Any:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetchval(query, *args)
        finally:
            await connection.close()

    def seconds(self) -> float:
        """Return the processor time of the postmaster, of its children, and of those that have ended."""
        server = psutil.Process(int((self._postgres / "data" / "postmaster.pid").read_text().split()[0]))
        while True:
            ended = _seconds_of_ended(server)
            with suppress(psutil.NoSuchProcess):  # it ended while it was asked
                living = processor_seconds([server.pid, *(child.pid for child in server.children())])
                if _seconds_of_ended(server) == ended:  # else a child that ended is counted twice, or not at all
                    return ended + living


def figures(run: Run, units: Mapping[str, str], *, once: bool = False, may_be_zero: Sequence[str] = ()) -> list[Bench]:
    """Return the figures of one run, by name and unit; what is no matter of speed is found *once* for all rounds."""
    shared = Shared(_kept(run) if once else run)

    def bench(name: str, unit: str) -> Bench:
        async def measure() -> float:
            return (await shared.result(name))[name]

        return Bench(name, unit, measure, is_duration=True, may_be_zero=name in may_be_zero)

    return [bench(name, unit) for name, unit in units.items()]


def _seconds_of_ended(server: psutil.Process) -> float:
    times = server.cpu_times()
    return float(times.children_user + times.children_system)


def _kept(run: Run) -> Run:
    found: list[Measurements] = []

    async def again() -> Measurements:
        if not found:
            found.append(await run())
        return found[0]

    return again


async def _fill(url: str, payload: int, counts: Sequence[int]) -> None:
    async with open_refdata(Settings.model_validate({"database": {"url": url}}), Telemetry()) as platform:
        for count in counts:
            await platform.db.execute(_FILL, TENANT, code_of(count), count, payload)
            await platform.db.execute(_STAND, TENANT, code_of(count))
        await platform.db.execute("VACUUM ANALYZE dictionary_item")


def code_of(count: int) -> str:
    return f"OF-{count}"
