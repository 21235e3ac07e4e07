"""Ingest put together: its tree, and the database where there is one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

from penstock.ingest.config import IngestSection
from penstock.ingest.deliver.deliveries import TargetDeliveries
from penstock.ingest.model import RunFailed, SupplierStatus, checked_supplier, no_supplier, supplier_of
from penstock.ingest.run.hooks import RunHooks, RunOutcome
from penstock.ingest.run.recorder import DatabaseRecorder
from penstock.ingest.run.run import Ingestion
from penstock.ingest.state import reader
from penstock.ingest.state.diff import StateComparison, compare_runs
from penstock.ingest.state.retention import RetentionResult, sweep
from penstock.ingest.state.supplier_status import standing
from penstock.ingest.supplier import Supplier, load_supplier
from penstock.ingest.tree import paths
from penstock.ingest.tree.async_bridge import AsyncBridge
from penstock.ingest.tree.location import make_tree
from penstock.ingest.tree.port import FileTree
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.db.database import Database
from penstock.kernel.errors import BadConfig, Invalid, NotFound
from penstock.kernel.ids import worker_name

OpenDatabase = Callable[[], AbstractAsyncContextManager[Database]]


@contextmanager
def workplace(section: IngestSection, open_database: OpenDatabase | None) -> Iterator["IngestWorkspace"]:
    """Open the tree of *section*, for runs that are recorded in a database if there is one; close it at the end."""
    with closing(AsyncBridge()) as bridge, closing(make_tree(section.root or ".", section)) as tree:
        yield IngestWorkspace(section, tree, bridge, open_database)


class IngestWorkspace:
    """What can be done with one tree."""

    def __init__(
        self, section: IngestSection, tree: FileTree, bridge: AsyncBridge, open_database: OpenDatabase | None
    ) -> None:
        self.tree = tree
        self._section = section
        self._bridge = bridge
        self._open_database = open_database
        self._holder = worker_name("ingest")
        self._clock: Clock = SystemClock()

    def run(self, supplier: str, hooks: RunHooks, *, waits: bool) -> RunOutcome:
        """One run, and then whoever is to be told of what is published."""
        checked_supplier(supplier)
        with ExitStack() as stack:
            if self._open_database is not None:
                db = stack.enter_context(self._bridge.entered(self._open_database()))
                recorder = DatabaseRecorder(self._bridge, db, self._holder)
                stack.enter_context(recorder.lock(self._section.root or ".", supplier))
                hooks = replace(hooks, recorder=recorder)
            outcome = Ingestion(self.tree, self._holder, hooks, self._clock).run(supplier, waits=waits)
        return replace(outcome, deliveries=self.deliver(supplier))

    def deliver(self, supplier: str) -> dict[str, str]:
        """I23: what came of telling the targets of the current state that have not been told."""
        try:
            config = self.config(supplier)
        except RunFailed:
            return {}
        return TargetDeliveries(self.tree, supplier, config, self._bridge, self._clock).deliver()

    def config(self, supplier: str) -> Supplier:
        """The supplier's configuration; Failed when there is none that can be used."""
        with self.tree.open_config(supplier) as file:
            return load_supplier(file, self.tree.uri(paths.config(supplier)))[0]

    def compare(self, supplier: str, before: str | None, after: str | None, limit: int) -> StateComparison:
        """I21: what one publication changed against another, by default the current one against the one before."""
        checked_supplier(supplier)
        after = after or reader.current(self.tree, supplier).run_id
        before = before or reader.manifest_of(self.tree, after)["previous_run"]
        if before is None:
            raise NotFound("NO_PREVIOUS_RUN", f"{after} is the first publication", hint="all of it is new")
        if other := [one for one in (before, after) if supplier_of(one) != supplier]:
            raise Invalid(
                "OTHER_SUPPLIER", f"{other[0]} is not a run of {supplier}", hint="compare runs of one supplier"
            )
        try:
            return compare_runs(self.tree, self.config(supplier), before, after, limit)
        except RunFailed as failed:
            raise BadConfig(failed.code.value, failed.message, hint=failed.hint) from failed

    def sweep(self, *, is_dry: bool) -> RetentionResult:
        """I12: remove what is too old."""
        return sweep(self.tree, self._section.retention, self._clock, self._holder, is_dry=is_dry)

    def suppliers(self, only: str | None = None) -> list[str]:
        """All suppliers, or the *only* one that is meant; NotFound when nobody has that name."""
        known = self.tree.list_suppliers()
        if only is not None and checked_supplier(only) not in known:
            raise no_supplier(only, known)
        return known if only is None else [only]

    def standings(self, supplier: str | None = None) -> list[SupplierStatus]:
        """Where suppliers stand."""
        now = self._clock.now()
        return [standing(self.tree, one, self._section.alerts, now) for one in self.suppliers(supplier)]

    def quarantined(self, supplier: str | None = None) -> list[dict[str, Any]]:
        """The files that were set aside, why, and by which run."""
        return [told for one in self.suppliers(supplier) for told in reader.quarantined(self.tree, one)]
