"""Where every supplier stands: the answer to "where is it and why"."""

from collections.abc import Collection, Iterator
from datetime import datetime, timedelta

from penstock.ingest.config import AlertSection
from penstock.ingest.contract import FailureCode
from penstock.ingest.model import IngestAlert, RunFailed, SupplierStatus
from penstock.ingest.run import ledger, publish
from penstock.ingest.supplier import load_supplier
from penstock.ingest.tree import paths
from penstock.ingest.tree.documents import parse_document
from penstock.ingest.tree.port import FileTree
from penstock.kernel.errors import Corrupt


def standing(tree: FileTree, supplier: str, section: AlertSection, now: datetime) -> SupplierStatus:
    """How *supplier* stands."""
    known = ledger.load(tree, supplier)
    arrivals = [arrival.name for arrival in tree.list_arrivals(supplier)]
    config, most, targets = _configured(tree, supplier, section.state_age)
    alerts: list[IngestAlert] = []
    try:
        current = publish.current_state(tree, supplier)
    except Corrupt:
        current = None
        alerts.append(IngestAlert.STATE_MISSING)
    published = datetime.fromisoformat(current.pointer.published_at) if current else None
    age = max((now - published).total_seconds(), 0.0) if published else None
    undelivered = list(_undelivered(tree, current.pointer.run_id, targets)) if current else []
    is_so = {
        IngestAlert.UNDELIVERED: bool(undelivered),
        IngestAlert.STATE_OLD: age is not None and age > most.total_seconds(),
        IngestAlert.SAME_FILE_AGAIN: known.equal_shas >= section.equal_shas,
        IngestAlert.REPEATED_FAIL: known.fails >= section.fails,
        IngestAlert.CONFIG_BROKEN: config is not None,
    }
    return SupplierStatus(
        supplier=supplier,
        run_id=current.pointer.run_id if current else None,
        fence=current.pointer.fence if current else None,
        published_at=published,
        age_seconds=age,
        facts=current.before.facts if current else None,
        inbox=[name for name in arrivals if not paths.is_temporary(name)],
        unfinished=[name for name in arrivals if paths.is_temporary(name)],
        broken=sum(1 for _ in tree.list_files(paths.broken(supplier))),
        fails=known.fails,
        equal_shas=known.equal_shas,
        last=known.last,
        config=config,
        undelivered=undelivered,
        alerts=[*alerts, *(alert for alert, holds in is_so.items() if holds)],
    )


def _undelivered(tree: FileTree, run_id: str, targets: Collection[str]) -> Iterator[str]:
    """Targets that could not be told of a run, and why."""
    for file in tree.list_files(paths.run(run_id, "deliveries")):
        told = parse_document(tree.read(file.path))
        answer = told.get("told") or {}
        if "code" in answer and told["target"] in targets:
            yield f"{told['target']}: {answer['code']}"


def _configured(tree: FileTree, supplier: str, usual: timedelta) -> tuple[str | None, timedelta, list[str]]:
    """What is wrong with the configuration, if anything; how old the state may get; and who is told of it."""
    try:
        with tree.open_config(supplier) as file:
            config, _ = load_supplier(file, tree.uri(paths.config(supplier)))
    except RunFailed as failed:
        said = failed.message if failed.code is FailureCode.CONFIG_INVALID else failed.code.value
        return said, usual, []
    hours = config.max_state_age_hours
    return None, timedelta(hours=hours) if hours is not None else usual, [target.name for target in config.targets]
