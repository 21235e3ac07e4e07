"""The database: visible transactions, and errors that say whether trying again can help."""

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

from penstock.kernel.db.database import Connection, Database, _PooledConnection, enable_all_plans, is_transient
from penstock.kernel.errors import BadConfig, Transient
from tests.services.postgres import database_url as url_of

UUID_ARRAY, JSONB_ARRAY = 2951, 3807  # oids


async def test_a_failed_transaction_leaves_nothing(db: Database) -> None:
    """All of it or nothing of it, whatever is raised inside."""
    await db.execute("CREATE TABLE t (n int)")
    with pytest.raises(LookupError):
        async with db.transaction() as tx:
            await tx.execute("INSERT INTO t VALUES (1)")
            raise LookupError
    assert await db.fetchval("SELECT count(*) FROM t") == 0


async def test_a_server_that_is_too_old_is_refused(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions are named before anything is changed."""
    monkeypatch.setattr("penstock.kernel.db.database.OLDEST_POSTGRES", 99)
    with pytest.raises(BadConfig, match="Penstock needs 99 or newer") as refused:
        async with Database.open(database_url):
            pass
    assert refused.value.code == "POSTGRES_TOO_OLD"


async def test_json_comes_and_goes_as_python(db: Database) -> None:
    """jsonb columns are read and written as plain values."""
    value = {"a": [1, None, "ü"], "b": {"c": True}}
    assert await db.fetchval("SELECT $1::jsonb", value) == value


@pytest.mark.parametrize("kind", ["json", "jsonb"])
@pytest.mark.parametrize("text", ["1.10", "123456789012345678901234567890", '{"a": [1.10, 0.1000]}'])
async def test_json_can_pass_as_the_text_it_is(database_url: str, kind: str, text: str) -> None:
    """R1: where JSON is not decoded, no digit of a number is lost on the way in or out."""
    async with Database.open(database_url, decodes_json=False) as db:
        # Each way by itself: a codec would quote the text on its way in and unquote it on its way out.
        assert await db.fetchval(f"SELECT $1::{kind}::text", text) == text
        assert await db.fetchval(f"SELECT $1::text::{kind}", text) == text


async def test_settings_hold_in_every_session(database_url: str) -> None:
    """R1: what is set for the server is there in every connection, wins over ours, and outlives a reset."""
    settings = {"search_path": "pg_catalog", "enable_seqscan": "on", "application_name": "penstock-x"}
    async with Database.open(database_url, size=2, prefers_indexes=True, settings=settings) as db:
        async with db.session() as one, db.session() as other:
            await one.execute("SET search_path = public")
            assert await _settings(other, *settings) == settings
        async with db.connection() as one, db.connection() as other:
            assert await _settings(one, *settings) == await _settings(other, *settings) == settings
            assert await _settings(one, "enable_hashjoin") == {"enable_hashjoin": "off"}


@pytest.mark.parametrize("ends_well", [True, False])
async def test_the_planner_is_free_for_one_transaction(database_url: str, ends_well: bool) -> None:
    """R1: a database that looks up lets the planner choose until the transaction ends, and not a statement longer."""
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


async def test_errors_of_the_callers_own_code_pass_unchanged(db: Database) -> None:
    """A missing file inside a transaction is not a database that is down."""
    with pytest.raises(FileNotFoundError):
        async with db.transaction():
            raise FileNotFoundError


@pytest.mark.parametrize(
    ("query", "error"),
    [("SELECT 1 / 0", asyncpg.DivisionByZeroError), ("SELECT broken", asyncpg.UndefinedColumnError)],
)
async def test_permanent_errors_are_not_transient(db: Database, query: str, error: type[Exception]) -> None:
    """R11: what trying again cannot mend is never taken for a failure of the moment."""
    with pytest.raises(error) as caught:
        await db.execute(query)
    assert not is_transient(caught.value)


async def test_an_argument_of_the_wrong_type_is_not_transient(db: Database) -> None:
    """R11: wrong types are permanent too."""
    with pytest.raises(asyncpg.DataError) as caught:
        await db.execute("SELECT $1::int", "x")
    assert not is_transient(caught.value)


async def test_a_cut_connection_is_transient_and_the_next_one_works(db: Database) -> None:
    """R11: a connection cut in mid-statement is Transient, and the pool heals."""

    async def cut() -> None:
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'SELECT pg_sleep%'"
        while not (pid := await db.fetchval(query)):
            pass
        await db.execute("SELECT pg_terminate_backend($1)", pid)

    cutting = asyncio.create_task(cut())
    with pytest.raises(Transient, match="does not answer"):
        await db.execute("SELECT pg_sleep(30)")
    await cutting
    assert await db.fetchval("SELECT 1") == 1


async def test_a_server_that_said_goodbye_is_transient(database_url: str) -> None:
    """R11: the moment between the last word of a server that stops and its hanging up is a failure of the moment."""
    async with slow_to_hang_up(database_url) as (url, hanging_up), Database.open(url, size=1) as db:
        pid = await db.fetchval("SELECT pg_backend_pid()")
        outside = await asyncpg.connect(database_url)
        await outside.execute("SELECT pg_terminate_backend($1)", pid)
        await outside.close()
        await hanging_up.wait()
        with pytest.raises(Transient, match="does not answer") as caught:
            await db.fetchval("SELECT 1")
        assert isinstance(caught.value.__cause__, asyncpg.InternalClientError)


@contextlib.asynccontextmanager
async def slow_to_hang_up(url: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """The same server through a line that passes on what it says, but not that it hung up; and when it did so."""
    hung_up, lines = asyncio.Event(), asyncio.TaskGroup()
    folder = parse_qs(urlsplit(url).query)["host"][0]

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                target.write(data)

    async def close(writer: asyncio.StreamWriter) -> None:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def ask(reader: asyncio.StreamReader, far: asyncio.StreamWriter) -> None:
        await pump(reader, far)
        await close(far)

    async def line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.5432")
        asking = lines.create_task(ask(reader, far_writer))
        await pump(far_reader, writer)
        hung_up.set()
        await asking
        await close(writer)

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.create_task(line(reader, writer))

    async with lines, await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"postgresql://postgres@127.0.0.1:{port}{urlsplit(url).path}?sslmode=disable", hung_up


async def test_a_deadlock_is_transient(db: Database) -> None:
    """R11: of two transactions that wait for each other one is Transient, the other commits."""
    await db.execute("CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t VALUES (1, 0), (2, 0)")
    both_hold = asyncio.Barrier(2)

    async def lock(first: int, second: int) -> None:
        async with db.transaction() as tx:
            await tx.execute("UPDATE t SET n = n + 1 WHERE id = $1", first)
            await both_hold.wait()
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


async def test_a_server_that_is_down_is_told_with_a_hint() -> None:
    """Nobody listening is Transient DATABASE_DOWN, not a stack of connection errors."""
    with pytest.raises(Transient) as caught:
        async with Database.open("postgresql://nobody@127.0.0.1:1/none"):
            pass
    assert (caught.value.code, bool(caught.value.hint)) == ("DATABASE_DOWN", True)


async def test_a_missing_database_is_refused(postgres_url: str) -> None:
    """A wrong name is told as such."""
    with pytest.raises(Transient, match="refused"):
        async with Database.open(url_of(postgres_url, "no_such_database")):
            pass


async def test_a_url_that_is_none_is_a_configuration_error() -> None:
    """Another scheme is BadConfig, which no retry mends."""
    with pytest.raises(BadConfig):
        async with Database.open("mysql://localhost/x"):
            pass


async def test_the_clock_is_the_servers(db: Database) -> None:
    """Leases of many hosts are told by one clock."""
    server = await db.fetchval("SELECT clock_timestamp()")
    assert abs(db.clock.now() - server) < timedelta(seconds=5)
    assert db.clock.now().tzinfo is UTC
    assert isinstance(server, datetime)


async def test_built_in_types_are_queried_once(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in types are queried once per process, the types of a database once per connection."""
    monkeypatch.setattr(_PooledConnection, "_known", {})
    asked: list[int] = []
    ask = asyncpg.Connection._introspect_types  # type: ignore[attr-defined]

    async def count(self: Any, typeoids: Any, timeout: float | None) -> Any:
        asked.extend(typeoids)
        return await ask(self, typeoids, timeout)

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
    assert Counter(asked) == {own: 2, UUID_ARRAY: 1, JSONB_ARRAY: 1}


async def _settings(connection: Connection, *names: str) -> dict[str, str]:
    """What the connection's session has set for *names*."""
    rows = await connection.fetch("SELECT name, current_setting(name) FROM unnest($1::text[]) AS name", names)
    return {row["name"]: row["current_setting"] for row in rows}
