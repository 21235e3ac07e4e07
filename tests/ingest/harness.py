"""Harness of ingest: a root folder of suppliers, with short methods for what tests do."""

import csv
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from penstock.ingest.contract import FailureCode
from penstock.ingest.run.hooks import RunHooks, RunOutcome
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.run.run import Ingestion
from penstock.ingest.tree import paths
from penstock.ingest.tree.folder import FolderTree
from penstock.ingest.workspace import IngestWorkspace
from penstock.kernel.clock import ManualClock
from tests.support.types import Json

SUPPLIER = "acme"
QUALITY: Json = {"min_fact_count": 1, "max_bad_ratio": 0.5, "allow_empty_snapshot": False, "file_stability_window": 0}
COLUMNS: Json = {"sku": {"from": "sku"}, "price": {"from": "price", "type": "integer"}}
KEYED: Json = {**QUALITY, "columns": COLUMNS, "key": ["sku"]}
QUICK = {"poll": 0.1}


def make_clock() -> ManualClock:
    """Return a clock that starts now, because the disk dates the files."""
    return ManualClock(datetime.now(UTC))


def snapshot(prices: Mapping[str, object] | Iterable[tuple[str, object]]) -> bytes:
    """Return a file with the columns sku and price."""
    out = io.StringIO()
    rows = prices.items() if isinstance(prices, Mapping) else prices
    csv.writer(out, lineterminator="\n").writerows([("sku", "price"), *rows])
    return out.getvalue().encode()


class IngestHarness:
    """The tree below *root* with methods for suppliers and readers."""

    def __init__(self, root: Path, config: Json | None = None) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        self.tree = FolderTree(root)
        self._age = 1_000_000
        if config is not None:
            self.configure(config)

    def configure(self, config: Json, supplier: str = SUPPLIER) -> None:
        self.put(paths.make_config_path(supplier), json.dumps(config).encode())
        self.tree.prepare(supplier)

    def put(self, path: str, content: bytes) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return file

    def drop(self, content: bytes, name: str = "price.csv", supplier: str = SUPPLIER) -> Path:
        """Put a file into the inbox; each file is newer than the one before."""
        file = self.put(f"{paths.make_inbox_path(supplier)}/{name}", content)
        self._age -= 10
        modified = time.time() - self._age
        os.utime(file, (modified, modified))
        return file

    def run(self, content: bytes | None = None, supplier: str = SUPPLIER, hooks: RunHooks | None = None) -> RunOutcome:
        """Run once; with *content*, put it into the inbox first."""
        if content is not None:
            self.drop(content, supplier=supplier)
        return Ingestion(self.tree, "test", hooks).run(supplier)

    def publish(self, content: bytes, supplier: str = SUPPLIER) -> str:
        """Publish a file, and return the id of the run."""
        outcome = self.run(content, supplier)
        assert outcome.manifest is not None
        assert outcome.manifest.failure is None, outcome.manifest.failure
        return outcome.manifest.run_id

    def current(self, supplier: str = SUPPLIER) -> str | None:
        pointer = self.tree.read_pointer(supplier)
        return pointer.run_id if pointer else None

    def facts(self, supplier: str = SUPPLIER) -> list[Json]:
        """Return the facts of the published state."""
        return self.lines(paths.make_state_path(supplier, self.current(supplier) or "", paths.FACTS))

    def lines(self, path: str) -> list[Json]:
        return [json.loads(line) for line in (self.root / path).read_text().splitlines()]

    def read_json(self, path: str) -> Json:
        document: Json = json.loads((self.root / path).read_bytes())
        return document

    def names(self, folder: str) -> list[str]:
        """Return the paths of the files below a folder, relative to it."""
        return sorted(file.path.removeprefix(f"{folder}/") for file in self.tree.list_files(folder))

    def all_files(self) -> dict[str, bytes]:
        """Return the contents of all files except ledgers and locks."""
        files = [file for file in self.root.rglob("*") if file.is_file() and ".work" not in file.parts]
        contents = {file.relative_to(self.root).as_posix(): file.read_bytes() for file in files}
        return {path: content for path, content in contents.items() if not path.startswith(paths.LEDGERS)}


def failure(outcome: RunOutcome) -> FailureCode | None:
    return outcome.manifest.failure.code if outcome.manifest and outcome.manifest.failure else None


def set_targets(harness: IngestHarness, *targets: Json) -> None:
    harness.configure({**KEYED, "targets": list(targets)})


def run(workspace: IngestWorkspace, on_step: Callable[[PublishStep], None] = lambda _step: None) -> RunOutcome:
    return workspace.run(SUPPLIER, RunHooks(on_step=on_step), waits=False)
