"""What is late or broken among dictionaries."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from penstock.kernel.status import PartReport, StatusIssue, broken_issue, late_issue, pluralize
from penstock.kernel.text import format_duration
from penstock.refdata.commands.service import Refdata

PENDING_TOO_LONG = timedelta(minutes=2)
UNTOLD_TOO_LONG = timedelta(minutes=1)  # Redis fails over within one
FAILED_WITHIN = timedelta(days=1)
_NAMED = 5  # dictionaries whose failures are told one by one


async def report_status(refdata: Refdata) -> PartReport:
    """How dictionaries stand, and what is wrong with some."""
    overview = await refdata.read_overview(FAILED_WITHIN, _NAMED)
    now, row = overview.at, overview.counts
    dictionaries = pluralize(row["dictionaries"], "dictionary", "dictionaries")
    pending = pluralize(row["pending"], "update")
    summary = f"{dictionaries} of {pluralize(row['tenants'], 'tenant')}, {pending} under way"
    return PartReport(summary, [*_waiting(row, now), *(_failed(one, now) for one in overview.failed)])


def _waiting(row: Mapping[str, Any], now: datetime) -> list[StatusIssue]:
    found = []
    if (since := row["pending_since"]) is not None and now - since > PENDING_TOO_LONG:
        what = f"{pluralize(row['pending'], 'update')} waiting, the oldest for {format_duration(now - since)}"
        found.append(late_issue("apply", what, "is `penstock work apply` running? penstock dict updates TENANT", since))
    if (since := row["untold_since"]) is not None and now - since > UNTOLD_TOO_LONG:
        what = f"versions waiting to be announced, the oldest for {format_duration(now - since)}"
        found.append(late_issue("relay", what, "is `penstock work relay` running, and does it reach Redis?", since))
    return found


def _failed(row: Mapping[str, Any], now: datetime) -> StatusIssue:
    subject = f"{row['tenant_id']}/{row['dict_code']}"
    ago = format_duration(now - row["last_at"])
    problem = f"{pluralize(row['failed'], 'update')} failed, the last {ago} ago: {row['code']}"
    return broken_issue(subject, problem, f"penstock dict updates {row['tenant_id']}", row["last_at"])
