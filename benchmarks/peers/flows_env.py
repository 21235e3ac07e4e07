"""The engines our flows are measured beside: the environment of each, and the figures each of them prints."""

import shutil
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.programs import run_program

FOLDER = peers.ENVIRONMENTS.with_name("peers-flows")
DBOS_REQUIREMENTS = ("dbos==3.3.0", "uvloop==0.23.0")
PREFECT_REQUIREMENTS = ("prefect==3.8.8", "fastapi==0.150.0")  # its server does not load with the newest FastAPI
DBOS = peers.HERE / "flows_dbos.py"
PREFECT = peers.HERE / "flows_prefect.py"
RESTATE = peers.HERE / "flows_restate.py"  # for any python; what it runs is in the folder beside it
LENGTH = 40
BREADTH = 1_000
FIRST, MIDDLE, LAST = range(3)  # the parts of a fan
Ticks = Mapping[int, Sequence[float]]  # when the steps ran, by flow, or by the part of the fan


async def dbos() -> Path:
    """Return the python of DBOS's environment, which is made unless it already has exactly these versions."""
    return await peers.environment(str(FOLDER / "dbos"), *DBOS_REQUIREMENTS)  # an absolute folder stays where it is


async def prefect() -> Path:
    """Return the python of Prefect's environment, made in the same way."""
    return await peers.environment(str(FOLDER / "prefect"), *PREFECT_REQUIREMENTS)


async def restate() -> Path | None:
    """Return the folder of Restate's packages for node.js, made in the same way; None where there is no npm."""
    npm, source, folder = shutil.which("npm"), peers.HERE / "flows_restate", FOLDER / "restate"
    if npm is None:
        return None
    wanted, marker = (source / "package.json").read_text(), folder / "package.json"
    if not marker.exists() or marker.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        draft = folder.with_name("restate.new")
        shutil.copytree(source, draft, dirs_exist_ok=True)
        options = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock")
        await run_program(npm, "install", *options, cwd=draft)
        draft.rename(folder)  # last: an installation left half made is made again
    shutil.copy(source / "worker.js", folder)  # it finds the packages from where it lies
    return folder


def chain_figures(ticks: Ticks, seconds: float) -> dict[str, Any]:
    """What chains of no-ops took; a step ends when it starts, so from one to the next is from finish to start."""
    gaps = [after - before for flow in ticks.values() for before, after in pairwise(flow)]
    return _figures(sum(map(len, ticks.values())), seconds, gaps)


def fan_figures(ticks: Ticks, seconds: float) -> dict[str, Any]:
    """What a fan took: from the first to the start of each, and from the last of them to the join."""
    [first], middle, [last] = ticks[FIRST], ticks[MIDDLE], ticks[LAST]
    found = _figures(len(middle) + 2, seconds, [each - first for each in middle])
    return {**found, "join_ms": round((last - max(middle)) * 1e3, 2)}


def _figures(steps: int, seconds: float, gaps: Sequence[float]) -> dict[str, Any]:
    cuts = statistics.quantiles((gap * 1e3 for gap in gaps), n=100, method="inclusive")
    between = {"p50": round(cuts[49], 2), "p99": round(cuts[98], 2)}
    return {
        "steps": steps,
        "seconds": round(seconds, 4),
        "rate": round(steps / seconds, 1),
        "finish_to_start_ms": between,
    }
