"""deploy/docker: the image's recipe, and all roles together as compose.yaml starts them."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from functools import cache
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import jwt
import pytest
import redis
from ruamel.yaml import YAML

from penstock.settings import Settings, load_settings
from tests.services.kafka import Kafka, kafka
from tests.services.postgres import module_database
from tests.services.redis import _dies_with_us, _free_port, redis_binary
from tests.support.processes import PENSTOCK, Server, penstock, penstock_here
from tests.support.require import require
from tests.support.wait import until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
CONFIG = FOLDER / "config" / "penstock.yaml"
SCHEMA = ROOT / ".build" / "tools" / "compose-spec-v2.16.2.json"
SECRETS = ("postgres_password", "redis_password", "jwt_secret")
ROLES = ("migrate", "api", "command-api", "query", "apply", "relay", "kafka-adapter", "flows", "ingest", "harvest")
TRIED = ("command-api", "apply", "relay", "query")  # the way of a write to a reader
_OWN_SECONDS = {"ingest": 30.0}  # a run that is asked to stop
_MARGIN = 10.0  # seconds, for what comes after
_UNSECURED = ("postgres", "kafka")  # their images write here and there

# --- the image ---


def test_every_base_is_pinned_and_none_is_the_latest() -> None:
    """R27: a tag with all its numbers; the two stages stand on the same one."""
    stages = _instructions("FROM")
    assert [words.split()[0] for words in stages] == ["${PYTHON}", "${PYTHON}"]
    assert re.fullmatch(r"PYTHON=python:3\.11\.\d+-slim-bookworm", _instructions("ARG")[0])
    images = [service["image"] for service in _services().values()]
    assert all(re.fullmatch(r"penstock:dev|[\w/]+:\d+\.\d+(\.\d+)?(-bookworm)?", image) for image in images)


def test_the_image_runs_as_any_user() -> None:
    """R27: a number, not root, so that Kubernetes can see it; stopped as Penstock expects; no shell in between."""
    [user] = _instructions("USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    assert _instructions("STOPSIGNAL") == ["SIGTERM"]
    assert _instructions("ENTRYPOINT") == ['["penstock"]']
    chart = ROOT / "deploy" / "helm" / "penstock" / "values.yaml"
    context = YAML(typ="safe").load(chart)["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"


def test_what_is_copied_is_there_and_reaches_the_builder() -> None:
    """R27: .dockerignore lets through what the recipe copies, and nothing that is not wanted."""
    for source in _copied():
        assert (ROOT / source).exists(), source
        assert not _is_ignored(source), source
    for unwanted in (
        ".git/config",
        ".venv/bin/python",
        ".build/tools",
        "tests/conftest.py",
        "deploy/docker/secrets/jwt_secret",
    ):
        assert _is_ignored(unwanted), unwanted
    assert _is_ignored("src/penstock/__pycache__")


def test_the_tools_a_wheel_is_built_with_are_all_named() -> None:
    """R27: hatchling and what it needs are taken from the development lock, by their hashes."""
    [chosen] = re.findall(r"\^\((hatchling[\w|-]*)\)==", (FOLDER / "Dockerfile").read_text())
    needed = {re.match(r"[\w-]+", line)[0] for line in requires("hatchling") or () if "python_version" not in line}  # type: ignore[index]
    assert set(chosen.split("|")) == {"hatchling", *needed}
    locked = (ROOT / "requirements-dev.lock").read_text()
    assert all(re.search(rf"^{name}==", locked, re.MULTILINE) for name in chosen.split("|"))


def test_a_wheel_built_without_git_has_the_given_commit(tmp_path: Path) -> None:
    """R27: from what the recipe copies and nothing else; COMMIT is what penstock_build_info tells."""
    assert "printf '%s\\n' \"$COMMIT\" >src/penstock/_commit" in (FOLDER / "Dockerfile").read_text()
    for source in _copied():
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source, tmp_path / source, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            (tmp_path / source).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / source, tmp_path / source)
    (tmp_path / "src" / "penstock" / "_commit").write_text("0123abc\n")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as found:
        assert found.read("penstock/_commit") == b"0123abc\n"


# --- compose.yaml ---


def test_compose_is_as_the_specification_says() -> None:
    """R27: by the schema of the Compose Specification."""
    if not SCHEMA.exists():
        require("compose-schema", "the schema is not here: scripts/deploy-tools brings it")
    jsonschema.validate(_compose(), json.loads(SCHEMA.read_text()))


def test_what_is_named_is_there() -> None:
    """R27: every service waited for, every secret, volume and network."""
    compose = _compose()
    for name, service in compose["services"].items():
        assert set(service.get("depends_on", ())) <= set(compose["services"]), name
        assert set(service.get("secrets", ())) <= set(compose["secrets"]), name
        assert set(service["networks"]) <= set(compose["networks"]), name
        for volume in service.get("volumes", ()):
            known = (
                (FOLDER / volume["source"]).is_dir()
                if volume["type"] == "bind"
                else volume["source"] in compose["volumes"]
            )
            assert known, volume
    assert set(compose["secrets"]) == set(SECRETS)


def test_waiting_is_for_what_comes_to_be() -> None:
    """R27: for the end of what ends, and for the health of what goes on and tells it."""
    services = _services()
    for service in services.values():
        for name, how in service.get("depends_on", {}).items():
            ends = services[name]["restart"] != "unless-stopped"
            assert how["condition"] == ("service_completed_successfully" if ends else "service_healthy")
            assert ends == bool(services[name].get("healthcheck", {}).get("disable"))


def test_nothing_is_open_to_other_machines() -> None:
    """R25: ports are published on loopback only, each once."""
    ports = [port for service in _services().values() for port in service.get("ports", ())]
    assert len({port.split(":")[1] for port in ports}) == len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_no_container_may_more_than_it_needs() -> None:
    """R27: no new privileges, limits for all; no capability and nothing to write on for ours and for Redis."""
    for name, service in _services().items():
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        if name not in _UNSECURED:
            assert service["read_only"] is True, name
            assert service["cap_drop"] == ["ALL"], name


def test_no_secret_is_in_the_repository(tmp_path: Path) -> None:
    """R27: make-secrets makes those that are missing, once, and git does not see them."""
    shutil.copy(FOLDER / "make-secrets", tmp_path)
    made = []
    for _ in range(2):
        subprocess.run([tmp_path / "make-secrets"], check=True)
        made.append({name: (tmp_path / "secrets" / name).read_text() for name in SECRETS})
    assert made[0] == made[1]
    assert all(len(value) >= 32 for value in made[0].values())
    assert len(set(made[0].values())) == len(SECRETS)
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    assert "secrets/" in (FOLDER / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("role", ROLES)
def test_every_command_is_one_of_ours(role: str) -> None:
    """R27: with options it has; the port is the one its health is asked for on."""
    command = _services()[role]["command"]
    words = [word for word in command if not word.startswith("--")][:2]
    output = penstock_here(*words, "--help")
    assert output.code == 0
    assert all(word in output.out for word in command if word.startswith("--"))
    if role != "migrate":
        port = command[command.index("--port") + 1]
        assert f"127.0.0.1:{port}/actuator/health/readiness" in _services()[role]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("role", ROLES)
def test_whatever_runs_in_a_container_looks_at_its_configuration(role: str) -> None:
    """R27: the environment names the file, so `docker compose exec ROLE penstock doctor` asks the same one."""
    service = _services()[role]
    [mount] = [volume for volume in service["volumes"] if volume["type"] == "bind"]
    assert service["environment"]["PENSTOCK_CONFIG"] == f"{mount['target']}/{CONFIG.name}"
    assert (FOLDER / mount["source"] / CONFIG.name) == CONFIG
    assert "--config" not in service["command"]


@pytest.mark.parametrize("role", [role for role in ROLES if role != "migrate"])
def test_a_container_has_time_to_end(role: str) -> None:
    """R27: active work is finished; a run of ingest has 30 more seconds."""
    server = _settings().server
    needed = server.drain_delay.total_seconds() + server.drain_timeout.total_seconds() + _OWN_SECONDS.get(role, 0.0)
    assert float(_services()[role]["stop_grace_period"].removesuffix("s")) >= needed + _MARGIN


def test_the_configuration_is_one() -> None:
    """R27: every role's penstock.yaml loads; its hosts and secrets are services and secrets of compose.yaml."""
    settings = _settings()
    services = _services()
    assert settings.signals.redis is not None
    assert settings.bus.kafka is not None
    assert {node.partition(":")[0] for node in settings.signals.redis.nodes} == {f"redis-{n}" for n in range(1, 7)}
    assert settings.bus.kafka.bootstrap.partition(":")[0] in services
    assert set(re.findall(r"file:/run/secrets/(\w+)", CONFIG.read_text())) == set(SECRETS)
    assert set(services["redis-cluster"]["environment"]["NODES"].split()) == {
        f"{services[f'redis-{n}']['networks']['penstock']['ipv4_address']}:6379" for n in range(1, 7)
    }


def test_a_pod_has_the_configured_memory() -> None:
    """R29: the limit and an eighth fit into /dev/shm, and that into the container."""
    query = _services()["query"]
    assert (
        _settings().refdata.query.memory_limit_mb * 9 / 8
        <= _megabytes(query["shm_size"])
        < _megabytes(query["mem_limit"])
    )


# --- all of it, running ---


@pytest.mark.full
def test_a_write_is_read_by_its_version(running: "ComposeRoles") -> None:
    """R6, R21, R25: with a token, from the command API over Kafka, PostgreSQL and Redis to a pod's memory."""
    item = "/v1/tenants/acme/dictionaries/RATES/items/EUR"
    update = {"dictCode": "RATES", "eventType": "DELTA", "items": [{"key": "EUR", "payload": {"rate": 1.1}}]}
    at = f"{running.urls['command-api']}/v1/tenants/acme/updates?consistencyMode=WAIT_COMMIT&timeoutMs=1000"
    assert httpx.post(at, json=update).status_code == 401
    written = httpx.post(at, json=update, headers=running.token("acme"), timeout=30)
    assert written.status_code in (200, 202), written.text
    found: list[httpx.Response] = []

    def is_read() -> bool:
        headers = {**running.token("acme"), "X-Min-Version": "1"}
        found.append(httpx.get(running.urls["query"] + item, headers=headers, timeout=30))
        return found[-1].status_code == 200

    until(is_read, "version 1 is not read")
    assert found[-1].json() == {"rate": 1.1}
    assert found[-1].headers["X-Dict-Version"] == "1"
    assert httpx.get(running.urls["query"] + item, headers=running.token("other")).status_code == 403


def test_the_announcement_went_over_the_redis_cluster(running: "ComposeRoles") -> None:
    """R15, R16: the relay wrote the stream of the cluster that redis-cluster made, behind its password."""
    nodes = [redis.cluster.ClusterNode("127.0.0.1", port) for port in running.redis_ports]  # type: ignore[no-untyped-call]
    client = redis.RedisCluster(startup_nodes=nodes, password=running.secret("redis_password"))
    try:
        until(lambda: client.xlen("refdata:inv:stream") >= 1, "nothing was announced")
    finally:
        client.close()


def test_the_health_that_compose_asks_for_is_good(running: "ComposeRoles") -> None:
    """R17: the check of compose.yaml itself, against each role."""
    for role in TRIED:
        *_, program = _services()[role]["healthcheck"]["test"]
        asked = re.sub(r"http://127\.0\.0\.1:\d+", running.urls[role], program)
        assert asked != program
        subprocess.run([sys.executable, "-c", asked], check=True, timeout=30)


class ComposeRoles:
    """Roles as compose.yaml starts them, on servers of this machine."""

    def __init__(self, secrets: Path, urls: Mapping[str, str], redis_ports: list[int]) -> None:
        self._secrets, self.urls, self.redis_ports = secrets, urls, redis_ports

    def secret(self, name: str) -> str:
        return (self._secrets / name).read_text()

    def token(self, tenant: str) -> dict[str, str]:
        claims = {"sub": "ann", "tenant_id": tenant, "exp": 4_000_000_000}
        known = _settings().auth.jwt
        assert known is not None
        output = {**claims, "iss": known.issuer, "aud": known.audience}
        return {"authorization": "Bearer " + jwt.encode(output, self.secret("jwt_secret"), algorithm="HS256")}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeRoles]:
    """`migrate`, then the roles; penstock.yaml as it is but for the names of hosts, folders and topics."""
    folder = tmp_path_factory.mktemp("compose")
    if redis_binary() is None or shutil.which("redis-cli") is None:
        require("redis")
    shutil.copy(FOLDER / "make-secrets", folder)
    subprocess.run([folder / "make-secrets"], check=True)
    with ExitStack() as stack:
        broker = stack.enter_context(kafka())
        broker.needs_real("does not make topics when it is asked to")
        ports = stack.enter_context(_redis_cluster(folder))
        config = _adapted(folder, stack.enter_context(module_database(empty=True)), broker, ports)
        env = {
            "PENSTOCK__REFDATA__KAFKA__COMMANDSTOPIC": f"commands.{folder.name}.{os.getpid()}",
            "PENSTOCK__BUS__KAFKA__GROUP_PREFIX": f"compose.{os.getpid()}",
            "PENSTOCK_CONFIG": str(config),
        }
        elsewhere = tmp_path_factory.mktemp("elsewhere")  # the file is found by its name alone
        done = penstock(*_arguments("migrate"), cwd=elsewhere, env=env)
        assert done.code == 0, done.err
        servers = {role: Server(role, [PENSTOCK, *_arguments(role), "--json"], elsewhere, env) for role in TRIED}
        for server in servers.values():
            stack.enter_context(server)
        urls = {role: server.api.replace("0.0.0.0", "127.0.0.1") for role, server in servers.items()}
        yield ComposeRoles(folder / "secrets", urls, ports)
        assert [server.stop() for server in servers.values()] == [0] * len(TRIED)


@contextmanager
def _redis_cluster(folder: Path) -> Iterator[list[int]]:
    """Six nodes by the commands of compose.yaml, made a cluster by its service, which runs twice."""
    services, ports, nodes = _services(), [_free_port() for _ in range(6)], []
    try:
        for number, port in enumerate(ports, 1):
            script = _script(services[f"redis-{number}"]["command"], folder).replace("/data", str(folder / str(port)))
            (folder / str(port)).mkdir()
            script = script.replace("redis-server --port 6379", f"{redis_binary()} --bind 127.0.0.1 --port {port}")
            nodes.append(subprocess.Popen(["sh", "-c", script], preexec_fn=_dies_with_us(), stdout=subprocess.DEVNULL))
        healths = [
            _script(services["redis-1"]["healthcheck"]["test"], folder).replace("cli", f"cli -p {p}") for p in ports
        ]
        for health in healths:
            until(lambda health=health: _succeeds(health), "a node of Redis is not healthy")  # type: ignore[misc]
        forms = _script(services["redis-cluster"]["command"], folder)
        env = {**os.environ, "NODES": " ".join(f"127.0.0.1:{port}" for port in ports)}
        for _ in range(2):
            subprocess.run(["sh", "-c", forms], env=env, check=True, stdout=subprocess.DEVNULL, timeout=60)
        yield ports
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def _succeeds(script: str) -> bool:
    return subprocess.run(["sh", "-c", script], check=False, stderr=subprocess.DEVNULL).returncode == 0


def _script(words: list[str], folder: Path) -> str:
    """What a shell is given, as Compose hands it on."""
    return words[-1].replace("$$", "$").replace("/run/secrets", str(folder / "secrets"))


def _adapted(folder: Path, database: str, broker: Kafka, redis_ports: list[int]) -> Path:
    text = CONFIG.read_text()
    places = {f"redis-{number}:6379": f"127.0.0.1:{port}" for number, port in enumerate(redis_ports, 1)}
    places["postgresql://penstock@postgres:5432/penstock"] = database
    places["kafka:9092"] = broker.bootstrap
    places |= {"/run/secrets": str(folder / "secrets"), "/var/lib/penstock": str(folder / "data")}
    for written, here in places.items():
        assert written in text
        text = text.replace(written, here)
    (folder / "data").mkdir()  # as it is in the image
    (folder / "penstock.yaml").write_text(text)
    return folder / "penstock.yaml"


def _arguments(role: str) -> list[str]:
    given: list[str] = _services()[role]["command"]
    return ["0" if before == "--port" else word for before, word in zip(["", *given], given, strict=False)]


@cache
def _compose() -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load(FOLDER / "compose.yaml")
    return found


def _services() -> dict[str, Any]:
    services: dict[str, Any] = _compose()["services"]
    return services


@cache
def _settings() -> Settings:
    return load_settings(CONFIG, env={})


def _instructions(name: str) -> list[str]:
    """What follows each instruction of that name, its lines as one."""
    lines = [line for line in (FOLDER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [line.partition(" ")[2].strip() for line in whole if line.startswith(f"{name} ")]


def _copied() -> list[str]:
    """What comes from the repository."""
    copies = [words.split()[:-1] for words in _instructions("COPY") if not words.startswith("--from")]
    return [source for sources in copies for source in sources]


def _is_ignored(path: str) -> bool:
    """The last pattern of .dockerignore that matches a path, or a folder it is in, decides."""
    parents = [path, *map(str, Path(path).parents)]
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if line and not line.startswith("#") and any(fnmatch(name, pattern) for name in [*parents, Path(path).name]):
            ignored = not line.startswith("!")
    return ignored


def _megabytes(text: str) -> int:
    return int(text[:-1]) * {"m": 1, "g": 1024}[text[-1]]
