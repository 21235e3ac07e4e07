"""No-op flows beside DBOS, Prefect and Restate: one machine, interleaved, each as durable as it can be.

Ours, DBOS's and Prefect's flows are in the same PostgreSQL, in a database of their own for every run; Restate keeps a
log of its own. A chain is 40 steps, one after another; a fan is one step, then a thousand, then one.
"""

import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.harness import Bench, Figure, Group, Measure, Shared, ratio
from benchmarks.harvest_place import fresh_database
from benchmarks.peers import flows_env
from benchmarks.session import Session
from penstock.kernel.db.embedded import run_embedded_postgres

OURS = peers.HERE.parent / "flows_ours.py"
US, DBOS, PREFECT, RESTATE = "Penstock", "DBOS", "Prefect", "Restate"
FEWER = 10  # chains at once for Prefect, which would take minutes
P50, P99 = "finish to start, p50", "finish to start, p99"
MANY, ONE, FAN = "100 chains", "1 chain", "fan of 1,000"
WANTED = {MANY: 20, ONE: 3}  # times DBOS
_WANTED_MS = 5
Measurements = dict[str, Any]
Ask = Callable[[Sequence[str]], Awaitable[Measurements]]


@dataclass(frozen=True)
class Workload:
    """A workload and its repetitions: a short one runs several times, and the median counts."""

    what: str
    workers: int
    args: Sequence[str]
    times: int = 1

    @property
    def name(self) -> str:
        return f"{self.what}, {self.workers} worker{'s' if self.workers > 1 else ''}"

    def args_for(self, who: str) -> list[str]:
        """As the script of *who* takes them."""
        fewer = ["--flows", str(FEWER)] if who == PREFECT and self.what == MANY else []
        return [*self.args, *fewer, "--workers", str(self.workers)]


@dataclass(frozen=True)
class Sizes:
    """The workloads of all contenders."""

    workloads: Sequence[Workload]


@asynccontextmanager
async def benches(session: Session, sizes: Sizes) -> AsyncIterator[list[Bench]]:
    """Open every workload for each contender that can run here."""
    async with run_embedded_postgres(session.postgres) as url:
        asked = await _askable(session, url)
        yield [
            bench
            for workload in sizes.workloads
            for who, ask in asked.items()
            if not (who == PREFECT and workload.what == FAN and workload.workers > 1)  # always the work of one
            for bench in _figures(workload, who, ask)
        ]


def conclusions(figures: Sequence[Figure], sizes: Sizes) -> list[str]:
    """Return how many times the others' speed ours is, and how soon a step follows."""
    text = []
    for workload in sizes.workloads:
        for who in (DBOS, PREFECT, RESTATE):
            times = ratio(figures, _name(workload, US), _name(workload, who))
            if times is not None:
                wanted = WANTED.get(workload.what) if who == DBOS else None
                text.append(f"{workload.name}: {times:.1f} times {who}" + (f" (target: {wanted})" if wanted else ""))
    measurements = next(workload for workload in sizes.workloads if workload.what == ONE)
    latency = [figure.median for figure in figures if figure.bench.name == _name(measurements, US, P50)]
    text += [f"finish to start, p50 of 1 chain: {ms:.2f} ms (target: at most {_WANTED_MS})" for ms in latency]
    return text


GROUP = Group(
    benches,
    full=Sizes(
        (
            Workload(MANY, 1, ("chain", "--flows", "100")),
            Workload(MANY, 4, ("chain", "--flows", "100")),
            Workload(ONE, 1, ("chain", "--flows", "1"), times=5),
            Workload(FAN, 1, ("fan",)),
            Workload(FAN, 4, ("fan",)),
        )
    ),
    smoke=Sizes((Workload(ONE, 1, ("chain", "--flows", "1")),)),  # fans are in the smoke form of flows-large
    conclude=conclusions,
)


async def _askable(session: Session, url: str) -> Mapping[str, Ask]:
    """Return all contenders with their calls; their environments are created first."""
    found: dict[str, Ask] = {US: partial(_asked, Path(sys.executable), OURS, url)}
    if not session.has_peers(DBOS, PREFECT, RESTATE):
        return found
    found[DBOS] = partial(_asked, await flows_env.dbos(), flows_env.DBOS, url)
    found[PREFECT] = partial(_asked, await flows_env.prefect(), flows_env.PREFECT, url)
    if installed := await flows_env.restate():
        found[RESTATE] = partial(_asked_restate, installed)
    else:
        session.leave_out(RESTATE, "npm is missing")
    return found


async def _asked(python: Path, script: Path, url: str, args: Sequence[str]) -> Measurements:
    async with fresh_database(url) as own:
        return await peers.ask(python, script, *args, "--dsn", own)


async def _asked_restate(installed: Path, args: Sequence[str]) -> Measurements:
    return await peers.ask(Path(sys.executable), flows_env.RESTATE, *args, "--installed", str(installed))


def _figures(workload: Workload, who: str, ask: Ask) -> list[Bench]:
    """Steps a second, and from the end of a step to the start of the next, of the same run."""

    async def run() -> Mapping[str, float]:
        times = workload.times if who != PREFECT else 1
        results = [_measurements(await ask(workload.args_for(who))) for _ in range(times)]
        return {figure: statistics.median(measurements[figure] for measurements in results) for figure in results[0]}

    shared = Shared(run)
    wanted = _WANTED_MS if who == US and workload.what == ONE else None
    return [
        Bench(_name(workload, who), "steps", _figure(shared, "rate")),
        Bench(_name(workload, who, P50), "ms", _figure(shared, "p50"), wanted, is_duration=True),
        Bench(_name(workload, who, P99), "ms", _figure(shared, "p99"), is_duration=True),
    ]


def _measurements(answer: Measurements) -> Mapping[str, float]:
    return {"rate": answer["rate"], **answer["finish_to_start_ms"]}


def _figure(shared: Shared[Mapping[str, float]], figure: str) -> Measure:
    async def measure() -> float:
        return (await shared.result(figure))[figure]

    return measure


def _name(workload: Workload, who: str, figure: str | None = None) -> str:
    text = f"{workload.name}: {who}"
    if who == PREFECT and workload.what == MANY:
        text += f", {FEWER} chains"
    return f"{text}, {figure}" if figure else text
