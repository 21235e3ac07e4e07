"""The platform, opened as the settings say: databases, bus, signals, storage, and the tree of ingest.

The parts are opened in `parts.py`: a command that needs a database alone does not import them.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

from penstock.app.factories import make_bus, make_signals, make_storage
from penstock.app.schema import known_migrations, refdata_migrations, tracking_migrations
from penstock.kernel.bus import Bus
from penstock.kernel.config.loader import resolve_secret
from penstock.kernel.config.sections import EMBEDDED, DatabaseSection
from penstock.kernel.db import datadir, migrate
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import embedded_postgres
from penstock.kernel.db.outbox import Outbox
from penstock.kernel.errors import BadConfig
from penstock.kernel.signals import Signals
from penstock.kernel.states import journal
from penstock.kernel.storage import Storage
from penstock.kernel.tasks.periodic import PeriodicTask, run_periodically
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.ingest.workspace import IngestWorkspace

BUS_OUTBOX = Outbox("bus_outbox")
OUTBOX_RETENTION = timedelta(days=1)
Schema = tuple[str, AbstractAsyncContextManager[Database], list[migrate.Migration]]


@dataclass(frozen=True)
class Platform:
    """What every role stands on: the four ports, opened as the settings say."""

    settings: Settings
    telemetry: Telemetry
    db: Database
    bus: Bus
    signals: Signals
    storage: Storage


@asynccontextmanager
async def open_platform(settings: Settings, telemetry: Telemetry) -> AsyncIterator[Platform]:
    """Everything connected and the schema up to date; closed in reverse at the end."""
    async with AsyncExitStack() as stack:
        db = await stack.enter_async_context(open_database(settings))
        await migrate.migrate(db, known_migrations(settings))
        bus = make_bus(settings, db)
        stack.push_async_callback(bus.close)
        signals = make_signals(settings, db)
        stack.push_async_callback(signals.close)
        platform = Platform(settings, telemetry, db, bus, signals, make_storage(settings))
        for name, chore, every in _chores(platform):
            await stack.enter_async_context(run_periodically(name, chore, every))
        yield platform


@asynccontextmanager
async def open_database(
    settings: Settings,
    section: DatabaseSection | None = None,
    *,
    prefers_indexes: bool = False,
    session: Mapping[str, str] | None = None,
) -> AsyncIterator[Database]:
    """The platform's PostgreSQL, the embedded one started when needed, or the one *section* names."""
    section = section or settings.database
    async with AsyncExitStack() as stack:
        if section.url == EMBEDDED:
            datadir.check_format(settings.data_dir)
            url = await stack.enter_async_context(embedded_postgres(settings.data_dir / "postgres"))
        else:
            url = _with_password(section)
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
    """R1: the PostgreSQL that refdata names, else the platform's."""
    own = settings.refdata.postgres
    if own is None:
        async with open_database(settings, session=lease_settings(settings.refdata.apply.lease)) as db:
            yield db
        return
    password = f"env:{own.password_from_env}" if own.password_from_env else None
    section = DatabaseSection(url=own.dsn, password=password, pool_size=own.pool.max_size)
    url = _with_password(section, "refdata.postgres.passwordFromEnv")
    async with Database.open(
        url, size=section.pool_size, settings={**search_path(settings), **lease_settings(settings.refdata.apply.lease)}
    ) as db:
        if await db.fetchval("SELECT to_regnamespace(quote_ident($1))", own.db_schema) is None:
            hint = "create it, or mend refdata.postgres.schema"
            raise BadConfig("UNKNOWN_SCHEMA", f"the database has no schema {own.db_schema!r}", hint=hint)
        yield db


def lease_settings(lease_for: timedelta) -> dict[str, str]:
    """R11, H4: a process that freezes or vanishes in a transaction loses it, and with it its locks, after its lease."""
    lease = lease_for.total_seconds()
    return {
        "idle_in_transaction_session_timeout": str(int(lease * 1000)),
        "tcp_keepalives_idle": str(max(1, int(lease / 2))),
        "tcp_keepalives_interval": str(max(1, int(lease / 6))),
        "tcp_keepalives_count": "3",
    }


def search_path(settings: Settings) -> dict[str, str]:
    """Return the session setting for the schema of refdata, if it names one."""
    own = settings.refdata.postgres
    return {} if own is None else {"search_path": '"' + own.db_schema.replace('"', '""') + '"'}


@contextmanager
def open_workplace(settings: Settings, *, uses_database: bool) -> Iterator["IngestWorkspace"]:
    """Open ingest's tree; with *uses_database*, what happens there is recorded in the platform's database."""
    # Imports the readers of files, which most commands that use a database do not need.
    from penstock.ingest.workspace import open_workspace

    @asynccontextmanager
    async def open_migrated() -> AsyncIterator[Database]:
        async with open_database(settings) as db:
            await migrate.migrate(db, known_migrations(settings))
            yield db

    with open_workspace(settings.ingest, open_migrated if uses_database else None) as place:
        yield place


def schemas(settings: Settings) -> list[Schema]:
    """Every database there is: its name, itself, and what belongs into it."""
    found: list[Schema] = [("database", open_database(settings), known_migrations(settings))]
    if settings.tracking.database is not None:
        found.append(("tracking database", open_database(settings, settings.tracking.database), tracking_migrations()))
    if settings.refdata.postgres is not None:
        found.append(("refdata database", open_refdata_database(settings), refdata_migrations()))
    return found


def _with_password(section: DatabaseSection, name: str = "database.password") -> str:
    """The database's URL with its password put in; only ever in memory."""
    if section.password is None:
        return section.url
    parts = urlsplit(section.url)
    password = quote(resolve_secret(section.password, name), safe="")
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:{password}@{host}"))


def _chores(platform: Platform) -> list[tuple[str, PeriodicTask, timedelta]]:
    async def forget_sent_messages() -> None:
        while await BUS_OUTBOX.prune(platform.db, platform.db.clock.now() - OUTBOX_RETENTION):
            pass

    async def relay_to_the_broker() -> None:
        while await platform.bus.relay():
            pass

    chores = [journal_retention(platform.settings, platform.db)]
    if platform.settings.bus.kafka:
        chores.append(("bus relay", relay_to_the_broker, timedelta(milliseconds=100)))
        chores.append(("outbox retention", forget_sent_messages, timedelta(minutes=1)))
    return chores


def journal_retention(settings: Settings, db: Database) -> tuple[str, PeriodicTask, timedelta]:
    """Return the periodic task that deletes old entries of the journal in *db*."""

    async def forget_old_moves() -> None:
        gone = journal.PRUNE_LIMIT
        while gone >= journal.PRUNE_LIMIT:
            async with db.transaction() as tx:
                gone = await journal.prune(tx, db.clock.now() - settings.telemetry.journal_retention)

    return "journal retention", forget_old_moves, timedelta(minutes=1)
