"""The embedded setup: PostgreSQL from the wheel, and every role as a separate process on this machine."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import asyncpg

from drills.faults import Fault
from drills.target import Target
from penstock.app.schema import list_platform_migrations
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.kernel.db.migrate import migrate
from penstock.kernel.errors import Invalid, TimedOut, Transient
from penstock.settings import Settings

TENANT, DICTIONARY = "drill", "DRILL"
DOWN_SECONDS = 1.0  # between a kill and the restart
FROZEN_SECONDS = 3.0
_START_TIMEOUT = 60.0
_STOP_TIMEOUT = 10.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder created in it has mode 0700
_PROGRAM = (sys.executable, "-m", "penstock.cli.main")


@dataclass(frozen=True)
class Setup:
    """The processes of the embedded setup; Kafka as the bus and Redis for signals if given."""

    run: str
    pods: int = 3
    lease: float = 5.0
    kafka: str | None = None
    redis: str | None = None

    def description(self) -> dict[str, object]:
        return {
            "set-up": f"embedded: command-api, apply, relay and {self.pods} query pods as separate processes",
            "bus": f"Kafka at {self.kafka}" if self.kafka else "PostgreSQL",
            "signals": f"Redis at {self.redis}" if self.redis else "PostgreSQL",
            "refdata.apply.lease": f"{self.lease:g} s",
        }

    def settings(self, url: str, memory: Path, data: Path) -> dict[str, Any]:
        """Return penstock.yaml of the roles."""
        refdata: dict[str, Any] = {
            "dictionaries": [{"code": DICTIONARY}],
            "tenants": [TENANT],
            "apply": {"lease": self.lease},
            "query": {"memoryDir": str(memory)},
            "kafka": {"commandsTopic": f"penstock.drill.{self.run}"},
        }
        if self.redis:
            names = {"pubChannel": f"drill:{self.run}:pub", "streamKey": f"drill:{self.run}:stream"}
            refdata["redis"] = {"mode": "single", "nodes": [self.redis], **names}
        bus = {"kafka": {"bootstrap": self.kafka, "group_prefix": f"drill-{self.run}"}} if self.kafka else {}
        telemetry = {"log_level": "INFO", "log_format": "json"}
        return {"data_dir": str(data), "database": {"url": url}, "bus": bus, "telemetry": telemetry, "refdata": refdata}


class Role:
    """A role as a process with its children; it has the same port after a restart."""

    def __init__(self, name: str, command: Sequence[str], config: Path, logs: Path) -> None:
        self.name = name
        self.url = ""
        self._command = [*_PROGRAM, *command, "--json", "--config", str(config)]
        self._log = logs / f"{name}.log"
        self._port = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process and return when it is ready."""
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--port",
                str(self._port),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK")},
                start_new_session=True,
            )
        self._process = process
        self.url = (await self._read_startup(process))["api"]
        self._port = int(self.url.rpartition(":")[2])

    async def kill(self) -> None:
        """Kill the process and its children, like the end of a container."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    async def restart_killed(self) -> None:
        await self.kill()
        await asyncio.sleep(DOWN_SECONDS)
        await self.start()

    async def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(FROZEN_SECONDS)
        finally:
            self.signal(signal.SIGCONT)

    async def stop(self) -> None:
        """Send SIGTERM; kill the process after a timeout."""
        if self._process is None:
            return
        with suppress(TimeoutError):
            self.signal(signal.SIGTERM)
            async with asyncio.timeout(_STOP_TIMEOUT):
                await self._process.wait()
        await self.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _read_startup(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        output = cast("asyncio.StreamReader", process.stdout)
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                startup: dict[str, Any] = json.loads(await output.readuntil(b"}\n"))
        except TimeoutError:
            raise TimedOut("ROLE_NOT_READY", f"{self.name} is not ready after {_START_TIMEOUT:g} s") from None
        except asyncio.IncompleteReadError:
            code = await process.wait()
            hint = f"see {self._log}"
            raise Transient("ROLE_ENDED", f"{self.name} ended with {code} instead of being ready", hint=hint) from None
        return startup


@asynccontextmanager
async def embedded(setup: Setup, logs: Path) -> AsyncIterator[Target]:
    """Start all roles and yield the target; stop the roles at the end, and keep the logs."""
    logs.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        folder = _create_folder(stack, None)
        memory = _create_folder(stack, _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None)
        postgres = Postgres(folder / "postgres")
        url = await stack.enter_async_context(run_embedded_postgres(postgres.folder))
        config = folder / "penstock.yaml"
        config.write_text(json.dumps(setup.settings(url, memory, folder / "data")))  # JSON is YAML too
        async with Database.open(url, size=1) as db:
            await migrate(db, list_platform_migrations(Settings()))
        postgres.url = url
        roles = _roles(setup, config, logs)
        for role in roles.values():
            stack.push_async_callback(role.stop)
        await asyncio.gather(*(role.start() for role in roles.values()))
        pods = {name: role.url for name, role in roles.items() if name.startswith("pod-")}
        faults = _faults(roles, postgres)
        yield Target(roles["command-api"].url, pods, TENANT, DICTIONARY, faults=faults, description=setup.description())


def selected(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """Return the faults with these names in this order; all faults if there are no names."""
    by_name = {fault.name: fault for fault in faults}
    for name in names:
        if name not in by_name:
            hint = f"choose from {', '.join(by_name)}; NAME=COMMAND needs --command-url"
            raise Invalid("UNKNOWN_FAULT", f"there is no fault {name!r}", hint=hint)
    return [by_name[name] for name in names] or list(faults)


class Postgres:
    """The embedded server, which its owner restarts when it ends."""

    def __init__(self, folder: Path, start_timeout: float = _START_TIMEOUT) -> None:
        self.folder = folder
        self.url = ""
        self.start_timeout = start_timeout

    async def restart(self) -> None:
        """Stop the server immediately, like a power failure, and return when it answers again."""
        try:
            pid = int((self.folder / "data" / "postmaster.pid").read_text().split("\n", 1)[0])
            os.kill(pid, signal.SIGQUIT)
        except (OSError, ValueError) as error:
            raise Transient("POSTGRES_GONE", f"PostgreSQL is not running and cannot be stopped: {error}") from error
        await asyncio.sleep(0.1)
        try:
            async with asyncio.timeout(self.start_timeout):
                while not await self._answers():  # noqa: ASYNC110 - another process is restarted
                    await asyncio.sleep(0.05)
        except TimeoutError:
            problem = f"PostgreSQL does not answer {self.start_timeout:g} s after it was stopped"
            raise TimedOut("POSTGRES_NOT_BACK", problem) from None

    async def _answers(self) -> bool:
        try:
            connection = await asyncpg.connect(self.url, timeout=5)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        await connection.close()
        return True


def _roles(setup: Setup, config: Path, logs: Path) -> dict[str, Role]:
    commands = {
        "command-api": ("serve", "command-api"),
        "apply": ("work", "apply"),
        "relay": ("work", "relay"),
        **{f"pod-{number}": ("serve", "query-api") for number in range(1, setup.pods + 1)},
    }
    return {name: Role(name, command, config, logs) for name, command in commands.items()}


def _faults(roles: dict[str, Role], postgres: Postgres) -> list[Fault]:
    restart = f"kill -9, restart after {DOWN_SECONDS:g} s"
    frozen = max(name for name in roles if name.startswith("pod-"))
    return [
        Fault("kill-pod", f"pod-1: {restart}", roles["pod-1"].restart_killed),
        Fault("kill-apply", f"apply: {restart}", roles["apply"].restart_killed),
        Fault("kill-relay", f"relay: {restart}", roles["relay"].restart_killed),
        Fault("kill-command-api", f"command-api: {restart}", roles["command-api"].restart_killed),
        Fault("restart-postgres", "PostgreSQL: immediate stop, restart", postgres.restart),
        Fault("freeze-pod", f"{frozen}: SIGSTOP for {FROZEN_SECONDS:g} s", roles[frozen].freeze),
    ]


def _create_folder(stack: AsyncExitStack, parent: Path | None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="penstock-drill-", dir=parent))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder
