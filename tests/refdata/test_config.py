"""R1: the YAML of the founding document is valid configuration; errors name their place."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg
import jsonschema
import pytest
from ruamel.yaml import YAML

from penstock.app.parts import open_refdata
from penstock.kernel.errors import BadConfig
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.config import RefdataSection
from penstock.settings import Settings, load_settings
from tests.refdata.harness import (
    DOCUMENT,
    OTHER,
    RefdataHarness,
    create_schemas,
    dictionaries,
    refdata_settings,
    upsert,
)
from tests.services.postgres import fresh_database
from tests.support.processes import penstock
from tests.support.types import Json

COUNTRY, CURRENCY = dictionaries(DOCUMENT)
HEAD = "refdata:\n  dictionaries:\n    - code: D\n"
APPLY = "      apply:\n        upsertSql: select :tenantId, :key\n        deleteSql: select :tenantId, :key\n"
LOAD = "      loadSql: select k, v from t where tenant_id = :tenantId\n"
REPLACE = "        snapshotReplaceSql: select f(:tenantId, :snapshotJson)\n"
STAGE = "        snapshotStageSql: insert into t values (:tenantId, :key, :payload)\n"
FINALIZE = "        snapshotFinalizeSql: select f(:tenantId)\n"


def refused(path: Path, content: str, env: dict[str, str] | None = None) -> list[str]:
    """Return the messages about an invalid file, with FILE for its path."""
    path.write_text(content)
    with pytest.raises(BadConfig) as raised:
        load_settings(path, env or {})
    return raised.value.message.replace(str(path), "FILE").splitlines()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "penstock.yaml"


def test_the_documents_yaml_is_accepted_unchanged() -> None:
    """R1: every value of §5 is read."""
    found = load_settings(DOCUMENT, {}).refdata
    assert found.postgres is not None
    assert found.postgres.dsn == "postgresql://app_user@pg-host:5432/app"
    assert found.postgres.password_from_env == "PG_PASSWORD"
    assert (found.postgres.db_schema, found.postgres.pool.max_size) == ("public", 50)
    assert found.consistency.wait_commit_timeout_ms == 300
    tenant = found.security.tenant
    assert (tenant.source, tenant.claim) == ("JWT_CLAIM", "tenant_id")
    assert not tenant.allow_header_override_for_trusted_clients
    assert (found.kafka.commands_topic, found.kafka.key_template) == ("refdata.commands", "{tenantId}:{dictCode}")
    assert found.redis.nodes == ["redis-0:6379", "redis-1:6379", "redis-2:6379"]
    redis = found.redis
    assert (redis.mode, redis.pub_channel, redis.stream_key) == ("cluster", "refdata:inv:pub", "refdata:inv:stream")
    assert redis.consumer_group == "refdata-query-pods"


def test_the_documents_dictionaries_are_taken_word_for_word() -> None:
    """R1, R4: SQL is stored as written, with comments."""
    for section, written in zip(load_settings(DOCUMENT, {}).refdata.dictionaries, [COUNTRY, CURRENCY], strict=True):
        assert section.apply is not None
        assert section.enabled
        assert section.reload_on_event == "FULL"
        assert (section.code, section.load_sql) == (written["code"], written["loadSql"])
        assert section.drift_check_sql == written["driftCheckSql"]
        assert section.apply.upsert_sql == written["apply"]["upsertSql"]
        assert section.apply.delete_sql == written["apply"]["deleteSql"]
        assert section.apply.snapshot_replace_sql == written["apply"]["snapshotReplaceSql"]
        assert (section.apply.mode, section.apply.snapshot_strategy) == ("SQL_TEMPLATE", "FULL_REPLACE")


def test_a_dictionary_is_its_code_and_nothing_else() -> None:
    """R2: a dictionary without SQL is stored in dictionary_item; all other settings have defaults."""
    loose, off = load_settings(OTHER, {}).refdata.dictionaries[2:]
    assert (loose.load_sql, loose.apply, loose.enabled, loose.reload_on_event) == (None, None, True, "DELTA")
    assert not off.enabled
    empty = RefdataSection()
    assert empty.postgres is None
    assert empty.retention.processed_events == timedelta(days=14)


def test_pods_keep_the_documents_pace() -> None:
    """R19, R21: debounce, jitter and waiting times have the defaults of the document."""
    query = RefdataSection().query
    assert 20 <= query.debounce_ms <= 80
    assert (query.jitter_ms, query.barrier_wait_ms) == (50, 100)
    section = RefdataSection.model_validate(
        {"query": {"debounceMs": 80, "jitterMs": 0, "loads": 1, "barrierWaitMs": 5}}
    )
    assert (section.query.debounce_ms, section.query.jitter_ms) == (80, 0)
    assert (section.query.loads, section.query.barrier_wait_ms) == (1, 5)


@pytest.mark.parametrize(
    ("jdbc", "url"),
    [
        ("jdbc:postgresql://h:1/d", "postgresql://u@h:1/d"),
        ("postgresql://h/d", "postgresql://u@h/d"),
        ("postgres://h/d?sslmode=require", "postgresql://u@h/d?sslmode=require"),
        ("jdbc:postgresql://a:1,b:2/d?target_session_attrs=primary",
         "postgresql://u@a:1,b:2/d?target_session_attrs=primary"),
        ("jdbc:postgresql://other@[::1]:5/d", "postgresql://u@[::1]:5/d"),
    ],
)  # fmt: skip
def test_a_jdbc_url_is_understood(jdbc: str, url: str) -> None:
    """R1: a JDBC URL names the same database as in Java."""
    section = RefdataSection.model_validate({"postgres": {"jdbcUrl": jdbc, "username": "u"}})
    assert section.postgres is not None
    assert section.postgres.dsn == url


@pytest.mark.parametrize(
    ("keys", "url"),
    [
        ({"url": "postgresql://u@h:1/d"}, "postgresql://u@h:1/d"),
        ({"url": "postgres://u%40corp@a:1,b:2/d?sslmode=require"}, "postgresql://u%40corp@a:1,b:2/d?sslmode=require"),
        ({"url": "postgresql://h/d", "username": "u"}, "postgresql://u@h/d"),
        ({"url": "postgresql://other@h/d", "username": "u"}, "postgresql://u@h/d"),
    ],
)
def test_a_url_of_postgresql_is_accepted_in_place_of_a_jdbc_url(keys: Json, url: str) -> None:
    """`refdata.postgres.url` has the form of `database.url`; its user may be in the URL."""
    section = RefdataSection.model_validate({"postgres": keys})
    assert section.postgres is not None
    assert section.postgres.dsn == url


def test_a_user_name_is_written_as_urls_want_it() -> None:
    """R1: a name with an @ does not change the host."""
    postgres = {"jdbcUrl": "jdbc:postgresql://h/d", "username": "me@corp/x"}
    section = RefdataSection.model_validate({"postgres": postgres})
    assert section.postgres is not None
    assert urlsplit(section.postgres.dsn).hostname == "h"


def test_the_environment_overrides_the_file() -> None:
    """R1: variables set camelCase keys, and their errors name the variable."""
    env = {
        "PENSTOCK__REFDATA__POSTGRES__JDBCURL": "jdbc:postgresql://elsewhere/app",
        "PENSTOCK__REFDATA__POSTGRES__POOL__MAXSIZE": "7",
        "PENSTOCK__REFDATA__CONSISTENCY__WAITCOMMITTIMEOUTMS": "500",
    }
    found = load_settings(DOCUMENT, env).refdata
    assert found.postgres is not None
    assert found.postgres.dsn == "postgresql://app_user@elsewhere/app"
    assert (found.postgres.pool.max_size, found.consistency.wait_commit_timeout_ms) == (7, 500)
    name = "PENSTOCK__REFDATA__POSTGRES__JDBCURL"
    with pytest.raises(BadConfig, match=f"environment variable {name}: refdata.postgres.jdbcUrl: must be jdbc:"):
        load_settings(DOCUMENT, {name: "jdbc:mysql://h/d"})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("refdata:\n  postgress: {}\n", "FILE:2:3: refdata.postgress: unknown key; did you mean 'postgres'?"),
        (
            "refdata:\n  postgres:\n    jdbcURL: x\n    username: u\n    jdbcUrl: postgresql://h/d\n",
            "FILE:3:5: refdata.postgres.jdbcURL: unknown key; did you mean 'jdbcUrl'?",
        ),
        (
            HEAD + "      load_sql: x\n",
            "FILE:4:7: refdata.dictionaries.0.load_sql: unknown key; did you mean 'loadSql'?",
        ),
        (
            HEAD + LOAD + APPLY + REPLACE + "        snapshotSql: x\n",
            "FILE:9:9: refdata.dictionaries.0.apply.snapshotSql: unknown key; did you mean ",
        ),
        (
            "refdata: {kafka: {externalTopics: [{topic: t, tenantId: =a, dictCode: =B, evntId: key}]}}",
            "FILE:1:75: refdata.kafka.externalTopics.0.evntId: unknown key; did you mean 'eventId'?",
        ),
    ],
)
def test_an_unknown_key_is_an_error_with_line_and_column(file: Path, content: str, problem: str) -> None:
    """R1: an unknown key is an error with its place and the nearest valid key."""
    (line,) = refused(file, content)
    assert line.startswith(problem)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (HEAD + "      loadSql: select k, v from t\n", "FILE:4:7: refdata.dictionaries.0.loadSql: "),
        (HEAD + "      loadSql: select :tenantId, :key\n", "FILE:4:7: refdata.dictionaries.0.loadSql: "),
        (HEAD + LOAD + "      driftCheckSql: select 1\n", "FILE:5:7: refdata.dictionaries.0.driftCheckSql: "),
        (
            HEAD + LOAD + APPLY.replace("select :tenantId, :key\n", "select :key\n", 1) + REPLACE,
            "FILE:6:9: refdata.dictionaries.0.apply.upsertSql: ",
        ),
        (
            HEAD + LOAD + APPLY.replace("deleteSql: select", "deleteSql: select :unknown,") + REPLACE,
            "FILE:7:9: refdata.dictionaries.0.apply.deleteSql: ",
        ),
        (
            HEAD + LOAD + APPLY.replace("upsertSql: select", "upsertSql: select :snapshotJson,") + REPLACE,
            "FILE:6:9: refdata.dictionaries.0.apply.upsertSql: ",
        ),
        (
            HEAD + LOAD + APPLY + "        snapshotReplaceSql: select f(:tenantId)\n",
            "FILE:8:9: refdata.dictionaries.0.apply.snapshotReplaceSql: must use ",
        ),
        (
            HEAD + LOAD + APPLY + FINALIZE + "        snapshotStageSql: select f(:tenantId)\n",
            "FILE:9:9: refdata.dictionaries.0.apply.snapshotStageSql: must use either :snapshotJson, ",
        ),
        (
            HEAD + LOAD + APPLY + STAGE + "        snapshotFinalizeSql: select f(:tenantId, :key)\n",
            "FILE:9:9: refdata.dictionaries.0.apply.snapshotFinalizeSql: ",
        ),
        (HEAD + '      loadSql: "select \':tenantId"\n', "FILE:4:7: refdata.dictionaries.0.loadSql: "),
    ],
)
def test_an_invalid_template_is_an_error_at_its_key(file: Path, content: str, problem: str) -> None:
    """R1, R3: a missing :tenantId, an unknown or misplaced parameter, an unterminated text: each with its place."""
    (line,) = refused(file, content)
    assert line.startswith(problem)
    assert len(line) > len(problem)


@pytest.mark.parametrize("ways", ["", STAGE, FINALIZE, REPLACE + STAGE, REPLACE + STAGE + FINALIZE])
def test_there_is_one_way_to_write_a_snapshot(file: Path, ways: str) -> None:
    """R4: snapshotReplaceSql or the pair is required; not neither, half a pair, or both."""
    (line,) = refused(file, HEAD + LOAD + APPLY + ways)
    problem = "needs snapshotReplaceSql, or both snapshotStageSql and snapshotFinalizeSql"
    assert line == f"FILE:5:7: refdata.dictionaries.0.apply: {problem}"


@pytest.mark.parametrize("ways", [REPLACE, STAGE + FINALIZE])
def test_either_way_will_do(file: Path, ways: str) -> None:
    """R4: snapshotReplaceSql or the pair is accepted."""
    file.write_text(HEAD + LOAD + APPLY + ways)
    (found,) = load_settings(file, {}).refdata.dictionaries
    assert found.apply is not None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("refdata: {dictionaries: [{code: A}, {code: B}, {code: A}]}",
         "FILE:1:11: refdata.dictionaries: duplicate dictionary: A"),
        ("refdata: {dictionaries: [{code: 'a:b'}]}", "FILE:1:27: refdata.dictionaries.0.code: must match"),
        ("refdata: {dictionaries: [{}]}", "FILE:1:26: refdata.dictionaries.0.code: is required"),
        ("refdata: {tenants: [ok, 'not:ok']}", "FILE:1:25: refdata.tenants.1: must match"),
        ("refdata:\n  kafka:\n    keyTemplate: '{dictCode}'\n",
         "FILE:3:5: refdata.kafka.keyTemplate: must be {tenantId}:{dictCode}"),
        (HEAD + APPLY + REPLACE, "FILE:3:7: refdata.dictionaries.0: a dictionary with `apply` needs a loadSql"),
        ("refdata:\n  postgres: {jdbcUrl: 'jdbc:postgresql://h/d'}\n", "FILE:2:3: refdata.postgres.username: is "
        "required"),
        ("refdata:\n  postgres: {url: 'postgresql://h/d'}\n", "FILE:2:3: refdata.postgres.username: is required"),
        ("refdata:\n  postgres: {username: u}\n",
         "FILE:2:3: refdata.postgres.url: exactly one of `url` and `jdbcUrl` is required"),
        ("refdata:\n  postgres: {jdbcUrl: 'jdbc:postgresql://u@h/d', url: 'postgresql://u@h/d'}\n",
         "FILE:2:50: refdata.postgres.url: exactly one of `url` and `jdbcUrl` is required"),
        ("refdata:\n  postgres: {url: 'mysql://u@h/d'}\n",
         "FILE:2:14: refdata.postgres.url: must be postgresql://host:5432/database"),
        ("refdata:\n  postgres: {username: u, jdbcUrl: 'jdbc:postgresql://u:pw@h/d'}\n",
         "FILE:2:27: refdata.postgres.jdbcUrl: must not contain a password"),
        ("refdata:\n  postgres: {username: u, jdbcUrl: 'jdbc:postgresql://h:none/d'}\n",
         "FILE:2:27: refdata.postgres.jdbcUrl: must be a URL with a port"),
        ("refdata:\n  postgres: {username: u, jdbcUrl: 'jdbc:postgresql://h'}\n",
         "FILE:2:27: refdata.postgres.jdbcUrl: must be jdbc:"),
        ("refdata:\n  postgres: {username: u, jdbcUrl: 'jdbc:postgresql://h/d', passwordFromEnv: 'a b'}\n",
         "FILE:2:61: refdata.postgres.passwordFromEnv: must match"),
        ("refdata: {consistency: {waitCommitTimeoutMs: 5}}",
         "FILE:1:25: refdata.consistency.waitCommitTimeoutMs: must be a whole number of at least 50"),
        ("refdata: {retention: {updates: P1D}}",
         "FILE:1:23: refdata.retention.updates: must not be shorter than processedEvents"),
        ("refdata: {kafka: {externalTopics: [{topic: t, tenantId: acme, dictCode: =B}]}}",
         "FILE:1:47: refdata.kafka.externalTopics.0.tenantId: must be =text, "),
        ("refdata: {kafka: {externalTopics: [{topic: t, tenantId: =a, dictCode: =B},"
         " {topic: t, tenantId: =a, dictCode: =C}]}}",
         "FILE:1:19: refdata.kafka.externalTopics: duplicate topic: t"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_an_error_at_its_place(file: Path, content: str, problem: str) -> None:
    """R1: each error has file, line and column."""
    (line,) = refused(file, content)
    assert line.startswith(problem)


def test_a_password_is_neither_in_the_file_nor_in_a_message(file: Path) -> None:
    """R1: a password in a URL is rejected without being printed."""
    content = "refdata:\n  postgres: {username: u, jdbcUrl: 'jdbc:postgresql://u:hunter2@h/d'}\n"
    assert "hunter2" not in "\n".join(refused(file, content))


@pytest.mark.parametrize("source", [DOCUMENT, OTHER])
def test_what_config_show_prints_can_be_loaded_again(tmp_path: Path, source: Path) -> None:
    """R1: keys are printed as in the file, SQL unchanged, and the password as its variable."""
    shown = penstock("config", "show", "-c", str(source), cwd=tmp_path, env={"PG_PASSWORD": "hunter2"})
    assert shown.code == 0, shown.err
    assert "hunter2" not in shown.out
    (tmp_path / "again.yaml").write_text(shown.out)
    assert load_settings(tmp_path / "again.yaml", {}) == load_settings(source, {})
    written = YAML(typ="safe").load(source)
    assert _is_within(written, YAML(typ="safe").load(shown.out))


def test_config_show_prints_json_that_can_be_loaded_again(tmp_path: Path) -> None:
    """R1: the same with --json."""
    shown = penstock("config", "show", "-c", str(DOCUMENT), "--json", cwd=tmp_path)
    (tmp_path / "again.yaml").write_text(shown.out)
    assert load_settings(tmp_path / "again.yaml", {}) == load_settings(DOCUMENT, {})


def test_config_validate_tells_what_is_wrong(tmp_path: Path, file: Path) -> None:
    """R1: exit code 3 and the place; the file of the document is valid."""
    assert penstock("config", "validate", "-c", str(DOCUMENT), cwd=tmp_path).code == 0
    file.write_text(HEAD + "      loadSql: select 1\n")
    wrong = penstock("config", "validate", cwd=tmp_path)
    assert wrong.code == 3
    assert "penstock.yaml:4:7: refdata.dictionaries.0.loadSql" in wrong.err


def test_the_schema_knows_the_documents_spelling(tmp_path: Path) -> None:
    """R1: an editor with the schema accepts the YAML of the document and marks an unknown key."""
    schema = json.loads(penstock("config", "schema", cwd=tmp_path).out)
    document = YAML(typ="safe").load(DOCUMENT)
    jsonschema.validate(document, schema)
    jsonschema.validate(YAML(typ="safe").load(OTHER), schema)
    document["refdata"]["postgres"]["jdbc_url"] = document["refdata"]["postgres"].pop("jdbcUrl")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


def _is_within(part: Any, whole: Any) -> bool:
    """Return whether *whole* contains every key of *part* with the same value."""
    if isinstance(part, dict):
        return all(key in whole and _is_within(value, whole[key]) for key, value in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(_is_within, part, whole))
    return bool(part == whole)


def postgres_of(url: str, **more: Any) -> Json:
    """Return the `postgres` block for the database at *url*."""
    parts = urlsplit(url)
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return {"jdbcUrl": f"jdbc:{bare}", "username": parts.username, **more}


@asynccontextmanager
async def opened_on(settings: Settings) -> AsyncIterator[RefdataHarness]:
    async with open_refdata(settings, Telemetry()) as platform:
        yield RefdataHarness(platform)


async def tables_in(url: str, schema: str) -> set[str]:
    connection = await asyncpg.connect(url)
    try:
        query = "SELECT table_name FROM information_schema.tables WHERE table_schema = $1"
        return {row[0] for row in await connection.fetch(query, schema)}
    finally:
        await connection.close()


async def test_refdata_has_a_database_of_its_own(database_url: str, postgres_url: str) -> None:
    """R1: with refdata.postgres its tables, bus and dictionaries are there, and none in the platform's database."""
    async with fresh_database(postgres_url, empty=True) as own:
        await create_schemas(own)
        async with opened_on(refdata_settings(database_url, postgres=postgres_of(own))) as harness:
            event_id = await harness.send("CURRENCY", upsert("NOK", {"name": "Krone", "digits": 2}))
            await harness.send("LOOSE", upsert("a", 1))
            await harness.apply()
            assert (await harness.update(event_id)).committed_version == 1
            assert await harness.items("CURRENCY") == {"NOK": {"name": "Krone", "digits": 2}}
            assert await harness.items("LOOSE") == {"a": 1}
            assert await harness.relay() == 2
        found = await tables_in(own, "public")
        assert {"dictionary_meta", "outbox_event", "journal"} <= found
        assert "pipeline_tracking" not in found
        connection = await asyncpg.connect(database_url)
        assert await connection.fetchval("SELECT count(*) FROM dictionary_meta") == 0
        await connection.close()


async def test_refdata_has_a_schema_of_its_own(database_url: str, postgres_url: str) -> None:
    """R1: postgres.schema contains all tables of refdata, also with a name that needs quotes, beside other schemas."""
    async with fresh_database(postgres_url, empty=True) as own:
        connection = await asyncpg.connect(own)
        await connection.execute('CREATE SCHEMA "Ref ""data"; CREATE SCHEMA second')
        await connection.close()
        for schema in ('Ref "data', "second"):
            settings = refdata_settings(
                database_url, postgres=postgres_of(own, schema=schema), dictionaries=[{"code": "L"}]
            )
            async with opened_on(settings) as harness:
                await harness.send("L", upsert("a", schema))
                await harness.apply()
                assert (await harness.items("L"), await harness.version("L")) == ({"a": schema}, 1)
                assert await harness.relay() == 1
            assert {"dictionary_meta", "dictionary_item", "journal"} <= await tables_in(own, schema)
        assert await tables_in(own, "public") == set()


async def test_an_unknown_schema_is_a_mistake_in_the_configuration(database_url: str) -> None:
    """R1: no table is created in another schema than the configured one."""
    settings = refdata_settings(database_url, postgres=postgres_of(database_url, schema="nowhere"))
    with pytest.raises(BadConfig, match="no schema 'nowhere'"):
        async with opened_on(settings):
            pass


async def test_a_missing_password_is_an_error_with_its_variable(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1: passwordFromEnv names the variable; without the variable nothing is connected."""
    monkeypatch.delenv("NO_SUCH_PASSWORD", raising=False)
    settings = refdata_settings(database_url, postgres=postgres_of(database_url, passwordFromEnv="NO_SUCH_PASSWORD"))
    with pytest.raises(BadConfig, match="environment variable NO_SUCH_PASSWORD is not set") as raised:
        async with opened_on(settings):
            pass
    assert "refdata.postgres.passwordFromEnv" in raised.value.message


async def test_the_password_is_taken_from_the_environment(
    database_url: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1: a password with special characters reaches the server."""
    secret = "p@ss/wö:rd%20#?"
    connection = await asyncpg.connect(database_url)
    role = "refdata_" + database_url.rpartition("/")[2].partition("?")[0]
    try:
        await connection.execute(f"CREATE ROLE {role} LOGIN SUPERUSER PASSWORD '{secret}'")
        monkeypatch.setenv("THE_PASSWORD", secret)
        block = postgres_of(database_url, passwordFromEnv="THE_PASSWORD") | {"username": role}
        async with opened_on(refdata_settings(database_url, postgres=block)) as harness:
            assert await harness.db.fetchval("SELECT current_user") == role
            assert unquote(urlsplit(harness.db.dsn).password or "") == secret
    finally:
        await connection.execute(f"DROP ROLE {role}")
        await connection.close()


async def test_a_missing_right_names_the_grant(database_url: str) -> None:
    """R1: a user of refdata.postgres without a right gets an error with database, user and the GRANT that helps."""
    name = database_url.rpartition("/")[2].partition("?")[0]
    role = f"limited_{name}"
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(f"CREATE ROLE {role} LOGIN; CREATE SCHEMA empty")
        block = postgres_of(database_url, schema="empty") | {"username": role}
        for grant in (f"GRANT USAGE ON SCHEMA empty TO {role}", f"GRANT ALL ON SCHEMA empty TO {role}"):
            with pytest.raises(BadConfig) as raised:
                async with opened_on(refdata_settings(database_url, postgres=block)):
                    pass
            text = f"{raised.value.message} {raised.value.hint}"
            assert name in text
            assert role in text
            assert "GRANT" in text
            await connection.execute(grant)
        async with opened_on(refdata_settings(database_url, postgres=block)) as harness:
            assert await harness.db.fetchval("SELECT current_user") == role
    finally:
        await connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
        await connection.close()
