"""Run no-op flows with Prefect and print their figures as JSON; run by the python of Prefect's environment.

A worker is a process that runs flows and tells a Prefect server, one more process, which writes to a database of its
own on the given PostgreSQL. Flow runs are written at once. Task runs are sent as events and written later, in batches:
a step is not durable when the next one starts, so `recorded_seconds` says when all of them were.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter  # one clock for all processes
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import asyncpg

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.flows_env import BREADTH, FIRST, LAST, LENGTH, MIDDLE, Ticks, chain_figures, fan_figures

DATABASE = "prefect"
START = 60  # seconds
RECORDING = 300
RECORDED = "SELECT count(*) FROM task_run WHERE state_type = 'COMPLETED'"
SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "ERROR",
    "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
}


def work(workload: str, share: range, pipe: Connection) -> None:
    """Warm up with a chain, then run the share on a signal."""
    from prefect import flow, task  # type: ignore[import-not-found]  # reads its settings when it is imported

    ticks: defaultdict[int, list[float]] = defaultdict(list)

    @task  # type: ignore[untyped-decorator]
    async def step(part: int) -> None:
        ticks[part].append(perf_counter())

    @flow  # type: ignore[untyped-decorator]
    async def chain(number: int) -> None:
        for _ in range(LENGTH):
            await step(number)

    @flow  # type: ignore[untyped-decorator]
    async def fan(breadth: int) -> None:
        await step(FIRST)
        await asyncio.gather(*(step(MIDDLE) for _ in range(breadth)))
        await step(LAST)

    async def run() -> None:
        await chain(0)
        ticks.clear()
        pipe.send("ready")
        pipe.recv()
        began = perf_counter()
        await asyncio.gather(*(chain(number) for number in share) if workload == "chain" else [fan(BREADTH)])
        pipe.send((began, perf_counter(), dict(ticks)))

    asyncio.run(run())


def measure(dsn: str, workload: str, flows: int, workers: int) -> dict[str, Any]:
    """The figures of a run; exits when not every step ran."""
    with tempfile.TemporaryDirectory(prefix="penstock-prefect-") as folder, _serving(dsn, Path(folder)) as database:
        ticks, began, ended = _worked(database, workload, flows, workers)
        found = (chain_figures if workload == "chain" else fan_figures)(ticks, ended - began)
        expected = flows * LENGTH if workload == "chain" else BREADTH + 2
        if found["steps"] != expected:
            sys.exit(f"{found['steps']} steps ran, not {expected}")
        recorded = asyncio.run(_recorded(database, expected + workers * LENGTH)) - began
    about = {"workers": workers, "durability": "task runs are written later", "version": version("prefect")}
    return {**found, "recorded_seconds": round(recorded, 4), "flows": flows if workload == "chain" else 1, **about}


def _worked(database: str, workload: str, flows: int, workers: int) -> tuple[Ticks, float, float]:
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(workers)]
    processes = [
        spawn.Process(target=work, args=(workload, range(number, flows, workers), theirs), daemon=True)
        for number, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for ours, _ in pipes:
        ours.recv()
    asyncio.run(_recorded(database, workers * LENGTH))  # of the warm-up, which must not be in the way
    for ours, _ in pipes:
        ours.send("go")
    results = [ours.recv() for ours, _ in pipes]
    for process in processes:
        process.join()
    ticks = {part: times for _, _, found in results for part, times in found.items()}
    return ticks, min(began for began, _, _ in results), max(ended for _, ended, _ in results)


@contextmanager
def _serving(dsn: str, folder: Path) -> Iterator[str]:
    """The DSN of the database of a server that runs; workers find the server in the environment."""
    head, _, query = dsn.partition("?")
    database = f"{head.rpartition('/')[0]}/{DATABASE}" + (f"?{query}" if query else "")
    asyncio.run(_execute(dsn, f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)", f"CREATE DATABASE {DATABASE}"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= SETTINGS | {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database.replace("postgresql://", "postgresql+asyncpg://", 1),
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--no-ui", "--host=127.0.0.1", f"--port={port}"]
    server = subprocess.Popen(command, stdout=sys.stderr)
    try:
        _until_it_answers(server, f"{os.environ['PREFECT_API_URL']}/health")
        yield database
    finally:
        server.terminate()
        server.wait()
        asyncio.run(_execute(dsn, f"DROP DATABASE {DATABASE} WITH (FORCE)"))


def _until_it_answers(server: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + START
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urlopen(url, timeout=5):
                return
        except URLError:
            time.sleep(0.1)
    sys.exit("Prefect's server did not start")


async def _execute(dsn: str, *statements: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def _recorded(dsn: str, steps: int) -> float:
    """The time at which all *steps* are in the database."""
    connection = await asyncpg.connect(dsn)
    try:
        async with asyncio.timeout(RECORDING):
            while True:
                if await connection.fetchval(RECORDED) >= steps:
                    return perf_counter()
                await asyncio.sleep(0.05)
    finally:
        await connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=("chain", "fan"))
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--flows", type=int, default=10, help="chains at once; fewer than others run: it is slow")
    parser.add_argument("--workers", type=int, default=1, help="a fan is always the work of one")
    args = parser.parse_args()
    print(json.dumps(measure(args.dsn, args.workload, args.flows, args.workers if args.workload == "chain" else 1)))


if __name__ == "__main__":
    main()
