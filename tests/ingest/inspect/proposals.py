"""Inspections in tests, and runs with the proposed configuration."""

import json
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

from penstock.ingest.inspect.inspection import inspect_file
from penstock.ingest.inspect.report import Inspection
from penstock.ingest.model import RunManifest
from penstock.ingest.run.run import Ingestion
from penstock.ingest.supplier import Supplier, load_supplier
from penstock.ingest.tree import paths
from penstock.ingest.tree.folder import FolderTree

SUPPLIER = "acme"


@dataclass(frozen=True)
class ProposalRun:
    """The results of a run."""

    manifest: RunManifest
    facts: list[dict[str, Any]]

    @property
    def payloads(self) -> list[dict[str, Any]]:
        return [fact["payload"] for fact in self.facts]

    def by(self, field: str) -> dict[Any, dict[str, Any]]:
        return {payload[field]: payload for payload in self.payloads}


def inspect_valid(file: Path) -> Inspection:
    """Return the inspection of *file*; its configuration must be valid as a document and as a file."""
    inspection = inspect_file(file, SUPPLIER)
    written = file.parent / "proposed.yaml"
    written.write_text(inspection.format_yaml(), encoding="utf-8")
    supplier, _ = load_supplier(written)
    assert supplier == Supplier.model_validate(inspection.config)
    assert json.loads(json.dumps(inspection.as_dict()))["config"] == inspection.config
    assert file.name in inspection.format_text()
    return inspection


def run_proposal(file: Path, inspection: Inspection, root: Path) -> ProposalRun:
    """Run ingest over *file* with the proposed configuration."""
    tree = FolderTree(root)
    tree.prepare(SUPPLIER)
    # No process writes to the file, so that there is no need to wait.
    config = f"{inspection.format_yaml()}file_stability_window: 0\n"
    (root / paths.make_config_path(SUPPLIER)).write_text(config, encoding="utf-8")
    copyfile(file, root / paths.make_inbox_path(SUPPLIER) / file.name)
    manifest = Ingestion(tree, "test").run(SUPPLIER, waits=True).manifest
    assert manifest is not None
    facts = root / paths.CURRENT / SUPPLIER / paths.FACTS
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    return ProposalRun(manifest, [json.loads(line) for line in lines])


def columns(inspection: Inspection) -> dict[str, Any]:
    return dict(inspection.config["columns"])
