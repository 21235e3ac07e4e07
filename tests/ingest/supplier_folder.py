"""A folder with one supplier, the files it sends, and the invariants that must hold after any crash."""

import os
import shutil
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from penstock.ingest.config import AlertSection, IngestRetentionSection
from penstock.ingest.model import CurrentPointer, SupplierStatus
from penstock.ingest.run import ledger
from penstock.ingest.run.hooks import RunHooks, RunOutcome
from penstock.ingest.run.ledger import Ledger
from penstock.ingest.run.publish import OnStep
from penstock.ingest.run.run import Ingestion
from penstock.ingest.state import reader
from penstock.ingest.state.retention import RetentionResult, delete_expired
from penstock.ingest.state.supplier_status import read_supplier_status
from penstock.ingest.state.verify import verify_suppliers
from penstock.ingest.tree import paths as layout
from penstock.ingest.tree.folder import FolderTree
from penstock.kernel.clock import Clock, SystemClock

SUPPLIER = "acme"
CONFIG = """
min_fact_count: 1
max_bad_ratio: 0.5
allow_empty_snapshot: false
file_stability_window: {window}
dedup: {dedup}
on_bad_row: {on_bad_row}
columns:
  sku: {{from: sku, required: true}}
  price: {{from: price, type: integer, required: true}}
key: [sku]
"""
_MEMORY = Path("/dev/shm")  # a crash of a process is the same there, and a sync costs nothing
_BEGINNING = 1_750_000_000  # when the first file was written
STATE_FILES = {layout.FACTS, layout.POINTER, layout.MANIFEST, layout.STATS, layout.CHANGES, layout.CHANGED_KEYS}

Facts = dict[str, int]


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory where there is such a thing."""
    where = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="penstock-ingest-", dir=where))
    try:
        yield folder
    finally:
        unlocked(folder)
        shutil.rmtree(folder, ignore_errors=True)


def unlocked(folder: Path) -> None:
    """Published states are read-only; whoever removes them has to say so first."""
    for place, _, _ in os.walk(folder):
        Path(place).chmod(0o755)


def csv(facts: Facts | Iterable[tuple[str, object]]) -> bytes:
    rows = facts.items() if isinstance(facts, dict) else facts
    return ("sku,price\n" + "".join(f"{sku},{price}\n" for sku, price in rows)).encode()


def digest(content: bytes) -> str:
    return sha256(content).hexdigest()


class SupplierFolder:
    """What a supplier, an operator and a reader do, and what they see."""

    def __init__(self, root: Path, clock: Clock | None = None) -> None:
        self.root = root
        self.tree = FolderTree(root)
        self.clock = clock or SystemClock()
        self.sent: Counter[str] = Counter()
        self.tree.prepare(SUPPLIER)
        self.configure()

    def configure(self, window: float = 0, dedup: str = "accepted", on_bad_row: str = "drop") -> None:
        told = CONFIG.format(window=window, dedup=dedup, on_bad_row=on_bad_row)
        (self.root / layout.config(SUPPLIER)).write_text(told)

    def copy(self, root: Path) -> "SupplierFolder":
        """Another place where all is as it is here."""
        shutil.copytree(self.root, root, symlinks=True)
        twin = SupplierFolder(root, self.clock)
        shutil.copyfile(self.root / layout.config(SUPPLIER), root / layout.config(SUPPLIER))
        twin.sent = self.sent.copy()
        return twin

    def inbox(self, name: str = "") -> Path:
        return self.root / layout.inbox(SUPPLIER) / name

    def drop(self, name: str, content: bytes, at: float = 0) -> Path:
        """A file that was written *at* some second; nobody sends two of one name before the first is taken."""
        file = self.inbox(name)
        assert not file.exists(), name
        file.write_bytes(content)
        os.utime(file, (_BEGINNING + at, _BEGINNING + at))
        self.sent[digest(content)] += 1
        return file

    def run(self, on_step: OnStep = lambda _step: None, *, waits: bool = False) -> RunOutcome:
        return Ingestion(self.tree, "test", RunHooks(on_step=on_step), self.clock).run(SUPPLIER, waits=waits)

    def sweep(self, section: IngestRetentionSection | None = None, *, is_dry: bool = False) -> RetentionResult:
        return delete_expired(self.tree, section or IngestRetentionSection(), self.clock, "test", is_dry=is_dry)

    def standing(self) -> SupplierStatus:
        return read_supplier_status(self.tree, SUPPLIER, AlertSection(), self.clock.now())

    def ledger(self) -> Ledger:
        return ledger.load(self.tree, SUPPLIER)

    def pointer(self) -> CurrentPointer | None:
        return self.tree.read_pointer(SUPPLIER)

    def facts(self) -> Facts | None:
        """The current state as readers get it, which is of one run; None when there is none."""
        if self.pointer() is None:
            return None
        with reader.open_state(self.tree, SUPPLIER) as state:
            found = list(state)
        assert {fact["run_id"] for fact in found} == {state.pointer.run_id}
        assert len(found) == len({fact["payload"]["sku"] for fact in found})
        return {fact["payload"]["sku"]: fact["payload"]["price"] for fact in found}

    def manifests(self) -> dict[str, dict[str, Any] | None]:
        """What is noted of each run that left anything."""
        told = {run_id: self.tree.read(layout.run(run_id, layout.MANIFEST)) for run_id in self.tree.list_runs(SUPPLIER)}
        return {run_id: orjson.loads(content) if content else None for run_id, content in told.items()}

    def kept(self, folder: str) -> Counter[str]:
        """The contents of the files that lie in *folder* itself."""
        place = self.root / folder
        files = [file for file in place.iterdir() if file.is_file()] if place.is_dir() else []
        return Counter(digest(file.read_bytes()) for file in files)

    def everywhere(self) -> dict[str, Counter[str]]:
        """The contents of the files a supplier sent, by the place they are in."""
        places = {
            "inbox": layout.inbox(SUPPLIER), "archive": layout.archive(SUPPLIER), "obsolete": layout.obsolete(SUPPLIER),
            "duplicates": layout.duplicates(SUPPLIER), "broken": layout.broken(SUPPLIER),
        }  # fmt: skip
        return {name: self.kept(folder) for name, folder in places.items()}

    def check_nothing_is_lost(self) -> None:
        """I2: every file is in one place, as it was sent, and nothing else is there."""
        assert sum(self.everywhere().values(), Counter()) == self.sent

    def check_nothing_is_half(self) -> None:
        """I11, I16: what has its final name is whole, current or not."""
        for run_id in self.tree.list_states(SUPPLIER):
            folder = self.root / layout.state(SUPPLIER, run_id)
            assert {file.name for file in folder.iterdir()} == STATE_FILES
            pointer = orjson.loads((folder / layout.POINTER).read_bytes())
            assert digest((folder / layout.FACTS).read_bytes()) == pointer["sha256"]
            assert pointer["run_id"] == run_id == orjson.loads((folder / layout.MANIFEST).read_bytes())["run_id"]
            assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o444}
        for told in self.manifests().values():
            assert told is None or told["status"] in ("PASS", "FAIL")

    def check_all_is_well(self) -> None:
        """I10, I16, I24: all is done, noted and as noted, and nothing is left lying about."""
        self.check_nothing_is_lost()
        self.check_nothing_is_half()
        assert [one for one in verify_suppliers(self.tree, [SUPPLIER]) if one.problem] == []
        manifests = self.manifests()
        assert None not in manifests.values()
        for told in manifests.values():
            assert told is not None
            if told["status"] == "PASS":
                assert self.tree.read(layout.accepted(SUPPLIER, told["input_sha256"])) is not None
        assert self.ledger().running is None
        assert self.leftovers() == []

    def leftovers(self) -> list[str]:
        """Private copies, and what is not the current state but was to be."""
        links = (self.root / layout.CURRENT).glob(".*")
        work = self.root / layout.DATA / ".work"
        copies = [path for path in work.rglob("*") if path.parent != work or path.is_dir()]
        return sorted(path.relative_to(self.root).as_posix() for path in (*links, *copies))

    def drafts(self) -> list[str]:
        """Files that were being written; those of a run go with it."""
        found = [path for top in (layout.DATA, layout.OPS) for path in (self.root / top).rglob(".*.tmp")]
        paths = [path.relative_to(self.root).as_posix() for path in found]
        return sorted(path for path in paths if not path.startswith(f"{layout.RUNS}/"))


def later(clock: Clock, step: timedelta) -> float:
    return (clock.now() + step).timestamp()


def seconds_ago(age: float) -> float:
    return time.time() - age - _BEGINNING
