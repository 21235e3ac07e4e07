"""Versions of the program side by side: the one before, and one that is yet to come."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

import penstock
from penstock.kernel.db.migrate import load
from tests.deploy.upgrade.upgrade_rules import tables_made
from tests.support.processes import Result, penstock_from_scratch
from tests.support.require import require
from tests.support.wait import until

ROOT = Path(__file__).parents[3]
BEFORE = "a47b3b3b0c4f808ad48a6369f20ac2b11ec7c44f"  # the first version with the names of the first release
NEXT = "99.0.0"
PARTS = ("kernel", "tracking", "refdata", "ingest", "harvest", "flows")
_LAUNCHER = Path(__file__).with_name("upgrade_launcher.py")


class Version(AbstractContextManager["Version"]):
    """One version's sources; all run with the same interpreter and libraries."""

    def __init__(self, name: str, sources: Path) -> None:
        self.name = name
        self._path = {"PYTHONPATH": os.pathsep.join(map(str, (sources, ROOT)))}
        command, pipe = [sys.executable, "-P", str(_LAUNCHER)], subprocess.PIPE
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK")}
        self._launcher = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**kept, **self._path})
        self._asking = threading.Lock()
        self._numbers = itertools.count()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._launcher.communicate(timeout=30)

    def run(self, *args: str, folder: Path) -> Result:
        """A command to its end."""
        return penstock_from_scratch(*args, cwd=folder, env=self._path)

    def start(self, *args: str, folder: Path) -> "VersionRole":
        """A role of this version, which is not ready yet."""
        return VersionRole(self, args, folder, f"{'-'.join((self.name, *args[:2]))}.{next(self._numbers)}")

    def ask(self, request: dict[str, Any]) -> int:
        with self._asking:
            assert self._launcher.stdin is not None
            assert self._launcher.stdout is not None
            self._launcher.stdin.write(json.dumps(request) + "\n")
            self._launcher.stdin.flush()
            return int(self._launcher.stdout.readline())


class VersionRole(AbstractContextManager["VersionRole"]):
    """A process of a version, ready when entered, gone at the end."""

    def __init__(self, version: Version, args: tuple[str, ...], folder: Path, name: str) -> None:
        self._version, self._out, self._log = version, folder / f"{name}.out", folder / f"{name}.log"
        request = {"args": [*args, "--json"], "folder": str(folder), "out": str(self._out), "log": str(self._log)}
        self._pid = version.ask(request)
        self._is_over = False
        self.api = ""

    def __enter__(self) -> Self:
        try:
            until(self._has_printed, "a role is ready")
            ready = self._out.read_text()
            assert ready.endswith("}\n"), self.log
        except AssertionError:
            self._end(signal.SIGKILL)
            raise
        self.api = json.loads(ready)["api"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_over:
            self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Ask it to stop; its exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> int:
        self._is_over = True
        os.kill(self._pid, how)
        return self._version.ask({"wait": self._pid})

    @property
    def log(self) -> str:
        return f"{self._log.name}: {self._log.read_text()[-3000:]}"

    @property
    def pid(self) -> int:
        return self._pid

    def _has_printed(self) -> bool:
        is_gone = psutil.Process(self._pid).status() == psutil.STATUS_ZOMBIE
        return is_gone or (self._out.exists() and self._out.read_text().endswith("}\n"))


def before(folder: Path) -> Version:
    """The version before, out of the history."""
    git = shutil.which("git") or require("git")
    migrations = subprocess.run(
        [git, "-C", ROOT, "cat-file", "-e", f"{BEFORE}^{{commit}}"], capture_output=True, check=False
    )
    if migrations.returncode:
        require("git history", f"the commit {BEFORE[:7]} is not in this clone")
    archive = subprocess.run([git, "-C", ROOT, "archive", BEFORE, "src", "db"], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return Version("before", folder / "src")


def next_one(folder: Path) -> Version:
    """This version and, in each part, a migration that expands whatever is there."""
    copy = Path(shutil.copytree(ROOT / "src", folder / "src"))
    init = copy / "penstock" / "__init__.py"
    init.write_text(init.read_text().replace(penstock.__version__, NEXT))
    for part in PARTS:
        migrations = load(f"penstock.{part}")
        file = copy / "penstock" / part / "migrations" / f"{migrations[-1].version + 1:04}_next.sql"
        file.write_text(_expanded(part, [table for migration in migrations for table in tables_made(migration.sql)]))
    return Version("next", copy)


def _expanded(part: str, tables: list[str]) -> str:
    """Add a column to every table, and an index to the first, without an effect on running roles."""
    lines = [f"ALTER TABLE {table} ADD COLUMN next_note text;" for table in tables]
    index = f"CREATE INDEX {part}_next_note ON {tables[0]} (next_note) WHERE next_note IS NOT NULL;"
    return "\n".join([*lines, index, f"CREATE TABLE {part}_next (id bigint PRIMARY KEY, note text);\n"])
