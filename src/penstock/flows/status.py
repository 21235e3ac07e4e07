"""The status of flows: counts of runs and steps, and issues such as failed runs, waiting steps and invalid files."""

import shlex
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from penstock.flows.api.queries import FailedRun, FlowViews, WaitingSteps
from penstock.flows.definition.catalogue import FlowFileError
from penstock.kernel.status import PartReport, StatusIssue, make_broken_issue, make_late_issue, pluralize
from penstock.kernel.text import format_duration

FAILED_WITHIN = timedelta(days=1)
WAITS_TOO_LONG = timedelta(minutes=5)  # a restarted worker claims again within this time
_FAILED_SHOWN = 5  # failed runs that are reported


async def report_status(views: FlowViews) -> PartReport:
    """Return the number of active runs and waiting steps, and the issues of files, runs and steps."""
    now = views.read_clock()
    active, waiting = await views.count_active_runs(), await views.list_waiting_steps()
    failed = await views.list_failed_runs(now - FAILED_WITHIN, _FAILED_SHOWN)
    steps = sum(kind.steps for kind in waiting)
    return PartReport(
        f"{pluralize(active, 'active run')}, {pluralize(steps, 'step')} waiting for a worker",
        [
            *(_make_file_issue(path, error, views.folder) for path, error in views.list_file_errors().items()),
            *(_make_run_issue(run, now) for run in failed),
            *_list_kind_issues(waiting),
        ],
    )


def _make_file_issue(path: str, error: FlowFileError, folder: Path | None) -> StatusIssue:
    quoted = shlex.quote(str(Path(path).absolute()))  # the hint is pasted in another folder
    if path == str(folder):
        hint = f"mkdir -p {quoted}; or correct `flows.folder` in penstock.yaml and restart"
        return make_broken_issue("flows.folder", error.message, hint)
    hint = f"fix the file; penstock flow validate {quoted}"
    first, *others = error.message.splitlines()
    more = f" (and {pluralize(len(others), 'more error')})" if others else ""
    return make_broken_issue(Path(path).name, f"{first}{more}", hint)


def _make_run_issue(run: FailedRun, now: datetime) -> StatusIssue:
    ago = format_duration(now - run.finished_at)
    problem = f"{run.flow or 'run'} failed {ago} ago: {run.reason or 'see its steps'}"
    hint = f"penstock flow show {run.run_id}; then penstock flow retry {run.run_id}"
    return make_broken_issue(run.run_id, problem, hint, run.finished_at)


def _list_kind_issues(waiting: list[WaitingSteps]) -> Iterator[StatusIssue]:
    for kind in waiting:
        if kind.oldest > WAITS_TOO_LONG:
            oldest = format_duration(kind.oldest)
            problem = f"{pluralize(kind.steps, 'step')} waiting for a worker, the oldest for {oldest}"
            hint = f"penstock work flows --kinds {kind.kind}; or start your own worker for this kind"
            yield make_late_issue(kind.kind, problem, hint)
