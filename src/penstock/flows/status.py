"""What is late or broken among runs and steps."""

from datetime import timedelta

from penstock.flows.api.queries import FlowViews
from penstock.kernel.status import PartReport, broken_issue, late_issue, pluralize
from penstock.kernel.text import format_duration

FAILED_WITHIN = timedelta(days=1)
WAITS_TOO_LONG = timedelta(minutes=5)  # a worker that restarts claims again
_NAMED = 5  # failed runs that are told one by one


async def report_status(views: FlowViews) -> PartReport:
    """How runs stand, and what is wrong with some."""
    now = views.now()
    active, ready = await views.under_way()
    summary = f"{pluralize(sum(active.values()), 'run')} under way, {sum(one.steps for one in ready):,} steps wait"
    found = []
    for run in await views.failed(now - FAILED_WITHIN, _NAMED):
        what = (
            f"{run.flow or 'run'} failed {format_duration(now - run.finished_at)} ago: {run.reason or 'see its steps'}"
        )
        hint = f"penstock flow show {run.run_id}; then penstock flow retry {run.run_id}"
        found.append(broken_issue(run.run_id, what, hint, run.finished_at))
    for one in ready:
        if one.waits > WAITS_TOO_LONG:
            what = f"{pluralize(one.steps, 'step')} waiting for a worker, the oldest for {format_duration(one.waits)}"
            found.append(late_issue(one.kind, what, f"penstock work flows --kinds {one.kind}, or a worker of your own"))
    return PartReport(summary, found)
