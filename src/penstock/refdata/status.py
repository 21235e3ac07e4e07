"""The status of refdata: dictionaries whose SQL fails or whose tables drifted, failed updates, and delays."""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from penstock.kernel.status import PartReport, StatusIssue, make_broken_issue, make_late_issue, pluralize
from penstock.kernel.text import format_duration
from penstock.refdata.commands.service import Refdata
from penstock.refdata.dictionaries.statement_checks import BrokenStatement
from penstock.refdata.model import DictionaryKey

PENDING_TOO_LONG = timedelta(minutes=2)
UNANNOUNCED_TOO_LONG = timedelta(minutes=1)  # a Redis failover takes less
FAILED_WITHIN = timedelta(days=1)
DRIFTED_WITHIN = timedelta(days=1)  # pods load drifted items with their hourly audit
_MAX_DICTIONARIES = 5  # with an issue of each kind


async def report_status(refdata: Refdata) -> PartReport:
    """Return the number of dictionaries and pending updates, and the issues of dictionaries, apply and relay."""
    overview = await refdata.read_overview(FAILED_WITHIN, DRIFTED_WITHIN, _MAX_DICTIONARIES)
    broken = (await refdata.statements.find_broken())[:_MAX_DICTIONARIES]
    now, counts = overview.at, overview.counts
    dictionaries = pluralize(counts["dictionaries"], "dictionary", "dictionaries")
    pending = pluralize(counts["pending"], "update")
    summary = f"{dictionaries} of {pluralize(counts['tenants'], 'tenant')}, {pending} pending"
    issues = [*map(_make_sql_issue, broken), *(_make_failed_issue(row, now) for row in overview.failed)]
    drifts = [_make_drift_issue(refdata, row, now) for row in overview.drifted]
    return PartReport(summary, [*issues, *drifts, *_list_delay_issues(counts, now)])


def _make_sql_issue(broken: BrokenStatement) -> StatusIssue:
    hint = "fix the statement in refdata.dictionaries, its tables, or the rights of the database user"
    return make_broken_issue(
        broken.subject, f"SQL fails: {broken.error}", f"{hint}; docs/runbook/PenstockReloadErrors.md"
    )


def _make_failed_issue(row: Mapping[str, Any], now: datetime) -> StatusIssue:
    ago = format_duration(now - row["last_at"])
    problem = f"{pluralize(row['failed'], 'update')} failed, the last {ago} ago: {row['code']}"
    hint = f"penstock dict updates {row['tenant_id']}"
    return make_broken_issue(f"{row['tenant_id']}/{row['dict_code']}", problem, hint, row["last_at"])


def _make_drift_issue(refdata: Refdata, row: Mapping[str, Any], now: datetime) -> StatusIssue:
    target = DictionaryKey(row["tenant_id"], row["dict_code"])
    times = pluralize(row["drifts"], "time")
    ago = format_duration(now - row["drifted_at"])
    problem = f"tables changed {times} without a new version, the last time {ago} ago: pods may have old items"
    names = f"{target.tenant_id} {target.dict_code}"
    hint = f"penstock dict audit {names}; it compares and reloads one query server: repeat it for each with --query-url"
    if refdata.catalogue.get(target).is_writable:
        hint = f"{hint}; or make a new version for all pods; penstock dict import {names} FILE"
    return make_late_issue(
        "/".join(target), problem, f"{hint}; docs/runbook/PenstockDriftDetected.md", row["drifted_at"]
    )


def _list_delay_issues(counts: Mapping[str, Any], now: datetime) -> Iterator[StatusIssue]:
    since = counts["pending_since"]
    if since is not None and now - since > PENDING_TOO_LONG:
        problem = f"{pluralize(counts['pending'], 'update')} pending, the oldest for {format_duration(now - since)}"
        hint = "check that `penstock work apply` or `penstock up` is running; "
        hint += "penstock dict updates TENANT --status PENDING"
        yield make_late_issue("apply", problem, hint, since)
    since = counts["unannounced_since"]
    if since is not None and now - since > UNANNOUNCED_TOO_LONG:
        problem = f"versions not announced to pods, the oldest for {format_duration(now - since)}"
        hint = "check that `penstock work relay` or `penstock up` is running and reaches Redis"
        yield make_late_issue("relay", problem, hint, since)
