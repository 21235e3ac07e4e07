"""Benchmarks keep working: each has a smoke form, and reports the finished rounds when it is interrupted."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from benchmarks.__main__ import GROUPS, load_group
from benchmarks.kernel import KAFKA
from benchmarks.servers import has_two_cores

from tests.services.kafka import ADDRESS
from tests.support.require import is_required, require

ROOT = Path(__file__).parents[2]
ROUNDS = 100_000  # more than any test waits for
PEER = "needs an environment of its own"
GONE_WITHIN = 30.0  # seconds; only a process that was forgotten takes so long


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", GROUPS)
def test_smoke_form_measures_everything(name: str) -> None:
    """Every benchmark has a smoke form, which runs to its end; with the real servers it leaves out peers only."""
    group = load_group(name)
    assert group.smoke != group.full
    if group.needs_two_cores and not has_two_cores():
        require("two cores")
    with _started(name, "--smoke", "--json") as process:
        output, log = process.communicate()
    assert process.returncode == 0, log
    report = json.loads(output)
    assert (report["form"], report["rounds"], report["interrupted"]) == ("smoke", 1, None)
    assert report["figures"]
    assert not is_required("kafka") or [figure for figure in report["left_out"] if PEER not in figure] == []
    assert [figure["name"] for figure in report["figures"] if figure["median"] <= 0 and not figure["may_be_zero"]] == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["tracking", "flows"])
def test_ctrl_c_prints_the_finished_rounds(name: str) -> None:
    """Ctrl-C, which a terminal sends to all processes at once, prints a table of the finished rounds and exits 130."""
    with _started(name, "--smoke", "--rounds", str(ROUNDS)) as process:
        servers = _wait_for_first_round(process)
        os.killpg(process.pid, signal.SIGINT)
        output, log = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, log
    assert f"interrupted by SIGINT after {_finished(log)} of {ROUNDS} rounds" in output
    assert output.startswith("measured")
    assert _still_running(servers) == []


@pytest.mark.full
def test_sigterm_prints_the_finished_rounds_as_json() -> None:
    """SIGTERM, even when it is sent twice, prints the finished rounds as JSON and exits 143."""
    with _started("tracking", "--smoke", "--json", "--rounds", str(ROUNDS)) as process:
        servers = _wait_for_first_round(process)
        process.terminate()
        process.terminate()
        output, log = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, log
    report = json.loads(output)
    assert (report["interrupted"], report["rounds"]) == ("SIGTERM", _finished(log))
    assert {len(figure["rounds"]) for figure in report["figures"]} == {_finished(log)}
    assert _still_running(servers) == []


@contextmanager
def _started(*args: str) -> "Iterator[subprocess.Popen[str]]":
    """Start `python -m benchmarks` as the leader of a process group, and stop it at the end."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    if address := os.environ.get(ADDRESS):
        env[KAFKA] = address
    command = [sys.executable, "-m", "benchmarks", *args]
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def _wait_for_first_round(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Wait until a round is finished; return the servers that the benchmark has started by then."""
    assert process.stderr is not None
    log = []
    for line in process.stderr:
        log.append(line)
        if line == f"round 1/{ROUNDS} finished\n":
            return psutil.Process(process.pid).children(recursive=True)
    raise AssertionError("".join(log))


def _finished(log: str) -> int:
    """Return how many rounds were finished, the first of which was read before *log*."""
    return 1 + sum(line.startswith("round ") and line.endswith(" finished") for line in log.splitlines())


def _still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return list(psutil.wait_procs(processes, timeout=GONE_WITHIN)[1])
