"""Read suppliers, runs, quarantine and states from the tree; the API and the command line answer from here."""

from contextlib import AbstractContextManager
from datetime import datetime
from itertools import islice
from typing import Any

from penstock.ingest.api import schemas
from penstock.ingest.config import IngestSection
from penstock.ingest.contract import IngestRunState
from penstock.ingest.model import RunFailed, checked_supplier, no_run, no_supplier, supplier_of
from penstock.ingest.run import ledger
from penstock.ingest.state import reader
from penstock.ingest.state.diff import compare_runs
from penstock.ingest.state.reader import PublishedState
from penstock.ingest.state.supplier_status import standing
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
        return schemas.SupplierList(suppliers=[self._status(name) for name in self._tree.list_suppliers()])

    def supplier(self, name: str) -> schemas.SupplierView:
        """Return the status of one supplier; NotFound if it has neither an inbox nor a configuration."""
        return self._status(self._known(name))

    def quarantine(self, supplier: str, limit: int) -> schemas.QuarantineList:
        """I3: return the files in quarantine of *supplier*, newest first, with the reason and the run of each."""
        files = sorted(reader.quarantined(self._tree, self._known(supplier)), key=lambda file: file["since"])
        shown = [schemas.QuarantinedFile(**file) for file in reversed(files)]
        return schemas.QuarantineList(files=shown[:limit], total=len(files))

    def bad_rows(self, run_id: str, limit: int) -> schemas.BadRowList:
        """Return the first bad rows of a run, and the number of bad rows per reason."""
        manifest, stats = reader.manifest_of(self._tree, run_id), reader.stats_of(self._tree, run_id)
        rows = list(islice(reader.bad_rows(self._tree, run_id), limit))
        return schemas.BadRowList(
            run_id=run_id, bad_rows=manifest["bad_rows"], reasons=stats.get("reasons", {}), rows=rows
        )

    def state(self, supplier: str) -> schemas.StateView:
        """Return the published state of *supplier* and the manifest of its run."""
        pointer = reader.current(self._tree, supplier)
        return schemas.StateView.of(supplier, pointer, reader.manifest_of(self._tree, pointer.run_id))

    def open_state(self, supplier: str) -> AbstractContextManager[PublishedState]:
        """Open the published state of *supplier* after its hash is verified."""
        return reader.open_state(self._tree, supplier)

    def diff(self, supplier: str, before: str | None, after: str | None, limit: int) -> schemas.StateDiff:
        """I10, I21: compare two runs of *supplier*, by default the published one with the one before it."""
        checked_supplier(supplier)
        after = after or reader.current(self._tree, supplier).run_id
        before = before or reader.manifest_of(self._tree, after)["previous_run"]
        if before is None:
            raise NotFound(
                "NO_PREVIOUS_RUN", f"{after} is the first publication of {supplier}", hint="all of it is new"
            )
        if other := [run_id for run_id in (before, after) if supplier_of(run_id) != supplier]:
            message = f"{other[0]} is not a run of {supplier}"
            raise Invalid("OTHER_SUPPLIER", message, hint="compare two runs of one supplier")
        try:
            with self._tree.open_config(supplier) as file:
                config = load_supplier(file, self._tree.uri(paths.config(supplier)))[0]
            found = compare_runs(self._tree, config, before, after, limit)
        except RunFailed as failed:
            raise BadConfig(failed.code.value, failed.message, hint=failed.hint) from failed
        return schemas.StateDiff.of(supplier, before, after, found.changes, found.shown)

    def runs(self, supplier: str, limit: int) -> schemas.IngestRunList:
        """Return the runs that the folder still has, newest first; `next` is always null."""
        names = sorted(self._tree.list_runs(self._known(supplier)), reverse=True)
        return schemas.IngestRunList(runs=[self._run(name) for name in names[:limit]], next=None)

    def run(self, run_id: str) -> schemas.IngestRunDetails:
        """Return a run as its manifest describes it; NotFound if the folder has no run of that id."""
        supplier = supplier_of(run_id)
        if run_id not in self._tree.list_runs(supplier):
            raise no_run(run_id)
        return schemas.IngestRunDetails(**self._run(run_id).model_dump(), moves=[], history=[])

    def _status(self, supplier: str) -> schemas.SupplierView:
        return schemas.SupplierView.of(standing(self._tree, supplier, self._section.alerts, self._clock.now()))

    def _known(self, supplier: str) -> str:
        if checked_supplier(supplier) not in (known := self._tree.list_suppliers()):
            raise no_supplier(supplier, known)
        return supplier

    def _run(self, run_id: str) -> schemas.IngestRun:
        supplier = supplier_of(run_id)
        manifest: dict[str, Any] = parse_document(self._tree.read(paths.run(run_id, paths.MANIFEST)))
        status = manifest.get("status") or IngestRunState.RUNNING
        if not manifest and ledger.load(self._tree, supplier).running != run_id:
            status = IngestRunState.FAIL  # it was killed: the next run writes its manifest
        return schemas.IngestRun(
            run_id=run_id,
            supplier=supplier,
            status=IngestRunState(status),
            holder=None,
            failure_code=manifest.get("failure_code"),
            started_at=_moment(manifest.get("started_at")),
            finished_at=_moment(manifest.get("finished_at")),
            manifest=manifest or None,
        )


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
