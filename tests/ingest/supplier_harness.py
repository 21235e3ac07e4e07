"""Harness of one supplier in a folder: inbox, configuration and runs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from ruamel.yaml import YAML

from penstock.ingest.run.hooks import RunHooks, RunOutcome
from penstock.ingest.run.run import Ingestion
from penstock.ingest.tree import paths
from penstock.ingest.tree.folder import FolderTree
from penstock.kernel.clock import Clock

SUPPLIER = "brinex"
QUALITY: Mapping[str, Any] = {
    "min_fact_count": 1, "max_bad_ratio": 0.5, "allow_empty_snapshot": False, "file_stability_window": 0,
}  # fmt: skip
COLUMNS: Mapping[str, Any] = {
    "sku": {"from": "sku", "required": True},
    "qty": {"from": "qty", "type": "integer"},
    "price_minor": {"from": "price", "type": "money"},
}


class SupplierHarness:
    """One supplier's inbox, configuration and runs."""

    def __init__(self, root: Path, supplier: str = SUPPLIER) -> None:
        self.root = root
        self.supplier = supplier
        self.tree = FolderTree(root)
        self.tree.prepare(supplier)
        self.configure()

    def configure(self, **settings: Any) -> None:
        """Write a configuration with quality limits and three columns; *settings* override it."""
        with (self.root / paths.make_config_path(self.supplier)).open("w") as file:
            YAML().dump({**QUALITY, "columns": dict(COLUMNS), "key": ["sku"], **settings}, file)

    def drop(self, name: str, content: str | bytes, at: float | None = None) -> Path:
        """Put a file into the inbox, with the mtime *at* if it is given."""
        file = self.root / paths.make_inbox_path(self.supplier) / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        if at is not None:
            os.utime(file, (at, at))
        return file

    def run(self, hooks: RunHooks | None = None, clock: Clock | None = None) -> RunOutcome:
        return Ingestion(self.tree, "test", hooks, clock).run(self.supplier, waits=False)

    def files(self, folder: str) -> list[str]:
        """Return the names of the files in *folder*."""
        path = self.root / folder
        return sorted(file.name for file in path.iterdir() if file.is_file()) if path.is_dir() else []

    def json(self, path: str) -> Any:
        return orjson.loads((self.root / path).read_bytes())

    def lines(self, path: str) -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in (self.root / path).read_bytes().splitlines()]


def price_list(*rows: tuple[str, object, object]) -> str:
    """Return a small CSV file."""
    return "sku;qty;price\n" + "".join(f"{sku};{qty};{price}\n" for sku, qty, price in rows)
