"""Migrations: each is applied once, and completely or not at all."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.app.schema import list_platform_migrations
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from penstock.kernel.db.migrate import Migration
from penstock.kernel.errors import BadConfig, Conflict, Corrupt
from penstock.settings import Settings

FIRST = Migration(
    "demo", 1, "one", "CREATE TABLE one (); CREATE TABLE effect (name text); INSERT INTO effect VALUES ('1')"
)
SECOND = Migration("demo", 2, "two", "CREATE TABLE two (); INSERT INTO effect VALUES ('2')")
THIRD = Migration("demo", 3, "three", "CREATE TABLE three (); INSERT INTO effect VALUES ('3')")
BROKEN = Migration("demo", 2, "two", "CREATE TABLE two (); SELECT 1 / 0")
UNLISTED = Migration("demo", 2, "two", "CREATE TABLE two (); ALTER TABLE schema_migration ADD CHECK (name <> 'two')")


async def tables(db: Database) -> set[str]:
    rows = await db.fetch("SELECT tablename FROM pg_tables WHERE tablename IN ('one', 'two', 'three')")
    return {row["tablename"] for row in rows}


async def applied(db: Database) -> list[int]:
    rows = await db.fetch("SELECT version FROM schema_migration WHERE part = 'demo' ORDER BY version")
    return [row["version"] for row in rows]


async def effects(db: Database) -> list[str]:
    return [row["name"] for row in await db.fetch("SELECT name FROM effect")]


async def test_each_migration_is_applied_once(db: Database) -> None:
    """Pending migrations are applied in order and returned; a second run has nothing to do."""
    assert await migrate.migrate(db, [FIRST, SECOND]) == [FIRST, SECOND]
    assert await migrate.migrate(db, [FIRST, SECOND]) == []
    assert await migrate.migrate(db, [FIRST, SECOND, THIRD]) == [THIRD]
    assert await effects(db) == ["1", "2", "3"]


async def test_concurrent_callers_apply_each_migration_once(db: Database) -> None:
    """Of four pods that start together one migrates; the others wait and have nothing to do."""
    done = await asyncio.gather(*(migrate.migrate(db, [FIRST, SECOND, THIRD]) for _ in range(4)))
    assert sorted(map(len, done)) == [0, 0, 0, 3]
    assert await effects(db) == ["1", "2", "3"]


@pytest.mark.parametrize(("failing", "reason"), [(BROKEN, "division by zero"), (UNLISTED, "violates check")])
async def test_a_failing_migration_is_rolled_back(db: Database, failing: Migration, reason: str) -> None:
    """Earlier migrations remain, the failed one leaves nothing, later ones wait; after a fix all are applied."""
    with pytest.raises(Conflict, match=f"failed: .*{reason}"):
        await migrate.migrate(db, [FIRST, failing, THIRD])
    assert (await tables(db), await applied(db)) == ({"one"}, [1])
    assert await migrate.migrate(db, [FIRST, SECOND, THIRD]) == [SECOND, THIRD]


@pytest.mark.parametrize("call", [migrate.migrate, migrate.plan])
async def test_a_changed_migration_is_corrupt(db: Database, call: object) -> None:
    """A file that was changed after it was applied is an error with its name, and nothing is applied."""
    await migrate.migrate(db, [FIRST])
    edited = Migration("demo", 1, "one", FIRST.sql + " -- a small change")
    with pytest.raises(Corrupt, match=r"demo 0001 \(one\)") as corrupt:
        await call(db, [edited, SECOND])  # type: ignore[operator]
    assert corrupt.value.code == "MIGRATION_CHANGED"
    assert await applied(db) == [1]


async def test_a_newer_database_is_reported_and_tolerated(db: Database) -> None:
    """An older release continues to run during a rolling upgrade, and `plan` names the unknown migrations."""
    await migrate.migrate(db, [FIRST, SECOND])
    plan = await migrate.plan(db, [*list_platform_migrations(Settings()), FIRST])
    assert (plan.pending, plan.newer) == ([], ["demo 0002 two"])
    assert await migrate.migrate(db, [FIRST]) == []


async def test_a_plan_changes_nothing(db: Database) -> None:
    """On an empty database `plan` returns all migrations and creates nothing, not even its table."""
    await db.execute("DROP TABLE schema_migration")
    assert (await migrate.plan(db, [FIRST, SECOND])).pending == [FIRST, SECOND]
    assert await tables(db) == set()
    assert await db.fetchval("SELECT to_regclass('schema_migration')") is None


async def test_a_duplicate_number_is_refused(db: Database) -> None:
    """Two files with one number are an error, because one of them would be skipped."""
    with pytest.raises(ValueError, match="one number"):
        await migrate.migrate(db, [FIRST, SECOND, Migration("demo", 2, "other", "SELECT 1")])
    assert await tables(db) == set()


async def test_numbers_are_per_part(db: Database) -> None:
    """The same number in another part is another migration."""
    other = Migration("other", 1, "one", "CREATE TABLE two ()")
    assert await migrate.migrate(db, [FIRST, other]) == [FIRST, other]


def test_files_are_found_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbered files of the folder are returned in order; other files are ignored."""
    folder = tmp_path / "some_part" / "migrations"
    folder.mkdir(parents=True)
    for name in ("0010_ten.sql", "0002_two.sql", "0001_one.sql", "README.md", "3_three.sql", "0004_four.sql.orig"):
        (folder / name).write_text(f"-- {name}\n")
    monkeypatch.syspath_prepend(tmp_path)
    migrations = migrate.load("some_part")
    assert [(migration.part, migration.version, migration.name) for migration in migrations] == [
        ("some_part", 1, "one"),
        ("some_part", 2, "two"),
        ("some_part", 10, "ten"),
    ]
    assert migrations[0].sql == "-- 0001_one.sql\n"


@pytest.fixture
async def restricted_url(db: Database, database_url: str) -> AsyncIterator[str]:
    """Yield the URL of a role that may connect to an empty database, and nothing else."""
    await db.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO public")
    role = f"restricted_{await db.fetchval('SELECT current_database()')}"
    await db.execute(f'CREATE ROLE "{role}" LOGIN')
    yield database_url.replace("postgres@", f"{role}@")
    await db.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


@pytest.mark.parametrize("revoke", ["SELECT 1", "REVOKE USAGE ON SCHEMA public FROM public"])
async def test_missing_rights_are_an_error_with_the_grant(db: Database, restricted_url: str, revoke: str) -> None:
    """The error names database, user and schema; the hint is the statement after which the migration succeeds."""
    await db.execute(revoke)
    async with Database.open(restricted_url) as restricted:
        assert (await migrate.plan(restricted, [FIRST])).pending == [FIRST]
        for call in (migrate.migrate(restricted, [FIRST]), migrate.check_rights(restricted)):
            with pytest.raises(BadConfig, match="lacks rights in schema public of database") as refused:
                await call
            assert (refused.value.code, refused.value.exit_code) == ("DATABASE_RIGHTS", 3)
            assert refused.value.details["user"] in refused.value.message
        assert refused.value.hint is not None
        await db.execute(refused.value.hint.partition(": ")[2])
        await migrate.check_rights(restricted)
        assert await migrate.migrate(restricted, [FIRST]) == [FIRST]


async def test_tables_of_another_user_are_an_error(db: Database, restricted_url: str) -> None:
    """A user without rights on existing tables gets the hint to connect as their owner."""
    await migrate.migrate(db, [FIRST])
    await db.execute("GRANT CREATE ON SCHEMA public TO public")
    async with Database.open(restricted_url) as restricted:
        with pytest.raises(BadConfig, match="permission denied for table schema_migration") as refused:
            await migrate.migrate(restricted, [FIRST])
    assert refused.value.code == "DATABASE_RIGHTS"
    assert "connect as their owner" in (refused.value.hint or "")


async def test_the_migrations_of_the_kernel_are_applied(db: Database) -> None:
    """The database of a test has all migrations of the kernel."""
    assert (await migrate.plan(db, migrate.load("penstock.kernel"))).pending == []
