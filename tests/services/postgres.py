"""One real PostgreSQL for the whole test run, and a fresh database per test from a migrated template."""

import asyncio
import atexit
import functools
import itertools
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import asyncpg

from penstock.app.schema import list_platform_migrations
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from penstock.settings import Settings

SERVER_URL = "PENSTOCK_TEST_POSTGRES_URL"  # environment variable: where the server of the test run is
TEMPLATE = "penstock_template"
# Tests kill processes, never the machine: what the system holds in memory is safe, so no fsync is needed.
SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "400",
    "max_wal_size": "1GB",
}
# Locks of every database are in pg_locks, and all tests share one server.
OWN_ADVISORY_LOCKS = """
    (SELECT * FROM pg_locks WHERE locktype = 'advisory'
     AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) AS own_locks"""
LOCK_AWAITED = f"SELECT count(*) FROM {OWN_ADVISORY_LOCKS} WHERE NOT granted"
# Waits until the session has ended: a session that was only signalled still has its locks.
STOP_LOCK_HOLDERS = f"""
    SELECT pg_terminate_backend(pid, 10000) FROM {OWN_ADVISORY_LOCKS} WHERE granted AND pid <> pg_backend_pid()"""
_CATALOGS = """
    SELECT string_agg(oid::regclass::text, ', ') FROM pg_class
    WHERE relkind = 'r' AND NOT relisshared AND relnamespace = 'pg_catalog'::regnamespace"""
_numbers = itertools.count()


async def make_template(url: str) -> None:
    """Migrate the template once, so that a test pays only for a copy."""
    await _admin(url).execute(f'CREATE DATABASE "{TEMPLATE}"')
    async with Database.open(database_url(url, TEMPLATE), size=1) as db:
        await migrate.migrate(db, list_platform_migrations(Settings()))
        # An eighth fewer files to copy: no free space maps and visibility maps. Our own tables stay as they are.
        await db.execute(f"VACUUM FULL {await db.fetchval(_CATALOGS)}")
    async with Database.open(database_url(url, TEMPLATE), size=1):
        pass  # the first session writes a cache of the catalogs, which is copied, too


@contextmanager
def module_database(*, empty: bool = False) -> Iterator[str]:
    """Yield the URL of a fresh database, for fixtures that several tests share; drop it afterwards."""
    with asyncio.Runner() as runner:
        opened = fresh_database(os.environ[SERVER_URL], empty=empty)
        url = runner.run(opened.__aenter__())
        try:
            yield url
        finally:
            runner.run(opened.__aexit__(None, None, None))


@asynccontextmanager
async def fresh_database(url: str, *, empty: bool = False) -> AsyncIterator[str]:
    """Yield the URL of a database for this test, migrated unless *empty*; it is deleted afterwards."""
    name = f"t{os.getpid()}_{next(_numbers)}"
    template = "template0" if empty else TEMPLATE
    await _admin(url).execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY FILE_COPY')
    try:
        yield database_url(url, name)
    finally:
        await _admin(url).execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def database_url(url: str, name: str) -> str:
    head, _, query = url.partition("?")
    return f"{head.rpartition('/')[0]}/{name}" + (f"?{query}" if query else "")


class _Admin:
    """One connection for all databases of this process: a connection costs as much as a fourth of a database.

    The connection belongs to the event loop of a thread, because a test's event loop ends with the test.
    """

    def __init__(self, url: str) -> None:
        self._url = database_url(url, "postgres")
        self._loop = asyncio.new_event_loop()
        self._lock = asyncio.Lock()
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        atexit.register(self._close)

    async def execute(self, statement: str) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._execute(statement), self._loop))

    async def _execute(self, statement: str) -> None:
        async with self._lock:
            if self._connection is None or self._connection.is_closed():
                self._connection = await asyncpg.connect(self._url)
            await self._connection.execute(statement)

    def _close(self) -> None:
        if self._connection is not None:
            self._loop.call_soon_threadsafe(self._connection.terminate)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


_admin = functools.cache(_Admin)
