"""The memory of a supplier between runs: the files seen in the inbox, and the results of the last runs."""

from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import orjson

from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.tree import paths
from penstock.ingest.tree.port import FileTree


@dataclass
class FileSighting:
    """A file of the inbox: the times when it was first seen and since when it is unchanged, by the tree's clock."""

    signature: str
    identity: str | None
    first_seen: float
    since: float


@dataclass
class Ledger:
    """Hints that may be lost: without them a file only waits a little longer."""

    running: str | None = None
    seen: dict[str, FileSighting] = field(default_factory=dict)
    unchanged_files: int = 0
    failed_runs: int = 0
    last_run: dict[str, Any] | None = None
    fence: int = 0  # of the last publication
    killed_by: str | None = None  # the sha256 of the file during which the last runs were killed
    kills: int = 0  # the number of these runs

    def record_end(self, manifest: dict[str, Any]) -> None:
        """Record the end of a run; repeating it has no effect."""
        names = ("run_id", "status", "failure_code", "finished_at")
        run = {name: manifest[name] for name in names}
        if self.last_run == run:
            return
        if manifest["status"] == IngestRunStatus.PASS.value:
            self.failed_runs = self.unchanged_files = 0
            self.fence = max(self.fence, manifest["fence"] or 0)
        else:
            self.failed_runs += 1
        self.last_run = run

    def record_kill(self, sha256: str | None) -> None:
        """Record that a run was killed while it processed a file."""
        self.kills = self.kills + 1 if sha256 == self.killed_by else 1
        self.killed_by = sha256


def load(tree: FileTree, supplier: str) -> Ledger:
    """Return the ledger of *supplier*; an empty one if it is missing or invalid."""
    content = tree.read(paths.make_ledger_path(supplier))
    try:
        return msgspec.json.decode(content, type=Ledger) if content else Ledger()
    except msgspec.DecodeError:
        return Ledger()


def save(tree: FileTree, supplier: str, ledger: Ledger) -> None:
    tree.write(paths.make_ledger_path(supplier), orjson.dumps(asdict(ledger)))
