"""`doctor` checks all dependencies, and names those that are down."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.kernel.db.database import Database
from tests.services.postgres import fresh_database
from tests.support.processes import penstock


def test_doctor_checks_every_configured_server(tmp_path: Path) -> None:
    """R8, R23: Kafka and Redis are named if they do not answer, also before the first start."""
    (tmp_path / "penstock.yaml").write_text(
        "server: {port: 0, query_port: 0}\n"
        'bus: {kafka: {bootstrap: "127.0.0.1:1"}}\n'
        'signals: {redis: {nodes: ["127.0.0.1:1"]}}\n'
    )
    done = penstock("doctor", "--json", cwd=tmp_path)
    codes = {check["name"]: (check["error"] or {}).get("code") for check in json.loads(done.out)}
    assert done.code == 7
    assert (codes["bus"], codes["signals"], codes["database"]) == ("BUS_DOWN", "SIGNALS_DOWN", None)


def test_doctor_changes_nothing_and_names_what_is_down(tmp_path: Path) -> None:
    """`doctor` creates no file, and has exit code 7 and a hint when a dependency is down."""
    assert (
        penstock("doctor", cwd=tmp_path, env={"PENSTOCK__SERVER__PORT": "0", "PENSTOCK__SERVER__QUERY_PORT": "0"}).code
        == 0
    )
    assert list(tmp_path.iterdir()) == []
    down = {"PENSTOCK__DATABASE__URL": "postgresql://user@127.0.0.1:1/none"}
    done = penstock("doctor", "--json", cwd=tmp_path, env=down)
    database = next(check for check in json.loads(done.out) if check["name"] == "database")
    assert done.code == 7
    assert database["error"]["code"] == "DATABASE_DOWN"
    assert database["error"]["hint"]


@pytest.fixture
async def restricted_url(postgres_url: str) -> AsyncIterator[str]:
    """Yield the URL of a role that cannot create tables in its database."""
    async with fresh_database(postgres_url, empty=True) as url, Database.open(url) as db:
        await db.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO public")
        role = f"doctor_{await db.fetchval('SELECT current_database()')}"
        await db.execute(f'CREATE ROLE "{role}" LOGIN')
        yield url.replace("postgres@", f"{role}@")
        await db.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


async def test_missing_rights_are_reported_with_the_grant(restricted_url: str, tmp_path: Path) -> None:
    """`doctor`, `db migrate` and `up` have exit code 3, the code DATABASE_RIGHTS, and a GRANT statement as the hint."""
    env = {"PENSTOCK__DATABASE__URL": restricted_url}
    done = await asyncio.to_thread(penstock, "doctor", "--json", cwd=tmp_path, env=env)
    schema = next(check for check in json.loads(done.out) if check["name"] == "schema")
    assert (done.code, schema["error"]["code"]) == (3, "DATABASE_RIGHTS")
    assert "GRANT USAGE, CREATE ON SCHEMA public TO" in schema["error"]["hint"]
    for command in (("db", "migrate"), ("up", "--port", "0", "--query-port", "0")):
        failed = await asyncio.to_thread(penstock, *command, cwd=tmp_path, env=env)
        assert failed.code == 3, failed.err
        assert "lacks rights in schema public" in failed.err
        assert "GRANT USAGE, CREATE ON SCHEMA public TO" in failed.err


def test_commands_do_not_log_to_standard_output(tmp_path: Path) -> None:
    """The output of a command with --json is one JSON document, also when it starts the embedded PostgreSQL."""
    done = penstock("db", "migrate", "--json", cwd=tmp_path)
    assert (done.code, json.loads(done.out)["dryRun"]) == (0, False)
