"""The status of ingest: counts of suppliers, and issues such as invalid configurations, failed runs and stray files."""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from penstock.ingest.api.queries import IngestViews
from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.model import IgnoredEntry, IngestAlert, SupplierStatus
from penstock.ingest.tree import paths
from penstock.kernel.status import PartReport, StatusIssue, make_broken_issue, make_late_issue, pluralize
from penstock.kernel.text import format_duration


async def report_status(views: IngestViews) -> PartReport:
    """Return the number of suppliers, publications and waiting files, and the issues of each supplier."""
    suppliers = await views.list_suppliers()
    strays = await views.list_strays()
    published = sum(1 for supplier in suppliers if supplier.run_id is not None)
    waiting = sum(len(supplier.inbox) for supplier in suppliers)
    summary = (
        f"{pluralize(len(suppliers), 'supplier')}, {published:,} published, {pluralize(waiting, 'file')} in inboxes"
    )
    issues = [issue for supplier in suppliers for issue in list_issues(supplier)]
    return PartReport(summary, [*issues, *_list_stray_issues(strays)])


def list_issues(supplier: SupplierStatus) -> Iterator[StatusIssue]:
    """Return the issues of one supplier."""
    alerts = supplier.alerts
    if IngestAlert.STATE_MISSING in alerts:
        yield _make_state_issue(supplier)
    if IngestAlert.CONFIG_BROKEN in alerts:
        yield _make_config_issue(supplier)
    if IngestAlert.REPEATED_FAIL in alerts or _has_failed(supplier):
        yield _make_failure_issue(supplier)
    if IngestAlert.STATE_OLD in alerts:
        yield _make_age_issue(supplier)
    if IngestAlert.SAME_FILE_AGAIN in alerts:
        yield _make_unchanged_issue(supplier)
    if IngestAlert.UNDELIVERED in alerts:
        yield _make_delivery_issue(supplier)
    if supplier.ignored:
        yield _make_ignored_issue(supplier)


def _make_state_issue(supplier: SupplierStatus) -> StatusIssue:
    root = supplier.config_path.removesuffix(f"/{paths.make_config_path(supplier.supplier)}")
    hint = f"penstock ingest verify {supplier.supplier} --root {shlex.quote(root)}; then restore the files it names"
    return make_broken_issue(supplier.supplier, "the published state is missing or damaged", hint)


def _make_config_issue(supplier: SupplierStatus) -> StatusIssue:
    files = _count_waiting(supplier)
    name, config = supplier.supplier, shlex.quote(supplier.config_path)
    if supplier.has_config:
        first, *more = (supplier.config_error or "").splitlines()
        errors = f" (and {pluralize(len(more), 'more error')})" if more else ""
        problem = f"the configuration is invalid: {first}{errors}{files}"
        return make_broken_issue(name, problem, f"fix {config}; then penstock ingest show {name}")
    problem = f"an inbox without a configuration: {supplier.config_path} is missing{files}"
    if supplier.inbox:
        sample = shlex.quote(f"{supplier.inbox_path}/{supplier.inbox[0]}")
        return make_broken_issue(name, problem, f"penstock ingest inspect {sample} > {config}; then review that file")
    hint = f"rmdir {shlex.quote(supplier.inbox_path)}; or create {config}; penstock ingest inspect FILE > {config}"
    return make_late_issue(name, problem, hint)


def _count_waiting(supplier: SupplierStatus) -> str:
    waiting = len(supplier.inbox)
    return f"; {pluralize(waiting, 'file')} waiting in the inbox" if waiting else ""


def _has_failed(supplier: SupplierStatus) -> bool:
    return supplier.last_run is not None and supplier.last_run["status"] == IngestRunStatus.FAIL


def _make_failure_issue(supplier: SupplierStatus) -> StatusIssue:
    name, run = supplier.supplier, supplier.last_run or {}
    runs = f"the last {supplier.failed_runs:,} runs" if supplier.failed_runs > 1 else "the last run"
    problem = f"{runs} failed: {run.get('failure_code')}"
    served = "the state before is served" if supplier.run_id else "nothing is published yet"
    hint = f"penstock ingest quarantine ls {name}"
    if run.get("run_id"):
        hint = f"{hint}; penstock ingest bad-rows {run['run_id']}"
    since = datetime.fromisoformat(run["finished_at"]) if run.get("finished_at") else None
    return make_broken_issue(name, f"{problem}; {served}", hint, since)


def _make_age_issue(supplier: SupplierStatus) -> StatusIssue:
    age = format_duration(timedelta(seconds=supplier.age_seconds or 0))
    problem = f"the published state is {age} old; {pluralize(len(supplier.inbox), 'file')} in the inbox"
    hint = f"check that the supplier has sent a file; penstock ingest show {supplier.supplier}"
    return make_late_issue(supplier.supplier, problem, hint, supplier.published_at)


def _make_unchanged_issue(supplier: SupplierStatus) -> StatusIssue:
    problem = f"the last {pluralize(supplier.unchanged_files, 'file')} had the same content as the published file"
    hint = f"ask the supplier why its export does not change; penstock ingest quarantine ls {supplier.supplier}"
    return make_late_issue(supplier.supplier, problem, hint)


def _make_delivery_issue(supplier: SupplierStatus) -> StatusIssue:
    undelivered = supplier.undelivered
    problem = f"the published state has not reached {pluralize(len(undelivered), 'target')}: {'; '.join(undelivered)}"
    hint = f"deliveries are retried; check the target if this stays; penstock ingest show {supplier.supplier}"
    return make_late_issue(supplier.supplier, problem, hint)


def _make_ignored_issue(supplier: SupplierStatus) -> StatusIssue:
    problem = f"{_describe_entries(supplier.ignored)} in the inbox: runs ignore everything but complete files"
    return make_late_issue(supplier.supplier, problem, _make_move_hint(supplier.ignored))


def _list_stray_issues(strays: Sequence[IgnoredEntry]) -> Iterator[StatusIssue]:
    if strays:
        problem = f"{_describe_entries(strays)} beside the inboxes: no supplier reads them"
        yield make_late_issue("inbox", problem, _make_move_hint(strays))


def _describe_entries(entries: Sequence[IgnoredEntry]) -> str:
    """Return the number of entries by kind, with an example, e.g. `2 entries (folder: 2), e.g. old`."""
    kinds = Counter(entry.kind for entry in entries)
    counts = ", ".join(f"{kind}: {number:,}" for kind, number in sorted(kinds.items()))
    return f"{pluralize(len(entries), 'entry', 'entries')} ({counts}), e.g. {entries[0].name},"


def _make_move_hint(entries: Sequence[IgnoredEntry]) -> str:
    """Return the command that moves the first of *entries* out of the inbox."""
    path = shlex.quote(entries[0].path)
    if "://" in entries[0].path:
        return f"aws s3 mv --recursive {path} s3://BUCKET/PREFIX"
    return f"mv -i {path} {shlex.quote('/tmp/')}"  # noqa: S108 - a destination that exists everywhere
