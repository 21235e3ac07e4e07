"""The operations of ingest on one tree: run, deliver, delete expired files, report the status."""

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, closing, contextmanager
from dataclasses import replace

from penstock.ingest.config import IngestSection
from penstock.ingest.deliver.deliveries import TargetDeliveries
from penstock.ingest.model import (
    DeliveryResult,
    RunFailed,
    SupplierStatus,
    check_supplier_name,
    make_supplier_not_found_error,
)
from penstock.ingest.run.hooks import RunHooks, RunOutcome
from penstock.ingest.run.recorder import DatabaseRecorder
from penstock.ingest.run.run import Ingestion
from penstock.ingest.state import retention
from penstock.ingest.state.retention import RetentionResult
from penstock.ingest.state.supplier_status import read_supplier_status
from penstock.ingest.supplier import Supplier, load_supplier
from penstock.ingest.tree import paths
from penstock.ingest.tree.async_bridge import AsyncBridge
from penstock.ingest.tree.location import make_tree
from penstock.ingest.tree.port import FileTree
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.db.database import Database
from penstock.kernel.ids import make_worker_name

OpenDatabase = Callable[[], AbstractAsyncContextManager[Database]]


@contextmanager
def open_workspace(section: IngestSection, open_database: OpenDatabase | None) -> Iterator["IngestWorkspace"]:
    """Open the tree of *section*; runs are also recorded in the database, if there is one."""
    with closing(AsyncBridge()) as bridge, closing(make_tree(section.root or ".", section)) as tree:
        yield IngestWorkspace(section, tree, bridge, open_database)


class IngestWorkspace:
    """The operations on one tree."""

    def __init__(
        self, section: IngestSection, tree: FileTree, bridge: AsyncBridge, open_database: OpenDatabase | None
    ) -> None:
        self.tree = tree
        self._section = section
        self._bridge = bridge
        self._open_database = open_database
        self._holder = make_worker_name("ingest")
        self._clock: Clock = SystemClock()

    def run(self, supplier: str, hooks: RunHooks, *, waits: bool) -> RunOutcome:
        """Execute one run, then deliver the published state."""
        check_supplier_name(supplier)
        with ExitStack() as stack:
            if self._open_database is not None:
                db = stack.enter_context(self._bridge.enter(self._open_database()))
                recorder = DatabaseRecorder(self._bridge, db, self._holder)
                stack.enter_context(recorder.lock(self._section.root or ".", supplier))
                hooks = replace(hooks, recorder=recorder)
            outcome = Ingestion(self.tree, self._holder, hooks, self._clock).run(supplier, waits=waits)
        return replace(outcome, deliveries=self.deliver(supplier))

    def deliver(self, supplier: str) -> dict[str, DeliveryResult]:
        """I23: deliver the published state to the targets that are due; return the result by target."""
        try:
            config = self.load_config(supplier)
        except RunFailed:
            return {}
        return TargetDeliveries(self.tree, supplier, config, self._bridge, self._clock).deliver()

    def load_config(self, supplier: str) -> Supplier:
        """Return the configuration of *supplier*; raise RunFailed if it is missing or invalid."""
        with self.tree.open_config(supplier) as file:
            return load_supplier(file, self.tree.make_uri(paths.make_config_path(supplier)))[0]

    def delete_expired(self, *, is_dry: bool) -> RetentionResult:
        """I12: delete expired files; with *is_dry*, only report them."""
        return retention.delete_expired(self.tree, self._section.retention, self._clock, self._holder, is_dry=is_dry)

    def list_suppliers(self, only: str | None = None) -> list[str]:
        """Return all suppliers, or [*only*]; NotFound if *only* does not exist."""
        suppliers = self.tree.list_suppliers()
        if only is None:
            return suppliers
        if check_supplier_name(only) not in suppliers:
            raise make_supplier_not_found_error(only, suppliers)
        return [only]

    def read_statuses(self) -> list[SupplierStatus]:
        """Return the status of all suppliers."""
        now, section = self._clock.now(), self._section.alerts
        return [read_supplier_status(self.tree, supplier, section, now) for supplier in self.list_suppliers()]
