"""Run `worker` in a process and read its output."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

from tests.kernel.bus.backends import BusBackend

ROOT = Path(__file__).parents[3]
WITHIN = 40.0


class BusWorkerProcess:
    """A worker in another process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> str:
        """Return the next line of its output; an empty line at the end."""
        assert self._process.stdout is not None
        async with asyncio.timeout(WITHIN):
            return (await self._process.stdout.readline()).decode().strip()

    async def taken(self) -> list[str]:
        """Wait for its claimed messages and return them."""
        taken = []
        while (line := await self.line()) != "holding":
            assert line.startswith("took "), f"the worker printed {line!r}"
            taken.append(line.removeprefix("took "))
        return taken

    async def handled(self) -> list[str]:
        """Return the messages that it handled until it ended or died."""
        handled = []
        while line := await self.line():
            handled.append(line.removeprefix("handling "))
        return handled

    async def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self) -> int:
        async with asyncio.timeout(WITHIN):
            return await self._process.wait()


@asynccontextmanager
async def child(
    backend: BusBackend, mode: str, *, lease: timedelta, max_attempts: int = 5
) -> AsyncIterator[BusWorkerProcess]:
    """Start a worker process on the topic of the backend; kill it at the end if it still runs."""
    arguments = [backend.address().dump(), backend.topic, str(lease.total_seconds()), str(max_attempts), mode]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.kernel.bus.worker", *arguments),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield BusWorkerProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
