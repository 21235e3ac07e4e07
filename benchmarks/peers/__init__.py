"""Other people's queues, each in an environment of its own, measured on the same PostgreSQL as ours."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[1] / ".build" / "peers"

# asyncpg, uvloop and pydantic are the versions Penstock itself is locked to: a driver must not decide the comparison.
PGQUEUER = ("pgqueuer[asyncpg]==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0", "pydantic==2.14.3")
PGQUEUER_DRAIN = HERE / "pgqueuer_drain.py"


class PeerFailed(Exception):
    """A peer's script ended badly, or said nothing that can be read."""


def environment(name: str, *requirements: str) -> Path:
    """The python of the virtual environment *name*, made anew unless it already has exactly *requirements*."""
    folder = ENVIRONMENTS / name
    python, marker = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "".join(f"{requirement}\n" for requirement in requirements)
    if not marker.exists() or marker.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        for command in _installation(folder, python, requirements):
            subprocess.run(command, check=True, stdout=sys.stderr)
        marker.write_text(wanted)  # last: an environment left half made is made again
    return python


async def ask(python: Path, script: Path, *args: str) -> dict[str, Any]:
    """The JSON document *script* prints last; PeerFailed with its stderr when it fails."""
    # -I: neither our PYTHONPATH nor our folders reach the peer.
    process = await asyncio.create_subprocess_exec(
        python, "-I", script, *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:  # we were cancelled
            process.kill()
            await process.wait()
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
