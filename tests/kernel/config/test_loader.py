"""Configuration: every error has its location, and every error is BadConfig."""

import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field

from penstock.kernel.config.loader import Section, load, resolve_secret
from penstock.kernel.errors import BadConfig
from penstock.settings import Settings, load_settings

EXAMPLE = """
data_dir: /var/lib/penstock
server: {host: 0.0.0.0, port: 80, drain_timeout: 20}
database:
  url: postgresql://penstock@db-1:5432,db-2:5433/penstock
  password: env:DB_PASSWORD
  statement_timeout: PT1M
bus:
  kafka: {bootstrap: "kafka:9092", options: {acks: all}, secrets: {sasl.password: file:/run/secrets/kafka}}
signals:
  redis: {nodes: [r1:6379], mode: single, tls: true}
storage: {url: s3://bucket/prefix, secrets: {secret_access_key: env:KEY}}
auth:
  jwt: {jwks_file: /etc/penstock/jwks.json, audience: penstock, leeway: 1.5}
telemetry: {log_level: WARNING, otlp_endpoint: "http://collector:4318/v1/traces"}
"""


class Config:
    """A configuration file that a test writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, content: str | bytes, env: dict[str, str] | None = None, **overrides: Any) -> Settings:
        self.path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_settings(self.path, env or {}, overrides)

    def refused(self, content: str | bytes, env: dict[str, str] | None = None, **overrides: Any) -> str:
        """Return the error of an invalid file, with FILE for its path."""
        with pytest.raises(BadConfig) as refused:
            self.load(content, env, **overrides)
        assert refused.value.exit_code == 3
        return refused.value.message.replace(str(self.path), "FILE")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(tmp_path / "penstock.yaml")


def test_a_full_example_is_loaded(config: Config) -> None:
    """Every section can be set, durations as seconds or as ISO 8601, hosts of PostgreSQL as a list."""
    found = config.load(EXAMPLE)
    assert (found.server.port, found.server.drain_timeout) == (80, timedelta(seconds=20))
    assert found.database.statement_timeout == timedelta(minutes=1)
    assert found.bus.kafka is not None
    assert found.bus.kafka.options == {"acks": "all"}


@pytest.mark.parametrize("content", ["", "# nothing yet\n", "---\n", "null", "{}", "\ufeff"])
def test_an_empty_file_is_a_configuration(config: Config, content: str) -> None:
    """Every key has a default."""
    assert config.load(content) == Settings()


def test_a_missing_default_file_is_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --config the file in the working directory is read if it exists."""
    monkeypatch.chdir(tmp_path)
    assert load_settings(None, {}) == Settings()
    (tmp_path / "penstock.yaml").write_text("server: {port: 99}")
    assert load_settings(None, {}).server.port == 99


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("server: {port: 1\n", "FILE:2:1: not valid YAML: expected ',' or '}'"),
        ("a: b: c", "FILE:1:5: not valid YAML: mapping values are not allowed here"),
        ("server:\n\tport: 1", "FILE:2:1: not valid YAML: found character '\\t'"),
        ("server:\n  port: 1\n  port: 2\n", 'FILE:3:3: not valid YAML: found duplicate key "port"'),
        ("server: {port: 1}\n---\nbus: {}\n", "FILE:2:1: not valid YAML: but found another document"),
        ("server: *missing", "FILE:1:9: not valid YAML: found undefined alias 'missing'"),
        ("- server\n- bus\n", "FILE:1:1: the file must contain keys with values"),
        ("just words", "FILE:1:1: the file must contain keys with values"),
        ("server: {port: 2001-99-99}", "FILE: not valid YAML: month must be in 1..12"),
        ("server: !!float ''", "FILE: not valid YAML: a value does not match its tag"),
        ("[" * 700, "FILE: not valid YAML: nested too deep"),
        ("server: \0", "FILE: not valid YAML: unacceptable character #x0000"),
        (b"\x7fELF\xff\xfe\x00\x01", "FILE is not UTF-8"),
        ("server: {}".encode("utf-16"), "FILE is not UTF-8"),
        (b"#" * 1_000_001, "FILE has more than 1000000 bytes"),
    ],
)
def test_invalid_yaml_has_a_location(config: Config, content: str | bytes, expected: str) -> None:
    """The error of a file that is not a mapping has the reason, and line and column if the parser knows them."""
    assert config.refused(content).startswith(expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("sever: {}", ["FILE:1:1: sever: unknown key; did you mean 'server'?"]),
        ("server:\n  hots: x\n", ["FILE:2:3: server.hots: unknown key; did you mean 'host'?"]),
        (
            "bus:\n  kafka:\n    bootstrap: k:9092\n    optons: {}\n",
            ["FILE:4:5: bus.kafka.optons: unknown key; did you mean 'options'?"],
        ),
        (
            "bus: {kafka: {bootstrp: x}}",
            [
                "FILE:1:7: bus.kafka.bootstrap: is required",
                "FILE:1:15: bus.kafka.bootstrp: unknown key; did you mean 'bootstrap'?",
            ],
        ),
        ("auth:\n  jwt:\n    zzz: 1\n    jwks_file: /k\n", ["FILE:3:5: auth.jwt.zzz: unknown key; known keys: algor"]),
        ("flows: {x: 1}", ["FILE:1:9: flows.x: unknown key; "]),
        (
            "storage: {options: {secret_access_key: hunter2}}",
            [
                "FILE:1:11: storage.options: secret_access_key is a secret: move it to `secrets`, as env:NAME or "
                "file:/path"
            ],
        ),
        ("1: 2", ["FILE:1:1: 1: keys must be text"]),
        ("server:\n  port: many\n", ["FILE:2:3: server.port: must be a whole number"]),
        ("server: {port: 65536}", ["FILE:1:10: server.port: must be a whole number of at most 65535"]),
        ("server: 5", ["FILE:1:1: server: must be an object with keys"]),
        ("server: [1]", ["FILE:1:1: server: must be an object with keys"]),
        ("server: {drain_timeout: soon}", ["FILE:1:10: server.drain_timeout: must be a duration, e.g. 300 or PT5M"]),
        ("server: {drain_timeout: -5}", ["FILE:1:10: server.drain_timeout: must be a duration of at least 0 seconds"]),
        (
            "database: {statement_timeout: 0}",
            ["FILE:1:12: database.statement_timeout: must be a duration of at least 1 second"],
        ),
        (
            "telemetry: {log_level: LOUD}",
            ["FILE:1:13: telemetry.log_level: must be one of: DEBUG, INFO, WARNING, ERROR"],
        ),
        (
            "signals:\n  redis:\n    nodes:\n    - a:1\n    - [b]\n",
            ["FILE:5:7: signals.redis.nodes.1: must be text"],
        ),
        ("server: {port: x}\nbus: {partitions: y}", ["FILE:1:10: server.port: ", "FILE:2:7: bus.partitions: "]),
    ],
)
def test_every_wrong_key_and_value_has_line_and_column(config: Config, content: str, expected: list[str]) -> None:
    """All errors are reported at once, each with its location, and a misspelt key with a suggestion."""
    lines = config.refused(content).splitlines()
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True)), lines


def test_errors_are_also_data(config: Config) -> None:
    """`--json` prints location, path and message separately."""
    with pytest.raises(BadConfig) as refused:
        config.load("server: {hots: x}")
    (problem,) = refused.value.as_dict()["problems"]
    assert (problem["location"], problem["path"]) == (f"{config.path}:1:10", "server.hots")


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_an_unreadable_file_is_a_configuration_error(tmp_path: Path, name: str) -> None:
    """A missing file, or a folder instead of a file, is BadConfig."""
    with pytest.raises(BadConfig) as refused:
        load_settings(tmp_path / name, {})
    assert refused.value.code == "CONFIG_UNREADABLE"


def test_the_command_line_overrides_the_environment_and_the_file(config: Config) -> None:
    """The command line overrides the environment, which overrides the file, value by value."""
    content = "server: {port: 1, query_port: 1, body_limit: 1001}"
    env = {"PENSTOCK__SERVER__PORT": "2", "PENSTOCK__SERVER__QUERY_PORT": "2", "OTHER": "x"}
    server = config.load(content, env, **{"server.port": 3, "server.host": None}).server
    assert (server.port, server.query_port, server.body_limit, server.host) == (3, 2, 1001, "127.0.0.1")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SERVER__PORT", "many", "server.port: must be a whole number"),
        ("SERVER__HOTS", "x", "server.hots: unknown key; did you mean 'host'?"),
        ("SEVER__PORT", "1", "sever: unknown key; did you mean 'server'?"),
        ("SERVER__PORT__X", "1", "server.port.x: unknown key"),
        ("SERVER", "5", "server: must be an object with keys"),
        ("SERVER", "{port: 1", "not a YAML value; put text in quotes"),
        ("SERVER__PORT", "2001-99-99", "not a YAML value; put text in quotes"),
        ("SERVER__PORT", "!!float ''", "not a YAML value; put text in quotes"),
        ("DATABASE__PASSWORD", "hunter2", "database.password: must be a reference to a secret"),
        ("", "1", ": unknown key"),
    ],
)
def test_a_wrong_variable_is_reported_by_its_name(config: Config, name: str, value: str, expected: str) -> None:
    """An error of a variable has the name of the variable, never a line of the file."""
    message = config.refused("server: {port: 1}", {f"PENSTOCK__{name}": value})
    assert "FILE" not in message
    assert f"environment variable PENSTOCK__{name}: {expected}".replace(": : ", ": ") in message


def test_variables_set_keys_of_missing_sections(config: Config) -> None:
    """A variable creates the sections of its path, and its text is read as YAML."""
    found = config.load("signals:\n", {"PENSTOCK__SIGNALS__REDIS__NODES": "[a:1, b:2]"})
    assert found.signals.redis is not None
    assert found.signals.redis.nodes == ["a:1", "b:2"]


class SourceSection(Section):
    jdbc_url: str = Field("", alias="jdbcUrl")
    fetch_size: int = Field(1, alias="fetchSize")
    schema_name: str = "public"


class Mirror(Section):
    read_only: SourceSection | None = Field(None, alias="readOnly")
    options: dict[str, str] = Field(default_factory=dict)


class Sources(Section):
    postgres: SourceSection = SourceSection()
    mirror: Mirror = Mirror()


@pytest.mark.parametrize(
    "name", ["POSTGRES__JDBCURL", "POSTGRES__jdbcUrl", "MIRROR__READONLY__JDBCURL", "Mirror__readOnly__Jdbcurl"]
)
def test_variables_set_keys_in_camel_case(name: str) -> None:
    """R1: the path of a variable matches keys in any case, and the key has the spelling of the model."""
    found = load(Sources, None, {f"PENSTOCK__{name}": "jdbc:x"})
    source = found.postgres if name.startswith("POSTGRES") else found.mirror.read_only
    assert source == SourceSection(jdbcUrl="jdbc:x")


def test_a_variable_overrides_the_camel_case_key_of_the_file(config: Config) -> None:
    """R1: the variable overrides the same key of the file; other keys remain, also those without an alias."""
    config.path.write_text("postgres: {jdbcUrl: file, fetchSize: 7}")
    env = {"PENSTOCK__POSTGRES__JDBCURL": "env", "PENSTOCK__POSTGRES__SCHEMA_NAME": "ref"}
    found = load(Sources, config.path, env)
    assert found.postgres == SourceSection(jdbcUrl="env", fetchSize=7, schema_name="ref")


def test_keys_of_a_free_mapping_remain_in_lower_case() -> None:
    """R1: keys that no model defines have no other spelling."""
    assert load(Sources, None, {"PENSTOCK__MIRROR__OPTIONS__JDBCURL": "x"}).mirror.options == {"jdbcurl": "x"}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("POSTGRES__FETCHSIZE", "many", "postgres.fetchSize: must be a whole number"),
        ("POSTGRES__FETCHSIZES", "1", "postgres.fetchsizes: unknown key; did you mean 'fetchSize'?"),
        ("POSTGRES__JDBC_URL", "x", "postgres.jdbc_url: unknown key; did you mean 'jdbcUrl'?"),
        ("POSTGRE__JDBCURL", "x", "postgre: unknown key; did you mean 'postgres'?"),
        ("POSTGRES__0__JDBCURL", "x", "postgres.0: unknown key; known keys: jdbcUrl"),
    ],
)
def test_a_wrong_variable_for_camel_case_is_reported_by_its_name(name: str, value: str, expected: str) -> None:
    """R1: an invalid value is reported with the spelling of the model, an unknown key as it was given."""
    with pytest.raises(BadConfig) as refused:
        load(Sources, None, {f"PENSTOCK__{name}": value})
    assert refused.value.message.startswith(f"environment variable PENSTOCK__{name}: {expected}")


@pytest.mark.parametrize(
    "content",
    [
        "database: {password: hunter2}",
        "database: {password: 'env:'}",
        "database: {password: 'env:hunter2 '}",
        'database: {password: "env:A\\nhunter2"}',
        'database: {password: "file:/hunter2\\n"}',
        "database: {password: file:hunter2}",
        "database: {password: [hunter2]}",
        "storage: {secrets: {key: hunter2}}",
        "auth: {jwt: {secret: hunter2, algorithms: [HS256]}}",
        "database: {url: 'postgresql://u:hunter2@h/d'}",
        "database: {url: 'postgresql://u:p@hunter2@h/d'}",
        "database: {url: 'postgresql://u:hunter2/x@h/d'}",
        "database: {url: 'postgresql://u:hunter2@[h/d'}",
        "database: {url: 'postgresql://u:hunter2@h\u2100/d'}",
        "database: {url: 'postgresql://u:hunter2@h:port/d'}",
        "database: {url: 'postgresql://h/d?user=u&password=hunter2'}",
        "auth: {jwt: {jwks_url: 'https://u:hunter2@h/jwks'}}",
        "storage: {url: 's3://key:hunter2@bucket'}",
        "telemetry: {otlp_endpoint: 'http://u:hunter2@h'}",
    ],
)
def test_a_secret_in_the_file_is_refused_and_not_repeated(config: Config, content: str) -> None:
    """A secret must be a reference; the error, which may be logged, does not contain it."""
    with pytest.raises(BadConfig) as refused:
        config.load(content)
    assert "hunter2" not in f"{refused.value.as_dict()}"


@pytest.mark.parametrize(
    "url", ["postgresql://h:x/d", "postgresql://h:1,i:x/d", "postgresql://h:70000/d", "http://[h/"]
)
def test_an_invalid_url_is_refused(config: Config, url: str) -> None:
    """An invalid port is an error before anything starts."""
    assert config.refused(f"database: {{url: '{url}'}}").startswith("FILE:1:12: database.url: ")


def test_a_reference_is_resolved_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """env: and file: return the secret, a file without its final newline."""
    monkeypatch.setenv("A_SECRET", "s3cret\n")
    (tmp_path / "secret").write_text("s3cret two\n")
    assert resolve_secret("env:A_SECRET", "x") == "s3cret\n"
    assert resolve_secret(f"file:{tmp_path / 'secret'}", "x") == "s3cret two"


@pytest.mark.parametrize(
    "reference", ["env:NOT_SET_AT_ALL", "file:/no/such/file", "file:/", "file:/a\0b", "file:BINARY"]
)
def test_a_missing_secret_is_reported_by_name(tmp_path: Path, reference: str) -> None:
    """The error of a missing secret names the setting and the reference."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    reference = reference.replace("BINARY", str(tmp_path / "binary"))
    with pytest.raises(BadConfig) as refused:
        resolve_secret(reference, "database.password")
    assert refused.value.code == "SECRET_MISSING"
    assert f"database.password refers to {reference}" in refused.value.message


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
@pytest.mark.parametrize("by", ["file", "environment variable PENSTOCK__SERVER__HOST", "command line"])
def test_without_authentication_only_loopback_is_served(config: Config, host: str, by: str) -> None:
    """R25: a host that others can reach is refused without auth.jwt, with the location of the host."""
    content = f"server: {{host: '{host}'}}" if by == "file" else ""
    env = {"PENSTOCK__SERVER__HOST": f"'{host}'"} if by.startswith("env") else {}
    message = config.refused(content, env, **({"server.host": host} if by == "command line" else {}))
    assert message.startswith(
        f"{'FILE:1:10' if by == 'file' else by}: server.host: {host} accepts connections from other machines"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_authentication(config: Config, host: str) -> None:
    """R25: without any setting the server accepts connections of this machine."""
    assert config.load(f"server: {{host: '{host}'}}").server.is_loopback


@pytest.mark.parametrize(
    ("jwt", "expected"),
    [
        ("{}", "must have exactly one of"),
        ("{jwks_file: /k, jwks_url: 'https://h/k'}", "must have exactly one of"),
        ("{secret: 'env:S', jwks_file: /k, algorithms: [HS256]}", "must have exactly one of"),
        ("{secret: 'env:S'}", "`secret` needs"),
        ("{secret: 'env:S', algorithms: [HS256, RS256]}", "`secret` needs"),
        ("{jwks_file: /k, algorithms: [HS256]}", "`secret` needs"),
        ("{jwks_file: /k, algorithms: [HS256, RS256]}", "`secret` needs"),
        ("{jwks_url: 'https://h/k', algorithms: [none]}", "must be one of: HS256, RS256, ES256"),
        ("{jwks_file: /k, algorithms: []}", "must not be empty"),
        ("{jwks_file: /k, leeway: -1}", "must be a duration of at least 0 seconds"),
    ],
)
def test_keys_and_algorithms_must_match(config: Config, jwt: str, expected: str) -> None:
    """R25: there is one source of keys, and never a public key for an algorithm with a shared secret."""
    assert expected in config.refused(f"auth: {{jwt: {jwt}}}")


@pytest.mark.parametrize(
    "jwt",
    ["{secret: 'env:S', algorithms: [HS256]}", "{jwks_file: /k}", "{jwks_url: 'https://h/k', algorithms: [ES256]}"],
)
def test_with_authentication_any_host_is_served(config: Config, jwt: str) -> None:
    """R25: with keys the server accepts connections of other machines."""
    assert config.load(f"server: {{host: 0.0.0.0}}\nauth: {{jwt: {jwt}}}").auth.jwt is not None


SCHEMA = jsonschema.Draft202012Validator(Settings.model_json_schema())


def test_the_schema_accepts_valid_configurations() -> None:
    """The JSON Schema accepts the example and the defaults."""
    from ruamel.yaml import YAML

    jsonschema.Draft202012Validator.check_schema(SCHEMA.schema)
    assert list(SCHEMA.iter_errors(YAML(typ="safe").load(EXAMPLE))) == []
    assert list(SCHEMA.iter_errors(Settings().model_dump(mode="json", by_alias=True))) == []


@pytest.mark.parametrize(
    "document",
    [
        {"sever": {}},
        {"server": {"port": "many"}},
        {"server": {"drain_timeout": -1}},
        {"bus": {"kafka": {"bootstrap": "k", "optons": {}}}},
        {"bus": {"kafka": {}}},
        {"telemetry": {"log_level": "LOUD"}},
        [],
    ],
)
def test_the_schema_refuses_invalid_configurations(document: Any) -> None:
    """The JSON Schema refuses unknown keys, wrong types and missing keys."""
    assert list(SCHEMA.iter_errors(document))


TOKENS = (
    "server bus kafka port host : - ? , [ ] { } ' \" | > & &a *a << ! !!int !!float !!set !!omap !!binary !!timestamp "
    "!!bool !x %YAML --- ... # 0x 0b1 1_0 1e .nan -.inf 1:2:3 2001-13-01 ~ null yes = @ ` \\"
)
SPACES = st.sampled_from([" ", "\n", "\n  ", "\n    ", "", "\t", "\r", "\0", "\x85", "\u2028", "\ufeff"])
YAML_LIKE = st.lists(st.tuples(st.sampled_from(TOKENS.split()), SPACES), max_size=15).map(
    lambda pairs: "".join(map("".join, pairs))
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(YAML_LIKE.map(str.encode) | st.text().map(str.encode) | st.binary())
def test_any_file_is_a_configuration_or_an_error(config: Config, content: bytes) -> None:
    """Any content of the file is a configuration or BadConfig."""
    with contextlib.suppress(BadConfig):
        config.load(content)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["SERVER", "SERVER__PORT", "DATA_DIR", "BUS__KAFKA__OPTIONS", "A__B"]), YAML_LIKE | st.text())
def test_any_variable_is_a_configuration_or_an_error(name: str, value: str) -> None:
    """Any content of the environment is a configuration or BadConfig."""
    with contextlib.suppress(BadConfig):
        load_settings(None, {f"PENSTOCK__{name}": value})
