"""Servers that are measured, the cores they run on, and the processor time they take."""

import asyncio
import json
import os
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

from benchmarks.programs import spawned

SERVER_CORE, CLIENT_CORE = 0, 1
_CPUCLOCK_SCHED = 2  # the clock of a process that counts its processor time, from <linux/posix-timers.h>


@dataclass(frozen=True)
class Served:
    """A program that listens."""

    api: str
    pid: int


@asynccontextmanager
async def served(*command: str) -> AsyncIterator[str]:
    """Start a Python program that prints its address as JSON, and yield the address."""
    async with started(*command) as program:
        yield program.api


@asynccontextmanager
async def started(*command: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Served]:
    """Start a Python program that prints its address as JSON, and yield it once it listens."""
    async with spawned(sys.executable, *command, env=env, stdout=asyncio.subprocess.PIPE) as process:
        yield Served(await _read_address(process, command), process.pid)


@asynccontextmanager
async def listening(*command: str, port: int) -> AsyncIterator[int]:
    """Start a program and yield its process id once it listens on *port*."""
    async with spawned(*command) as process:
        while not _answers(port):
            if process.returncode is not None:
                raise SystemExit(f"{' '.join(command[:4])} … ended with code {process.returncode}")
            await asyncio.sleep(0.02)
        yield process.pid


def has_two_cores() -> bool:
    """Return whether a server and its load can be pinned to a core each."""
    return (os.cpu_count() or 1) >= 2 and hasattr(os, "sched_setaffinity")


def pinned(core: int, *command: str) -> list[str]:
    """*command*, on one core alone."""
    return ["taskset", "-c", str(core), *command]


def pin(pids: Sequence[int], core: int) -> None:
    """Move running processes to one core, with all their threads."""
    for pid in pids:
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, {core})


def processor_seconds(pids: Sequence[int]) -> float:
    """Return the processor time that running processes have taken so far."""
    return sum(_processor_seconds(pid) for pid in pids)


def children_seconds() -> float:
    """What programs that were started here, and have ended, took of the processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


async def _read_address(process: asyncio.subprocess.Process, command: Sequence[str]) -> str:
    assert process.stdout is not None
    try:
        return str(json.loads(await process.stdout.readuntil(b"}\n"))["api"])
    except asyncio.IncompleteReadError as error:
        code = await process.wait()
        raise RuntimeError(f"python {' '.join(command)} ended with code {code} before it listened") from error


def _processor_seconds(pid: int) -> float:
    if sys.platform != "linux":
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    # /proc counts in ticks of 10 ms, more than a process takes in a short measurement; its clock counts nanoseconds.
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error


def _answers(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0
