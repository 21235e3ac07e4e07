"""Helpers of the example pipeline: daemons as processes, shards in MariaDB, conditions to wait for."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymysql

ROOT = Path(__file__).parents[2]
TIMEOUT = 45  # seconds; only a failed guarantee takes so long


class ExampleDaemon:
    """A daemon of the example as a process of its own; its log is a file."""

    def __init__(self, module: str, log_file: Path, args: Sequence[str]) -> None:
        self._log_file = log_file
        with log_file.open("ab") as log:
            command = [sys.executable, "-m", f"examples.pipeline.{module}", *args]
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The lines of its log that tell of *event*."""
        lines = self._log_file.read_text().split("\n")[:-1]  # the last one may be half written
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in entries if line["event"] == event]

    def kill(self) -> None:
        """SIGKILL: it gets no chance to say anything."""
        self._process.kill()
        self._process.wait()

    async def stop(self) -> int:
        """Ask it to stop; its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return await self.ends()

    async def ends(self) -> int:
        """Its exit code, once it has ended by itself."""
        return await asyncio.to_thread(self._process.wait, TIMEOUT)


@dataclass
class Daemons:
    """Starts daemons that share an API and folders, and lets none of them live on."""

    url: str
    folder: Path
    _started: list[ExampleDaemon] = field(default_factory=list)

    @property
    def raw(self) -> Path:
        return self.folder / "raw"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def start(self, module: str, *args: str, url: str | None = None) -> ExampleDaemon:
        log_file = self.folder / f"{len(self._started)}-{module}.log"
        daemon = ExampleDaemon(module, log_file, ["--url", url or self.url, "--folder", str(self.work), *args])
        self._started.append(daemon)
        return daemon

    def put(self, name: str, text: str) -> None:
        """Let a raw file appear, whole."""
        draft = self.raw / f".{name}"
        draft.write_text(text)
        draft.rename(self.raw / f"{name}.jsonl")

    @classmethod
    @contextmanager
    def running(cls, url: str, folder: Path) -> "Iterator[Daemons]":
        daemons = cls(url, folder)
        daemons.raw.mkdir()
        daemons.work.mkdir()
        try:
            yield daemons
        finally:
            for daemon in daemons._started:
                daemon.kill()
            for log_file in sorted(folder.glob("*-*_*.log")):  # pytest shows it when the test failed
                sys.stderr.write(f"--- {log_file.name}\n{log_file.read_text()}")


class Shards:
    """The shards' databases on one MariaDB, as the test looks at them."""

    def __init__(self, socket: Path, count: int) -> None:
        self._socket = socket
        self.names = [f"shard_{n}" for n in range(count)]
        self.addresses = [f"{socket}/{name}" for name in self.names]
        # Tests kill processes, never the machine: what the system holds in memory is safe.
        self.ask("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        for name in self.names:
            self.ask(f"CREATE DATABASE {name}")

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        with self._connection() as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    @contextmanager
    def held_up(self, shard: int) -> Iterator[None]:
        """Make every writer of an event into *shard* wait in the middle of its transaction."""
        with self._connection() as connection, connection.cursor() as cursor:
            cursor.execute(f"SELECT count(*) FROM {self.names[shard]}.event FOR UPDATE")
            yield

    async def is_blocked(self) -> bool:
        """Return true if a writer is waiting."""
        # Not innodb_trx: read more often than every 0.1 s, it never changes.
        return bool(self.ask("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")[0][1] != "0")

    async def is_disconnected(self) -> bool:
        """Whether no sender is connected: what a dead one left open was rolled back."""
        return not self.ask("SELECT 1 FROM information_schema.processlist WHERE db LIKE 'shard%'")

    def has_sent(self, filename: str, shard: int) -> bool:
        ledger = f"{self.names[shard]}.sent_file"
        return bool(self.ask(f"SELECT 1 FROM {ledger} WHERE filename = '{filename}' AND shard = {shard}"))

    def _connection(self) -> "pymysql.Connection[pymysql.cursors.Cursor]":
        return pymysql.connect(unix_socket=str(self._socket), user="root", read_timeout=TIMEOUT)
