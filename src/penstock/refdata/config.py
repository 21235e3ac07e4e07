"""The `refdata` section of penstock.yaml: the founding document's YAML as it stands, and what it leaves open."""

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


def _twice(names: Sequence[str]) -> str:
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


class CamelSection(Section):
    """A part of the configuration whose keys are spelt as the founding document spells them."""

    model_config = ConfigDict(alias_generator=to_camel)


class PoolSection(CamelSection):
    """Connections to it."""

    max_size: int = Field(20, ge=2, le=500, description="Connections of one process.")


class PostgresSection(CamelSection):
    """R1: the PostgreSQL the dictionaries live in. Without it they live in the platform's."""

    url: Url | None = Field(
        None, description="postgresql://user@host:5432/database. Either `url` or `jdbcUrl` is required."
    )
    jdbc_url: Url | None = Field(None, description="The same as a JDBC URL: jdbc:postgresql://host:5432/database.")
    username: str | None = Field(
        None, min_length=1, description="User name in PostgreSQL. Required if the URL contains no user."
    )
    password_from_env: Annotated[str, _ENV_NAME] | None = Field(None, description="Name of the variable.")
    db_schema: str = Field(
        "public",
        alias="schema",
        min_length=1,
        max_length=63,
        description="Where the tables of Penstock are, and what statements see.",
    )
    pool: PoolSection = PoolSection()

    @field_validator("url", "jdbc_url")
    @classmethod
    def _is_postgres(cls, url: str | None, info: ValidationInfo) -> str | None:
        if url is None:
            return None
        parts = urlsplit(validate_url(url.removeprefix(_JDBC)))
        if parts.scheme not in ("postgresql", "postgres") or not parts.path.strip("/"):
            prefix = _JDBC if info.field_name == "jdbc_url" else ""
            raise ValueError(f"expected {prefix}postgresql://host:5432/database")
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
    """What writers may wait for."""

    wait_commit_timeout_ms: int = Field(300, ge=50, le=1000, description="How long WAIT_COMMIT waits unless told.")


class TenantSection(CamelSection):
    """R25: how a request's tenant is known."""

    source: Literal["JWT_CLAIM"] = Field("JWT_CLAIM", description="There is no other.")
    claim: str = Field("tenant_id", min_length=1, description="The claim that names the tenant.")
    allow_header_override_for_trusted_clients: bool = Field(False, description="Whether `trustedClients` count.")
    trusted_clients: list[str] = Field(
        default_factory=list, description="Subjects of tokens that may name another tenant by X-Tenant-Id."
    )

    def read_tenant(self, caller: Principal, named: str | None) -> object:
        """Return the tenant of the token's claim; a trusted client may name another."""
        if self.allow_header_override_for_trusted_clients and named and caller.subject in self.trusted_clients:
            return named
        return caller.claims.get(self.claim, "")


class SecuritySection(CamelSection):
    """Whose tenant a caller is."""

    tenant: TenantSection = TenantSection()


class ExternalTopicSection(CamelSection):
    """R10: a topic of somebody else's messages, and how each becomes a command.

    A field comes from `=text` (a constant), `/a/b` (a JSON pointer into the value), `key` (the message's key) or
    `header:name`. With `items`, a pointer to a list, the last three are looked up in each of its elements.
    """

    topic: str = Field(pattern=r"^[A-Za-z0-9._-]{1,200}$", description="The topic of others that is read.")
    tenant_id: str = Field(description="Where the tenant comes from.")
    dict_code: str = Field(description="Where the dictionary comes from.")
    event_type: str = Field("=DELTA", description="DELTA or SNAPSHOT.")
    event_id: str | None = Field(None, description="Without it, it is made of topic, partition and offset.")
    source_revision: str | None = Field(
        None, description="The source's own number of a change; an older one is passed over."
    )
    occurred_at: str | None = Field(None, description="When it happened, by ISO 8601.")
    snapshot_id: str | None = Field(None, description="The snapshot a chunk belongs to.")
    chunk_index: str | None = Field(None, description="Which chunk it is, from 1.")
    chunks_total: str | None = Field(None, description="How many there are.")
    items: str | None = Field(None, description="A pointer to a list; without it, the message is one item.")
    key: str = Field("key", description="The key of an item.")
    op: str | None = Field(None, description="UPSERT, unless it is one of `deletes`.")
    payload: str = Field("/", description="The payload of an item.")
    deletes: list[str] = Field(["DELETE", "delete", "D", "d"], description="Values of `op` that mean DELETE.")

    @model_validator(mode="after")
    def _has_sources(self) -> "ExternalTopicSection":
        for name, said in self:
            is_source = name not in ("topic", "deletes") and said is not None
            if is_source and not re.match(r"^(=.*|/.*|key|header:.+)$", str(said), re.DOTALL):
                raise MisplacedKey((to_camel(name),), "expected =text, /json/pointer, key or header:name")
        for name, pattern in (("tenant_id", NAME), ("dict_code", NAME), ("event_type", "^(DELTA|SNAPSHOT)$")):
            said = getattr(self, name)
            if said.startswith("=") and not re.fullmatch(pattern, said[1:]):
                raise MisplacedKey((to_camel(name),), f"{said[1:]!r} cannot be a {to_camel(name)}")
        return self


class CommandsSection(CamelSection):
    """Where commands go, and the topics of others that are turned into commands."""

    commands_topic: str = Field(
        "refdata.commands",
        pattern=r"^[A-Za-z0-9._-]{1,200}$",
        description="Where commands go; what could not be applied goes to `….dead`.",
    )
    key_template: str = Field(
        KEY_TEMPLATE, description="There is no other: it keeps the order of a dictionary's changes."
    )
    external_topics: list[ExternalTopicSection] = Field(default_factory=list)

    @field_validator("key_template")
    @classmethod
    def _keeps_order(cls, said: str) -> str:
        if said != KEY_TEMPLATE:
            raise ValueError(f"only {KEY_TEMPLATE} keeps the order of a dictionary's changes")
        return said

    @model_validator(mode="after")
    def _has_different_topics(self) -> "CommandsSection":
        names = [self.commands_topic, f"{self.commands_topic}.dead", *(topic.topic for topic in self.external_topics)]
        if twice := _twice(names):
            raise MisplacedKey(("externalTopics",), f"topic given twice: {twice}")
        return self


class InvalidationSection(CamelSection):
    """R16: where invalidations go: to this Redis, else to `signals.redis`, else over PostgreSQL."""

    mode: Literal["cluster", "single"] = Field("cluster", description="`cluster`, or `single` for one server.")
    nodes: list[str] = Field(default_factory=list, description="host:port of some nodes")
    username: str | None = Field(None, description="Who we are there.")
    password_from_env: Annotated[str, _ENV_NAME] | None = Field(None, description="Name of the variable.")
    pub_channel: str = Field(
        "refdata:inv:pub", min_length=1, max_length=63, description="Where invalidations are told at once."
    )
    stream_key: str = Field(
        "refdata:inv:stream", min_length=1, description="Where they are kept for whoever missed them."
    )
    consumer_group: str = Field(
        "refdata-query-pods", min_length=1, description="What the groups of pods begin with; each pod has its own."
    )
    stream_length: int = Field(100_000, ge=100, description="About so many entries the stream keeps.")


class ApplySection(CamelSection):
    """How commands are applied."""

    workers: int = Field(2, ge=1, le=32, description="Batches a process applies side by side.")
    batch: int = Field(500, ge=1, le=10_000, description="Commands in one transaction.")
    lease: Annotated[Duration, Field(ge=timedelta(seconds=1), le=timedelta(minutes=30))] = Field(
        timedelta(seconds=30), description="How long a frozen process holds its commands."
    )
    max_attempts: int = Field(5, ge=1, le=100, description="Tries of a command whose statement takes too long.")


class RefdataRetentionSection(CamelSection):
    """R14: how long things are remembered; commands at least twice as long as the topic keeps them."""

    processed_events: Duration = Field(timedelta(days=14), description="Commands that are known again.")
    tombstones: Duration = Field(timedelta(days=14), description="Items that were deleted.")
    updates: Duration = Field(timedelta(days=30), description="What became of updates.")
    history: Duration = Field(timedelta(days=90), description="Versions, and what made them.")

    @model_validator(mode="after")
    def _remembers_answers(self) -> "RefdataRetentionSection":
        if self.updates < self.processed_events:
            raise MisplacedKey(("updates",), "must not be shorter than processedEvents: a repeated command is answered")
        return self


class SnapshotSection(CamelSection):
    """R13: snapshots that come in chunks."""

    expire_after: Annotated[Duration, Field(ge=timedelta(seconds=1))] = Field(
        timedelta(hours=1), description="An incomplete snapshot that gets no chunk for so long has failed."
    )
    max_items: int = Field(5_000_000, ge=1, description="Items of a snapshot in all its chunks.")


class QuerySection(CamelSection):
    """R17–R24: the pods that serve from memory."""

    processes: int = Field(1, ge=1, le=64, description="That serve; they share one copy of the data.")
    memory_dir: Path | None = Field(None, description="Where that copy is; without it /dev/shm, else the data_dir.")
    memory_limit_mb: int = Field(16_384, ge=16, description="The copy grows to this and no further.")
    debounce_ms: int = Field(20, ge=0, le=1000, description="A dictionary is loaded at most once in so long.")
    jitter_ms: int = Field(50, ge=0, le=1000, description="Before a full reload, so that pods do not come together.")
    loads: int = Field(4, ge=1, le=64, description="Dictionaries a pod loads at once.")
    reconcile_every: Annotated[Duration, Field(ge=timedelta(milliseconds=100), le=timedelta(minutes=1))] = Field(
        timedelta(seconds=3), description="The versions of all dictionaries are compared with the primary's so often."
    )
    barrier_wait_ms: int = Field(100, ge=0, le=1000, description="X-Min-Version waits so long for a reload.")
    barrier_waiters: int = Field(1_000, ge=1, description="That wait so in one pod; more are told to come again.")
    fallbacks: int = Field(8, ge=1, le=100, description="Reads from the primary at once.")
    fallback_timeout_ms: int = Field(2_000, ge=50, le=60_000, description="For an answer of the primary.")
    audit_every: Annotated[Duration, Field(ge=timedelta(seconds=1))] | None = Field(
        timedelta(hours=1), description="R32: a pod compares its items with the primary's so often; null: never."
    )


class SqlTemplateSection(CamelSection):
    """R3, R4: how changes are written."""

    mode: Literal["SQL_TEMPLATE"] = Field("SQL_TEMPLATE", description="There is no other.")
    upsert_sql: str = Field(description="Writes one item: `:key`, `:payload`.")
    delete_sql: str = Field(description="Takes one away: `:key`.")
    snapshot_strategy: Literal["FULL_REPLACE"] = Field("FULL_REPLACE", description="There is no other.")
    snapshot_replace_sql: str | None = Field(None, description="Replaces everything by `:snapshotJson`.")
    snapshot_stage_sql: str | None = Field(
        None, description="Stages an item (`:key`, `:payload`) or a chunk (`:snapshotJson`) of a large snapshot."
    )
    snapshot_finalize_sql: str | None = Field(None, description="Makes what was staged all there is.")

    @field_validator("upsert_sql", "delete_sql")
    @classmethod
    def _is_for_items(cls, text: str) -> str:
        sql_template.parse(text, _ITEM)
        return text

    @field_validator("snapshot_replace_sql")
    @classmethod
    def _is_for_snapshots(cls, text: str | None) -> str | None:
        if text is not None and "snapshotJson" not in sql_template.parse(text, _WHOLE).names:
            raise ValueError("it must use :snapshotJson")
        return text

    @field_validator("snapshot_stage_sql")
    @classmethod
    def _is_for_chunks_or_items(cls, text: str | None) -> str | None:
        if text is not None:
            names = sql_template.parse(text, (*_ITEM, "snapshotJson")).names
            if ("snapshotJson" in names) == ("key" in names):
                raise ValueError("it uses :snapshotJson, to stage a chunk at a time, or :key and :payload")
        return text

    @field_validator("snapshot_finalize_sql")
    @classmethod
    def _is_for_the_end(cls, text: str | None) -> str | None:
        if text is not None:
            sql_template.parse(text, _CHANGING)
        return text

    @model_validator(mode="after")
    def _has_one_way(self) -> "SqlTemplateSection":
        pair = [self.snapshot_stage_sql is not None, self.snapshot_finalize_sql is not None]
        if pair[0] != pair[1] or (self.snapshot_replace_sql is not None) == pair[0]:
            raise ValueError("give snapshotReplaceSql, or the pair snapshotStageSql and snapshotFinalizeSql")
        return self


class DictionarySection(CamelSection):
    """One dictionary. Without any SQL it lives in `dictionary_item`; with `loadSql` alone it is read-only."""

    code: Annotated[str, _CODE] = Field(description="What it is called.")
    enabled: bool = Field(True, description="`false`: it is neither written nor read.")
    load_sql: str | None = Field(
        None, description="Reads all items of `:tenantId`: the key as `k`, the payload as `v`."
    )
    drift_check_sql: str | None = Field(
        None, description="A value that changes only with a version; asked twice a minute."
    )
    apply: SqlTemplateSection | None = None
    reload_on_event: Literal["FULL", "DELTA"] = Field(
        "DELTA", description="What a pod loads after a change: the keys it names, or everything."
    )
    max_drop_percent: int | None = Field(
        None, ge=0, le=99, description="R30: a SNAPSHOT that would take away more of the items than this has failed."
    )
    retain_versions: int = Field(
        0, ge=0, le=100, description="R30: what was before a SNAPSHOT is kept, so many times, to go back to."
    )

    @field_validator("load_sql", "drift_check_sql")
    @classmethod
    def _is_for_tenants(cls, text: str | None) -> str | None:
        if text is not None:
            sql_template.parse(text, _LOADING)
        return text

    @model_validator(mode="after")
    def _can_be_read(self) -> "DictionarySection":
        if self.apply is not None and self.load_sql is None:
            raise ValueError("what `apply` writes must be read by a loadSql")
        return self


class RefdataSection(CamelSection):
    """Refdata: dictionaries in by REST and Kafka, out from memory."""

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
        timedelta(minutes=1), description="R8: an update that is PENDING so long is looked for on the bus."
    )
    tenants: list[Annotated[str, _CODE]] | None = Field(
        None, description="All there are; without it, any. Taken over while it runs."
    )
    dictionaries: list[DictionarySection] = Field(default_factory=list, description="Taken over while everything runs.")

    @model_validator(mode="after")
    def _remembers_chunks(self) -> "RefdataSection":
        if self.snapshots.expire_after >= self.retention.processed_events:
            raise MisplacedKey(("snapshots", "expireAfter"), "must be shorter than retention.processedEvents")
        return self

    @field_validator("dictionaries")
    @classmethod
    def _are_different(cls, dictionaries: list[DictionarySection]) -> list[DictionarySection]:
        if twice := _twice([dictionary.code for dictionary in dictionaries]):
            raise ValueError(f"dictionary given twice: {twice}")
        return dictionaries
