"""Factories that make the bus, signals, storage and telemetry from the settings."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from penstock.kernel.bus import Bus
from penstock.kernel.bus.postgres import PostgresBus
from penstock.kernel.config.loader import resolve_secret
from penstock.kernel.db.database import Database
from penstock.kernel.signals import Signals
from penstock.kernel.signals.postgres import PostgresSignals
from penstock.kernel.storage import Storage
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.config import InvalidationSection
from penstock.settings import KafkaSection, RedisSection, Settings

CHANNEL = "penstock"


def make_bus(settings: Settings, db: Database) -> Bus:
    """Return the bus: Kafka if it is configured, else PostgreSQL."""
    section = settings.bus
    if section.kafka is not None:
        return make_kafka(section.kafka, section.partitions, db)
    return PostgresBus(db, partitions=section.partitions)


def make_kafka(section: KafkaSection, partitions: int, db: Database | None) -> Bus:
    """Return the bus on Kafka; without a database it cannot publish in a transaction."""
    from penstock.kernel.bus.kafka import KafkaBus  # imported here: librdkafka is loaded only if it is used

    config = {**section.options, **_resolve_secrets(section.secrets, "bus.kafka.secrets")}
    return KafkaBus(section.bootstrap, db=db, partitions=partitions, group_prefix=section.group_prefix, config=config)


def make_signals(settings: Settings, db: Database) -> Signals:
    """Return the signals: Redis if it is configured, else PostgreSQL."""
    section = settings.signals
    return make_redis(section.redis) if section.redis is not None else PostgresSignals(db, CHANNEL)


def make_redis(section: RedisSection, route: InvalidationSection | None = None) -> Signals:
    """Return the signals on Redis: on the channel of the platform, or on the *route* of refdata."""
    from penstock.kernel.signals.redis import STREAM_LENGTH, RedisSignals  # imported here: loaded only if it is used

    return RedisSignals(
        section.nodes,
        mode=section.mode,
        pub_channel=route.pub_channel if route else f"{CHANNEL}:pub",
        stream_key=route.stream_key if route else f"{CHANNEL}:stream",
        group_prefix=route.consumer_group if route else f"{CHANNEL}:group",
        stream_length=route.stream_length if route else STREAM_LENGTH,
        username=section.username,
        password=resolve_secret(section.password, "signals.redis.password") if section.password else None,
        tls=section.tls,
        tls_ca_file=str(section.tls_ca_file) if section.tls_ca_file else None,
    )


def make_invalidations(settings: Settings, db: Database) -> Signals:
    """R16: return the signals of refdata: on its own Redis, or else on the platform's Redis, or else on PostgreSQL."""
    if settings.refdata.redis.nodes or settings.signals.redis:
        return make_refdata_redis(settings)
    return PostgresSignals(db, settings.refdata.redis.pub_channel)


def make_refdata_redis(settings: Settings) -> Signals:
    """Return the signals of refdata on its own Redis, or else on the platform's."""
    route, redis = settings.refdata.redis, settings.signals.redis
    if route.nodes or redis is None:
        password = f"env:{route.password_from_env}" if route.password_from_env else None
        redis = RedisSection(nodes=route.nodes, mode=route.mode, username=route.username, password=password)
    return make_redis(redis, route)


def make_storage(settings: Settings) -> Storage:
    """Return the configured object store, or else the folder `objects` of the data directory."""
    section = settings.storage
    parts = urlsplit(section.url or "")
    if parts.scheme in ("", "file"):
        return FolderStorage(Path(unquote(parts.path)) if section.url else settings.data_dir / "objects")
    from penstock.kernel.storage.objects import ObjectStorage  # imported here: loaded only if it is used

    return ObjectStorage(section.url or "", {**section.options, **_resolve_secrets(section.secrets, "storage.secrets")})


def make_telemetry(settings: Settings) -> Telemetry:
    """Return the telemetry: metrics always, traces only if `telemetry.otlp_endpoint` is set."""
    endpoint = settings.telemetry.otlp_endpoint
    if endpoint is None:
        return Telemetry()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return Telemetry(spans=[BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))])


def _resolve_secrets(secrets: Mapping[str, str], name: str) -> dict[str, str]:
    return {key: resolve_secret(reference, f"{name}.{key}") for key, reference in secrets.items()}
