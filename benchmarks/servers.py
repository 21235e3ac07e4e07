"""Programs as processes of their own, for what is measured through them."""

import asyncio
import json
import os
import resource
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

SERVER_CORE, CLIENT_CORE = 0, 1
_PACKAGES = {"nginx": "nginx", "wrk": "wrk", "redis-server": "redis-server", "redis-benchmark": "redis-tools"}


@dataclass(frozen=True)
class Served:
    """A program that listens."""

    api: str
    pid: int


@asynccontextmanager
async def served(*command: str) -> AsyncIterator[str]:
    """Where a Python program listens that tells so in JSON, until the end."""
    async with started(*command) as program:
        yield program.api


@asynccontextmanager
async def started(*command: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Served]:
    """A Python program that tells in JSON where it listens, until the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )
    try:
        assert process.stdout is not None
        yield Served(json.loads(await process.stdout.readuntil(b"}\n"))["api"], process.pid)
    finally:
        await _ended(process)


@asynccontextmanager
async def listening(*command: str, port: int) -> AsyncIterator[int]:
    """The process id of a program once it listens on *port*, until the end."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        while not _answers(port):
            if process.returncode is not None:
                raise SystemExit(f"{' '.join(command[:4])} … ended with code {process.returncode}")
            await asyncio.sleep(0.02)
        yield process.pid
    finally:
        await _ended(process)


def tool(name: str) -> str:
    """Where a program of the system is; it ends the run where there is none, and says how to get it."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    ours = [folder for folder in folders if not folder.startswith(sys.prefix)]  # a wheel's copy is another version
    found = shutil.which(name, path=os.pathsep.join([*ours, "/usr/sbin"]))
    if found is None:
        raise SystemExit(f"{name} is missing, and this suite measures with it: apt-get install {_PACKAGES[name]}")
    return found


def need_two_cores() -> None:
    """Servers are measured on one core, their load comes from another."""
    if (os.cpu_count() or 1) < 2 or not hasattr(os, "sched_setaffinity"):
        raise SystemExit("this suite pins the server to core 0 and the load to core 1: it needs Linux and two cores")


def pinned(core: int, *command: str) -> list[str]:
    """*command*, on one core alone."""
    return ["taskset", "-c", str(core), *command]


def pin(pids: Sequence[int], core: int) -> None:
    """Move running processes to one core, with all their threads."""
    for pid in pids:
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, {core})


def processor_seconds(pids: Sequence[int]) -> float:
    """What processes have taken of the processors so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(one.user + one.system for one in times))


def children_seconds() -> float:
    """What programs that were started here, and have ended, took of the processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        await process.wait()
