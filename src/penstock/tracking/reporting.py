"""T13: reports of claimed rows, and what becomes of each."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from penstock.kernel.db.database import Connection
from penstock.kernel.work.lease import Lease, Settled
from penstock.kernel.work.lease import Report as LeaseReport
from penstock.tracking import store
from penstock.tracking.contract import Answer, Said, Stage, Status
from penstock.tracking.model import TARGETS, Report, Result

RETRY_AFTER = timedelta(seconds=5)  # when a report does not say


async def settle(
    tx: Connection, stage: Stage, lease: Lease[Status], reports: Sequence[Report], *, now: datetime
) -> list[Result]:
    """T13: end what is still held; one result per report, in their order."""
    told = await lease.settle(tx, [_lease_report(report, now) for report in reports], now=now)
    settled = {(*one.key, one.fence): one for one in told}
    missing = [report[:2] for report in reports if report[:3] not in settled]
    standing = await store.statuses(tx, stage, missing) if missing else {}
    answered: set[tuple[str, int, int]] = set()
    return [_result(report, settled, standing, answered) for report in reports]


def _result(
    report: Report,
    settled: Mapping[tuple[str, int, int], Settled[Status]],
    standing: Mapping[tuple[str, int], Status],
    answered: set[tuple[str, int, int]],
) -> Result:
    """Of two reports on one row the first was believed; the other said the same, or came too late."""
    name = (report.filename, report.shard, report.fence)
    one = settled.get(name)
    if one is None:
        status = standing.get((report.filename, report.shard))
        return Result(report, Answer.SUPERSEDED if status else Answer.UNKNOWN, status)
    if one.moved and name not in answered:
        answered.add(name)
        return Result(report, Answer.SETTLED, one.state)
    agrees = one.state is TARGETS[report.said] or (report.said is Said.RETRY and one.state is Status.FAILED)
    return Result(report, Answer.UNCHANGED if agrees else Answer.SUPERSEDED, one.state)


def _lease_report(report: Report, now: datetime) -> LeaseReport[Status]:
    counts = report.said is not Said.RELEASE
    wait = RETRY_AFTER if report.retry_after is None and counts else report.retry_after
    key, due_at = (report.filename, report.shard), None if wait is None else now + wait
    return LeaseReport(key, report.fence, TARGETS[report.said], report.error, due_at, counts)
