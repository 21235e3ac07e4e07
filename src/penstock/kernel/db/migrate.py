"""Migrations: numbered SQL files per part, applied once, in order, by one process at a time."""

import asyncio
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.resources import files

import asyncpg
import structlog

from penstock.kernel.db.database import Connection, Database, is_transient
from penstock.kernel.db.locks import advisory_lock
from penstock.kernel.errors import Conflict, Corrupt
from penstock.kernel.tasks.backoff import Backoff

_FILE = re.compile(r"^(\d{4})_(\w+)\.sql$")
_LEDGER = """
CREATE TABLE IF NOT EXISTS schema_migration (
    part text NOT NULL,
    version integer NOT NULL,
    name text NOT NULL,
    checksum text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (part, version)
)
"""
_RECORD = "INSERT INTO schema_migration (part, version, name, checksum) VALUES ($1, $2, $3, $4)"
_PATIENCE = 86_400.0
# Whoever comes after one who waits for a table's lock, waits too: so one waits briefly, and again later. Less than
# PostgreSQL's deadlock_timeout: of two who wait for each other the migration is, as a rule, the first to give way.
_LOCK_PATIENCE = "500ms"


@dataclass(frozen=True)
class Migration:
    """One file; its number orders it within its part."""

    part: str
    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


@dataclass(frozen=True)
class MigrationPlan:
    """What a database lacks, and what it has that this release does not know."""

    pending: Sequence[Migration]
    newer: Sequence[str]


def load(package: str) -> list[Migration]:
    """The migrations in *package*'s folder `migrations`, by number; the part's name is the package's last word."""
    part = package.rpartition(".")[2]
    found = [
        Migration(part, int(match[1]), match[2], file.read_text(encoding="utf-8"))
        for file in files(package).joinpath("migrations").iterdir()
        if (match := _FILE.match(file.name))
    ]
    return sorted(found, key=lambda migration: migration.version)


async def migrate(db: Database, migrations: Iterable[Migration]) -> list[Migration]:
    """Apply what is missing and return it; each file is one transaction, two callers never apply one file twice."""
    wanted = list(migrations)
    if not (await plan(db, wanted)).pending:  # nor need one wait for a newer release's that is under way
        return []
    async with db.session() as connection:
        await connection.execute("SET statement_timeout = 0")  # an index on a large table takes what it takes
        async with advisory_lock(connection, "penstock.migrate", timeout=_PATIENCE):
            await connection.execute(_LEDGER)
            pending = _compare(wanted, await _applied(connection)).pending
            for migration in pending:
                await _apply(connection, migration)
    return list(pending)


async def _apply(connection: Connection, migration: Migration) -> None:
    backoff = Backoff(limit=timedelta(seconds=10))
    while not await _is_applied(connection, migration):
        pause = backoff.next()
        told = {"part": migration.part, "version": migration.version, "again_in": pause.total_seconds()}
        structlog.get_logger().warning("migration_gives_way", **told)
        await asyncio.sleep(pause.total_seconds())


async def _is_applied(connection: Connection, migration: Migration) -> bool:
    """Apply it; False when somebody at work held a table for too long, and nothing of it was applied."""
    row = (migration.part, migration.version, migration.name, migration.checksum)
    try:
        async with connection.transaction():
            await connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_PATIENCE}'")
            await connection.execute(migration.sql, timeout=_PATIENCE)
            await connection.execute(_RECORD, *row)
    except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
        return False
    except asyncpg.PostgresError as error:
        if is_transient(error):
            raise
        raise Conflict(
            "MIGRATION_FAILED",
            f"migration {migration.part} {migration.version:04} ({migration.name}) failed: {error}",
            hint="nothing of it was applied; mend the cause and run `penstock db migrate` again",
        ) from error
    return True


async def plan(db: Database, migrations: Iterable[Migration]) -> MigrationPlan:
    """What `migrate` would do; changes nothing."""
    async with db.connection() as connection:
        try:
            applied = await _applied(connection)
        except asyncpg.UndefinedTableError:
            applied = []
        return _compare(list(migrations), applied)


async def _applied(connection: Connection) -> list[asyncpg.Record]:
    return await connection.fetch("SELECT part, version, name, checksum FROM schema_migration ORDER BY part, version")


def _compare(wanted: Sequence[Migration], applied: Sequence[asyncpg.Record]) -> MigrationPlan:
    """An older release may run on a newer database (a rolling upgrade), so what is unknown is told, not refused."""
    known = {(migration.part, migration.version): migration for migration in wanted}
    if len(known) != len(wanted):
        raise ValueError("two migrations of one part have one number")
    done = {(row["part"], row["version"]): row for row in applied}
    for key, row in done.items():
        if key in known and known[key].checksum != row["checksum"]:
            raise Corrupt(
                "MIGRATION_CHANGED",
                f"migration {row['part']} {row['version']:04} ({row['name']}) was changed after it was applied",
                hint="restore the file and put the change into a new migration",
            )
    pending = [migration for key, migration in known.items() if key not in done]
    newer = [
        f"{part} {version:04} {row['name']}" for (part, version), row in done.items() if (part, version) not in known
    ]
    return MigrationPlan(pending, newer)
