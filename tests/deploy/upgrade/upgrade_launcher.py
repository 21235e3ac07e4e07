"""Starts roles of the version whose sources are first in its path; forked, so that the program is read only once."""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from penstock.cli import main


def launch() -> None:
    """Answer each line: the process id of what it starts, or the exit code of what it waits for."""
    for name in ("penstock.app.programs", "penstock.serving", "penstock.worker_programs"):  # also of older releases
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)  # noqa: T201
        elif pid := os.fork():
            print(pid, flush=True)  # noqa: T201
        else:
            _execute(request)
            return


def _execute(request: Mapping[str, Any]) -> None:
    os.chdir(request["folder"])
    for target, name, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY),
        (2, request["log"], os.O_WRONLY),
    ):
        os.dup2(os.open(name, mode | os.O_CREAT | os.O_APPEND), target)
    sys.argv = ["penstock", *request["args"]]
    main.run()


if __name__ == "__main__":
    launch()
