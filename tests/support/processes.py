"""Run the program as a process: commands with output and exit code, and servers by role."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import pytest

from penstock.cli import main
from tests.support.fork_server import ForkedProgram

PENSTOCK = "penstock.cli.main"
_COMMAND = [sys.executable, "-m", PENSTOCK]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def penstock(*args: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 60) -> Result:
    """Run a command to its end, in a process forked from one that has it loaded."""
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "stderr"
        process = ForkedProgram([PENSTOCK, *args], cwd, _environment(env), errors)
        ended = threading.Timer(timeout, process.kill)
        ended.start()
        with process.stdout as output:
            out = output.read().decode()
        code = process.wait(timeout)
        ended.cancel()
        return Result(code, out, errors.read_text())


def penstock_from_scratch(*args: str, cwd: Path, env: Mapping[str, str] | None = None) -> Result:
    """Run a command to its end in a new interpreter, as a user's shell does, for tests of imports."""
    command = [*_COMMAND, *args]
    done = subprocess.run(
        command, cwd=cwd, env=_environment(env), capture_output=True, text=True, timeout=60, check=False
    )
    return Result(done.returncode, done.stdout, done.stderr)


def penstock_here(*args: str | bytes, cwd: Path | None = None, given: bytes = b"") -> Result:
    """Run a command to its end in this process, which is faster."""
    out, err = io.BytesIO(), io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["penstock", *map(os.fsdecode, args)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
        patch.setattr(sys, "stdout", io.TextIOWrapper(out, "utf-8", write_through=True))
        patch.setattr(sys, "stderr", io.TextIOWrapper(err, "utf-8", "backslashreplace", write_through=True))
        if cwd is not None:
            patch.chdir(cwd)
        with pytest.raises(SystemExit) as ended:
            main.run()
        return Result(int(ended.value.code or 0), out.getvalue().decode(), err.getvalue().decode())


class ServerCli:
    """Run the commands of one group, such as `penstock flow`, in this process against one server."""

    def __init__(self, group: str, url: str) -> None:
        self.group, self.url = group, url

    def run(self, *args: str) -> Result:
        done = penstock_here(self.group, *args, "--url", self.url)
        assert "Traceback" not in done.err
        assert "bug in Penstock" not in done.err
        return done

    def text(self, *args: str, code: int = 0) -> str:
        done = self.run(*args)
        assert done.code == code, done
        return done.out

    def json(self, *args: str, code: int = 0) -> Any:
        done = self.run(*args, "--json")
        assert done.code == code, done
        return json.loads(done.out)

    def refused(self, code: int, *args: str) -> str:
        """Return the error message of a command that ends with exit code *code* and prints nothing else."""
        done = self.run(*args)
        assert (done.code, done.out) == (code, ""), done
        assert done.err.startswith("error: ")
        return done.err


def penstock_on_a_terminal(*args: str) -> Result:
    """Run a command to its end, its standard error on a terminal."""
    ours, terminal = pty.openpty()
    with subprocess.Popen([*_COMMAND, *args], stdout=subprocess.PIPE, stderr=terminal, text=True) as process:
        os.close(terminal)
        shown = _shown_on(ours)
        assert process.stdout is not None
        out = process.stdout.read()
    return Result(process.returncode, out, shown)


def _shown_on(terminal: int) -> str:
    """Return what is written to a terminal until no process has it open."""
    output = b""
    try:
        while data := os.read(terminal, 65536):
            output += data
    except OSError:  # Linux raises it when the other end is closed
        pass
    finally:
        os.close(terminal)
    return output.decode()


class Server(AbstractContextManager["Server"]):
    """A command that serves until it is stopped, ready when entered; its log is a file in its folder.

    The *command* is a module and its arguments. It is forked from a process that has loaded it, which saves a second;
    with *in_new_interpreter* it starts as from the shell of a user.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        *,
        in_new_interpreter: bool = False,
    ) -> None:
        self._name = name
        self.log_file = folder / f"{name}.log"
        self.log_file.touch()
        start = _start_interpreter if in_new_interpreter else ForkedProgram
        self._process = start(command, folder, _environment(env), self.log_file)
        self.api = ""

    def __enter__(self) -> Self:
        try:
            self._on_ready(self._first_document())
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _on_ready(self, document: Mapping[str, Any]) -> None:
        self.api = document["api"]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Stop it and return its exit code."""
        self._process.send_signal(how)
        return self.ended()

    def ended(self) -> int:
        """Wait for its end and return its exit code."""
        return self._process.wait(30)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)
        if self._process.stdout:
            self._process.stdout.close()

    @property
    def port(self) -> int:
        return int(self.api.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self._process.pid

    def _first_document(self) -> dict[str, Any]:
        """Return the document that it prints with `--json` when it is ready; wait until then or until it ends."""
        text = ""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text += line.decode()
            if line.startswith(b"}"):
                document: dict[str, Any] = json.loads(text)
                return document
        raise AssertionError(f"{self._name} ended with {self._process.wait()}: {self.log_file.read_text()}")


class Up(Server):
    """`penstock up` on free ports."""

    def __init__(
        self, folder: Path, *args: str, env: Mapping[str, str] | None = None, in_new_interpreter: bool = False
    ) -> None:
        command = [PENSTOCK, "up", "--port", "0", "--query-port", "0", "--json", *args]
        super().__init__("up", command, folder, env, in_new_interpreter=in_new_interpreter)
        self.query = ""

    def _on_ready(self, document: Mapping[str, Any]) -> None:
        super()._on_ready(document)
        self.query = document["query"]


class CommandApi(Server):
    """`penstock serve command-api` on a free port."""

    def __init__(self, folder: Path, *args: str, env: Mapping[str, str] | None = None) -> None:
        command = [PENSTOCK, "serve", "command-api", "--port", "0", "--json", *args]
        super().__init__("command-api", command, folder, env)


class QueryApi(Server):
    """`penstock serve query-api`, on a free port unless *port* is given; `serving_pids` are its serving processes."""

    def __init__(self, folder: Path, *args: str, port: int = 0, env: Mapping[str, str] | None = None) -> None:
        command = [PENSTOCK, "serve", "query-api", "--port", str(port), "--json", *args]
        super().__init__("query-api", command, folder, env)

    @property
    def serving_pids(self) -> list[int]:
        return [
            child.pid
            for child in psutil.Process(self.pid).children()
            if "penstock.refdata.pod.serve.main" in child.cmdline()
        ]


class Work(Server):
    """`penstock work ROLE`."""

    def __init__(self, folder: Path, role: str, *args: str, env: Mapping[str, str] | None = None) -> None:
        super().__init__(f"work-{role}", [PENSTOCK, "work", role, "--json", *args], folder, env)


class PipelineApid(Server):
    """`pipeline-apid`, on a free port unless *port* is given."""

    def __init__(
        self,
        folder: Path,
        *args: str,
        port: int = 0,
        env: Mapping[str, str] | None = None,
        in_new_interpreter: bool = False,
    ) -> None:
        command = ["penstock.cli.pipeline_apid", "--port", str(port), "--json", *args]
        super().__init__("pipeline-apid", command, folder, env, in_new_interpreter=in_new_interpreter)


def _start_interpreter(
    command: Sequence[str], folder: Path, env: Mapping[str, str], log_file: Path
) -> "subprocess.Popen[bytes]":
    with log_file.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *command], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=log
        )


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK")}
    return {**inherited, **(extra or {})}
