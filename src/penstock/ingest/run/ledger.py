"""What is remembered between runs of one supplier: which files were seen when, and how the last runs ended."""

from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import orjson

from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.tree import paths
from penstock.ingest.tree.port import FileTree


@dataclass
class FileSighting:
    """A file of the inbox: when it was first seen, and since when it has not changed. Seconds of the tree's clock."""

    signature: str
    identity: str | None
    first_seen: float
    since: float


@dataclass
class Ledger:
    """Hints, not truth: all of it may be lost, and a file only waits a little longer."""

    running: str | None = None
    seen: dict[str, FileSighting] = field(default_factory=dict)
    equal_shas: int = 0
    fails: int = 0
    last: dict[str, Any] | None = None
    fence: int = 0  # of the last publication
    killed_by: str | None = None  # the sha256 of the file the last runs died on, and how many did
    kills: int = 0

    def note(self, manifest: dict[str, Any]) -> None:
        """Remember how a run ended; told again, it changes nothing."""
        names = ("run_id", "status", "failure_code", "finished_at")
        told = {name: manifest[name] for name in names}
        if self.last == told:
            return
        if manifest["status"] == IngestRunStatus.PASS.value:
            self.fails = self.equal_shas = 0
            self.fence = max(self.fence, manifest["fence"] or 0)
        else:
            self.fails += 1
        self.last = told

    def note_kill(self, sha256: str | None) -> None:
        """Remember that a run died on a file."""
        self.kills = self.kills + 1 if sha256 == self.killed_by else 1
        self.killed_by = sha256


def load(tree: FileTree, supplier: str) -> Ledger:
    """The ledger as it was left; an empty one when there is none, or it makes no sense."""
    content = tree.read(paths.ledger(supplier))
    try:
        return msgspec.json.decode(content, type=Ledger) if content else Ledger()
    except msgspec.DecodeError:
        return Ledger()


def save(tree: FileTree, supplier: str, ledger: Ledger) -> None:
    tree.write(paths.ledger(supplier), orjson.dumps(asdict(ledger)))
