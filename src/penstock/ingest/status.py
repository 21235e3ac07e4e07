"""What is late or broken among suppliers."""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

from penstock.ingest.api.queries import IngestViews
from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.model import IngestAlert, SupplierStatus
from penstock.kernel.status import PartReport, StatusIssue, broken_issue, late_issue, pluralize
from penstock.kernel.text import format_duration

_Told = tuple[Callable[..., StatusIssue], Callable[[SupplierStatus], str], str]  # the hint may name the supplier
_ALERTS: Mapping[IngestAlert, _Told] = {
    IngestAlert.STATE_MISSING: (
        broken_issue,
        lambda _: "its published state is damaged or gone",
        "penstock ingest verify",
    ),
    IngestAlert.CONFIG_BROKEN: (
        broken_issue,
        lambda one: f"its configuration cannot be used: {one.config}",
        "mend etl_ops/config/{supplier}.yaml; penstock ingest inspect FILE proposes one",
    ),
    IngestAlert.REPEATED_FAIL: (
        broken_issue,
        lambda one: f"{pluralize(one.fails, 'run')} in a row failed",
        "penstock ingest ls",
    ),
    IngestAlert.STATE_OLD: (
        late_issue,
        lambda one: f"its state is {format_duration(timedelta(seconds=one.age_seconds or 0))} old",
        "has the supplier sent anything?",
    ),
    IngestAlert.SAME_FILE_AGAIN: (
        late_issue,
        lambda one: f"sends the same file, {one.equal_shas} times now",
        "ask the supplier",
    ),
    IngestAlert.UNDELIVERED: (
        late_issue,
        lambda one: f"not delivered: {'; '.join(one.undelivered)}",
        "it is tried again",
    ),
}


async def report_status(views: IngestViews) -> PartReport:
    """How suppliers stand, and what is wrong with some."""
    suppliers = await views.suppliers()
    published = sum(1 for supplier in suppliers if supplier.run_id is not None)
    waiting = sum(len(supplier.inbox) for supplier in suppliers)
    summary = (
        f"{pluralize(len(suppliers), 'supplier')}, {published:,} published, {pluralize(waiting, 'file')} in inboxes"
    )
    return PartReport(summary, [issue for supplier in suppliers for issue in _of(supplier)])


def _of(one: SupplierStatus) -> list[StatusIssue]:
    found = [
        made(one.supplier, what(one), hint.format(supplier=one.supplier))
        for alert in one.alerts
        for made, what, hint in [_ALERTS[alert]]
    ]
    last = one.last
    if last is not None and last.get("status") == IngestRunStatus.FAIL and IngestAlert.REPEATED_FAIL not in one.alerts:
        what = f"its last run failed: {last.get('failure_code')}; the state before it is served"
        if one.run_id is None:
            what = f"its last run failed: {last.get('failure_code')}; nothing is published yet"
        since = datetime.fromisoformat(last["finished_at"]) if last.get("finished_at") else None
        found.append(broken_issue(one.supplier, what, f"penstock ingest bad-rows {last['run_id']}", since))
    return found
