"""Other people's queues, each in an environment of its own, measured on the same PostgreSQL as ours."""

import asyncio
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.programs import run_program, spawned

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[1] / ".build" / "peers"

# asyncpg, uvloop and pydantic are the versions Penstock itself is locked to: a driver must not decide the comparison.
PGQUEUER = ("pgqueuer[asyncpg]==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0", "pydantic==2.14.3")
PGQUEUER_DRAIN = HERE / "pgqueuer_drain.py"


class PeerFailed(Exception):
    """The script of a peer failed or printed an unreadable result."""


async def environment(name: str, *requirements: str) -> Path:
    """Return the python of the virtual environment *name*, created again unless it has exactly *requirements*."""
    folder = ENVIRONMENTS / name
    python, marker = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "".join(f"{requirement}\n" for requirement in requirements)
    if not marker.exists() or marker.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        for command in _installation(folder, python, requirements):
            await run_program(*command)
        marker.write_text(wanted)  # last: an environment left half made is made again
    return python


async def ask(python: Path, script: Path, *args: str) -> dict[str, Any]:
    """Return the JSON document *script* prints last; PeerFailed with its stderr when it fails."""
    pipe = asyncio.subprocess.PIPE
    # -I: neither our PYTHONPATH nor our folders reach the peer.
    async with spawned(python, "-I", script, *args, stdout=pipe, stderr=pipe) as process:
        output, errors = await process.communicate()
    if process.returncode != 0:
        raise PeerFailed(f"{script.name} ended with code {process.returncode}:\n{errors.decode(errors='replace')}")
    return _last_document(script, output.decode())


def _installation(folder: Path, python: Path, requirements: Sequence[str]) -> list[list[str]]:
    if uv := shutil.which("uv"):
        return [
            [uv, "venv", "--quiet", "--python", sys.executable, str(folder)],
            [uv, "pip", "install", "--quiet", "--python", str(python), *requirements],
        ]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return [[sys.executable, "-m", "venv", str(folder)], [*pip, *requirements]]


def _last_document(script: Path, output: str) -> dict[str, Any]:
    lines = output.split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        found = json.loads(last)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise PeerFailed(f"{script.name} was to print a JSON document last, not {last!r}")
    return found
