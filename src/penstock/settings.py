"""All settings of penstock.yaml with their defaults; read from the file, the environment and overrides."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from penstock.flows.config import FlowsSection
from penstock.harvest.config import DictionarySinkSection, HarvestSection
from penstock.ingest.config import IngestSection
from penstock.kernel.config.loader import KeyPath, MisplacedKey, SecretRef, Section, load
from penstock.kernel.config.sections import DatabaseSection, Duration, Options, Secrets, Url
from penstock.kernel.http.auth import AuthSection
from penstock.kernel.telemetry.telemetry import LogFormat
from penstock.refdata.config import RefdataSection
from penstock.tracking.config import TrackingSection

FILE = "penstock.yaml"
Port = Annotated[int, Field(ge=0, le=65535)]
Stamp = tuple[int, int, int]


class ServerSection(Section):
    """HTTP servers: address, ports, limits and graceful shutdown."""

    host: str = Field(
        "127.0.0.1",
        description="IP address or host name that the HTTP servers bind. An address other than loopback needs "
        "`auth.jwt`.",
    )
    port: Port = Field(8080, description="TCP port of the API. 0 chooses a free port.")
    query_port: Port = Field(
        8081, description="TCP port of the query server, which serves dictionaries. 0 chooses a free port."
    )
    body_limit: int = Field(
        10_000_000, ge=1_000, description="Maximum size of a request body in bytes. A larger body is answered with 413."
    )
    drain_delay: Duration = Field(
        timedelta(),
        description="Grace period after SIGTERM: readiness fails, but requests are still served, so that load "
        "balancers can stop sending them.",
    )
    drain_timeout: Duration = Field(
        timedelta(seconds=20),
        description="How long a shutdown waits for running requests and tasks before it cancels them.",
    )

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can connect."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class KafkaSection(Section):
    """Apache Kafka as the message bus."""

    bootstrap: str = Field(
        min_length=1,
        description="Kafka bootstrap servers: host:port, separated by commas, e.g. kafka-1:9092,kafka-2:9092.",
    )
    group_prefix: str = Field("penstock", description="Prefix of the names of Kafka consumer groups.")
    options: Options = Field(
        default_factory=dict,
        description="Configuration properties of librdkafka that are not secret, e.g. `sasl.username: penstock`.",
    )
    secrets: Secrets = Field(
        default_factory=dict,
        description="Secret configuration properties of librdkafka, each as env:NAME or file:/path, e.g. "
        "`sasl.password: env:KAFKA_PASSWORD`.",
    )


class BusSection(Section):
    """Message bus between processes: PostgreSQL, or Apache Kafka if `kafka` is set."""

    partitions: int = Field(
        16,
        ge=1,
        le=1000,
        description="Number of partitions of each topic that Penstock creates; the limit of parallel work.",
    )
    kafka: KafkaSection | None = Field(
        None, description="Connection to Apache Kafka. If not set, the bus uses PostgreSQL."
    )


class RedisSection(Section):
    """Redis as the transport of signals."""

    nodes: list[str] = Field(
        min_length=1, description="Addresses of Redis nodes as host:port. In a cluster the other nodes are discovered."
    )
    mode: Literal["cluster", "single"] = Field(
        "cluster", description="Type of the Redis deployment: `cluster`, or `single` for one server."
    )
    username: str | None = Field(None, description="User name for authentication at Redis.")
    password: SecretRef | None = Field(
        None, description="Password for authentication at Redis, as env:NAME or file:/path."
    )
    tls: bool = Field(False, description="Whether to connect to Redis with TLS.")
    tls_ca_file: Path | None = Field(
        None,
        description="PEM file with the CA certificates that Redis is verified with. Default: the CAs of the system.",
    )


class SignalsSection(Section):
    """Signals that announce new versions to query servers: PostgreSQL, or Redis if `redis` is set."""

    redis: RedisSection | None = Field(None, description="Connection to Redis. If not set, signals use PostgreSQL.")


class StorageSection(Section):
    """Object storage for large payloads, artifacts and harvested pages."""

    url: Url | None = Field(
        None,
        description="URL of the object store: s3://bucket/prefix, gs://…, az://… or file:///folder. Default: the "
        "folder "
        "`objects` of `data_dir`.",
    )
    options: Options = Field(
        default_factory=dict,
        description="Options of the object store that are not secret, e.g. `region` or `endpoint`.",
    )
    secrets: Secrets = Field(
        default_factory=dict,
        description="Secret options of the object store, each as env:NAME or file:/path, e.g. "
        "`secret_access_key: env:S3_SECRET`.",
    )


class TelemetrySection(Section):
    """Logs, traces and the journal of state changes."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Minimum level of log entries. A change in the file is applied without a restart."
    )
    log_format: LogFormat = Field(
        "auto",
        description="Format of log entries: `console`, `json`, or `auto` for console on a terminal and JSON elsewhere.",
    )
    otlp_endpoint: Url | None = Field(
        None,
        description="URL that OpenTelemetry traces are sent to, e.g. http://collector:4318/v1/traces. If not set, no "
        "traces "
        "are recorded.",
    )
    journal_retention: Duration = Field(
        timedelta(days=90), description="How long the journal of state changes is kept; older entries are deleted."
    )


@dataclass(frozen=True)
class Origin:
    """The source of settings. It is not part of their equality."""

    file: Path | None = field(default=None, compare=False)
    stamp: "Stamp | None" = field(default=None, compare=False)
    reread: "Callable[[], Settings] | None" = field(default=None, compare=False)


class Settings(Section):
    """penstock.yaml. Every key has a default: with an empty file everything runs on this machine."""

    data_dir: Path = Field(
        Path(".penstock"),
        description="Folder of the embedded PostgreSQL, of local objects and of the copies of dictionaries. Relative "
        "to the "
        "working directory.",
    )
    server: ServerSection = ServerSection()
    database: DatabaseSection = DatabaseSection()
    bus: BusSection = BusSection()
    signals: SignalsSection = SignalsSection()
    storage: StorageSection = StorageSection()
    auth: AuthSection = AuthSection()
    telemetry: TelemetrySection = TelemetrySection()
    tracking: TrackingSection = TrackingSection()
    refdata: RefdataSection = RefdataSection()
    ingest: IngestSection = IngestSection()
    flows: FlowsSection = FlowsSection()
    harvest: HarvestSection = HarvestSection()

    _origin: Origin = PrivateAttr(Origin())

    @property
    def file(self) -> Path | None:
        """Return the file that the settings were read from."""
        return self._origin.file

    @property
    def stamp(self) -> Stamp | None:
        """Return the stamp of the file just before it was read."""
        return self._origin.stamp

    def reread(self) -> "Settings":
        """Return the settings from the same sources as they are now; BadConfig if they are invalid."""
        return self._origin.reread() if self._origin.reread else self

    @model_validator(mode="after")
    def _check_dictionaries_of_feeds(self) -> "Settings":
        for feed, section in self.harvest.feeds.items():
            for index, sink in enumerate(section.dictionaries):
                if problem := _describe_wrong_sink(self.refdata, sink):
                    raise MisplacedKey(("harvest", "feeds", feed, "dictionaries", index), problem)
        return self

    @model_validator(mode="after")
    def _require_authentication(self) -> "Settings":
        if self.auth.jwt is None and not self.server.is_loopback:
            raise MisplacedKey(
                ("server", "host"),
                f"{self.server.host} accepts connections from other machines, which needs authentication: set "
                "auth.jwt, or "
                "use the loopback address 127.0.0.1",
            )
        return self


def _describe_wrong_sink(refdata: RefdataSection, sink: DictionarySinkSection) -> str | None:
    """Return why the dictionary *sink* cannot read a feed, or None if it can."""
    code = sink.code
    dictionary = next((dictionary for dictionary in refdata.dictionaries if dictionary.code == code), None)
    if dictionary is None:
        return f"refdata.dictionaries has no dictionary {code}"
    if dictionary.load_sql is None or dictionary.apply is not None:
        return f"dictionary {code} reads the tables of harvest: it needs `loadSql` and must not have `apply`"
    if dictionary.retain_versions or dictionary.max_drop_percent is not None:
        reason = "apply to SNAPSHOT commands only, which a feed does not send; use limits.max_delete_ratio of the feed"
        return f"retainVersions and maxDropPercent of dictionary {code} {reason}"
    if refdata.tenants is not None and sink.tenant not in refdata.tenants:
        return f"refdata.tenants has no tenant {sink.tenant}"
    if refdata.postgres is not None:
        return "refdata.postgres is another database, which cannot read the tables of harvest"
    return None


def load_settings(
    file: Path | None, env: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | None = None
) -> Settings:
    """Return the settings from *file* (default: ./penstock.yaml, if it exists), the environment and *overrides*."""
    source = file or (Path(FILE) if Path(FILE).exists() else None)
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    paths: dict[KeyPath, Any] = {tuple(name.split(".")): value for name, value in given.items()}
    stamp = read_stamp(source)
    settings = load(Settings, source, os.environ if env is None else env, paths)
    settings._origin = Origin(source, stamp, lambda: load_settings(source, env, overrides))  # noqa: SLF001 - same module
    return settings


def read_stamp(file: Path | None) -> Stamp | None:
    """Return a value that changes with the file, also if a symlink to it is moved, as Kubernetes does."""
    try:
        stat = file.stat() if file else None
    except OSError:  # missing for a moment, while it is replaced
        return None
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size) if stat else None
