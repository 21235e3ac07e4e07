"""The status of a supplier, read from the tree."""

from collections.abc import Collection, Iterator
from datetime import datetime, timedelta

from penstock.ingest.config import AlertSection
from penstock.ingest.model import IgnoredEntry, InboxFile, IngestAlert, RunFailed, SupplierStatus
from penstock.ingest.run import ledger, publish
from penstock.ingest.supplier import load_supplier
from penstock.ingest.tree import paths
from penstock.ingest.tree.documents import parse_document
from penstock.ingest.tree.port import FileTree
from penstock.kernel.errors import Corrupt

ABANDONED_AFTER = timedelta(hours=1)


def read_supplier_status(tree: FileTree, supplier: str, section: AlertSection, now: datetime) -> SupplierStatus:
    """Return the status of *supplier*."""
    memory = ledger.load(tree, supplier)
    arrivals = tree.list_arrivals(supplier)
    config_error, max_age, targets = _read_config(tree, supplier, section.state_age)
    damaged = False
    try:
        current = publish.read_current_state(tree, supplier)
    except Corrupt:
        current, damaged = None, True
    published_at = datetime.fromisoformat(current.pointer.published_at) if current else None
    age = max((now - published_at).total_seconds(), 0.0) if published_at else None
    undelivered = list(_list_undelivered(tree, current.pointer.run_id, targets)) if current else []
    active = {
        IngestAlert.STATE_MISSING: damaged,
        IngestAlert.UNDELIVERED: bool(undelivered),
        IngestAlert.STATE_OLD: age is not None and age > max_age.total_seconds(),
        IngestAlert.SAME_FILE_AGAIN: memory.unchanged_files >= section.unchanged_files,
        IngestAlert.REPEATED_FAIL: memory.failed_runs >= section.failed_runs,
        IngestAlert.CONFIG_BROKEN: config_error is not None,
    }
    return SupplierStatus(
        supplier=supplier,
        run_id=current.pointer.run_id if current else None,
        fence=current.pointer.fence if current else None,
        published_at=published_at,
        age_seconds=age,
        facts=current.as_previous.facts if current else None,
        inbox=[arrival.name for arrival in arrivals if not paths.is_temporary(arrival.name)],
        inbox_path=tree.make_uri(paths.make_inbox_path(supplier)),
        unfinished=[arrival.name for arrival in arrivals if paths.is_temporary(arrival.name)],
        ignored=[*tree.list_ignored(supplier), *_list_abandoned(tree, arrivals, now)],
        broken=sum(1 for _ in tree.list_files(paths.make_broken_path(supplier))),
        failed_runs=memory.failed_runs,
        unchanged_files=memory.unchanged_files,
        last_run=memory.last_run,
        config_path=tree.make_uri(paths.make_config_path(supplier)),
        has_config=tree.read(paths.make_config_path(supplier)) is not None,
        config_error=config_error,
        undelivered=undelivered,
        alerts=[alert for alert, is_active in active.items() if is_active],
    )


def _list_abandoned(tree: FileTree, arrivals: Collection[InboxFile], now: datetime) -> Iterator[IgnoredEntry]:
    """Return the files with a temporary name that have not changed for so long that no upload can be running."""
    for arrival in arrivals:
        changed_at = max(arrival.modified_at, arrival.changed_at or arrival.modified_at)
        if paths.is_temporary(arrival.name) and now - changed_at > ABANDONED_AFTER:
            path = tree.make_uri(f"{paths.make_inbox_path(arrival.supplier)}/{arrival.name}")
            yield IgnoredEntry(arrival.name, "unfinished file", path)


def _list_undelivered(tree: FileTree, run_id: str, targets: Collection[str]) -> Iterator[str]:
    """Return the targets to which the state of a run could not be delivered, with the error code."""
    for file in tree.list_files(paths.make_run_path(run_id, "deliveries")):
        delivery = parse_document(tree.read(file.path))
        result = delivery.get("result") or {}
        if "code" in result and delivery["target"] in targets:
            yield f"{delivery['target']}: {result['code']}"


def _read_config(tree: FileTree, supplier: str, default_age: timedelta) -> tuple[str | None, timedelta, list[str]]:
    """Return the error of the configuration, the maximum age of the state, and the names of the targets."""
    try:
        with tree.open_config(supplier) as file:
            config, _ = load_supplier(file, tree.make_uri(paths.make_config_path(supplier)))
    except RunFailed as failed:
        return failed.message, default_age, []
    hours = config.max_state_age_hours
    max_age = timedelta(hours=hours) if hours is not None else default_age
    return None, max_age, [target.name for target in config.targets]
