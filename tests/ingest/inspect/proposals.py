"""Run ingest with a proposed configuration and return what it publishes."""

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
    """What a run left behind."""

    manifest: RunManifest
    facts: list[dict[str, Any]]

    @property
    def payloads(self) -> list[dict[str, Any]]:
        return [fact["payload"] for fact in self.facts]

    def by(self, field: str) -> dict[Any, dict[str, Any]]:
        return {payload[field]: payload for payload in self.payloads}


def proposed(file: Path) -> Inspection:
    """An inspection of *file*, whose configuration is valid as a value and as a file."""
    inspection = inspect_file(file, SUPPLIER)
    written = file.parent / "proposed.yaml"
    written.write_text(inspection.format_yaml(), encoding="utf-8")
    supplier, _ = load_supplier(written)
    assert supplier == Supplier.model_validate(inspection.config)
    assert json.loads(json.dumps(inspection.as_dict()))["config"] == inspection.config
    assert file.name in inspection.format_text()
    return inspection


def ran(file: Path, inspection: Inspection, root: Path) -> ProposalRun:
    """A whole run over *file* with the configuration as it was proposed."""
    tree = FolderTree(root)
    tree.prepare(SUPPLIER)
    # Nobody writes to the file any more, so that there is nothing to wait for.
    config = f"{inspection.format_yaml()}file_stability_window: 0\n"
    (root / paths.config(SUPPLIER)).write_text(config, encoding="utf-8")
    copyfile(file, root / paths.inbox(SUPPLIER) / file.name)
    manifest = Ingestion(tree, "test").run(SUPPLIER, waits=True).manifest
    assert manifest is not None
    facts = root / paths.CURRENT / SUPPLIER / paths.FACTS
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    return ProposalRun(manifest, [json.loads(line) for line in lines])


def columns(inspection: Inspection) -> dict[str, Any]:
    return dict(inspection.config["columns"])
