"""`penstock up` as a user meets it: it starts, answers, stops, comes back, and says clearly what is wrong."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import psutil
import pytest

from penstock.kernel.db.locks import compute_advisory_key
from tests.services.postgres import fresh_database
from tests.support.processes import Up, penstock
from tests.support.wait import until


def test_up_answers_and_stops_cleanly(tmp_path: Path) -> None:
    """`up` says where it listens, answers health on both ports, and leaves nothing behind on SIGTERM."""
    with Up(tmp_path, in_new_interpreter=True) as up:
        for address in (up.api, up.query):
            assert httpx.get(f"{address}/actuator/health").json()["status"] == "UP"
            assert httpx.get(f"{address}/actuator/health/readiness").status_code == 200
        family = psutil.Process(up.pid).children(recursive=True)
        assert up.stop() == 0
    assert family, "the embedded server must have been running"
    assert not [process for process in family if process.is_running()]


@pytest.mark.full
def test_up_stops_cleanly_on_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C is a graceful stop too."""
    with Up(tmp_path, in_new_interpreter=True) as up:
        assert up.stop(signal.SIGINT) == 0


def test_up_survives_kill_9_and_goes_on_with_its_data(tmp_path: Path) -> None:
    """After kill -9 the same command on the same data directory works, and what was committed is there."""
    with Up(tmp_path) as up:
        up.kill()
    shown = penstock("db", "migrate", "--dry-run", "--json", cwd=tmp_path)
    assert json.loads(shown.out)["pending"] == []
    with Up(tmp_path) as up:
        assert httpx.get(f"{up.api}/actuator/health").json()["status"] == "UP"


@pytest.mark.full
def test_up_gets_its_database_back_when_it_dies(tmp_path: Path) -> None:
    """R23: with PostgreSQL killed it is alive, not ready, and becomes ready again by itself."""
    with Up(tmp_path) as up:
        (server,) = servers_of(up)
        server.kill()
        until(lambda: readiness(up) == 503, "up is not ready")
        assert httpx.get(f"{up.api}/actuator/health/liveness").status_code == 200
        until(lambda: readiness(up) == 200, "up is ready")
        assert up.stop() == 0


@pytest.mark.full
def test_a_second_up_on_the_same_data_gets_the_name_of_the_holder(tmp_path: Path) -> None:
    """One `up` per data directory: the second gets exit code 6 and the first one's pid."""
    with Up(tmp_path) as up:
        second = penstock("up", "--port", "0", "--query-port", "0", cwd=tmp_path)
        assert second.code == 6
        assert str(up.pid) in second.err
        assert httpx.get(f"{up.api}/actuator/health").status_code == 200


@pytest.mark.full
def test_up_outlives_the_process_that_started_the_database(tmp_path: Path, postgres_holder: "Holder") -> None:
    """The database another command had started goes on for `up` when that command ends."""
    holder = postgres_holder(tmp_path / ".penstock" / "postgres")
    with Up(tmp_path) as up:
        assert not servers_of(up)
        holder.communicate(b"leave")
        until(lambda: bool(servers_of(up)), "up has started a server")
        until(lambda: readiness(up) == 200, "up is ready")
        assert up.stop() == 0


def readiness(up: Up) -> int:
    return httpx.get(f"{up.api}/actuator/health/readiness").status_code


def servers_of(up: Up) -> list[psutil.Process]:
    """The PostgreSQL servers that *up* started."""
    return [process for process in psutil.Process(up.pid).children() if process.name() == "postgres"]


Holder = Callable[[Path], "subprocess.Popen[bytes]"]
HOLDER = """
import asyncio, sys
from pathlib import Path
from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.kernel.telemetry.telemetry import configure_logging
configure_logging("ERROR", "json")
async def main():
    async with run_embedded_postgres(Path(sys.argv[1])):
        print("held", file=sys.stderr, flush=True)  # the log goes to standard output
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


@pytest.fixture
def postgres_holder() -> Holder:
    """Starts a process that runs the embedded server of a folder until it is stopped."""

    def start(folder: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", HOLDER, str(folder)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stderr is not None
        assert process.stderr.readline() == b"held\n"
        return process

    return start


@pytest.mark.full
def test_a_signal_ends_a_start_that_waits(tmp_path: Path, empty_database_url: str) -> None:
    """SIGTERM while `up` waits for the migration lock ends it at once, with nothing left behind."""
    with MigrationLock(empty_database_url):
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "up", "--port", "0", "--query-port", "0"],
            cwd=tmp_path,
            env={**os.environ, "PENSTOCK__DATABASE__URL": empty_database_url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        until(lambda: MigrationLock.is_awaited(empty_database_url), "the start waits for the lock")
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, b"")
    assert b"Traceback" not in err


def test_a_newer_data_directory_is_refused_by_every_command(tmp_path: Path) -> None:
    """`db migrate` and `doctor` do not touch what a newer release wrote."""
    newer_data(tmp_path)
    (tmp_path / ".penstock" / "postgres" / "data").mkdir(parents=True)
    (tmp_path / ".penstock" / "postgres" / "data" / "PG_VERSION").write_text("18\n")
    before = sorted(tmp_path.rglob("*"))
    assert penstock("db", "migrate", cwd=tmp_path).code == 6
    assert penstock("doctor", cwd=tmp_path).code == 6
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.full
def test_up_warns_without_authentication(tmp_path: Path) -> None:
    """R25: without authentication it says so."""
    with Up(tmp_path) as up:
        assert "no authentication" in up.log_file.read_text()


@pytest.mark.full
def test_the_database_can_be_looked_at_while_up_runs(tmp_path: Path) -> None:
    """`db migrate` and `doctor` use the server that runs, and leave it running."""
    with Up(tmp_path) as up:
        assert penstock("db", "migrate", cwd=tmp_path).out == "the schema is up to date\n"
        findings = json.loads(penstock("doctor", "--json", cwd=tmp_path).out)
        assert {finding["name"]: finding["ok"] for finding in findings}["database"]
        assert httpx.get(f"{up.api}/actuator/health").status_code == 200


BUSY = "a port in use"


@pytest.fixture(scope="module")
def busy_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield str(held.getsockname()[1])


def newer_data(folder: Path) -> None:
    (folder / ".penstock").mkdir()
    (folder / ".penstock" / "FORMAT").write_text("99")


def file_in_the_way(folder: Path) -> None:
    (folder / ".penstock").write_text("")


def broken_yaml(folder: Path) -> None:
    (folder / "penstock.yaml").write_text("server: [1\n")


def unknown_key(folder: Path) -> None:
    (folder / "penstock.yaml").write_text("server:\n  prot: 1\n")


def other_postgres(folder: Path) -> None:
    (folder / ".penstock" / "postgres" / "data").mkdir(parents=True)
    (folder / ".penstock" / "postgres" / "data" / "PG_VERSION").write_text("9\n")


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("prepare", "args", "env", "code", "words"),
    [
        (broken_yaml, (), {}, 3, "penstock.yaml:2:1"),
        (unknown_key, (), {}, 3, "penstock.yaml:2:3: server.prot: unknown key; did you mean 'port'?"),
        (nothing, ("--config", "nowhere.yaml"), {}, 3, "nowhere.yaml"),
        (nothing, ("--port", "70000"), {}, 2, "--port: '70000' is more than 65535"),
        (nothing, ("--port", "many"), {}, 2, "--port"),
        (nothing, ("--bogus",), {}, 2, "--bogus"),
        (nothing, (), {"PENSTOCK__SERVER__BODY_LIMIT": "many"}, 3, "PENSTOCK__SERVER__BODY_LIMIT"),
        (nothing, ("--host", "0.0.0.0"), {}, 3, "from other machines, which needs authentication"),
        (
            nothing,
            ("--host", "no.such.name.invalid"),
            {},
            3,
            "from other machines, which needs authentication",
        ),
        (nothing, ("--port", BUSY), {}, 6, "already in use"),
        (nothing, ("--data-dir", "/proc/penstock"), {}, 3, "/proc/penstock"),
        (file_in_the_way, (), {}, 3, ".penstock"),
        (newer_data, (), {}, 6, "format 99"),
        (other_postgres, (), {}, 6, "PostgreSQL 9"),
        (nothing, (), {"PENSTOCK__DATABASE__URL": "postgresql://user@127.0.0.1:1/none"}, 7, "does not answer"),
        (nothing, (), {"PENSTOCK__DATABASE__URL": "mysql://user@127.0.0.1:1/none"}, 3, "database URL"),
        (nothing, (), {"PENSTOCK__DATABASE__URL": "postgresql://a:hunter2@h/d"}, 3, "must not contain a password"),
        (nothing, (), {"PENSTOCK__DATABASE__PASSWORD": "{hunter2"}, 3, "PENSTOCK__DATABASE__PASSWORD"),
        (
            nothing,
            (),
            {"PENSTOCK__AUTH__JWT__SECRET": "env:NOT_SET", "PENSTOCK__AUTH__JWT__ALGORITHMS": "[HS256]"},
            3,
            "NOT_SET",
        ),
    ],
)
def test_bad_input_gets_a_sentence_and_an_exit_code(
    tmp_path: Path,
    busy_port: str,
    prepare: Callable[[Path], None],
    args: tuple[str, ...],
    env: dict[str, str],
    code: int,
    words: str,
) -> None:
    """Whatever is wrong, `up` says it in words, with the right exit code, no traceback and no secret."""
    prepare(tmp_path)
    given = [busy_port if word is BUSY else word for word in args]
    done = penstock("up", "--query-port", "0", "--port", "0", *given, cwd=tmp_path, env=env)
    assert done.code == code, done.err
    assert words in done.err
    assert "Traceback" not in done.err
    assert "hunter2" not in done.err


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take rights away from root's files for itself")
def test_up_works_under_a_folder_closed_to_others(tmp_path: Path) -> None:
    """As root, PostgreSQL runs as an account that cannot enter root's folders; it works there all the same."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with Up(closed) as up:
        (server,) = servers_of(up)
        assert server.uids().effective != 0
        assert httpx.get(f"{up.api}/actuator/health").json()["status"] == "UP"
    assert closed.stat().st_mode & 0o077 == 0


class MigrationLock:
    """Another process with a long migration."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> None:
        self._connection = self._run(asyncpg.connect(self._url))
        self._run(self._connection.execute("SELECT pg_advisory_lock($1)", compute_advisory_key("penstock.migrate")))

    def __exit__(self, *_: object) -> None:
        self._run(self._connection.close())
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    @staticmethod
    def is_awaited(url: str) -> bool:
        async def ask() -> bool:
            connection = await asyncpg.connect(url)
            try:
                waiting = "SELECT true FROM pg_locks WHERE NOT granted AND locktype = 'advisory' AND database = $1"
                here = await connection.fetchval("SELECT oid FROM pg_database WHERE datname = current_database()")
                return bool(await connection.fetchval(waiting, here))
            finally:
                await connection.close()

        return asyncio.run(ask())


@pytest.fixture
def empty_database_url(postgres_url: str) -> Iterator[str]:
    """A database of the test's own, without a schema, for a test without an event loop."""
    opened = fresh_database(postgres_url, empty=True)
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete(opened.__aenter__())
    loop.run_until_complete(opened.__aexit__(None, None, None))
    loop.close()
