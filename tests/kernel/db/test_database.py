"""The database: explicit transactions, and errors that say whether a retry can help."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import asyncpg
import pytest

from penstock.kernel.db.database import (
    Connection,
    Database,
    _PooledConnection,
    enable_all_plans,
    is_transient,
    translate_errors,
)
from penstock.kernel.errors import BadConfig, Transient
from tests.services.postgres import database_url as url_of

UUID_ARRAY, JSONB_ARRAY = 2951, 3807  # oids


async def test_a_failed_transaction_leaves_nothing(db: Database) -> None:
    """A transaction is rolled back whatever is raised in it."""
    await db.execute("CREATE TABLE t (n int)")
    with pytest.raises(LookupError):
        async with db.transaction() as tx:
            await tx.execute("INSERT INTO t VALUES (1)")
            raise LookupError
    assert await db.fetchval("SELECT count(*) FROM t") == 0


async def test_a_server_that_is_too_old_is_refused(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the required version, and nothing is changed."""
    monkeypatch.setattr("penstock.kernel.db.database.OLDEST_POSTGRES", 99)
    with pytest.raises(BadConfig, match="Penstock needs 99 or newer") as refused:
        async with Database.open(database_url):
            pass
    assert refused.value.code == "POSTGRES_TOO_OLD"


async def test_json_is_read_and_written_as_python_values(db: Database) -> None:
    """jsonb columns are read and written as plain values."""
    value = {"a": [1, None, "ü"], "b": {"c": True}}
    assert await db.fetchval("SELECT $1::jsonb", value) == value


@pytest.mark.parametrize("kind", ["json", "jsonb"])
@pytest.mark.parametrize("text", ["1.10", "123456789012345678901234567890", '{"a": [1.10, 0.1000]}'])
async def test_json_can_be_passed_as_text(database_url: str, kind: str, text: str) -> None:
    """R1: without decoding, no digit of a number in JSON is lost in either direction."""
    async with Database.open(database_url, decodes_json=False) as db:
        # Each direction alone: a codec would quote the text on writing and unquote it on reading.
        assert await db.fetchval(f"SELECT $1::{kind}::text", text) == text
        assert await db.fetchval(f"SELECT $1::text::{kind}", text) == text


async def test_settings_apply_to_every_session(database_url: str) -> None:
    """R1: the settings apply to every connection, override the defaults, and survive a reset."""
    settings = {"search_path": "pg_catalog", "enable_seqscan": "on", "application_name": "penstock-x"}
    async with Database.open(database_url, size=2, prefers_indexes=True, settings=settings) as db:
        async with db.session() as session, db.session() as other:
            await session.execute("SET search_path = public")
            assert await _settings(other, *settings) == settings
        async with db.connection() as connection, db.connection() as other:
            assert await _settings(connection, *settings) == await _settings(other, *settings) == settings
            assert await _settings(connection, "enable_hashjoin") == {"enable_hashjoin": "off"}


@pytest.mark.parametrize("ends_well", [True, False])
async def test_all_plans_are_enabled_for_one_transaction(database_url: str, ends_well: bool) -> None:
    """R1: a database that prefers indexes allows all plans until the transaction ends, and no longer."""
    names = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin")
    async with Database.open(database_url, size=2, prefers_indexes=True) as db, db.connection() as connection:
        assert await _settings(connection, *names) == dict.fromkeys(names, "off")
        with contextlib.suppress(LookupError):
            async with connection.transaction():
                await enable_all_plans(connection)
                assert await _settings(connection, *names) == dict.fromkeys(names, "on")
                if not ends_well:
                    raise LookupError
        assert await _settings(connection, *names) == dict.fromkeys(names, "off")


async def test_errors_of_the_caller_pass_unchanged(db: Database) -> None:
    """A FileNotFoundError in a transaction is not translated into DATABASE_DOWN."""
    with pytest.raises(FileNotFoundError):
        async with db.transaction():
            raise FileNotFoundError


@pytest.mark.parametrize(
    ("query", "error"),
    [("SELECT 1 / 0", asyncpg.DivisionByZeroError), ("SELECT broken", asyncpg.UndefinedColumnError)],
)
async def test_permanent_errors_are_not_transient(db: Database, query: str, error: type[Exception]) -> None:
    """R11: an error that a retry cannot fix is never Transient."""
    with pytest.raises(error) as caught:
        await db.execute(query)
    assert not is_transient(caught.value)


async def test_an_argument_of_the_wrong_type_is_not_transient(db: Database) -> None:
    """R11: the wrong type of an argument is a permanent error."""
    with pytest.raises(asyncpg.DataError) as caught:
        await db.execute("SELECT $1::int", "x")
    assert not is_transient(caught.value)


async def test_a_broken_connection_is_transient_and_the_next_works(db: Database) -> None:
    """R11: a connection that breaks during a statement is Transient, and the pool opens another."""

    async def terminate() -> None:
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'SELECT pg_sleep%'"
        while not (pid := await db.fetchval(query)):
            pass
        await db.execute("SELECT pg_terminate_backend($1)", pid)

    terminating = asyncio.create_task(terminate())
    with pytest.raises(Transient, match="does not answer"):
        await db.execute("SELECT pg_sleep(30)")
    await terminating
    assert await db.fetchval("SELECT 1") == 1


async def test_a_session_that_the_server_has_ended_is_transient(database_url: str) -> None:
    """R11: the time between the last message of a stopping server and its closing of the connection is Transient."""
    async with delayed_close_proxy(database_url) as (url, has_closed), Database.open(url, size=1) as db:
        pid = await db.fetchval("SELECT pg_backend_pid()")
        outside = await asyncpg.connect(database_url)
        await outside.execute("SELECT pg_terminate_backend($1)", pid)
        await outside.close()
        await has_closed.wait()
        with pytest.raises(Transient, match="does not answer") as caught:
            await db.fetchval("SELECT 1")
        assert isinstance(caught.value.__cause__, asyncpg.InternalClientError)


@contextlib.asynccontextmanager
async def delayed_close_proxy(url: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Yield the URL of a proxy that forwards data, but not the close of the server, and an event for that close."""
    has_closed, tasks = asyncio.Event(), asyncio.TaskGroup()
    folder = parse_qs(urlsplit(url).query)["host"][0]

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                target.write(data)

    async def close(writer: asyncio.StreamWriter) -> None:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def forward(reader: asyncio.StreamReader, server_writer: asyncio.StreamWriter) -> None:
        await pump(reader, server_writer)
        await close(server_writer)

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.5432")
        forwarding = tasks.create_task(forward(reader, server_writer))
        await pump(server_reader, writer)
        has_closed.set()
        await forwarding
        await close(writer)

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.create_task(proxy(reader, writer))

    async with tasks, await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"postgresql://postgres@127.0.0.1:{port}{urlsplit(url).path}?sslmode=disable", has_closed


async def test_a_deadlock_is_transient(db: Database) -> None:
    """R11: in a deadlock one transaction is Transient, and the other commits."""
    await db.execute("CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t VALUES (1, 0), (2, 0)")
    both_locked = asyncio.Barrier(2)

    async def lock(first: int, second: int) -> None:
        async with db.transaction() as tx:
            await tx.execute("UPDATE t SET n = n + 1 WHERE id = $1", first)
            await both_locked.wait()
            await tx.execute("UPDATE t SET n = n + 1 WHERE id = $1", second)

    results = await asyncio.gather(lock(1, 2), lock(2, 1), return_exceptions=True)
    failed = [result for result in results if result is not None]
    assert [type(error) for error in failed] == [Transient]
    assert await db.fetchval("SELECT sum(n) FROM t") == 2


async def test_a_serialization_failure_is_transient(db: Database) -> None:
    """R11: a lost race under repeatable read is Transient."""
    await db.execute("CREATE TABLE t (n int); INSERT INTO t VALUES (0)")
    with pytest.raises(Transient, match="could not"):
        async with db.transaction("repeatable_read") as slow:
            await slow.fetchval("SELECT n FROM t")
            await db.execute("UPDATE t SET n = 1")
            await slow.execute("UPDATE t SET n = 2")


async def test_a_server_that_is_down_has_a_hint() -> None:
    """A port on which no server listens is Transient DATABASE_DOWN."""
    with pytest.raises(Transient) as caught:
        async with Database.open("postgresql://user@127.0.0.1:1/none"):
            pass
    assert (caught.value.code, bool(caught.value.hint)) == ("DATABASE_DOWN", True)


async def test_a_missing_database_is_refused(postgres_url: str) -> None:
    """The error names the database, and the hint says how to create it."""
    with pytest.raises(Transient, match='"no_such_database" does not exist') as refused:
        async with Database.open(url_of(postgres_url, "no_such_database")):
            pass
    assert refused.value.code == "DATABASE_REFUSED"
    assert "CREATE DATABASE" in (refused.value.hint or "")


async def test_a_user_without_the_right_to_connect_is_refused(db: Database, database_url: str) -> None:
    """The hint contains the GRANT statement."""
    await db.execute("DROP ROLE IF EXISTS penstock_no_connect; CREATE ROLE penstock_no_connect LOGIN")
    name = await db.fetchval("SELECT current_database()")
    await db.execute(f'REVOKE CONNECT ON DATABASE "{name}" FROM public')
    try:
        with pytest.raises(Transient, match="permission denied for database") as refused:
            async with Database.open(database_url.replace("postgres@", "penstock_no_connect@")):
                pass
        assert refused.value.code == "DATABASE_REFUSED"
        assert "GRANT CONNECT" in (refused.value.hint or "")
    finally:
        await db.execute("DROP ROLE penstock_no_connect")


def test_a_wrong_password_has_a_hint() -> None:
    """The hint names the settings of the user and of the password."""
    with pytest.raises(Transient, match="connection: password auth") as refused, translate_errors(connecting=True):
        raise asyncpg.InvalidPasswordError('password authentication failed for user "ann"')
    assert refused.value.code == "DATABASE_REFUSED"
    assert "`password`" in (refused.value.hint or "")


async def test_an_invalid_url_is_a_configuration_error() -> None:
    """A URL with another scheme is BadConfig, which is not retried."""
    with pytest.raises(BadConfig):
        async with Database.open("mysql://localhost/x"):
            pass


async def test_the_clock_is_the_servers(db: Database) -> None:
    """The clock is that of the server, so that the leases of many hosts can be compared."""
    server = await db.fetchval("SELECT clock_timestamp()")
    assert abs(db.clock.now() - server) < timedelta(seconds=5)
    assert db.clock.now().tzinfo is UTC
    assert isinstance(server, datetime)


async def test_built_in_types_are_queried_once(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in types are queried once per process, the types of a database once per connection."""
    monkeypatch.setattr(_PooledConnection, "_known", {})
    queried: list[int] = []
    introspect = asyncpg.Connection._introspect_types  # type: ignore[attr-defined]

    async def count(self: Any, typeoids: Any, timeout: float | None) -> Any:
        queried.extend(typeoids)
        return await introspect(self, typeoids, timeout)

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", count)
    async with Database.open(database_url) as db:
        await db.execute("CREATE TYPE colour AS ENUM ('red')")
        own = await db.fetchval("SELECT 'colour'::regtype::oid")
    for _ in range(2):
        async with Database.open(database_url) as db, db.connection() as connection:
            for _ in range(2):  # the second time as a statement that is prepared
                (row,) = await connection.fetch("SELECT $1::uuid[] AS a, $2::jsonb[] AS b", [UUID(int=1)], [{"c": [1]}])
                assert dict(row) == {"a": [UUID(int=1)], "b": [{"c": [1]}]}
            assert await connection.fetchval("SELECT $1::colour", "red") == "red"
    assert Counter(queried) == {own: 2, UUID_ARRAY: 1, JSONB_ARRAY: 1}


async def _settings(connection: Connection, *names: str) -> dict[str, str]:
    """Return the settings *names* of the session."""
    rows = await connection.fetch("SELECT name, current_setting(name) FROM unnest($1::text[]) AS name", names)
    return {row["name"]: row["current_setting"] for row in rows}
