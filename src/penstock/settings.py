"""All settings with their defaults, as penstock.yaml has them; read from the file, the environment and overrides."""

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
    """Where Penstock listens."""

    host: str = Field("127.0.0.1", description="The address it listens on; beyond loopback only with `auth.jwt`.")
    port: Port = Field(8080, description="The API; 0 takes a free port.")
    query_port: Port = Field(8081, description="The query server; 0 takes a free port.")
    body_limit: int = Field(10_000_000, ge=1_000, description="Bytes a request body may have.")
    drain_delay: Duration = Field(
        timedelta(), description="How long a stop goes on taking requests, not ready any more, until nobody sends any."
    )
    drain_timeout: Duration = Field(timedelta(seconds=20), description="How long a stop waits for work under way.")

    @property
    def is_loopback(self) -> bool:
        """Whether nobody outside this machine can connect."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class KafkaSection(Section):
    """Apache Kafka as the bus."""

    bootstrap: str = Field(min_length=1, description="host:port, several with commas")
    group_prefix: str = Field("penstock", description="What the names of consumer groups begin with.")
    options: Options = Field(default_factory=dict, description="librdkafka's own settings, e.g. sasl.username")
    secrets: Secrets = Field(default_factory=dict, description="Its secret settings, by reference: sasl.password")


class BusSection(Section):
    """Messages between processes: on PostgreSQL, unless Kafka is given."""

    partitions: int = Field(16, ge=1, le=1000, description="Partitions of a topic Penstock creates.")
    kafka: KafkaSection | None = None


class RedisSection(Section):
    """Redis as the carrier of signals."""

    nodes: list[str] = Field(min_length=1, description="host:port of some nodes")
    mode: Literal["cluster", "single"] = Field("cluster", description="`cluster`, or `single` for one server.")
    username: str | None = Field(None, description="Who we are there.")
    password: SecretRef | None = Field(None, description="Of that user.")
    tls: bool = Field(False, description="Whether to speak TLS.")
    tls_ca_file: Path | None = Field(None, description="Whom to trust; without it, whom the system trusts.")


class SignalsSection(Section):
    """Instant hints to all pods: on PostgreSQL, unless Redis is given."""

    redis: RedisSection | None = None


class StorageSection(Section):
    """Objects: in a folder of the data directory, unless a store is given."""

    url: Url | None = Field(None, description="s3://bucket/prefix, gs://…, az://…, or file:///folder")
    options: Options = Field(default_factory=dict, description="The store's own settings, e.g. region, endpoint")
    secrets: Secrets = Field(default_factory=dict, description="Its secret settings, by reference")


class TelemetrySection(Section):
    """Logs, metrics, traces."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Taken over while everything runs."
    )
    log_format: LogFormat = Field("auto", description="`auto`: for people on a terminal, else JSON.")
    otlp_endpoint: Url | None = Field(None, description="Where traces go, e.g. http://collector:4318/v1/traces")
    journal_retention: Duration = Field(timedelta(days=90), description="How long moves are remembered.")


@dataclass(frozen=True)
class Origin:
    """Where settings come from; it makes no two of them differ."""

    file: Path | None = field(default=None, compare=False)
    stamp: "Stamp | None" = field(default=None, compare=False)
    reread: "Callable[[], Settings] | None" = field(default=None, compare=False)


class Settings(Section):
    """penstock.yaml. Everything has a default; an empty file runs it all on this machine."""

    data_dir: Path = Field(Path(".penstock"), description="Where the embedded database and objects live.")
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
        """The file they come from."""
        return self._origin.file

    @property
    def stamp(self) -> Stamp | None:
        """How that file was marked just before it was read."""
        return self._origin.stamp

    def reread(self) -> "Settings":
        """The settings as they would be now; BadConfig when they cannot be used."""
        return self._origin.reread() if self._origin.reread else self

    @model_validator(mode="after")
    def _feeds_fill_what_reads_them(self) -> "Settings":
        for feed, section in self.harvest.feeds.items():
            for place, fed in enumerate(section.dictionaries):
                if wrong := _cannot_be_fed(self.refdata, fed):
                    raise MisplacedKey(("harvest", "feeds", feed, "dictionaries", place), wrong)
        return self

    @model_validator(mode="after")
    def _is_safe(self) -> "Settings":
        if self.auth.jwt is None and not self.server.is_loopback:
            raise MisplacedKey(
                ("server", "host"),
                f"{self.server.host} can be reached by other machines, and auth.jwt is not set; "
                "without authentication Penstock listens on loopback only",
            )
        return self


def _cannot_be_fed(refdata: RefdataSection, fed: DictionarySinkSection) -> str | None:
    found = next((dictionary for dictionary in refdata.dictionaries if dictionary.code == fed.code), None)
    if found is None:
        return f"there is no dictionary {fed.code} in refdata.dictionaries"
    if found.load_sql is None or found.apply is not None:
        return f"{fed.code} has to read what harvest publishes: give it `loadSql`, and no `apply`"
    if found.keep_versions or found.max_drop_percent is not None:
        said = "are for SNAPSHOTs, and nobody sends one to it; limits.max_delete_ratio of the feed guards it"
        return f"keepVersions and maxDropPercent of {fed.code} {said}"
    if refdata.tenants is not None and fed.tenant not in refdata.tenants:
        return f"there is no tenant {fed.tenant} in refdata.tenants"
    if refdata.postgres is not None:
        return "refdata.postgres is another database, and cannot read what harvest publishes"
    return None


def load_settings(
    file: Path | None, env: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | None = None
) -> Settings:
    """The settings from *file* (else ./penstock.yaml when there is one), the environment, and overrides by path."""
    place = file or (Path(FILE) if Path(FILE).exists() else None)
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    paths: dict[KeyPath, Any] = {tuple(name.split(".")): value for name, value in given.items()}
    stamp = stamp_of(place)
    settings = load(Settings, place, os.environ if env is None else env, paths)
    settings._origin = Origin(place, stamp, lambda: load_settings(place, env, overrides))  # noqa: SLF001 - it is ours
    return settings


def stamp_of(file: Path | None) -> Stamp | None:
    """Changes with the file, also when a symlink to it is moved, as Kubernetes does it."""
    try:
        stat = file.stat() if file else None
    except OSError:  # gone for a moment, while it is replaced
        return None
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size) if stat else None
