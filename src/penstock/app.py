"""The composition root: the only place that reads settings and wires parts together."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from penstock.kernel import datadir, journal, migrate
from penstock.kernel.auth import Authenticator, JwtAuthenticator, NoAuthenticator
from penstock.kernel.bus import Bus
from penstock.kernel.bus.postgres import PostgresBus
from penstock.kernel.config import resolve
from penstock.kernel.db import Database
from penstock.kernel.embedded import embedded_postgres
from penstock.kernel.keys import KeyFile, Keys, KeyUrl, SharedSecret
from penstock.kernel.outbox import Outbox
from penstock.kernel.periodic import Chore, repeating
from penstock.kernel.sections import EMBEDDED, DatabaseSection
from penstock.kernel.signals import Signals
from penstock.kernel.signals.postgres import PostgresSignals
from penstock.kernel.storage import Storage
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.telemetry import Telemetry
from penstock.settings import JwtSection, KafkaSection, RedisSection, Settings
from penstock.tracking import workers as tracking_workers
from penstock.tracking.metrics import TrackingMetrics
from penstock.tracking.service import Tracking

CHANNEL = "penstock"
BUS_OUTBOX = Outbox("bus_outbox")
OUTBOX_RETENTION = timedelta(days=1)


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
            await stack.enter_async_context(repeating(name, chore, every))
        yield platform


@asynccontextmanager
async def open_database(
    settings: Settings, section: DatabaseSection | None = None, *, looks_up: bool = False
) -> AsyncIterator[Database]:
    """The platform's PostgreSQL, the embedded one started when needed, or the one *section* names."""
    section = section or settings.database
    async with AsyncExitStack() as stack:
        if section.url == EMBEDDED:
            datadir.check_format(settings.data_dir)
            url = await stack.enter_async_context(embedded_postgres(settings.data_dir / "postgres"))
        else:
            url = _with_password(section)
        opened = _open(url, section, looks_up=looks_up)
        yield await stack.enter_async_context(opened)


def _open(url: str, section: DatabaseSection, *, looks_up: bool) -> AbstractAsyncContextManager[Database]:
    timeout = section.statement_timeout
    return Database.open(url, size=section.pool_size, statement_timeout=timeout, looks_up=looks_up)


@asynccontextmanager
async def open_tracking(
    settings: Settings, telemetry: Telemetry, platform: Database | None = None
) -> AsyncIterator[Tracking]:
    """T10: the pipeline on its own database, else on the *platform*'s, its tables up to date and its chores done."""
    own = settings.tracking.database
    async with AsyncExitStack() as stack:
        shared = platform if own is None else None
        if shared is not None:
            opened = _open(shared.dsn, settings.database, looks_up=True)
        else:
            opened = open_database(settings, own, looks_up=True)
        db = await stack.enter_async_context(opened)
        await migrate.migrate(db, tracking_migrations())
        metrics = TrackingMetrics(telemetry.registry)
        tracking = await stack.enter_async_context(Tracking.open(db, settings.tracking, metrics))
        chores = [*tracking_workers.chores(tracking), *([] if shared else [_journal_retention(settings, db)])]
        for name, chore, every in chores:
            await stack.enter_async_context(repeating(name, chore, every))
        yield tracking


def known_migrations(settings: Settings) -> list[migrate.Migration]:
    """Every migration of the platform's database, the kernel's first."""
    return tracking_migrations() if settings.tracking.database is None else migrate.load("penstock.kernel")


def tracking_migrations() -> list[migrate.Migration]:
    """What the pipeline's database needs: its tables, and the kernel's for their history."""
    return [*migrate.load("penstock.kernel"), *migrate.load("penstock.tracking")]


def make_bus(settings: Settings, db: Database) -> Bus:
    """Kafka when it is configured, else PostgreSQL."""
    section = settings.bus
    if section.kafka is not None:
        return make_kafka(section.kafka, section.partitions, db)
    return PostgresBus(db, partitions=section.partitions)


def make_kafka(section: KafkaSection, partitions: int, db: Database | None) -> Bus:
    """The bus on Kafka; without a database nothing can be published in a transaction."""
    from penstock.kernel.bus.kafka import KafkaBus  # librdkafka loads only where it is used

    config = {**section.options, **_resolved(section.secrets, "bus.kafka.secrets")}
    return KafkaBus(section.bootstrap, db=db, partitions=partitions, group_prefix=section.group_prefix, config=config)


def make_signals(settings: Settings, db: Database) -> Signals:
    """Redis when it is configured, else PostgreSQL."""
    section = settings.signals
    return make_redis(section.redis) if section.redis is not None else PostgresSignals(db, CHANNEL)


def make_redis(section: RedisSection) -> Signals:
    """The signals on Redis."""
    from penstock.kernel.signals.redis import RedisSignals  # loads only where it is used

    return RedisSignals(
        section.nodes,
        mode=section.mode,
        pub_channel=f"{CHANNEL}:pub",
        stream_key=f"{CHANNEL}:stream",
        group_prefix=f"{CHANNEL}:group",
        username=section.username,
        password=resolve(section.password, "signals.redis.password") if section.password else None,
        tls=section.tls,
        tls_ca_file=str(section.tls_ca_file) if section.tls_ca_file else None,
    )


def make_storage(settings: Settings) -> Storage:
    """The configured object store, else a folder of the data directory."""
    section = settings.storage
    parts = urlsplit(section.url or "")
    if parts.scheme in ("", "file"):
        return FolderStorage(Path(unquote(parts.path)) if section.url else settings.data_dir / "objects")
    from penstock.kernel.storage.objects import ObjectStorage

    return ObjectStorage(section.url or "", {**section.options, **_resolved(section.secrets, "storage.secrets")})


def make_authenticator(settings: Settings) -> Authenticator:
    """R25: tokens when keys are configured, else nobody but whoever is on this machine."""
    section = settings.auth.jwt
    if section is None:
        return NoAuthenticator()
    return JwtAuthenticator(
        _keys(section),
        algorithms=list(section.algorithms),
        issuer=section.issuer,
        audience=section.audience,
        tenant_claim=section.tenant_claim,
        leeway=section.leeway,
    )


def make_telemetry(settings: Settings) -> Telemetry:
    """Metrics always; traces where there is somewhere to send them."""
    endpoint = settings.telemetry.otlp_endpoint
    if endpoint is None:
        return Telemetry()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return Telemetry(spans=[BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))])


def _resolved(secrets: Mapping[str, str], name: str) -> dict[str, str]:
    return {key: resolve(reference, f"{name}.{key}") for key, reference in secrets.items()}


def _keys(section: JwtSection) -> Keys:
    if section.secret is not None:
        return SharedSecret(resolve(section.secret, "auth.jwt.secret"))
    return KeyFile(section.jwks_file) if section.jwks_file is not None else KeyUrl(section.jwks_url or "")


def _with_password(section: DatabaseSection) -> str:
    """The database's URL with its password put in; only ever in memory."""
    if section.password is None:
        return section.url
    parts = urlsplit(section.url)
    password = quote(resolve(section.password, "database.password"), safe="")
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:{password}@{host}"))


def _chores(platform: Platform) -> list[tuple[str, Chore, timedelta]]:
    async def forget_sent_messages() -> None:
        while await BUS_OUTBOX.prune(platform.db, platform.db.clock.now() - OUTBOX_RETENTION):
            pass

    async def relay_to_the_broker() -> None:
        while await platform.bus.relay():
            pass

    chores = [_journal_retention(platform.settings, platform.db)]
    if platform.settings.bus.kafka:
        chores.append(("bus relay", relay_to_the_broker, timedelta(milliseconds=100)))
        chores.append(("outbox retention", forget_sent_messages, timedelta(minutes=1)))
    return chores


def _journal_retention(settings: Settings, db: Database) -> tuple[str, Chore, timedelta]:
    async def forget_old_moves() -> None:
        gone = journal.PRUNE_LIMIT
        while gone >= journal.PRUNE_LIMIT:
            async with db.transaction() as tx:
                gone = await journal.prune(tx, db.clock.now() - settings.telemetry.journal_retention)

    return "journal retention", forget_old_moves, timedelta(minutes=1)
