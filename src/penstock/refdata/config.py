"""The `refdata` section of penstock.yaml: the YAML of the founding document, §5, and settings beyond it."""

import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import SplitResult, quote, urlsplit

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.alias_generators import to_camel

from penstock.kernel.config.loader import MisplacedKey, Section
from penstock.kernel.config.sections import Duration, Url, validate_url
from penstock.kernel.http.auth import Principal
from penstock.refdata import sql_template
from penstock.refdata.contract import NAME

KEY_TEMPLATE = "{tenantId}:{dictCode}"
_JDBC = "jdbc:"
_LOADING = ("tenantId",)
_CHANGING = ("tenantId", "eventEpoch", "eventVersion", "eventId", "occurredAt")
_ITEM = (*_CHANGING, "key", "payload")
_WHOLE = (*_CHANGING, "snapshotJson")
_CODE = Field(pattern=NAME)
_ENV_NAME = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")


def _list_duplicates(names: Sequence[str]) -> str:
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


class CamelSection(Section):
    """A section whose keys are in camelCase, as in the founding document."""

    model_config = ConfigDict(alias_generator=to_camel)


class PoolSection(CamelSection):
    """The connection pool of `refdata.postgres`."""

    max_size: int = Field(20, ge=2, le=500, description="Maximum number of connections of one process.")


class PostgresSection(CamelSection):
    """R1: the PostgreSQL database of the dictionaries. Default: the database of the platform."""

    url: Url | None = Field(
        None, description="postgresql://user@host:5432/database. Either `url` or `jdbcUrl` is required."
    )
    jdbc_url: Url | None = Field(None, description="The same as a JDBC URL: jdbc:postgresql://host:5432/database.")
    username: str | None = Field(
        None, min_length=1, description="User name in PostgreSQL. Required if the URL contains no user."
    )
    password_from_env: Annotated[str, _ENV_NAME] | None = Field(
        None, description="Name of the environment variable with the password."
    )
    db_schema: str = Field(
        "public",
        alias="schema",
        min_length=1,
        max_length=63,
        description="Schema with the tables of Penstock; also the search path of the configured statements.",
    )
    pool: PoolSection = PoolSection()

    @field_validator("url", "jdbc_url")
    @classmethod
    def _check_url(cls, url: str | None, info: ValidationInfo) -> str | None:
        if url is None:
            return None
        parts = urlsplit(validate_url(url.removeprefix(_JDBC)))
        if parts.scheme not in ("postgresql", "postgres") or not parts.path.strip("/"):
            prefix = _JDBC if info.field_name == "jdbc_url" else ""
            raise ValueError(f"must be {prefix}postgresql://host:5432/database")
        return url

    @model_validator(mode="after")
    def _has_one_address_and_a_user(self) -> "PostgresSection":
        if (self.url is None) == (self.jdbc_url is None):
            raise MisplacedKey(("url",), "exactly one of `url` and `jdbcUrl` is required")
        if self.username is None and not self._parts.username:
            raise MisplacedKey(("username",), "is required, because the URL contains no user")
        return self

    @property
    def dsn(self) -> str:
        """Return the URL for PostgreSQL's own clients, with the user and without a password."""
        user, _, host = self._parts.netloc.rpartition("@")
        user = user if self.username is None else quote(self.username, safe="")
        return self._parts._replace(scheme="postgresql", netloc=f"{user}@{host}").geturl()

    @property
    def _parts(self) -> SplitResult:
        return urlsplit((self.url or self.jdbc_url or "").removeprefix(_JDBC))


class ConsistencySection(CamelSection):
    """The waiting time of writers."""

    wait_commit_timeout_ms: int = Field(
        300,
        ge=50,
        le=1000,
        description="Time in ms that a request with WAIT_COMMIT waits for the commit if it has no `timeoutMs`.",
    )


class TenantSection(CamelSection):
    """R25: the source of a caller's tenant."""

    source: Literal["JWT_CLAIM"] = Field(
        "JWT_CLAIM", description="Source of a caller's tenant. Only JWT_CLAIM is supported."
    )
    claim: str = Field("tenant_id", min_length=1, description="Claim of the token that contains the tenant.")
    allow_header_override_for_trusted_clients: bool = Field(
        False, description="Whether `trustedClients` may act for another tenant with the header X-Tenant-Id."
    )
    trusted_clients: list[str] = Field(
        default_factory=list, description="Subjects (claim `sub`) of the tokens that may send the header X-Tenant-Id."
    )

    def read_tenant(self, caller: Principal, named: str | None) -> object:
        """Return the tenant of the token's claim, or the tenant that a trusted client names instead."""
        if self.allow_header_override_for_trusted_clients and named and caller.subject in self.trusted_clients:
            return named
        return caller.claims.get(self.claim, "")


class SecuritySection(CamelSection):
    """The access of callers to tenants."""

    tenant: TenantSection = TenantSection()


class ExternalTopicSection(CamelSection):
    """R10: a topic with messages of another system, and the mapping of a message to a command.

    The source of a field is `=text` (a constant), `/a/b` (a JSON pointer into the value), `key` (the key of the
    message) or `header:name`. If `items` points to a list, the fields of an item are read from each of its elements.
    """

    topic: str = Field(
        pattern=r"^[A-Za-z0-9._-]{1,200}$", description="Name of the topic that is read. Penstock does not write to it."
    )
    tenant_id: str = Field(description="Source of the tenant: =text, /json/pointer, key or header:name.")
    dict_code: str = Field(description="Source of the dictionary code: =text, /json/pointer, key or header:name.")
    event_type: str = Field("=DELTA", description="Source of the event type, DELTA or SNAPSHOT.")
    event_id: str | None = Field(
        None, description="Source of the event id. Default: a UUID derived from topic, partition and offset."
    )
    source_revision: str | None = Field(
        None, description="Source of the revision number. A command with a lower revision than the last one fails."
    )
    occurred_at: str | None = Field(None, description="Source of the time of the change, in ISO 8601.")
    snapshot_id: str | None = Field(None, description="Source of the snapshot id of a chunk.")
    chunk_index: str | None = Field(None, description="Source of the index of a chunk; the first is 1.")
    chunks_total: str | None = Field(None, description="Source of the number of chunks of the snapshot.")
    items: str | None = Field(None, description="JSON pointer to the list of items. Default: the message is one item.")
    key: str = Field("key", description="Source of the key of an item.")
    op: str | None = Field(
        None, description="Source of the operation: DELETE for a value of `deletes`, otherwise UPSERT."
    )
    payload: str = Field("/", description="Source of the payload of an item.")
    deletes: list[str] = Field(["DELETE", "delete", "D", "d"], description="Values of the operation that mean DELETE.")

    @model_validator(mode="after")
    def _check_sources(self) -> "ExternalTopicSection":
        for name, source in self:
            is_source = name not in ("topic", "deletes") and source is not None
            if is_source and not re.match(r"^(=.*|/.*|key|header:.+)$", str(source), re.DOTALL):
                raise MisplacedKey((to_camel(name),), "must be =text, /json/pointer, key or header:name")
        for name, pattern in (("tenant_id", NAME), ("dict_code", NAME), ("event_type", "^(DELTA|SNAPSHOT)$")):
            source = getattr(self, name)
            if source.startswith("=") and not re.fullmatch(pattern, source[1:]):
                raise MisplacedKey((to_camel(name),), f"{source[1:]!r} is not a valid {to_camel(name)}")
        return self


class CommandsSection(CamelSection):
    """The topic of commands, and the external topics whose messages become commands."""

    commands_topic: str = Field(
        "refdata.commands",
        pattern=r"^[A-Za-z0-9._-]{1,200}$",
        description="Topic of the commands. On Kafka, dead letters are sent to the topic with `.dead` appended.",
    )
    key_template: str = Field(
        KEY_TEMPLATE,
        description="Message key of the commands. Only {tenantId}:{dictCode} is supported: it keeps the commands of a "
        "dictionary in order.",
    )
    external_topics: list[ExternalTopicSection] = Field(
        default_factory=list, description="Topics of other systems, read by the role kafka-adapter."
    )

    @field_validator("key_template")
    @classmethod
    def _check_key_template(cls, template: str) -> str:
        if template != KEY_TEMPLATE:
            raise ValueError(f"must be {KEY_TEMPLATE}, which keeps the commands of a dictionary in order")
        return template

    @model_validator(mode="after")
    def _check_topics(self) -> "CommandsSection":
        names = [self.commands_topic, f"{self.commands_topic}.dead", *(topic.topic for topic in self.external_topics)]
        if duplicates := _list_duplicates(names):
            raise MisplacedKey(("externalTopics",), f"duplicate topic: {duplicates}")
        return self


class InvalidationSection(CamelSection):
    """R16: the Redis of invalidations. Default: `signals.redis`, or else PostgreSQL."""

    mode: Literal["cluster", "single"] = Field(
        "cluster", description="`cluster` for Redis Cluster, `single` for one Redis server."
    )
    nodes: list[str] = Field(default_factory=list, description="Addresses of one or more nodes, as host:port.")
    username: str | None = Field(None, description="User name for Redis.")
    password_from_env: Annotated[str, _ENV_NAME] | None = Field(
        None, description="Name of the environment variable with the password for Redis."
    )
    pub_channel: str = Field(
        "refdata:inv:pub", min_length=1, max_length=63, description="Pub/sub channel on which invalidations are sent."
    )
    stream_key: str = Field(
        "refdata:inv:stream",
        min_length=1,
        description="Stream of invalidations, from which pods read those that they missed.",
    )
    consumer_group: str = Field(
        "refdata-query-pods", min_length=1, description="Prefix of the consumer groups; each pod has its own group."
    )
    stream_length: int = Field(100_000, ge=100, description="Approximate maximum number of entries in the stream.")


class ApplySection(CamelSection):
    """The application of commands."""

    workers: int = Field(2, ge=1, le=32, description="Number of batches that one process applies concurrently.")
    batch: int = Field(500, ge=1, le=10_000, description="Maximum number of commands in one transaction.")
    lease: Annotated[Duration, Field(ge=timedelta(seconds=1), le=timedelta(minutes=30))] = Field(
        timedelta(seconds=30),
        description="Duration of the lease on commands. When a process hangs, another one takes them over after it.",
    )
    max_attempts: int = Field(
        5, ge=1, le=100, description="Number of attempts for a command whose SQL statement times out."
    )


class RefdataRetentionSection(CamelSection):
    """R14: retention times. `processedEvents` should be at least twice the retention time of the commands topic."""

    processed_events: Duration = Field(
        timedelta(days=14),
        description="Retention time of the ids of processed commands, by which repeated commands are recognised.",
    )
    tombstones: Duration = Field(
        timedelta(days=14), description="Retention time of deleted items in the table `dictionary_item`."
    )
    updates: Duration = Field(timedelta(days=30), description="Retention time of the results of updates.")
    history: Duration = Field(timedelta(days=90), description="Retention time of the history of versions.")

    @model_validator(mode="after")
    def _check_update_retention(self) -> "RefdataRetentionSection":
        if self.updates < self.processed_events:
            raise MisplacedKey(
                ("updates",),
                "must not be shorter than processedEvents: a repeated command gets the result of its update",
            )
        return self


class SnapshotSection(CamelSection):
    """R13: snapshots that are sent in chunks."""

    expire_after: Annotated[Duration, Field(ge=timedelta(seconds=1))] = Field(
        timedelta(hours=1), description="Time without a new chunk after which an incomplete snapshot fails."
    )
    max_items: int = Field(5_000_000, ge=1, description="Maximum number of items in all chunks of a snapshot.")


class QuerySection(CamelSection):
    """R17–R24: the pods, which serve dictionaries from memory."""

    processes: int = Field(
        1, ge=1, le=64, description="Number of serving processes of a pod; they share one copy of the data."
    )
    memory_dir: Path | None = Field(
        None,
        description="Folder of the shared copy of the data. Default: /dev/shm, or `data_dir` if /dev/shm is missing.",
    )
    memory_limit_mb: int = Field(16_384, ge=16, description="Maximum size of the shared copy of the data, in MiB.")
    debounce_ms: int = Field(
        20, ge=0, le=1000, description="Minimum time in ms between two loads of the same dictionary."
    )
    jitter_ms: int = Field(
        50,
        ge=0,
        le=1000,
        description="Maximum random delay in ms before a full reload, so that pods do not load at the same time.",
    )
    loads: int = Field(4, ge=1, le=64, description="Maximum number of dictionaries that a pod loads concurrently.")
    reconcile_every: Annotated[Duration, Field(ge=timedelta(milliseconds=100), le=timedelta(minutes=1))] = Field(
        timedelta(seconds=3),
        description="Interval at which a pod compares the versions of all dictionaries with the primary database.",
    )
    barrier_wait_ms: int = Field(
        100, ge=0, le=1000, description="Maximum time in ms that a request with X-Min-Version waits for a reload."
    )
    barrier_waiters: int = Field(
        1_000, ge=1, description="Maximum number of requests that wait in one pod; further requests get the status 503."
    )
    fallbacks: int = Field(
        8, ge=1, le=100, description="Maximum number of concurrent reads of a pod from the primary database."
    )
    fallback_timeout_ms: int = Field(
        2_000, ge=50, le=60_000, description="Timeout in ms of a read from the primary database."
    )
    audit_every: Annotated[Duration, Field(ge=timedelta(seconds=1))] | None = Field(
        timedelta(hours=1),
        description="R32: interval at which a pod compares its items with the primary database; null: never.",
    )


class SqlTemplateSection(CamelSection):
    """R3, R4: the SQL statements that write the changes of a dictionary."""

    mode: Literal["SQL_TEMPLATE"] = Field("SQL_TEMPLATE", description="Only SQL_TEMPLATE is supported.")
    upsert_sql: str = Field(description="Statement that inserts or updates one item, with `:key` and `:payload`.")
    delete_sql: str = Field(description="Statement that deletes one item, with `:key`.")
    snapshot_strategy: Literal["FULL_REPLACE"] = Field("FULL_REPLACE", description="Only FULL_REPLACE is supported.")
    snapshot_replace_sql: str | None = Field(
        None, description="Statement that replaces all items by those of `:snapshotJson`."
    )
    snapshot_stage_sql: str | None = Field(
        None,
        description="Statement that stages one item (`:key`, `:payload`) or one chunk (`:snapshotJson`) of a snapshot.",
    )
    snapshot_finalize_sql: str | None = Field(None, description="Statement that replaces all items by the staged ones.")

    @field_validator("upsert_sql", "delete_sql")
    @classmethod
    def _check_item_sql(cls, text: str) -> str:
        sql_template.parse(text, _ITEM)
        return text

    @field_validator("snapshot_replace_sql")
    @classmethod
    def _check_replace_sql(cls, text: str | None) -> str | None:
        if text is not None and "snapshotJson" not in sql_template.parse(text, _WHOLE).names:
            raise ValueError("must use :snapshotJson")
        return text

    @field_validator("snapshot_stage_sql")
    @classmethod
    def _check_stage_sql(cls, text: str | None) -> str | None:
        if text is not None:
            names = sql_template.parse(text, (*_ITEM, "snapshotJson")).names
            if ("snapshotJson" in names) == ("key" in names):
                raise ValueError(
                    "must use either :snapshotJson, to stage a chunk, or :key and :payload, to stage an item"
                )
        return text

    @field_validator("snapshot_finalize_sql")
    @classmethod
    def _check_finalize_sql(cls, text: str | None) -> str | None:
        if text is not None:
            sql_template.parse(text, _CHANGING)
        return text

    @model_validator(mode="after")
    def _check_snapshot_sql(self) -> "SqlTemplateSection":
        pair = [self.snapshot_stage_sql is not None, self.snapshot_finalize_sql is not None]
        if pair[0] != pair[1] or (self.snapshot_replace_sql is not None) == pair[0]:
            raise ValueError("needs snapshotReplaceSql, or both snapshotStageSql and snapshotFinalizeSql")
        return self


class DictionarySection(CamelSection):
    """A dictionary. Without SQL its items are in the table `dictionary_item`; with `loadSql` alone it is read-only."""

    code: Annotated[str, _CODE] = Field(
        description="Code of the dictionary, unique in the configuration; part of its URLs."
    )
    enabled: bool = Field(True, description="Whether the dictionary can be read and written.")
    load_sql: str | None = Field(
        None,
        description="Query for all items of `:tenantId`, with the key as column `k` and the payload as column `v`.",
    )
    drift_check_sql: str | None = Field(
        None,
        description="Query for a value that changes only with a new version, for example a row count. It runs twice a "
        "minute; another change is reported as drift.",
    )
    apply: SqlTemplateSection | None = None
    reload_on_event: Literal["FULL", "DELTA"] = Field(
        "DELTA", description="Items that a pod loads after a change: the changed ones (DELTA) or all (FULL)."
    )
    max_drop_percent: int | None = Field(
        None,
        ge=0,
        le=99,
        description="R30: maximum share of the items, in percent, that a SNAPSHOT may delete; with more it fails.",
    )
    retain_versions: int = Field(
        0,
        ge=0,
        le=100,
        description="R30: number of versions to retain for pins and rollbacks, stored before each SNAPSHOT.",
    )

    @field_validator("load_sql", "drift_check_sql")
    @classmethod
    def _check_query(cls, text: str | None) -> str | None:
        if text is not None:
            sql_template.parse(text, _LOADING)
        return text

    @model_validator(mode="after")
    def _check_load_sql(self) -> "DictionarySection":
        if self.apply is not None and self.load_sql is None:
            raise ValueError("a dictionary with `apply` needs a loadSql")
        return self


class RefdataSection(CamelSection):
    """Refdata: dictionaries, changed over REST and Kafka and served from memory."""

    postgres: PostgresSection | None = None
    consistency: ConsistencySection = ConsistencySection()
    security: SecuritySection = SecuritySection()
    kafka: CommandsSection = CommandsSection()
    redis: InvalidationSection = InvalidationSection()
    apply: ApplySection = ApplySection()
    snapshots: SnapshotSection = SnapshotSection()
    retention: RefdataRetentionSection = RefdataRetentionSection()
    query: QuerySection = QuerySection()
    give_up_after: Annotated[Duration, Field(ge=timedelta(seconds=1))] = Field(
        timedelta(minutes=1),
        description="R8: age at which a PENDING update fails unless its command is still on the bus.",
    )
    tenants: list[Annotated[str, _CODE]] | None = Field(
        None, description="All tenants. Default: any tenant. Reloaded while the process runs."
    )
    dictionaries: list[DictionarySection] = Field(
        default_factory=list, description="All dictionaries. Reloaded while the process runs."
    )

    @model_validator(mode="after")
    def _check_snapshot_expiry(self) -> "RefdataSection":
        if self.snapshots.expire_after >= self.retention.processed_events:
            raise MisplacedKey(("snapshots", "expireAfter"), "must be shorter than retention.processedEvents")
        return self

    @field_validator("dictionaries")
    @classmethod
    def _check_codes(cls, dictionaries: list[DictionarySection]) -> list[DictionarySection]:
        if duplicates := _list_duplicates([dictionary.code for dictionary in dictionaries]):
            raise ValueError(f"duplicate dictionary: {duplicates}")
        return dictionaries
