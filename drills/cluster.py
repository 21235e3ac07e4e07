"""The embedded set-up: PostgreSQL from the wheel and every role a process of its own, on this machine."""

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
from penstock.app.schema import known_migrations
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import embedded_postgres
from penstock.kernel.db.migrate import migrate
from penstock.kernel.errors import Invalid, TimedOut, Transient
from penstock.settings import Settings

TENANT, DICTIONARY = "drill", "DRILL"
DOWN_FOR = 1.0  # between a kill and the start that follows
FROZEN_FOR = 3.0
_START_TIMEOUT = 60.0
_STOP_TIMEOUT = 10.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder made in it is ours alone
_PROGRAM = (sys.executable, "-m", "penstock.cli.main")


@dataclass(frozen=True)
class Setup:
    """What is started: so many pods; Kafka as the bus and Redis for signals where given."""

    run: str
    pods: int = 3
    lease: float = 5.0
    kafka: str | None = None
    redis: str | None = None

    def about(self) -> dict[str, object]:
        return {
            "set-up": f"embedded: command-api, apply, relay and {self.pods} query pods, a process or more each",
            "bus": f"Kafka at {self.kafka}" if self.kafka else "PostgreSQL",
            "signals": f"Redis at {self.redis}" if self.redis else "PostgreSQL",
            "refdata.apply.lease": f"{self.lease:g} s",
        }

    def settings(self, url: str, memory: Path, data: Path) -> dict[str, Any]:
        """penstock.yaml of every role."""
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
    """One role as a process, with its children; it keeps its port over restarts."""

    def __init__(self, name: str, command: Sequence[str], config: Path, logs: Path) -> None:
        self.name = name
        self.url = ""
        self._command = [*_PROGRAM, *command, "--json", "--config", str(config)]
        self._log = logs / f"{name}.log"
        self._port = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Run it; back when it is ready."""
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
        self.url = (await self._first_words(process))["api"]
        self._port = int(self.url.rpartition(":")[2])

    async def kill(self) -> None:
        """kill -9, of its children too: so a container ends."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    async def restart_killed(self) -> None:
        await self.kill()
        await asyncio.sleep(DOWN_FOR)
        await self.start()

    async def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(FROZEN_FOR)
        finally:
            self.signal(signal.SIGCONT)

    async def stop(self) -> None:
        """SIGTERM, then no more patience."""
        if self._process is None:
            return
        with suppress(TimeoutError):
            self.signal(signal.SIGTERM)
            async with asyncio.timeout(_STOP_TIMEOUT):
                await self._process.wait()
        await self.kill()

    def signal(self, number: signal.Signals) -> None:
        """To the whole group."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _first_words(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        words = cast("asyncio.StreamReader", process.stdout)
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                said: dict[str, Any] = json.loads(await words.readuntil(b"}\n"))
        except TimeoutError:
            raise TimedOut("ROLE_NOT_READY", f"{self.name} is not ready after {_START_TIMEOUT:g} s") from None
        except asyncio.IncompleteReadError:
            code = await process.wait()
            hint = f"see {self._log}"
            raise Transient("ROLE_ENDED", f"{self.name} ended with {code} instead of being ready", hint=hint) from None
        return said


@asynccontextmanager
async def embedded(setup: Setup, logs: Path) -> AsyncIterator[Target]:
    """Everything up and ready, until the end; the logs stay."""
    logs.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        folder = _temporary(stack, None)
        memory = _temporary(stack, _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None)
        postgres = Postgres(folder / "postgres")
        url = await stack.enter_async_context(embedded_postgres(postgres.folder))
        config = folder / "penstock.yaml"
        config.write_text(json.dumps(setup.settings(url, memory, folder / "data")))  # JSON is YAML too
        async with Database.open(url, size=1) as db:
            await migrate(db, known_migrations(Settings()))
        postgres.url = url
        roles = _roles(setup, config, logs)
        for role in roles.values():
            stack.push_async_callback(role.stop)
        await asyncio.gather(*(role.start() for role in roles.values()))
        pods = {name: role.url for name, role in roles.items() if name.startswith("pod-")}
        faults = _faults(roles, postgres)
        yield Target(roles["command-api"].url, pods, TENANT, DICTIONARY, faults=faults, about=setup.about())


def chosen(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """The faults of those names, in that order; all of them when none is named."""
    known = {fault.name: fault for fault in faults}
    for name in names:
        if name not in known:
            hint = f"here these can be done: {', '.join(known)}; NAME=COMMAND goes with --command-url"
            raise Invalid("UNKNOWN_FAULT", f"no fault is called {name!r}", hint=hint)
    return [known[name] for name in names] or list(faults)


class Postgres:
    """The embedded server, which whoever runs it starts again when it is gone."""

    def __init__(self, folder: Path, start_timeout: float = _START_TIMEOUT) -> None:
        self.folder = folder
        self.url = ""
        self.start_timeout = start_timeout

    async def restart(self) -> None:
        """Immediate stop, as if the machine had lost power; back when it answers again."""
        try:
            pid = int((self.folder / "data" / "postmaster.pid").read_text().split("\n", 1)[0])
            os.kill(pid, signal.SIGQUIT)
        except (OSError, ValueError) as error:
            raise Transient("POSTGRES_GONE", f"PostgreSQL is not there to be stopped: {error}") from error
        await asyncio.sleep(0.1)
        try:
            async with asyncio.timeout(self.start_timeout):
                while not await self._answers():  # noqa: ASYNC110 - another process makes it so
                    await asyncio.sleep(0.05)
        except TimeoutError:
            late = f"PostgreSQL does not answer {self.start_timeout:g} s after it was stopped"
            raise TimedOut("POSTGRES_NOT_BACK", late) from None

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
    again = f"kill -9, started again {DOWN_FOR:g} s later"
    frozen = max(name for name in roles if name.startswith("pod-"))
    return [
        Fault("kill-pod", f"pod-1: {again}", roles["pod-1"].restart_killed),
        Fault("kill-apply", f"apply: {again}", roles["apply"].restart_killed),
        Fault("kill-relay", f"relay: {again}", roles["relay"].restart_killed),
        Fault("kill-command-api", f"command-api: {again}", roles["command-api"].restart_killed),
        Fault("restart-postgres", "PostgreSQL: immediate stop, started again", postgres.restart),
        Fault("freeze-pod", f"{frozen}: SIGSTOP for {FROZEN_FOR:g} s", roles[frozen].freeze),
    ]


def _temporary(stack: AsyncExitStack, parent: Path | None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="penstock-drill-", dir=parent))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder
