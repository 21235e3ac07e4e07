"""PostgreSQL: a pool, explicit transactions, and errors that say whether a retry can help."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import asyncpg
import orjson
from asyncpg.pool import PoolConnectionProxy

from penstock.kernel.clock import Clock, ServerClock
from penstock.kernel.errors import BadConfig, PenstockError, Transient

if TYPE_CHECKING:
    Connection = asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]
else:  # asyncpg's classes are generic only in their stubs
    Connection = asyncpg.Connection | PoolConnectionProxy
OLDEST_POSTGRES = 15  # major version; scripts/postgres tests from here on
ACQUIRE_TIMEOUT = 30.0
_RELEASE_TIMEOUT = 5.0
_FIRST_VARIABLE_OID = 10_000  # smaller OIDs are assigned in PostgreSQL's source code
_NOTHING_PREPARED = SimpleNamespace(name="none")  # tells asyncpg that its unnamed statement was not replaced
_CLIENT_MARGIN = 10.0  # seconds that the client waits longer than the statement timeout, for a server that is frozen
# Plans are cached. A plan made while a table was small scans the whole table, also for a minute or more after the table
# has grown: on the first day of a queue, or after every large delivery.
_INDEXES_ONLY = dict.fromkeys(("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin"), "off")
Isolation = Literal["read_committed", "repeatable_read", "serializable"]

# Failures of the moment: the same statement may succeed on a new connection or a moment later.
_DOWN = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the server ended an idle session while the client was writing to it
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleSessionTimeoutError,
    asyncpg.PostgresSystemError,
    asyncpg.TooManyConnectionsError,
    asyncpg.IdleInTransactionSessionTimeoutError,  # this process was frozen; only the transaction is lost
)
_UNREACHABLE = (
    OSError,
    TimeoutError,
)  # only while connecting: later these may come from the caller's code
_BUSY = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.InsufficientResourcesError,
    asyncpg.InvalidCachedStatementError,  # a table or function was changed: the next try prepares the statement again
    asyncpg.ReadOnlySQLTransactionError,  # a failover: this node is a replica now
)
_REFUSED = (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError)
_NO_CONNECT = asyncpg.InsufficientPrivilegeError  # only while connecting: later a statement lacks a right
_MISCONFIGURED = (asyncpg.ClientConfigurationError, ssl.SSLError)


class Database:
    """The connections of one event loop to one PostgreSQL database."""

    def __init__(self, dsn: str, pool: "asyncpg.Pool[asyncpg.Record]", clock: Clock) -> None:
        self.dsn = dsn
        self.clock = clock
        self._pool = pool

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        dsn: str,
        *,
        clock: Clock | None = None,
        size: int = 10,
        statement_timeout: timedelta = timedelta(minutes=5),
        prefers_indexes: bool = False,
        settings: Mapping[str, str] | None = None,
        decodes_json: bool = True,
    ) -> "AsyncIterator[Database]":
        """Connect, and disconnect at the end; Transient DATABASE_DOWN if the server does not answer.

        *prefers_indexes* is for queues: statements find rows by an index, whatever the planner estimates. *settings*
        are settings of the server for every session; they override the defaults of Penstock. Without *decodes_json*,
        json and jsonb are passed as text in both directions, so that numbers keep every digit.
        """
        server_clock = ServerClock()

        async def prepare(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
            _check_version(connection.get_server_version().major)
            _enable_keepalive(connection)
            if decodes_json:
                await _set_json_codecs(connection)
            server_clock.align(await connection.fetchval("SELECT clock_timestamp()"))

        with translate_errors(connecting=True):
            pool = await asyncpg.create_pool(
                dsn,
                min_size=1,
                max_size=size,
                connection_class=_PooledConnection,
                init=prepare,
                reset=_skip_reset,
                timeout=10,
                command_timeout=statement_timeout.total_seconds() + _CLIENT_MARGIN,
                server_settings=_make_session_settings(statement_timeout, prefers_indexes=prefers_indexes)
                | dict(settings or {}),
            )
        try:
            yield cls(dsn, pool, clock or server_clock)
        finally:
            await _close(pool)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Connection]:
        """Yield a connection whose settings and session locks may be changed; they are reset at the end."""
        async with self._acquire() as connection:
            with translate_errors():
                try:
                    yield connection
                finally:
                    if not connection.is_closed():
                        await connection.reset()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Yield a connection without a transaction, for single statements."""
        async with self._acquire() as connection:
            with translate_errors():
                yield connection

    @asynccontextmanager
    async def transaction(self, isolation: Isolation = "read_committed") -> AsyncIterator[Connection]:
        """Yield a connection in a transaction, which commits at the end and rolls back on any exception."""
        async with self._acquire() as connection:
            with translate_errors():
                async with connection.transaction(isolation=isolation):
                    yield connection

    async def fetch(self, query: str, *args: Any) -> list[asyncpg.Record]:
        async with self.connection() as connection:
            return await connection.fetch(query, *args)

    async def fetchrow(self, query: str, *args: Any) -> asyncpg.Record | None:
        async with self.connection() as connection:
            return await connection.fetchrow(query, *args)

    async def fetchval(self, query: str, *args: Any) -> Any:
        async with self.connection() as connection:
            return await connection.fetchval(query, *args)

    async def execute(self, query: str, *args: Any) -> str:
        async with self.connection() as connection:
            return await connection.execute(query, *args)

    async def check(self) -> str:
        """Return the version of the server, or raise Transient DATABASE_DOWN."""
        return str(await self.fetchval("SHOW server_version"))

    @asynccontextmanager
    async def _acquire(self) -> "AsyncIterator[PoolConnectionProxy[asyncpg.Record]]":
        with translate_errors(connecting=True):
            connection = await self._pool.acquire(timeout=ACQUIRE_TIMEOUT)
        try:
            yield connection
        finally:
            # A cancelled query waits for the server to confirm; after the timeout the connection is dropped. The error
            # of a connection that was lost meanwhile must not replace the original error.
            with suppress(TimeoutError, asyncpg.InternalClientError, asyncpg.InterfaceError):
                await self._pool.release(connection, timeout=_RELEASE_TIMEOUT)


async def enable_all_plans(tx: Connection) -> None:
    """Allow all plans for the rest of this transaction, in a database opened with `prefers_indexes`."""
    await tx.execute("SELECT set_config(setting, 'on', true) FROM unnest($1::text[]) AS setting", list(_INDEXES_ONLY))


def _make_session_settings(statement_timeout: timedelta, *, prefers_indexes: bool) -> dict[str, str]:
    """Return the settings of every session."""
    return {
        "application_name": "penstock",
        "timezone": "UTC",
        "statement_timeout": str(int(statement_timeout.total_seconds() * 1000)),
        **(_INDEXES_ONLY if prefers_indexes else {}),
    }


async def _skip_reset(_connection: Any) -> None:
    """Save the round trip that resets a session each time: `Database.session` resets what it changes."""


@contextmanager
def translate_errors(*, connecting: bool = False) -> Iterator[None]:
    """Turn the errors of asyncpg for a server that is down or busy into Transient; let the others pass."""
    try:
        yield
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, *_UNREACHABLE) as error:
        if isinstance(error, _UNREACHABLE) and not connecting:
            raise
        translated = _make_refused_error(error) if connecting and isinstance(error, _NO_CONNECT) else _translate(error)
        if translated is None:
            raise
        raise translated from error


def is_transient(error: BaseException) -> bool:
    """Return whether a retry can help."""
    return isinstance(error, Transient) or isinstance(_translate(error), Transient)


def _translate(error: BaseException) -> PenstockError | None:
    if isinstance(error, _MISCONFIGURED):
        hint = "use the form postgresql://user@host:5432/database"
        return BadConfig("DATABASE_URL", f"the database URL cannot be used: {error}", hint=hint)
    if isinstance(error, ValueError):  # asyncpg raises it for an argument of the wrong type: a retry cannot help
        return None
    if isinstance(error, _BUSY):
        return Transient("DATABASE_BUSY", f"PostgreSQL could not execute the statement: {error}", hint="try again")
    if isinstance(error, _REFUSED):
        return _make_refused_error(error)
    if isinstance(error, (*_DOWN, *_UNREACHABLE)):
        hint = "check that the server runs and that database.url points to it"
        return Transient("DATABASE_DOWN", f"PostgreSQL does not answer: {_describe_failure(error)}", hint=hint)
    return None


def _describe_failure(error: BaseException) -> str:
    is_refused = isinstance(error, ConnectionRefusedError)  # the text of asyncio contains the names of its functions
    return "connection refused" if is_refused else str(error) or type(error).__name__


def _make_refused_error(error: BaseException) -> Transient:
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        hint = "create the database with `CREATE DATABASE`, or correct its name in the URL"
    elif isinstance(error, asyncpg.InvalidPasswordError):
        hint = "correct the user in the URL, or the secret that the setting `password` beside the URL refers to"
    elif isinstance(error, _NO_CONNECT):
        hint = "run as the owner of the database: GRANT CONNECT ON DATABASE <database> TO <user>;"
    else:
        hint = "check the user in the URL, its right to log in, and pg_hba.conf of the server"
    return Transient("DATABASE_REFUSED", f"PostgreSQL refused the connection: {error}", hint=hint)


def _check_version(major: int) -> None:
    if major < OLDEST_POSTGRES:
        hint = "upgrade the server, or set database.url to another one"
        raise BadConfig(
            "POSTGRES_TOO_OLD",
            f"the server is PostgreSQL {major}; Penstock needs {OLDEST_POSTGRES} or newer",
            hint=hint,
        )


def _enable_keepalive(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Make the kernel end a connection to a server that has vanished: within half a minute, not hours."""
    transport: asyncio.Transport = connection._transport  # type: ignore[attr-defined]  # noqa: SLF001 - no other way
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # the names differ on other systems
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


class _PooledConnection(asyncpg.Connection):
    """A connection that caches the descriptions of built-in types, such as uuid[], for the whole process.

    asyncpg queries the type catalogue again on every connection, which takes three times as long as connecting. The
    OIDs of built-in types are the same on every server. asyncpg has no public hook for this; a test fails if a new
    version no longer calls the method.
    """

    _known: ClassVar[dict[frozenset[int], Any]] = {}

    async def _introspect_types(self, typeoids: Iterable[int], timeout: float | None) -> tuple[Any, Any]:
        wanted = frozenset(typeoids)
        if wanted in self._known:
            return self._known[wanted], _NOTHING_PREPARED
        types, statement = await super()._introspect_types(wanted, timeout)  # type: ignore[misc]  # not in asyncpg's stubs
        if max(wanted) < _FIRST_VARIABLE_OID:
            self._known[wanted] = types
        return types, statement


async def _set_json_codecs(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    for name in ("json", "jsonb"):
        await connection.set_type_codec(
            name,
            schema="pg_catalog",
            encoder=lambda value: orjson.dumps(value).decode(),
            decoder=orjson.loads,
        )


async def _close(pool: "asyncpg.Pool[asyncpg.Record]") -> None:
    """Close the connections gracefully, but do not wait for a server that does not answer."""
    try:
        async with asyncio.timeout(5):
            await pool.close()
    except (*_UNREACHABLE, *_DOWN):
        pool.terminate()
