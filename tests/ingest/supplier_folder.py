"""A folder with one supplier, the files that it sends, and the invariants after a crash."""

import os
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
_EPOCH = 1_750_000_000  # time of the first file
STATE_FILES = {layout.FACTS, layout.POINTER, layout.MANIFEST, layout.STATS, layout.CHANGES, layout.CHANGED_KEYS}

Facts = dict[str, int]


@contextmanager
def open_fast_folder() -> Iterator[Path]:
    """Yield a folder in memory if possible."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="penstock-ingest-", dir=parent))
    try:
        yield folder
    finally:
        make_writable(folder)
        shutil.rmtree(folder, ignore_errors=True)


def make_writable(folder: Path) -> None:
    """Make the folders of published states writable, so that they can be deleted."""
    for path, _, _ in os.walk(folder):
        Path(path).chmod(0o755)


def csv(facts: Facts | Iterable[tuple[str, object]]) -> bytes:
    rows = facts.items() if isinstance(facts, dict) else facts
    return ("sku,price\n" + "".join(f"{sku},{price}\n" for sku, price in rows)).encode()


def hash_bytes(content: bytes) -> str:
    return sha256(content).hexdigest()


class SupplierFolder:
    """The actions of a supplier, an operator and a reader, and their observations."""

    def __init__(self, root: Path, clock: Clock | None = None) -> None:
        self.root = root
        self.tree = FolderTree(root)
        self.clock = clock or SystemClock()
        self.sent: Counter[str] = Counter()
        self.tree.prepare(SUPPLIER)
        self.configure()

    def configure(self, window: float = 0, dedup: str = "accepted", on_bad_row: str = "drop") -> None:
        config = CONFIG.format(window=window, dedup=dedup, on_bad_row=on_bad_row)
        (self.root / layout.make_config_path(SUPPLIER)).write_text(config)

    def copy(self, root: Path) -> "SupplierFolder":
        """Return a copy of the folder below *root*."""
        shutil.copytree(self.root, root, symlinks=True)
        twin = SupplierFolder(root, self.clock)
        shutil.copyfile(self.root / layout.make_config_path(SUPPLIER), root / layout.make_config_path(SUPPLIER))
        twin.sent = self.sent.copy()
        return twin

    def inbox(self, name: str = "") -> Path:
        return self.root / layout.make_inbox_path(SUPPLIER) / name

    def drop(self, name: str, content: bytes, at: float = 0) -> Path:
        """Write a file with the time *at* in seconds; a name must not be in the inbox already."""
        file = self.inbox(name)
        assert not file.exists(), name
        file.write_bytes(content)
        os.utime(file, (_EPOCH + at, _EPOCH + at))
        self.sent[hash_bytes(content)] += 1
        return file

    def run(self, on_step: OnStep = lambda _step: None, *, waits: bool = False) -> RunOutcome:
        return Ingestion(self.tree, "test", RunHooks(on_step=on_step), self.clock).run(SUPPLIER, waits=waits)

    def sweep(self, section: IngestRetentionSection | None = None, *, is_dry: bool = False) -> RetentionResult:
        return delete_expired(self.tree, section or IngestRetentionSection(), self.clock, "test", is_dry=is_dry)

    def read_status(self) -> SupplierStatus:
        return read_supplier_status(self.tree, SUPPLIER, AlertSection(), self.clock.now())

    def ledger(self) -> Ledger:
        return ledger.load(self.tree, SUPPLIER)

    def pointer(self) -> CurrentPointer | None:
        return self.tree.read_pointer(SUPPLIER)

    def facts(self) -> Facts | None:
        """Return the published state as readers get it, and check that it is of one run; None without a state."""
        if self.pointer() is None:
            return None
        with reader.open_state(self.tree, SUPPLIER) as state:
            facts = list(state)
        assert {fact["run_id"] for fact in facts} == {state.pointer.run_id}
        assert len(facts) == len({fact["payload"]["sku"] for fact in facts})
        return {fact["payload"]["sku"]: fact["payload"]["price"] for fact in facts}

    def read_manifests(self) -> dict[str, dict[str, Any] | None]:
        """Return the manifest of each run; None for a run without one."""
        contents = {
            run_id: self.tree.read(layout.make_run_path(run_id, layout.MANIFEST))
            for run_id in self.tree.list_runs(SUPPLIER)
        }
        return {run_id: orjson.loads(content) if content else None for run_id, content in contents.items()}

    def count_contents(self, folder: str) -> Counter[str]:
        """Count the contents of the files directly in *folder*."""
        path = self.root / folder
        files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
        return Counter(hash_bytes(file.read_bytes()) for file in files)

    def count_all_contents(self) -> dict[str, Counter[str]]:
        """Count the contents of the files that the supplier sent, by their folder."""
        folders = {
            "inbox": layout.make_inbox_path(SUPPLIER),
            "archive": layout.make_archive_path(SUPPLIER),
            "obsolete": layout.make_obsolete_path(SUPPLIER),
            "duplicates": layout.make_duplicates_path(SUPPLIER),
            "broken": layout.make_broken_path(SUPPLIER),
        }
        return {name: self.count_contents(folder) for name, folder in folders.items()}

    def check_no_file_is_lost(self) -> None:
        """I2: check that every file is in one folder, unchanged, and that there are no other files."""
        assert sum(self.count_all_contents().values(), Counter()) == self.sent

    def check_states_are_complete(self) -> None:
        """I11, I16: check that every state with its final name is complete."""
        for run_id in self.tree.list_states(SUPPLIER):
            folder = self.root / layout.make_state_path(SUPPLIER, run_id)
            assert {file.name for file in folder.iterdir()} == STATE_FILES
            pointer = orjson.loads((folder / layout.POINTER).read_bytes())
            assert hash_bytes((folder / layout.FACTS).read_bytes()) == pointer["sha256"]
            assert pointer["run_id"] == run_id == orjson.loads((folder / layout.MANIFEST).read_bytes())["run_id"]
            assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o444}
        for manifest in self.read_manifests().values():
            assert manifest is None or manifest["status"] in ("PASS", "FAIL")

    def check_consistency(self) -> None:
        """I10, I16, I24: check that every run is complete and recorded, and that no temporary files are left."""
        self.check_no_file_is_lost()
        self.check_states_are_complete()
        assert [check for check in verify_suppliers(self.tree, [SUPPLIER]) if check.problem] == []
        manifests = self.read_manifests()
        assert None not in manifests.values()
        for manifest in manifests.values():
            assert manifest is not None
            if manifest["status"] == "PASS":
                assert self.tree.read(layout.make_accepted_path(SUPPLIER, manifest["input_sha256"])) is not None
        assert self.ledger().running is None
        assert self.list_leftovers() == []

    def list_leftovers(self) -> list[str]:
        """Return private copies, and links that were not switched."""
        links = (self.root / layout.CURRENT).glob(".*")
        work = self.root / layout.DATA / ".work"
        copies = [path for path in work.rglob("*") if path.parent != work or path.is_dir()]
        return sorted(path.relative_to(self.root).as_posix() for path in (*links, *copies))

    def list_drafts(self) -> list[str]:
        """Return files that were being written, without those of runs."""
        drafts = [path for top in (layout.DATA, layout.OPS) for path in (self.root / top).rglob(".*.tmp")]
        paths = [path.relative_to(self.root).as_posix() for path in drafts]
        return sorted(path for path in paths if not path.startswith(f"{layout.RUNS}/"))
