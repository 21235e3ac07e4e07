"""Start processes from a fork server that has the product loaded, which saves a second of imports per process.

Separate from `processes`, because the fork server loads this module: its children must not contain pytest.
"""

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkServerProcess
from pathlib import Path

# There is one fork server per process, and it preloads the last list that was set before its first fork. So all modules
# are listed here: a module that is missing would be imported again by every process that uses it.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "penstock.app.programs",
        "tests.flows.scenarios.worker_process",
        "tests.harvest.scenarios.worker_process",
        "tests.ingest.crash_process",
        "tests.tracking.scenarios.job_worker",
        "tests.refdata.scenarios.crash_points",
        "tests.tracking.scenarios.claimer_process",
    ]
)


class ForkedProgram:
    """Run a module with arguments, as `python -m` does; has the methods of `Popen` that tests use."""

    def __init__(self, command: Sequence[str], folder: Path, env: Mapping[str, str], log: Path) -> None:
        ours, theirs = FORKED.Pipe(duplex=False)
        arguments = (command, folder, dict(env), log, theirs)
        self._process: ForkServerProcess = FORKED.Process(target=_become, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        with ours:
            self.stdout = os.fdopen(os.dup(ours.fileno()), "rb")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"{self.pid} does not end"
        return self._process.exitcode


def _become(command: Sequence[str], folder: Path, env: Mapping[str, str], log: Path, output: Pipe) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    os.dup2(output.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    output.close()
    sys.argv = list(command)
    importlib.import_module(command[0]).run()
