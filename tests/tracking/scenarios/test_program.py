"""Tracking as a program: alone, with the other parts, and on a separate database."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from penstock.kernel.db.database import Database
from tests.services.postgres import fresh_database
from tests.support.processes import PipelineApid, Up, penstock
from tests.support.settings import write_config

ROOT = Path(__file__).parents[3]
DDL = ROOT / "db" / "pipeline_ddl.sql"
APID = [sys.executable, "-m", "penstock.cli.pipeline_apid"]


async def test_ddl_can_be_applied_repeatedly(db: Database) -> None:
    """T10: the DDL is applied at every start; the table keeps its rows, and the counts stay exact."""
    insert = "INSERT INTO pipeline_tracking (filename, shard) VALUES ($1, 0)"
    await db.execute(insert, "before")
    await db.execute(DDL.read_text())
    await db.execute(insert, "after")
    assert await db.fetchval("SELECT count(*) FROM pipeline_tracking") == 2
    assert await db.fetchval("SELECT sum(rows) FROM pipeline_count_change WHERE stage = 'event-ingest'") == 2


def test_wheel_contains_the_ddl(tmp_path: Path) -> None:
    """T10: the installed package contains the DDL."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        packaged = opened.read("penstock/tracking/migrations/0001_pipeline_ddl.sql")
    assert packaged == DDL.read_bytes()


def test_apid_runs_on_an_embedded_database_and_survives_kill_9(tmp_path: Path) -> None:
    """T10: `pipeline-apid --data-dir D` needs no other software; after a kill and a restart it has its rows."""
    with PipelineApid(tmp_path, "--data-dir", "data", in_new_interpreter=True) as alone:
        pipeline = f"{alone.api}/api/v1/pipeline"
        httpx.post(f"{pipeline}/files/register", json={"filename": "f", "shards": [0]}).raise_for_status()
        assert httpx.get(f"{alone.api}/actuator/health/readiness").status_code == 200
    with PipelineApid(tmp_path, "--data-dir", "data") as again:
        shown = httpx.get(f"{again.api}/api/v1/pipeline/files/f").json()
        assert shown["shards"][0]["event_ingest_status"] == "started"
        assert again.stop() == 0


@pytest.mark.full
def test_open_event_stream_does_not_delay_a_stop(tmp_path: Path) -> None:
    """T17: SIGTERM ends the streams, and with them the process, at once."""
    with Up(tmp_path) as up, httpx.stream("GET", f"{up.api}/api/v1/pipeline/events") as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith(":")
        assert up.stop() == 0
        assert list(lines)[-1:] in ([], [""])


@pytest.mark.full
async def test_up_uses_a_separate_tracking_database(tmp_path: Path, postgres_url: str) -> None:
    """T10: with tracking.database the platform has no tracking tables; `db migrate` and `doctor` use both databases."""
    async with fresh_database(postgres_url, empty=True) as platform, fresh_database(postgres_url, empty=True) as own:
        config = {"database": {"url": platform}, "tracking": {"database": {"url": own}}}
        write_config(tmp_path, config)
        applied = json.loads(penstock("db", "migrate", "--json", cwd=tmp_path).out)["applied"]
        assert applied.count("tracking 0001 pipeline_ddl") == 1
        with Up(tmp_path) as up:
            body = {"filename": "f", "shards": [1, 2]}
            async with httpx.AsyncClient(base_url=up.api) as client:
                assert (await client.post("/api/v1/pipeline/files/register", json=body)).json()["created"]
        assert "tracking database" in penstock("doctor", cwd=tmp_path).out
        async with Database.open(platform) as db:
            assert await db.fetchval("SELECT to_regclass('pipeline_tracking')") is None
        async with Database.open(own) as db:
            assert await db.fetchval("SELECT count(*) FROM pipeline_tracking") == 2


def test_password_on_the_command_line_is_refused(tmp_path: Path) -> None:
    """Secrets are passed by reference: the error gives the next step and does not repeat the password."""
    command = [*APID, "--port", "0", "--database", "postgresql://app:hunter2@db/pipeline"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "hunter2" not in done.stderr


@pytest.mark.full
def test_unreachable_database_is_reported(tmp_path: Path) -> None:
    """A start without its database ends with exit code 7 and a message."""
    command = [*APID, "--port", "0", "--database", "postgresql://app@127.0.0.1:1/pipeline"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7
    assert "does not answer" in done.stderr
