"""The folder of the demo, and the processes that run in it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.demo.event_files import write_documents
from penstock.demo.samples import FOLDER as SAMPLES
from penstock.kernel.db import datadir
from penstock.kernel.db.locks import hold_file_lock
from penstock.kernel.errors import BadConfig, Conflict

CONFIG, LOG = "penstock.yaml", "log.txt"
RAW, WORK = "events-raw", "events-work"
_MARK = ".penstock-demo"  # in a folder that the demo created and may empty; locked while a demo runs
_OTHER_FOLDER = "choose another folder with --folder"
_API, _SOURCE = "http://127.0.0.1:8080", "http://127.0.0.1:8090"  # in the sample files


class DemoFailed(Exception):
    """The demo cannot continue."""


@dataclass
class DemoWorkspace:
    """A folder with the sample files, and its processes."""

    folder: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    @classmethod
    @contextmanager
    def create(cls, folder: Path) -> "Iterator[DemoWorkspace]":
        """Create an empty workspace; end its processes on exit. The files stay for inspection."""
        workspace = cls(folder.absolute())
        with ExitStack() as stack:
            try:
                stack.enter_context(workspace.lock())
                workspace.clear()
            except OSError as error:
                message = f"cannot use {workspace.folder}: {error.strerror or error}"
                raise BadConfig("DEMO_FOLDER_UNUSABLE", message, hint=_OTHER_FOLDER) from error
            stack.callback(workspace.end_all)
            yield workspace

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder; Conflict if it contains other files than those of an earlier demo, or a demo is running."""
        if self.folder.exists() and any(self.folder.iterdir()) and not (self.folder / _MARK).exists():
            message = f"{self.folder} contains files that are not from a demo"
            raise Conflict("DEMO_FOLDER_NOT_EMPTY", message, hint=_OTHER_FOLDER)
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(hold_file_lock(self.folder / _MARK, "demo"))
                # A server may still run after its demo was killed.
                with datadir.lock_data_dir(self.folder / ".penstock", "demo"):
                    pass
            except Conflict as error:
                message = f"a demo is running in {self.folder}: {error.message}"
                raise Conflict("DEMO_FOLDER_IN_USE", message, hint=f"stop it, or {_OTHER_FOLDER}") from error
            yield

    def clear(self) -> None:
        """Empty the folder except for its mark, and create the folders of the demo."""
        for entry in self.folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _MARK:
                entry.unlink()
        for name in ("data/etl_ops/config", "flows", "files", RAW, WORK):
            (self.folder / name).mkdir(parents=True)

    @property
    def log(self) -> Path:
        """Return the file that all processes log to."""
        return self.folder / LOG

    def write_configuration(self, source: str) -> None:
        """Write the configuration, the flow and the candles; *source* is the address of the paged API."""
        self._write(CONFIG, (SAMPLES / CONFIG).read_text().replace(_SOURCE, source))
        shutil.copy(SAMPLES / "flows" / "morning.yaml", self.folder / "flows")
        shutil.copy(SAMPLES / "files" / "candles.csv", self.folder / "files")

    def write_suppliers(self, api: str) -> None:
        """Write the supplier configurations; publications go to the dictionary at *api*."""
        for file in (SAMPLES / "suppliers").glob("*.yaml"):
            self._write(f"data/etl_ops/config/{file.name}", file.read_text().replace(_API, api))

    def deliver_file(self, supplier: str, name: str) -> None:
        """Move a copy of a sample file into the inbox of a supplier, by a rename."""
        inbox = self.folder / "data" / "etl_data" / "raw_v1" / "inbox" / supplier
        inbox.mkdir(parents=True, exist_ok=True)
        shutil.copy(SAMPLES / "files" / name, inbox / f"{name}.tmp")
        (inbox / f"{name}.tmp").rename(inbox / name)

    def deliver_events(self, name: str, events: Sequence[dict[str, Any]]) -> None:
        """Write a raw file of events into the folder that event-ingest reads."""
        write_documents(self.folder / RAW / f"{name}.jsonl", events)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `python -m` with *arguments* in this folder; standard error goes to the log."""
        command = [sys.executable, "-m", *arguments]
        # The environment may name a production database, to which the demo must not write.
        env = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK")}
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        self.running.append(process)
        return process

    def start_penstock(self, *arguments: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """Start a `penstock` command that serves; return the process and the document that it prints when ready."""
        process = self.start("penstock.cli.main", *arguments, "--json")
        text = ""
        for line in process.stdout or ():
            text += line
            if line.startswith(("{", "}")) and line.endswith("}\n"):  # the whole document, or its last line
                return process, json.loads(text)
        errors = [line for line in self.log.read_text().splitlines() if line.startswith('{"error"')]
        last_error = f": {json.loads(errors[-1])['error']['message']}" if errors else ""
        raise DemoFailed(f"penstock {arguments[0]} did not start{last_error}")

    def end_all(self) -> None:
        """End all processes, the last one first."""
        for process in reversed(self.running[:]):
            self.end_process(process, signal.SIGTERM)

    def end_process(self, process: subprocess.Popen[str], sent: signal.Signals) -> None:
        """Send a signal to *process*, and wait until it has ended; kill a process that does not end."""
        process.send_signal(sent)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self.running.remove(process)

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
