"""Programs as processes of their own, none of which outlives the benchmark.

Scripts of peers import this in their own environments, which have nothing but the standard library in common.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

STOP_TIMEOUT = 30.0  # seconds; a program that takes longer is killed


@asynccontextmanager
async def spawned(
    *command: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int = asyncio.subprocess.DEVNULL,
    stderr: int | None = asyncio.subprocess.DEVNULL,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a program, and at the end stop it together with every process it has started."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        start_new_session=True,  # Ctrl-C is for the benchmark, which stops its programs in order
    )
    try:
        yield process
    finally:
        await _stop(process)


async def run_program(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a program to its end, its output on standard error; RuntimeError when it fails."""
    async with spawned(*command, cwd=cwd, stdout=sys.stderr.fileno(), stderr=None) as process:
        _check(command, await process.wait())


async def read_output(*command: str | Path) -> bytes:
    """Run a program to its end and return what it prints; RuntimeError when it fails."""
    async with spawned(*command, stdout=asyncio.subprocess.PIPE, stderr=None) as process:
        output, _ = await process.communicate()
        _check(command, process.returncode)
    return output


def _check(command: Sequence[str | Path], code: int | None) -> None:
    if code:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with code {code}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT):
                await process.wait()
    with suppress(ProcessLookupError):  # nothing of its session is left, which is the rule
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
