"""R27: a release may be put beside the one before it: what a migration does, and that one never changes."""

import asyncio
import hashlib
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.app.schema import list_platform_migrations
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from penstock.kernel.db.locks import hold_advisory_lock
from penstock.kernel.db.migrate import Migration
from penstock.settings import Settings
from tests.deploy.upgrade.upgrade_rules import broken_rules, tables_made
from tests.support.wait import becomes

HERE = Path(__file__).parent
PACKAGE = HERE.parents[2] / "src" / "penstock"
BASELINE = HERE / "migrations.baseline"
FILES = {file.relative_to(PACKAGE).as_posix(): file for file in sorted(PACKAGE.glob("**/migrations/*.sql"))}


def recorded() -> dict[str, tuple[str, str]]:
    """What was released: the sum of each file, and whether it was there before the rule."""
    lines = [line.split() for line in BASELINE.read_text().splitlines() if line and not line.startswith("#")]
    return {name: (checksum, when) for checksum, when, name in lines}


def test_every_migration_is_as_it_was_released() -> None:
    """A file that was applied somewhere never changes: a database would refuse the release that carries it."""
    known = {name: checksum for name, (checksum, _) in recorded().items()}
    found = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in FILES.items()}
    changed = sorted(name for name in known if found.get(name) != known[name])
    assert not changed, f"{changed}: restore them, and put the change into a new migration"
    new = [f"{checksum}  later  {name}" for name, checksum in found.items() if name not in known]
    assert not new, f"append to {BASELINE.name}:\n" + "\n".join(new)


def test_what_came_after_the_first_release_only_adds() -> None:
    """The release before works on, on the new schema: nothing it needs may go; see docs/deploy/upgrade.md."""
    later = [name for name, (_, when) in recorded().items() if when == "later"]
    assert {name: broken for name in later if (broken := broken_rules(FILES[name].read_text()))} == {}


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE flow_step",
        "drop view harvest_run",
        "DROP INDEX journal_subject",
        "ALTER TABLE flow_step DROP COLUMN worker",
        "ALTER TABLE flow_step ADD COLUMN a text, DROP b",
        "ALTER TABLE ONLY flow_step DROP CONSTRAINT flow_step_pkey",
        "ALTER TABLE flow_step RENAME COLUMN worker TO who",
        "ALTER TABLE flow_step RENAME TO step",
        "ALTER INDEX flow_step_held RENAME TO held",
        "ALTER TABLE flow_step ALTER COLUMN fence TYPE numeric(10, 2)",
        "ALTER TABLE flow_step ALTER fence SET DATA TYPE text",
        "ALTER TABLE flow_step ALTER COLUMN worker SET NOT NULL",
        "ALTER TABLE flow_step ADD COLUMN next text NOT NULL",
        "ALTER TABLE flow_step\n  ADD next text -- DEFAULT 'a'\n  NOT NULL",
        "ALTER TABLE flow_step ADD COLUMN next uuid DEFAULT gen_random_uuid()",
        "ALTER TABLE flow_step ADD COLUMN next bigint REFERENCES flow_run",
        "ALTER TABLE flow_step ADD CONSTRAINT known CHECK (n > 0)",
        "ALTER TABLE flow_step ADD UNIQUE (n)",
        "ALTER TYPE colour ADD VALUE 'red'",
        "CREATE OR REPLACE FUNCTION f() RETURNS int LANGUAGE sql AS $$ SELECT 1 $$",
        "CREATE OR REPLACE VIEW harvest_run AS SELECT 1",
        "UPDATE flow_step SET n = 1",
        "DELETE FROM flow_log",
        "TRUNCATE flow_log",
        "DO $$ BEGIN DROP TABLE flow_log; END $$",
        "CREATE INDEX i ON flow_step (n)",
        "-- locks: flow_log\nCREATE UNIQUE INDEX IF NOT EXISTS i ON flow_step (n)",
        "CREATE INDEX CONCURRENTLY i ON flow_step (n)",
        "LOCK TABLE flow_step",
    ],
)
def test_what_takes_away_is_found(statement: str) -> None:
    """Each of these breaks the previous release or blocks the table; a declaration allows it."""
    made = "CREATE TABLE fine (id bigint PRIMARY KEY);\n"
    assert broken_rules(f"{made}{statement};\n{made}") != []
    assert broken_rules(f"-- contract: since 1.2.0\n{statement};") == []
    assert broken_rules(f"{made}-- contract: since 1.2.0\n{statement};") != []


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE flow_step ADD COLUMN next text, ADD more integer NOT NULL DEFAULT 0",
        "ALTER TABLE flow_step ADD COLUMN note text DEFAULT 'DROP TABLE x; it''s not null'",
        "CREATE TABLE new (id bigint PRIMARY KEY, n text NOT NULL); ALTER TABLE new ADD CHECK (id > 0)",
        "-- locks: flow_log, flow_step\nCREATE INDEX i ON flow_step (n) WHERE n > 0",
        "CREATE TABLE new (n int); CREATE INDEX ON new (n)",
        "ALTER TABLE flow_step ADD CONSTRAINT known CHECK (n > 0) NOT VALID",
        "ALTER TABLE flow_step ALTER COLUMN worker DROP NOT NULL",
        "ALTER TABLE flow_step ALTER COLUMN outputs SET STORAGE EXTERNAL",
        "-- DROP TABLE flow_step;\n/* TRUNCATE flow_step; */ SELECT 1",
        "CREATE FUNCTION f() RETURNS void LANGUAGE plpgsql AS $body$ BEGIN DELETE FROM x; END $body$",
    ],
)
def test_what_only_adds_is_let_through(statement: str) -> None:
    """Words in comments, strings and bodies of functions are no statements; a table of its own is its own."""
    assert broken_rules(f"{statement};") == []


def test_our_tables_are_found() -> None:
    """Else the rules would look at nothing."""
    tables = [table for file in FILES.values() for table in tables_made(file.read_text())]
    assert {"bus_message", "flow_step", "pipeline_tracking", "update_request", "run_metadata"} <= set(tables)
    assert len(tables) == len(set(tables)) > 30


async def test_a_migration_deferred_to_those_at_work(db: Database) -> None:
    """R27: behind a long query a migration does not block others; it retries until the table is free."""
    expand = Migration("demo", 1, "expand", "ALTER TABLE flow_log ADD COLUMN note text")
    with capture_logs() as logged:
        async with db.transaction() as busy:
            await busy.execute("SELECT FROM flow_log")
            migrating = asyncio.create_task(migrate.migrate(db, [expand]))

            async def has_given_way() -> bool:
                assert not migrating.done()
                async with db.transaction() as tx:  # concurrent reads and writes wait for a moment at most
                    await tx.execute("SET LOCAL lock_timeout = '5s'")
                    await tx.execute("DELETE FROM flow_log")
                return any(entry["event"] == "migration_deferred" for entry in logged)

            await becomes(has_given_way, "it gives way")
        assert await migrating == [expand]
    assert await migrate.migrate(db, [expand]) == []


async def test_a_start_without_migrations_takes_no_lock(db: Database) -> None:
    """R27: a pod of the release before that restarts while the new one's index is built is there at once."""
    async with db.session() as other, hold_advisory_lock(other, "penstock.migrate"):
        async with asyncio.timeout(20):
            assert await migrate.migrate(db, list_platform_migrations(Settings())) == []
