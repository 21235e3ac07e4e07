"""Run no-op flows with Penstock and print their figures as JSON, as the scripts of the others do.

A worker is a process that makes its share of the runs, by the flow's name, while all of them do the steps. The time
is from the first that is asked for until the end of the last step is committed.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import asyncpg
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import flows_defined
from benchmarks.flows_defined import WARM_UP, fan_of, map_of
from benchmarks.peers.flows_env import BREADTH, LENGTH, Ticks, chain_figures, fan_figures
from penstock import __version__
from penstock.app.parts import open_flows
from penstock.app.platform import open_platform
from penstock.flows.definition.spec import RunRequest
from penstock.flows.model import ClaimedStep, StepReport
from penstock.flows.runtime import FlowsPlatform
from penstock.flows.worker.local import LocalWorkSource
from penstock.flows.worker.loop import StepWorker
from penstock.kernel.ids import make_worker_name
from penstock.kernel.telemetry.telemetry import Telemetry, configure_logging
from penstock.settings import Settings

CONCURRENCY = 200  # active steps of a worker
CREATING = 8  # runs a worker makes at once
LOOK = 0.02  # seconds
UNDER_WAY = "SELECT count(*) FROM flow_run WHERE status IN ('PENDING', 'RUNNING')"
INCONSISTENT = """
SELECT (SELECT count(*) FROM flow_run WHERE status <> 'SUCCEEDED')
     + (SELECT count(*) FROM flow_step WHERE status <> 'SUCCEEDED' OR attempts <> 1)
"""
Share = tuple[str, Sequence[int]]  # a flow by its name, and the numbers of its runs
Round = tuple[Ticks, float]


class TimedSource(LocalWorkSource):
    """One that knows when the last steps were settled."""

    settled_at = 0.0

    async def settle(
        self, worker: str, done: Sequence[tuple[ClaimedStep, StepReport]], kinds: Sequence[str], capacity: int
    ) -> Any:
        results = await super().settle(worker, done, kinds, capacity)
        self.settled_at = perf_counter()
        return results


def settings_of(dsn: str, folder: str) -> Settings:
    """All as it comes, but the database and the flows."""
    flows = {"modules": [flows_defined.__name__], "work": {"concurrency": CONCURRENCY}}
    return Settings.model_validate({"data_dir": folder, "database": {"url": dsn}, "flows": flows})


@asynccontextmanager
async def opened(dsn: str, folder: str) -> AsyncIterator[FlowsPlatform]:
    """The schema made, and the engine as `penstock work flows` has it."""
    settings = settings_of(dsn, folder)
    async with open_platform(settings, Telemetry()) as platform, open_flows(settings, platform) as flows:
        yield flows


@asynccontextmanager
async def working(platform: FlowsPlatform, concurrency: int) -> AsyncIterator[TimedSource]:
    """A worker on the *platform*, until the end."""
    source = TimedSource(platform.engine, platform.storage)
    worker = StepWorker(
        source,
        flows_defined.workers,
        platform.telemetry,
        platform.metrics,
        name=make_worker_name("benchmark"),
        concurrency=concurrency,
        lease_for=platform.section.lease,
    )
    async with worker.run():
        yield source


async def make_runs(platform: FlowsPlatform, flow: str, numbers: Sequence[int]) -> None:
    """Runs of *flow*, a few at a time."""
    left = iter(numbers)

    async def make() -> None:
        for number in left:
            await platform.engine.create(RunRequest(flow=flow, scope={"flow": number}), "benchmark")

    await asyncio.gather(*(make() for _ in range(CREATING)))


def work(dsn: str, folder: str, concurrency: int, pipe: Connection) -> None:
    """Make the share of every round, and do steps, until there is no more."""
    configure_logging("WARNING")

    async def run() -> None:
        async with opened(dsn, folder) as platform, working(platform, concurrency) as source:
            pipe.send("ready")
            while (share := await asyncio.to_thread(pipe.recv)) is not None:
                began = perf_counter()
                await make_runs(platform, *share)
                pipe.send(began)
                await asyncio.to_thread(pipe.recv)  # steps of other workers may run here until all have ended
                pipe.send((source.settled_at, dict(flows_defined.ticks)))
                flows_defined.ticks.clear()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def measure(dsn: str, workload: str, size: int, workers: int, concurrency: int) -> dict[str, Any]:
    """The figures of a round, after one to warm up; exits when not every step ran, once, and every run succeeded."""
    is_chain = workload == "chain"
    connection = await asyncpg.connect(dsn)
    with tempfile.TemporaryDirectory(prefix="penstock-flows-") as folder:
        async with opened(dsn, folder):
            pass  # the schema is made once, not by all of them at once
        with _working(dsn, folder, workers, concurrency) as pipes:
            await _round(connection, pipes, _shares(workload, WARM_UP, workers))
            ticks, seconds = await _round(connection, pipes, _shares(workload, size, workers))
    if inconsistent := await connection.fetchval(INCONSISTENT):
        sys.exit(f"{inconsistent} runs or steps did not succeed at once")
    await connection.close()
    found = chain_figures(ticks, seconds) if is_chain else fan_figures(ticks, seconds)
    expected = size * LENGTH if is_chain else size + 2
    if found["steps"] != expected:
        sys.exit(f"{found['steps']} steps ran, not {expected}")
    return {**found, "workers": workers, "concurrency": concurrency, "version": __version__}


def _shares(workload: str, size: int, workers: int) -> list[Share]:
    """*size* chains spread over all, or a fan of that breadth made by the first."""
    if workload == "chain":
        return [("chain", range(number, size, workers)) for number in range(workers)]
    flow = fan_of(size) if workload == "fan" else map_of(size)
    return [(flow, range(1 if number == 0 else 0)) for number in range(workers)]


@contextmanager
def _working(dsn: str, folder: str, workers: int, concurrency: int) -> Iterator[Sequence[Connection]]:
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(workers)]
    processes = [
        spawn.Process(target=work, args=(dsn, folder, concurrency, theirs), daemon=True) for _, theirs in pipes
    ]
    for process in processes:
        process.start()
    for ours, _ in pipes:
        ours.recv()
    yield [ours for ours, _ in pipes]
    for ours, _ in pipes:
        ours.send(None)
    for process in processes:
        process.join()


async def _round(
    connection: "asyncpg.Connection[asyncpg.Record]", pipes: Sequence[Connection], shares: Sequence[Share]
) -> Round:
    """The steps' ticks, and the seconds until the last was settled."""
    for pipe, share in zip(pipes, shares, strict=True):
        pipe.send(share)
    began = min([pipe.recv() for pipe in pipes])
    while await connection.fetchval(UNDER_WAY):  # noqa: ASYNC110 - the others are processes
        await asyncio.sleep(LOOK)
    ticks: defaultdict[int, list[float]] = defaultdict(list)
    ended = 0.0
    for pipe in pipes:
        pipe.send("done")
        settled_at, found = pipe.recv()
        ended = max(ended, settled_at)
        for part, times in found.items():
            ticks[part] += times
    return {part: sorted(times) for part, times in ticks.items()}, ended - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=("chain", "fan", "map"))
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--flows", type=int, default=100, help="chains at once")
    parser.add_argument("--breadth", type=int, default=BREADTH, help="of a fan")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    args = parser.parse_args()
    size = args.flows if args.workload == "chain" else args.breadth
    print(json.dumps(asyncio.run(measure(args.dsn, args.workload, size, args.workers, args.concurrency))))


if __name__ == "__main__":
    main()
