"""Where the demo happens: a folder of its own, and the processes that run there."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.kernel import datadir
from penstock.kernel.errors import Conflict

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_OURS = ".penstock-demo"  # marks a folder that may be emptied
LOG = "log.txt"
RAW, WORK = "events-raw", "events-work"
_API, _SOURCE = "http://127.0.0.1:8080", "http://127.0.0.1:8090"  # as the files of this example write them


class Broken(Exception):
    """The story cannot go on."""


@dataclass
class Place:
    """A fresh folder with the example's files in it."""

    folder: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    @classmethod
    @contextmanager
    def made(cls, folder: Path) -> "Iterator[Place]":
        """An empty place; whatever was started there is ended with it, what it left stays to be looked at."""
        place = cls(folder)
        place.clear()
        for name in ("data/etl_ops/config", "flows", "files", RAW, WORK):
            (folder / name).mkdir(parents=True)
        try:
            yield place
        finally:
            for process in reversed(place.running):
                process.terminate()
                process.wait(30)

    def clear(self) -> None:
        """Make it empty, if it is one of ours and nobody is in it; else Broken."""
        if self.folder.exists() and any(self.folder.iterdir()) and not (self.folder / _OURS).exists():
            raise Broken(f"{self.folder} holds something that is not the demo's")
        try:
            with datadir.owned(self.folder / ".penstock", "demo"):
                pass
        except Conflict as error:
            raise Broken(f"a demo is running in {self.folder}: {error.message}") from error
        shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        (self.folder / _OURS).touch()

    @property
    def log(self) -> Path:
        """What all processes log."""
        return self.folder / LOG

    def furnish(self, source: str) -> None:
        """Configuration, flow and candles."""
        self._write("penstock.yaml", (HERE / "penstock.yaml").read_text().replace(_SOURCE, source))
        shutil.copy(HERE / "flows" / "morning.yaml", self.folder / "flows")
        shutil.copy(ROOT / "examples" / "market-report" / "candles.csv", self.folder / "files")

    def expect_suppliers(self, api: str) -> None:
        """Their configurations: what is published goes on to the dictionary at *api*."""
        for file in (HERE / "suppliers").glob("*.yaml"):
            self._write(f"data/etl_ops/config/{file.name}", file.read_text().replace(_API, api))

    def deliver(self, supplier: str, name: str) -> None:
        """A file arrives: under a temporary name first, as a careful supplier sends it."""
        inbox = self.folder / "data" / "etl_data" / "raw_v1" / "inbox" / supplier
        inbox.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "files" / name, inbox / f"{name}.tmp")
        (inbox / f"{name}.tmp").rename(inbox / name)

    def drop_events(self, name: str, events: Sequence[dict[str, Any]]) -> None:
        """A file of events arrives, whole."""
        draft = self.folder / RAW / ".draft"
        draft.write_text("".join(f"{json.dumps(event)}\n" for event in events))
        draft.rename(self.folder / RAW / f"{name}.jsonl")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A program of Python, in this folder, with its log beside the data."""
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", *arguments]
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        self.running.append(process)
        return process

    def penstock(self, *arguments: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """A command of Penstock that serves, and what it says when it is ready."""
        process = self.start("penstock.cli.main", *arguments, "--json")
        assert process.stdout is not None
        text = ""
        for line in process.stdout:
            text += line
            if line.rstrip().endswith("}"):
                return process, json.loads(text)
        raise Broken(f"penstock {arguments[0]} did not start")

    def kill(self, process: subprocess.Popen[str]) -> None:
        """kill -9."""
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        self.running.remove(process)

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
