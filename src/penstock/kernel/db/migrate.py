"""Migrations: numbered SQL files per part, each applied once, in order, by one process at a time."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.resources import files

import asyncpg
import structlog

from penstock.kernel.db.database import Connection, Database, is_transient
from penstock.kernel.db.locks import hold_advisory_lock
from penstock.kernel.errors import BadConfig, Conflict, Corrupt
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
# Without USAGE on a schema, current_schema() skips it: then the last schema of the search path is meant.
_RIGHTS = """
SELECT current_database() AS database, quote_ident(current_user) AS user, quote_ident(schema) AS schema,
    coalesce(has_schema_privilege(to_regnamespace(quote_ident(schema)), 'USAGE'), false)
    AND coalesce(has_schema_privilege(to_regnamespace(quote_ident(schema)), 'CREATE'), false) AS may_create
FROM (SELECT coalesce(current_schema(), trim(split_part(current_setting('search_path'), ',', -1), ' "')) AS schema) AS s
"""
_NO_RIGHTS = (asyncpg.InsufficientPrivilegeError, asyncpg.InvalidSchemaNameError)
_MIGRATION_TIMEOUT = 86_400.0
# Statements queue behind a migration that waits for the lock of a table, so it waits briefly and tries again later.
# The limit is below PostgreSQL's deadlock_timeout, so that in a deadlock the migration is usually the first to yield.
_LOCK_TIMEOUT = "500ms"


@dataclass(frozen=True)
class Migration:
    """A file; its number orders it within its part."""

    part: str
    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


@dataclass(frozen=True)
class MigrationPlan:
    """The migrations that a database lacks, and the applied ones that this release does not know."""

    pending: Sequence[Migration]
    newer: Sequence[str]


def load(package: str) -> list[Migration]:
    """Return the migrations in the folder `migrations` of *package*, by number; the part is the package's last name."""
    part = package.rpartition(".")[2]
    migrations = [
        Migration(part, int(match[1]), match[2], file.read_text(encoding="utf-8"))
        for file in files(package).joinpath("migrations").iterdir()
        if (match := _FILE.match(file.name))
    ]
    return sorted(migrations, key=lambda migration: migration.version)


async def migrate(db: Database, migrations: Iterable[Migration]) -> list[Migration]:
    """Apply and return the pending migrations, each in one transaction; concurrent callers apply none twice.

    Raise BadConfig DATABASE_RIGHTS if the user may not create tables.
    """
    known = list(migrations)
    if not (await plan(db, known)).pending:  # does not wait for the lock, which a newer release may hold
        return []
    async with _explain_missing_rights(db), db.session() as connection:
        await connection.execute("SET statement_timeout = 0")  # an index on a large table has no time limit
        async with hold_advisory_lock(connection, "penstock.migrate", timeout=_MIGRATION_TIMEOUT):
            await connection.execute(_LEDGER)
            pending = _compare(known, await _read_applied(connection)).pending
            for migration in pending:
                await _apply(connection, migration)
    return list(pending)


async def _apply(connection: Connection, migration: Migration) -> None:
    backoff = Backoff(limit=timedelta(seconds=10))
    while not await _try_apply(connection, migration):
        delay = backoff.compute_next().total_seconds()
        log = structlog.get_logger()
        log.warning("migration_deferred", part=migration.part, version=migration.version, retry_in_seconds=delay)
        await asyncio.sleep(delay)


async def _try_apply(connection: Connection, migration: Migration) -> bool:
    """Apply *migration*; return False, with nothing applied, if another session locked one of its tables too long."""
    row = (migration.part, migration.version, migration.name, migration.checksum)
    try:
        async with connection.transaction():
            await connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
            await connection.execute(migration.sql, timeout=_MIGRATION_TIMEOUT)
            await connection.execute(_RECORD, *row)
    except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
        return False
    except asyncpg.PostgresError as error:
        if is_transient(error) or isinstance(error, _NO_RIGHTS):
            raise
        raise Conflict(
            "MIGRATION_FAILED",
            f"migration {migration.part} {migration.version:04} ({migration.name}) failed: {error}",
            hint="nothing of it was applied; fix the cause and run `penstock db migrate` again",
        ) from error
    return True


async def plan(db: Database, migrations: Iterable[Migration]) -> MigrationPlan:
    """Return what `migrate` would apply, without a change."""
    async with _explain_missing_rights(db), db.connection() as connection:
        try:
            applied = await _read_applied(connection)
        except asyncpg.UndefinedTableError:
            applied = []
        return _compare(list(migrations), applied)


async def check_rights(db: Database) -> None:
    """Raise BadConfig DATABASE_RIGHTS unless the user may create tables."""
    rights = await db.fetchrow(_RIGHTS)
    if rights is not None and not rights["may_create"]:
        raise _make_rights_error(rights, f"permission denied for schema {rights['schema']}")


@asynccontextmanager
async def _explain_missing_rights(db: Database) -> AsyncIterator[None]:
    try:
        yield
    except _NO_RIGHTS as error:
        rights = await db.fetchrow(_RIGHTS)
        if rights is None:
            raise
        raise _make_rights_error(rights, str(error)) from error


def _make_rights_error(rights: asyncpg.Record, reason: str) -> BadConfig:
    database, user, schema = rights["database"], rights["user"], rights["schema"]
    grant = f"GRANT USAGE, CREATE ON SCHEMA {schema} TO {user};"
    if rights["may_create"]:
        hint = f"the tables in schema {schema} belong to another user: connect as their owner"
    else:
        hint = f"run as the owner of the database: {grant}"
    message = f"user {user} lacks rights in schema {schema} of database {database}: {reason}"
    return BadConfig("DATABASE_RIGHTS", message, hint=hint, database=database, user=user, schema=schema)


async def _read_applied(connection: Connection) -> list[asyncpg.Record]:
    return await connection.fetch("SELECT part, version, name, checksum FROM schema_migration ORDER BY part, version")


def _compare(migrations: Sequence[Migration], applied: Sequence[asyncpg.Record]) -> MigrationPlan:
    """Compare the files with the applied migrations.

    An older release may run on a newer database during a rolling upgrade, so unknown migrations are no error.
    """
    known = {(migration.part, migration.version): migration for migration in migrations}
    if len(known) != len(migrations):
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
