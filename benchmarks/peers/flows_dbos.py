"""Run no-op flows with DBOS and print their figures as JSON; run by the python of DBOS's environment.

A worker is a process. Durability is DBOS's only one: a step's result is committed before the next step starts. Chains
run in the process that starts them, which spares them the queue and its polling. Without a ping of the connection
before each use, and with fewer connections and threads than its defaults, it is faster on two cores.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter  # one clock for all processes
from typing import Any

import psycopg  # type: ignore[import-not-found]
import uvloop
from dbos import DBOS  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.flows_env import BREADTH, FIRST, LAST, LENGTH, MIDDLE, Ticks, chain_figures, fan_figures

AT_ONCE = 4  # connections, and threads, of a process
CHILDREN, SHARDS = "children", "shards"
QUEUES = {CHILDREN: None, SHARDS: 1}  # and how many flows of each a process may run at once
POLL = 0.01  # seconds; the default of a second would be all that is measured
WARM_UP = 8  # flows, or steps of a fan
UNDONE = "SELECT count(*) FROM dbos.workflow_status WHERE status <> 'SUCCESS'"
_ticks: defaultdict[int, list[float]] = defaultdict(list)
_loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)  # not one a round: closing it would end DBOS's threads too


@DBOS.step()  # type: ignore[untyped-decorator]
def step(part: int) -> None:
    _ticks[part].append(perf_counter())


@DBOS.step()  # type: ignore[untyped-decorator]
async def async_step(part: int) -> None:
    _ticks[part].append(perf_counter())


@DBOS.workflow()  # type: ignore[untyped-decorator]
def chain(flow: int) -> None:
    for _ in range(LENGTH):
        step(flow)


@DBOS.workflow()  # type: ignore[untyped-decorator]
async def async_chain(flow: int) -> None:
    for _ in range(LENGTH):
        await async_step(flow)


@DBOS.workflow()  # type: ignore[untyped-decorator]
async def gathered(steps: int) -> None:
    await asyncio.gather(*(async_step(MIDDLE) for _ in range(steps)))


@DBOS.workflow()  # type: ignore[untyped-decorator]
async def gathered_fan(breadth: int) -> None:
    """The steps of one flow all at once: the work of one process."""
    await async_step(FIRST)
    await asyncio.gather(*(async_step(MIDDLE) for _ in range(breadth)))
    await async_step(LAST)


@DBOS.workflow()  # type: ignore[untyped-decorator]
def child() -> None:
    _ticks[MIDDLE].append(perf_counter())


@DBOS.workflow()  # type: ignore[untyped-decorator]
def children_fan(breadth: int) -> None:
    """A queued flow for every step, shared by all processes: what DBOS's manual shows."""
    step(FIRST)
    for handle in [DBOS.enqueue_workflow(CHILDREN, child) for _ in range(breadth)]:
        handle.get_result()
    step(LAST)


@DBOS.workflow()  # type: ignore[untyped-decorator]
def sharded_fan(breadth: int, workers: int) -> None:
    """A queued flow for every process, with a share of the steps in each."""
    step(FIRST)
    shares = [len(range(number, breadth, workers)) for number in range(workers)]
    for handle in [DBOS.enqueue_workflow(SHARDS, gathered, share) for share in shares]:
        handle.get_result()
    step(LAST)


def run_chains(flows: range, _workers: int) -> None:
    for handle in [DBOS.start_workflow(chain, flow) for flow in flows]:
        handle.get_result()


def run_async_chains(flows: range, _workers: int) -> None:
    async def run() -> None:
        handles = [await DBOS.start_workflow_async(async_chain, flow) for flow in flows]
        await asyncio.gather(*(handle.get_result() for handle in handles))

    _loop.run(run())


def run_gathered_fan(breadth: int, _workers: int) -> None:
    _loop.run(gathered_fan(breadth))


def run_children_fan(breadth: int, _workers: int) -> None:
    children_fan(breadth)


CHAINS = {"sync": run_chains, "async": run_async_chains}
FANS = {"gather": run_gathered_fan, CHILDREN: run_children_fan, SHARDS: sharded_fan}
WAYS: dict[str, Callable[[Any, int], None]] = {**CHAINS, **FANS}


def work(dsn: str, number: int, workers: int, how: str, pipe: Connection) -> None:
    """Do the share of every round, until there is no more."""
    _launch(dsn, number)
    while (share := pipe.recv()) is not None:
        began = perf_counter()
        if share:
            WAYS[how](share, workers)
        pipe.send((began, perf_counter()) if share else None)
        pipe.recv()  # steps of other workers may run here until all have ended
        pipe.send(dict(_ticks))
        _ticks.clear()
    DBOS.destroy()


def measure(dsn: str, how: str, flows: int, workers: int) -> dict[str, Any]:
    """The figures of a round, after one to warm up; exits when not every flow succeeded."""
    _prepare(dsn, how)
    with _working(dsn, workers, how) as pipes:
        _round(pipes, how, WARM_UP)
        ticks, seconds = _round(pipes, how, flows if how in CHAINS else BREADTH)
    with psycopg.connect(dsn) as connection:
        if undone := connection.execute(UNDONE).fetchone()[0]:
            sys.exit(f"{undone} flows did not succeed")
    found = chain_figures(ticks, seconds) if how in CHAINS else fan_figures(ticks, seconds)
    expected = flows * LENGTH if how in CHAINS else BREADTH + 2
    if found["steps"] != expected:
        sys.exit(f"{found['steps']} steps ran, not {expected}")
    return {**found, "workers": workers, "how": how, "version": version("dbos")}


def _prepare(dsn: str, how: str) -> None:
    """A system database as new, with no queue that is not needed, since every process would poll it."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS dbos CASCADE")
    _launch(dsn, 0)
    if how in QUEUES:
        DBOS.register_queue(how, polling_interval_sec=POLL, worker_concurrency=QUEUES[how])
    DBOS.destroy()


def _launch(dsn: str, number: int) -> None:
    config = {
        "name": "flows",
        "system_database_url": dsn,
        "executor_id": str(number),
        "application_version": "1",
        "sys_db_pool_size": AT_ONCE,
        "max_executor_threads": AT_ONCE,
        "db_engine_kwargs": {"pool_pre_ping": False},
        "enable_otlp": False,
        "log_level": "ERROR",
    }
    DBOS(config=config)
    DBOS.launch()


@contextmanager
def _working(dsn: str, workers: int, how: str) -> Iterator[Sequence[Connection]]:
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(workers)]
    processes = [
        spawn.Process(target=work, args=(dsn, number, workers, how, theirs), daemon=True)
        for number, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    yield [ours for ours, _ in pipes]
    for ours, _ in pipes:
        ours.send(None)
    for process in processes:
        process.join()


def _round(pipes: Sequence[Connection], how: str, size: int) -> tuple[Ticks, float]:
    """*size* flows spread over all, or a fan of that breadth given to the first; the steps' ticks and the seconds."""
    for number, pipe in enumerate(pipes):
        pipe.send(range(number, size, len(pipes)) if how in CHAINS else 0 if number else size)
    times = [spent for pipe in pipes if (spent := pipe.recv())]
    ticks: defaultdict[int, list[float]] = defaultdict(list)
    for pipe in pipes:
        pipe.send("done")
        for part, found in pipe.recv().items():
            ticks[part] += found
    return ticks, max(ended for _, ended in times) - min(began for began, _ in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=("chain", "fan"))
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--flows", type=int, default=100, help="chains at once")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--how", choices=WAYS, help="default: what is fastest here")
    args = parser.parse_args()
    fastest = "sync" if args.workload == "chain" else "gather" if args.workers == 1 else SHARDS
    print(json.dumps(measure(args.dsn, args.how or fastest, args.flows, args.workers)))


if __name__ == "__main__":
    main()
