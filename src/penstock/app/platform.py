"""The platform, opened from the settings: databases, bus, signals, storage, and the workspace of ingest.

The parts are opened in `parts.py`: a command that needs only a database does not import them.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

from penstock.app.factories import make_bus, make_signals, make_storage
from penstock.app.schema import list_platform_migrations, list_refdata_migrations, list_tracking_migrations
from penstock.kernel.bus import Bus
from penstock.kernel.config.loader import resolve_secret
from penstock.kernel.config.sections import EMBEDDED, DatabaseSection
from penstock.kernel.db import datadir, migrate
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.kernel.db.outbox import Outbox
from penstock.kernel.errors import BadConfig
from penstock.kernel.signals import Signals
from penstock.kernel.states import journal
from penstock.kernel.storage import Storage
from penstock.kernel.tasks.periodic import PeriodicTask, run_periodically
from penstock.kernel.telemetry.telemetry import Telemetry, log_warnings_to_stderr
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.ingest.workspace import IngestWorkspace

BUS_OUTBOX = Outbox("bus_outbox")
OUTBOX_RETENTION = timedelta(days=1)
Schema = tuple[str, AbstractAsyncContextManager[Database], list[migrate.Migration]]

log_warnings_to_stderr()  # here, because only commands that open something log


@dataclass(frozen=True)
class Platform:
    """The settings, the telemetry, the database and the open ports that every role uses."""

    settings: Settings
    telemetry: Telemetry
    db: Database
    bus: Bus
    signals: Signals
    storage: Storage


@asynccontextmanager
async def open_platform(settings: Settings, telemetry: Telemetry) -> AsyncIterator[Platform]:
    """Yield the platform with all connections open and the schema up to date; close it at the end."""
    async with AsyncExitStack() as stack:
        db = await stack.enter_async_context(open_database(settings))
        await migrate.migrate(db, list_platform_migrations(settings))
        bus = make_bus(settings, db)
        stack.push_async_callback(bus.close)
        signals = make_signals(settings, db)
        stack.push_async_callback(signals.close)
        platform = Platform(settings, telemetry, db, bus, signals, make_storage(settings))
        for name, task, every in _list_periodic_tasks(platform):
            await stack.enter_async_context(run_periodically(name, task, every))
        yield platform


@asynccontextmanager
async def open_database(
    settings: Settings,
    section: DatabaseSection | None = None,
    *,
    prefers_indexes: bool = False,
    session: Mapping[str, str] | None = None,
) -> AsyncIterator[Database]:
    """Yield the database of *section*, by default that of the platform; start the embedded PostgreSQL if needed."""
    section = section or settings.database
    async with AsyncExitStack() as stack:
        if section.url == EMBEDDED:
            datadir.check_format(settings.data_dir)
            url = await stack.enter_async_context(run_embedded_postgres(settings.data_dir / "postgres"))
        else:
            url = _add_password(section)
        opened = connect(url, section, prefers_indexes=prefers_indexes, session=session)
        yield await stack.enter_async_context(opened)


def connect(
    url: str, section: DatabaseSection, *, prefers_indexes: bool, session: Mapping[str, str] | None = None
) -> AbstractAsyncContextManager[Database]:
    """Return the database at *url* with the pool and the timeout of *section*."""
    timeout = section.statement_timeout
    return Database.open(
        url, size=section.pool_size, statement_timeout=timeout, prefers_indexes=prefers_indexes, settings=session
    )


@asynccontextmanager
async def open_refdata_database(settings: Settings) -> AsyncIterator[Database]:
    """R1: yield the database of `refdata.postgres` if it is set, or else the platform's."""
    own = settings.refdata.postgres
    if own is None:
        async with open_database(settings, session=make_lease_settings(settings.refdata.apply.lease)) as db:
            yield db
        return
    password = f"env:{own.password_from_env}" if own.password_from_env else None
    section = DatabaseSection(url=own.dsn, password=password, pool_size=own.pool.max_size)
    url = _add_password(section, "refdata.postgres.passwordFromEnv")
    async with Database.open(
        url,
        size=section.pool_size,
        settings={**make_search_path(settings), **make_lease_settings(settings.refdata.apply.lease)},
    ) as db:
        if await db.fetchval("SELECT to_regnamespace(quote_ident($1))", own.db_schema) is None:
            hint = f'create it with `CREATE SCHEMA "{own.db_schema}"`, or correct refdata.postgres.schema'
            raise BadConfig("UNKNOWN_SCHEMA", f"the database has no schema {own.db_schema!r}", hint=hint)
        yield db


def make_lease_settings(lease_for: timedelta) -> dict[str, str]:
    """R11, H4: return session settings that end a transaction whose process is frozen for longer than a lease."""
    lease = lease_for.total_seconds()
    return {
        "idle_in_transaction_session_timeout": str(int(lease * 1000)),
        "tcp_keepalives_idle": str(max(1, int(lease / 2))),
        "tcp_keepalives_interval": str(max(1, int(lease / 6))),
        "tcp_keepalives_count": "3",
    }


def make_search_path(settings: Settings) -> dict[str, str]:
    """Return the session setting for `refdata.postgres.schema`, if it is set."""
    own = settings.refdata.postgres
    return {} if own is None else {"search_path": '"' + own.db_schema.replace('"', '""') + '"'}


@contextmanager
def open_ingest_workspace(settings: Settings, *, uses_database: bool) -> Iterator["IngestWorkspace"]:
    """Open the workspace of ingest; with *uses_database*, its runs are recorded in the platform's database."""
    # Imported here: the file readers are slow to import, and most commands with a database do not need them.
    from penstock.ingest.workspace import open_workspace

    @asynccontextmanager
    async def open_migrated() -> AsyncIterator[Database]:
        async with open_database(settings) as db:
            await migrate.migrate(db, list_platform_migrations(settings))
            yield db

    with open_workspace(settings.ingest, open_migrated if uses_database else None) as workspace:
        yield workspace


def list_schemas(settings: Settings) -> list[Schema]:
    """Return every configured database: its name, the database to open, and its migrations."""
    databases: list[Schema] = [("database", open_database(settings), list_platform_migrations(settings))]
    if settings.tracking.database is not None:
        tracking = open_database(settings, settings.tracking.database)
        databases.append(("tracking database", tracking, list_tracking_migrations()))
    if settings.refdata.postgres is not None:
        databases.append(("refdata database", open_refdata_database(settings), list_refdata_migrations()))
    return databases


def _add_password(section: DatabaseSection, name: str = "database.password") -> str:
    """Return the URL of the database with its password, which is only ever in memory."""
    if section.password is None:
        return section.url
    parts = urlsplit(section.url)
    password = quote(resolve_secret(section.password, name), safe="")
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:{password}@{host}"))


def _list_periodic_tasks(platform: Platform) -> list[tuple[str, PeriodicTask, timedelta]]:
    async def delete_sent_messages() -> None:
        while await BUS_OUTBOX.prune(platform.db, platform.db.clock.now() - OUTBOX_RETENTION):
            pass

    async def relay_to_kafka() -> None:
        while await platform.bus.relay():
            pass

    tasks = [make_journal_retention(platform.settings, platform.db)]
    if platform.settings.bus.kafka:
        tasks.append(("bus relay", relay_to_kafka, timedelta(milliseconds=100)))
        tasks.append(("outbox retention", delete_sent_messages, timedelta(minutes=1)))
    return tasks


def make_journal_retention(settings: Settings, db: Database) -> tuple[str, PeriodicTask, timedelta]:
    """Return the periodic task that deletes old entries of the journal in *db*."""

    async def delete_old_entries() -> None:
        deleted = journal.PRUNE_LIMIT
        while deleted >= journal.PRUNE_LIMIT:
            async with db.transaction() as tx:
                deleted = await journal.prune(tx, db.clock.now() - settings.telemetry.journal_retention)

    return "journal retention", delete_old_entries, timedelta(minutes=1)
