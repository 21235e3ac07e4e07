"""R17, R23, R27: every role as a process: what its probes say while PostgreSQL goes and comes, and as it stops."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from penstock.app.schema import list_platform_migrations
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.settings import Settings
from tests.deploy.rolling.rolling_roles import (
    API,
    AT_MOST,
    COMMANDS,
    FLOWS,
    INGEST,
    QUERY,
    TRACKING,
    RollingRole,
    configure,
    running,
)
from tests.services.postgres import SETTINGS, fresh_database
from tests.support.ports import free_port
from tests.support.processes import penstock, penstock_here
from tests.support.settings import write_config
from tests.support.wait import until

# Which component of each role is its PostgreSQL.
DATABASE = {
    API: "database",
    "command-api": "refdata",
    "apply": "refdata",
    "relay": "refdata",
    "harvest": "database",
    FLOWS: "database",
    INGEST: "database",
    QUERY: "primary",
}
start_programs = partial(running, in_new_interpreter=True)  # every role is a new interpreter here
STEPS = {"dump": {"kind": "python", "inputs": {"call": "json:dumps", "args": {"obj": 1}}}}


class Primary:
    """A PostgreSQL of the test's own, which it stops and starts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running = AsyncExitStack()
        self.url = ""

    async def start(self) -> None:
        self.url = await self._running.enter_async_context(run_embedded_postgres(self._folder, settings=SETTINGS))

    async def stop(self) -> None:
        await self._running.aclose()


@pytest.fixture
async def primary(tmp_path: Path) -> AsyncIterator[Primary]:
    primary = Primary(tmp_path / "postgres")
    await primary.start()
    async with Database.open(primary.url, size=1) as db:
        await migrate.migrate(db, list_platform_migrations(Settings()))
    yield primary
    await primary.stop()


@pytest.mark.full
async def test_probes_mean_what_they_say(primary: Primary, tmp_path: Path) -> None:
    """R17, R23, R27: not ready without PostgreSQL but alive, ready when it is back; a stop is announced first."""
    configure(tmp_path, primary.url, server={"drain_delay": 3})
    await primary.stop()
    with start_programs(tmp_path, QUERY, waits=False) as query_roles:
        is_loaded_late(query_roles[QUERY])
        await primary.start()
        query_roles[QUERY].becomes_ready()
        with start_programs(tmp_path, *(name for name in COMMANDS if name not in (QUERY, FLOWS, TRACKING))) as others:
            roles = {**query_roles, **others}
            everyone_is_ready(roles)
            begin_a_run(roles[API])
            with start_programs(tmp_path, FLOWS) as workers:
                is_done_by(workers[FLOWS], roles[API])
                roles |= workers
                await primary.stop()
                everyone_notices(roles)
                await primary.start()
                everyone_is_ready(roles)
                everyone_ends(roles)


def is_loaded_late(pod: RollingRole) -> None:
    """Alive without PostgreSQL, and not ready before its dictionaries are there."""
    until(lambda: pod.status("liveness") == 200, "the pod lives", within=AT_MOST)
    assert pod.status("readiness") == 503
    assert pod.metric("penstock_ready") == 0
    assert pod.tells("dictionaries", is_up=False)
    found = pod.get("/v1/tenants/acme/dictionaries/ONE/items/a")
    assert (found.status_code, found.json()["code"]) == (503, "NOT_LOADED")


def begin_a_run(api: RollingRole) -> None:
    """The API has the routes of all parts, takes a run of a flow in, and does none of it."""
    paths = api.get("/openapi.json").json()["paths"]
    parts = ("/api/v1/pipeline", "/api/v1/ingest", "/api/v1/harvest", "/api/v1/flow", "/v1/tenants")
    assert [part for part in parts if not any(path.startswith(part) for path in paths)] == []
    made = httpx.post(f"{api.address}/api/v1/flow_runs", json={"runId": "r", "steps": STEPS}, timeout=30)
    assert made.status_code == 201, made.text
    assert "penstock_work_items_total{" not in api.get("/actuator/prometheus").text
    assert status_of_run(api) == "RUNNING"


def is_done_by(worker: RollingRole, api: RollingRole) -> None:
    """The run without a worker ends as soon as there is one."""
    worker.becomes_ready()
    until(lambda: status_of_run(api) != "RUNNING", "the run ends")
    assert status_of_run(api) == "SUCCEEDED"


def status_of_run(api: RollingRole) -> str:
    return str(api.get("/api/v1/flow_runs/r").json()["status"])


def everyone_notices(roles: dict[str, RollingRole]) -> None:
    """Without PostgreSQL a role is not ready, but for a pod, which serves from memory."""
    for name, role in roles.items():
        if name == QUERY:
            continue
        role.becomes_ready(is_ready=False)
        assert role.metric("penstock_ready") == 0
        assert role.tells(DATABASE[name], is_up=False)
    until(lambda: roles[QUERY].tells(DATABASE[QUERY], is_up=False), "the pod misses its primary")
    assert (roles[QUERY].status("readiness"), roles[QUERY].status("liveness")) == (200, 200)
    assert roles[QUERY].metric("penstock_ready") == 1


def everyone_is_ready(roles: dict[str, RollingRole]) -> None:
    """The role is ready again when PostgreSQL is back, without a restart."""
    for name, role in roles.items():
        role.becomes_ready()
        assert role.metric("penstock_ready") == 1
        until(lambda role=role, name=name: role.tells(DATABASE[name], is_up=True), f"{name} sees it")  # type: ignore[misc]


def everyone_ends(roles: dict[str, RollingRole]) -> None:
    """After SIGTERM the role is not ready, but alive until it ends with exit code 0."""
    for role in roles.values():
        psutil.Process(role.pid).terminate()
    for role in roles.values():
        role.becomes_ready(is_ready=False)
    for role in roles.values():
        assert role.ended() == 0, role.log_file.read_text()[-2000:]
        assert "Traceback" not in role.log_file.read_text()


async def test_wait_for_the_schema(postgres_url: str, tmp_path: Path) -> None:
    """R27: `db wait` ends when the schema exists, whichever process created it."""
    async with fresh_database(postgres_url, empty=True) as url:
        write_config(tmp_path, {"database": {"url": url}})
        command = [sys.executable, "-m", "penstock.cli.main", "db", "wait", "--json"]
        waiting = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=PIPE, stderr=PIPE)
        assert waiting.stderr is not None
        assert b"are pending" in await waiting.stderr.readline()
        async with Database.open(url, size=1) as db:
            await migrate.migrate(db, list_platform_migrations(Settings()))
        out, _ = await waiting.communicate()
        assert waiting.returncode == 0
        assert json.loads(out)["ready"] is True
        looked = await asyncio.to_thread(penstock_here, "db", "wait", "--timeout", "0", cwd=tmp_path)
        assert looked.code == 0


def test_wait_in_vain(tmp_path: Path) -> None:
    """R27: `db wait` gives up in time, with 124, and says what it waited for."""
    url = f"postgresql://postgres@127.0.0.1:{free_port()}/penstock"
    write_config(tmp_path, {"database": {"url": url}})
    done = penstock("db", "wait", "--timeout", "3", cwd=tmp_path)
    assert done.code == 124
    assert "PostgreSQL does not answer" in done.err


def test_wait_for_what_does_not_come(tmp_path: Path, postgres_url: str) -> None:
    """R27: errors that do not pass, such as a wrong password, end `db wait` at once with another exit code."""
    wrong = postgres_url.replace("//postgres@", "//unknown@")
    write_config(tmp_path, {"database": {"url": wrong}})
    done = penstock("db", "wait", "--timeout", "300", cwd=tmp_path)
    assert done.code == 7
    assert "PostgreSQL refused the connection" in done.err


def test_wait_for_a_database_that_does_not_exist(tmp_path: Path, postgres_url: str) -> None:
    """R27: `db wait` waits until the database is created, and checks once even without time."""
    url = postgres_url.replace("/penstock?", "/not_made_yet?")
    write_config(tmp_path, {"database": {"url": url}})
    done = penstock_here("db", "wait", "--timeout", "0", cwd=tmp_path)
    assert done.code == 124
    assert "not_made_yet" in done.err
