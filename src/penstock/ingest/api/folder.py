"""Read suppliers, runs, quarantine and states from the tree; the API and the command line answer from here."""

from contextlib import AbstractContextManager
from datetime import datetime
from itertools import islice
from typing import Any

from penstock.ingest.api import schemas
from penstock.ingest.config import IngestSection
from penstock.ingest.contract import IngestRunState
from penstock.ingest.model import (
    RunFailed,
    check_supplier_name,
    make_run_not_found_error,
    make_supplier_not_found_error,
    parse_supplier,
)
from penstock.ingest.run import ledger
from penstock.ingest.state import reader
from penstock.ingest.state.diff import compare_runs
from penstock.ingest.state.reader import PublishedState
from penstock.ingest.state.supplier_status import read_supplier_status
from penstock.ingest.supplier import load_supplier
from penstock.ingest.tree import paths
from penstock.ingest.tree.documents import parse_document
from penstock.ingest.tree.port import FileTree
from penstock.kernel.clock import Clock
from penstock.kernel.errors import BadConfig, Invalid, NotFound


class FolderViews:
    """The documents of the API, read from a tree without a database."""

    def __init__(self, tree: FileTree, section: IngestSection, clock: Clock) -> None:
        self._tree = tree
        self._section = section
        self._clock = clock

    def suppliers(self) -> schemas.SupplierList:
        """Return the status of every supplier."""
        return schemas.SupplierList(suppliers=[self._read_status(name) for name in self._tree.list_suppliers()])

    def supplier(self, name: str) -> schemas.SupplierView:
        """Return the status of one supplier; NotFound if it has neither an inbox nor a configuration."""
        return self._read_status(self._check_supplier(name))

    def quarantine(self, supplier: str, limit: int) -> schemas.QuarantineList:
        """I3: return the files in quarantine of *supplier*, newest first, with the reason and the run of each."""
        files = sorted(
            reader.list_quarantine(self._tree, self._check_supplier(supplier)), key=lambda file: file["since"]
        )
        shown = [schemas.QuarantinedFile(**file) for file in reversed(files)]
        return schemas.QuarantineList(files=shown[:limit], total=len(files))

    def bad_rows(self, run_id: str, limit: int) -> schemas.BadRowList:
        """Return the first bad rows of a run, and the number of bad rows per reason."""
        manifest, stats = reader.read_manifest(self._tree, run_id), reader.read_stats(self._tree, run_id)
        rows = list(islice(reader.read_bad_rows(self._tree, run_id), limit))
        return schemas.BadRowList(
            run_id=run_id, bad_rows=manifest["bad_rows"], reasons=stats.get("reasons", {}), rows=rows
        )

    def state(self, supplier: str) -> schemas.StateView:
        """Return the published state of *supplier* and the manifest of its run."""
        pointer = reader.find_pointer(self._tree, supplier)
        return schemas.StateView.from_pointer(supplier, pointer, reader.read_manifest(self._tree, pointer.run_id))

    def open_state(self, supplier: str) -> AbstractContextManager[PublishedState]:
        """Open the published state of *supplier* after its hash is verified."""
        return reader.open_state(self._tree, supplier)

    def diff(self, supplier: str, before: str | None, after: str | None, limit: int) -> schemas.StateDiff:
        """I10, I21: compare two runs of *supplier*, by default the published one with the one before it."""
        check_supplier_name(supplier)
        after = after or reader.find_pointer(self._tree, supplier).run_id
        before = before or reader.read_manifest(self._tree, after)["previous_run"]
        if before is None:
            raise NotFound(
                "NO_PREVIOUS_RUN", f"{after} is the first publication of {supplier}", hint="all of it is new"
            )
        if other := [run_id for run_id in (before, after) if parse_supplier(run_id) != supplier]:
            message = f"{other[0]} is not a run of {supplier}"
            raise Invalid("OTHER_SUPPLIER", message, hint="compare two runs of one supplier")
        try:
            with self._tree.open_config(supplier) as file:
                config = load_supplier(file, self._tree.make_uri(paths.make_config_path(supplier)))[0]
            comparison = compare_runs(self._tree, config, before, after, limit)
        except RunFailed as failed:
            raise BadConfig(failed.code.value, failed.message, hint=failed.hint) from failed
        return schemas.StateDiff.from_changes(supplier, before, after, comparison.changes, comparison.shown)

    def runs(self, supplier: str, limit: int) -> schemas.IngestRunList:
        """Return the runs that the folder still has, newest first; `next` is always null."""
        names = sorted(self._tree.list_runs(self._check_supplier(supplier)), reverse=True)
        return schemas.IngestRunList(runs=[self._read_run(name) for name in names[:limit]], next=None)

    def run(self, run_id: str) -> schemas.IngestRunDetails:
        """Return a run as its manifest describes it; NotFound if the folder has no run of that id."""
        supplier = parse_supplier(run_id)
        if run_id not in self._tree.list_runs(supplier):
            raise make_run_not_found_error(run_id)
        return schemas.IngestRunDetails(**self._read_run(run_id).model_dump(), moves=[], history=[])

    def _read_status(self, supplier: str) -> schemas.SupplierView:
        return schemas.SupplierView.from_status(
            read_supplier_status(self._tree, supplier, self._section.alerts, self._clock.now())
        )

    def _check_supplier(self, supplier: str) -> str:
        suppliers = self._tree.list_suppliers()
        if check_supplier_name(supplier) not in suppliers:
            raise make_supplier_not_found_error(supplier, suppliers)
        return supplier

    def _read_run(self, run_id: str) -> schemas.IngestRun:
        supplier = parse_supplier(run_id)
        manifest: dict[str, Any] = parse_document(self._tree.read(paths.make_run_path(run_id, paths.MANIFEST)))
        status = manifest.get("status") or IngestRunState.RUNNING
        if not manifest and ledger.load(self._tree, supplier).running != run_id:
            status = IngestRunState.FAIL  # the run was killed; the next run writes its manifest
        return schemas.IngestRun(
            run_id=run_id,
            supplier=supplier,
            status=IngestRunState(status),
            holder=None,
            failure_code=manifest.get("failure_code"),
            started_at=_parse_time(manifest.get("started_at")),
            finished_at=_parse_time(manifest.get("finished_at")),
            manifest=manifest or None,
        )


def _parse_time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
