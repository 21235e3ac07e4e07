"""Migrations: each applied once, whole or not at all, whoever comes first."""

import asyncio
from pathlib import Path

import pytest

from penstock.app.schema import known_migrations
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from penstock.kernel.db.migrate import Migration
from penstock.kernel.errors import Conflict, Corrupt
from penstock.settings import Settings

ONE = Migration(
    "demo", 1, "one", "CREATE TABLE one (); CREATE TABLE effect (name text); INSERT INTO effect VALUES ('1')"
)
TWO = Migration("demo", 2, "two", "CREATE TABLE two (); INSERT INTO effect VALUES ('2')")
THREE = Migration("demo", 3, "three", "CREATE TABLE three (); INSERT INTO effect VALUES ('3')")
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
    """What is missing is applied in order and returned; a second run finds nothing to do."""
    assert await migrate.migrate(db, [ONE, TWO]) == [ONE, TWO]
    assert await migrate.migrate(db, [ONE, TWO]) == []
    assert await migrate.migrate(db, [ONE, TWO, THREE]) == [THREE]
    assert await effects(db) == ["1", "2", "3"]


async def test_callers_at_once_apply_each_migration_once(db: Database) -> None:
    """Four pods that start together migrate once; the others wait and find it done."""
    done = await asyncio.gather(*(migrate.migrate(db, [ONE, TWO, THREE]) for _ in range(4)))
    assert sorted(map(len, done)) == [0, 0, 0, 3]
    assert await effects(db) == ["1", "2", "3"]


@pytest.mark.parametrize(("failing", "why"), [(BROKEN, "division by zero"), (UNLISTED, "violates check")])
async def test_a_failing_migration_leaves_nothing_of_itself(db: Database, failing: Migration, why: str) -> None:
    """Those before it stay, it leaves neither table nor entry, those after it wait; mended, all goes on."""
    with pytest.raises(Conflict, match=f"failed: .*{why}"):
        await migrate.migrate(db, [ONE, failing, THREE])
    assert (await tables(db), await applied(db)) == ({"one"}, [1])
    assert await migrate.migrate(db, [ONE, TWO, THREE]) == [TWO, THREE]


@pytest.mark.parametrize("call", [migrate.migrate, migrate.plan])
async def test_a_changed_migration_is_corrupt(db: Database, call: object) -> None:
    """A file edited after it was applied is told by name, and nothing else is applied."""
    await migrate.migrate(db, [ONE])
    edited = Migration("demo", 1, "one", ONE.sql + " -- a small change")
    with pytest.raises(Corrupt, match=r"demo 0001 \(one\)") as corrupt:
        await call(db, [edited, TWO])  # type: ignore[operator]
    assert corrupt.value.code == "MIGRATION_CHANGED"
    assert await applied(db) == [1]


async def test_a_newer_database_is_told_and_tolerated(db: Database) -> None:
    """An older release runs on during a rolling upgrade, and `plan` names what it does not know."""
    await migrate.migrate(db, [ONE, TWO])
    plan = await migrate.plan(db, [*known_migrations(Settings()), ONE])
    assert (plan.pending, plan.newer) == ([], ["demo 0002 two"])
    assert await migrate.migrate(db, [ONE]) == []


async def test_a_plan_changes_nothing(db: Database) -> None:
    """On a database nobody migrated, `plan` tells all and does nothing, not even a ledger."""
    await db.execute("DROP TABLE schema_migration")
    assert (await migrate.plan(db, [ONE, TWO])).pending == [ONE, TWO]
    assert await tables(db) == set()
    assert await db.fetchval("SELECT to_regclass('schema_migration')") is None


async def test_a_number_given_twice_is_refused(db: Database) -> None:
    """Two files of one number are a mistake: one of them would silently be left out."""
    with pytest.raises(ValueError, match="one number"):
        await migrate.migrate(db, [ONE, TWO, Migration("demo", 2, "other", "SELECT 1")])
    assert await tables(db) == set()


async def test_parts_number_on_their_own(db: Database) -> None:
    """The same number in another part is another migration."""
    other = Migration("other", 1, "one", "CREATE TABLE two ()")
    assert await migrate.migrate(db, [ONE, other]) == [ONE, other]


def test_files_are_found_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbered files of the part's folder, in order; whatever else lies there is left alone."""
    folder = tmp_path / "some_part" / "migrations"
    folder.mkdir(parents=True)
    for name in ("0010_ten.sql", "0002_two.sql", "0001_one.sql", "README.md", "3_three.sql", "0004_four.sql.orig"):
        (folder / name).write_text(f"-- {name}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = migrate.load("some_part")
    assert [(one.part, one.version, one.name) for one in found] == [
        ("some_part", 1, "one"),
        ("some_part", 2, "two"),
        ("some_part", 10, "ten"),
    ]
    assert found[0].sql == "-- 0001_one.sql\n"


async def test_our_own_migrations_are_applied(db: Database) -> None:
    """The database a test gets has all of the kernel's."""
    assert (await migrate.plan(db, migrate.load("penstock.kernel"))).pending == []
