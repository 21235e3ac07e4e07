"""The use cases of tracking; each one owns its transaction."""

import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta

import structlog

from penstock.kernel.db.database import Connection, Database
from penstock.kernel.db.notifier import Notifier
from penstock.kernel.db.page import Page, make_page
from penstock.kernel.errors import Conflict, Invalid, NotFound, Transient
from penstock.kernel.machine import Transition
from penstock.kernel.states.event_stream import ChangeNotifications, JournalTail, LiveEvents
from penstock.kernel.states.journal import StoredEntry
from penstock.kernel.tasks.outcome import sanitize_reason
from penstock.tracking import store
from penstock.tracking.config import TrackingSection
from penstock.tracking.contract import Stage, StageReportAnswer, StageReportKind, StageStatus
from penstock.tracking.explain import AHEAD_LIMIT, RowExplanation, explain_row
from penstock.tracking.lease import AcceptedReport, Lease, LeaseReport
from penstock.tracking.metrics import TrackingMetrics
from penstock.tracking.model import (
    FILE_STAGE,
    LAST_STAGE,
    MACHINES,
    QUEUES,
    STAGES_BY_MACHINE,
    TARGETS,
    ClaimedRow,
    FailureFilter,
    OverdueRows,
    PipelineCounts,
    RowFilter,
    RowKey,
    RowReport,
    RowReportResult,
    ShardRow,
    StageCount,
    StagePause,
    WaitingRow,
    find_conflict,
    make_concurrent_change_error,
    make_file_sealed_error,
)

RETRY_AFTER = timedelta(seconds=5)  # delay of a `retry` report without retry_after_seconds
EVENT_TOPIC = "moves"  # the notifier topic of event streams
_log = structlog.get_logger()


async def settle(
    tx: Connection, stage: Stage, lease: Lease[StageStatus], reports: Sequence[RowReport], *, now: datetime
) -> list[RowReportResult]:
    """T13: settle claimed rows, and return one result per report, in their order."""
    accepted = await lease.settle(tx, [_make_lease_report(report, now) for report in reports], now=now)
    settled = {(*report.key, report.fence): report for report in accepted}
    missing = [report[:2] for report in reports if report[:3] not in settled]
    statuses = await store.find_statuses(tx, stage, missing) if missing else {}
    answered: set[tuple[str, int, int]] = set()
    return [_make_result(report, settled, statuses, answered) for report in reports]


def _make_result(
    report: RowReport,
    settled: Mapping[tuple[str, int, int], AcceptedReport[StageStatus]],
    statuses: Mapping[tuple[str, int], StageStatus],
    answered: set[tuple[str, int, int]],
) -> RowReportResult:
    """Return the result of *report*; of two reports on one row the first counts, an equal second is unchanged."""
    name = (report.filename, report.shard, report.fence)
    accepted = settled.get(name)
    if accepted is None:
        status = statuses.get((report.filename, report.shard))
        return RowReportResult(report, StageReportAnswer.SUPERSEDED if status else StageReportAnswer.UNKNOWN, status)
    if accepted.moved and name not in answered:
        answered.add(name)
        return RowReportResult(report, StageReportAnswer.SETTLED, accepted.state)
    agrees = accepted.state is TARGETS[report.outcome] or (
        report.outcome is StageReportKind.RETRY and accepted.state is StageStatus.FAILED
    )
    answer = StageReportAnswer.UNCHANGED if agrees else StageReportAnswer.SUPERSEDED
    return RowReportResult(report, answer, accepted.state)


def _make_lease_report(report: RowReport, now: datetime) -> LeaseReport[StageStatus]:
    counts_attempt = report.outcome is not StageReportKind.RELEASE
    wait = RETRY_AFTER if report.retry_after is None and counts_attempt else report.retry_after
    key, due_at = (report.filename, report.shard), None if wait is None else now + wait
    return LeaseReport(key, report.fence, TARGETS[report.outcome], report.error, due_at, counts_attempt)


class Tracking:
    """The pipeline of one database."""

    def __init__(self, db: Database, notifier: Notifier, section: TrackingSection, metrics: TrackingMetrics) -> None:
        self.lease_for = section.lease
        self.live = LiveEvents([JournalTail(db, STAGES_BY_MACHINE)], [ChangeNotifications(notifier, EVENT_TOPIC)])
        self.db = db
        self._notifier = notifier
        self._metrics = metrics
        self._leases = store.declare_leases(section.max_attempts)

    @classmethod
    @asynccontextmanager
    async def open(cls, db: Database, section: TrackingSection, metrics: TrackingMetrics) -> "AsyncIterator[Tracking]":
        """Yield the service, with notifications from the other processes on the same database."""
        async with Notifier.open(db, store.CHANNEL) as notifier:
            yield cls(db, notifier, section, metrics)

    def stop(self) -> None:
        """End all waiting requests."""
        self._notifier.close()

    async def check(self) -> str:
        """Return the version of the database, or raise Transient DATABASE_DOWN."""
        return await self.db.check()

    async def register(self, filename: str, shards: Sequence[int], *, worker: str | None, actor: str) -> bool:
        """T1: insert one row per new shard, and return whether any is new.

        New shards get the event-ingest status and the producer of their file.
        """
        async with self.db.transaction() as tx:
            await store.lock_file(tx, filename)
            known = await store.find_file(tx, filename)
            new = sorted(set(shards) - {row.shard for row in known})
            status = known[0].status[FILE_STAGE] if known else StageStatus.STARTED
            if new and status is StageStatus.DONE:
                raise make_file_sealed_error(filename, new)
            if new:
                now, producer = self.db.clock.now(), known[0].worker if known else worker
                await store.insert_rows(tx, filename, new, status, worker=producer, actor=actor, now=now)
        self._notifier.notify(EVENT_TOPIC)
        if new:
            _log.info("file_registered", filename=filename, shards=len(new), actor=actor)
        return bool(new)

    async def move(
        self,
        stage: Stage,
        name: str,
        filename: str,
        shard: int | None = None,
        *,
        worker: str | None = None,
        actor: str,
        reason: str | None = None,
    ) -> int:
        """T2, T3, T4, T8: make the move *name* with a row, or with all rows of a file in event-ingest.

        Return the number of rows that have the target status now.
        """
        step = MACHINES[stage].move(name)
        error = sanitize_reason(reason) if reason else None
        async with self.db.transaction() as tx:
            if shard is None:
                await store.lock_file(tx, filename)
            rows = await store.move(
                tx, stage, step, filename, shard, worker=worker, actor=actor, reason=error, now=self.db.clock.now()
            )
            if not rows:
                raise _make_not_found_error(filename, shard)
            if not any(moved for _, moved in rows):
                await self._raise_conflict(tx, stage, step, worker, [row for row, _ in rows])
        self._notify(stage, {step.target})
        if any(moved for _, moved in rows):
            await self._log_move(stage, step.target, filename, shard, actor=actor, error=error)
        return len(rows)

    async def _log_move(
        self, stage: Stage, target: StageStatus, filename: str, shard: int | None, *, actor: str, error: str | None
    ) -> None:
        if target is StageStatus.FAILED:
            event = "file_failed" if shard is None else "row_failed"
            _log.warning(event, stage=stage, filename=filename, shard=shard, actor=actor, error=error)
        elif target is StageStatus.DONE and stage is LAST_STAGE:
            await self._log_complete_files([filename])
        else:
            _log.debug("row_moved", stage=stage, filename=filename, shard=shard, status=target, actor=actor)

    async def _raise_conflict(
        self, tx: Connection, stage: Stage, step: Transition[StageStatus], worker: str | None, rows: Sequence[ShardRow]
    ) -> None:
        """Raise the error of the first of *rows* that cannot move; return if all have the target status already."""
        pause = (await store.list_pauses(tx)).get(stage)
        for row in rows:
            if conflict := find_conflict(row, stage, step, worker, pause):
                raise conflict
        for row in rows:
            if row.status[stage] is not step.target:
                raise make_concurrent_change_error(row, stage)

    async def claim(
        self,
        stage: Stage,
        worker: str,
        *,
        limit: int,
        lease_for: timedelta | None = None,
        wait: float = 0,
        is_gone: Callable[[], Awaitable[bool]] | None = None,
    ) -> list[ClaimedRow]:
        """T12: claim rows for *worker*, oldest first; wait up to *wait* seconds for the first one.

        The wait ends early when *is_gone* returns true, i.e. the client has disconnected.
        """
        duration = self._choose_lease_duration(lease_for)
        return await self._notifier.claim(
            stage, lambda: self._claim_now(stage, worker, limit, duration), wait=wait, is_gone=is_gone
        )

    async def _claim_now(self, stage: Stage, worker: str, limit: int, lease_for: timedelta) -> list[ClaimedRow]:
        async with self.db.connection() as connection:
            lease, now = self._leases[stage], self.db.clock.now()
            rows = await store.claim(connection, lease, worker=worker, limit=limit, lease_for=lease_for, now=now)
        if rows:
            self._notifier.notify(EVENT_TOPIC)
            _log.debug("rows_claimed", stage=stage, worker=worker, rows=len(rows))
        return rows

    async def report(self, stage: Stage, reports: Sequence[RowReport]) -> list[RowReportResult]:
        """T13: settle claimed rows, and return one result per report. A report under an old fence changes nothing."""
        async with self.db.connection() as connection:
            results = await settle(connection, stage, self._leases[stage], reports, now=self.db.clock.now())
        settled = [result for result in results if result.answer is StageReportAnswer.SETTLED]
        if settled:
            self._notify(stage, {result.status for result in settled if result.status})
            await self._log_settled(stage, settled)
        return results

    async def _log_settled(self, stage: Stage, settled: Sequence[RowReportResult]) -> None:
        _log.debug("rows_settled", stage=stage, rows=len(settled))
        for report, _, status in settled:
            if status is StageStatus.FAILED:
                row = {"filename": report.filename, "shard": report.shard, "fence": report.fence}
                _log.warning("row_failed", stage=stage, **row, error=report.error)
        if stage is LAST_STAGE:
            await self._log_complete_files(
                report.filename for report, _, status in settled if status is StageStatus.DONE
            )

    async def _log_complete_files(self, filenames: Iterable[str]) -> None:
        """Log the files whose last shard is done now.

        Concurrent reports on the last shards of a file may both find it complete, and log it twice.
        """
        if names := sorted(set(filenames)):
            try:
                async with self.db.connection() as connection:
                    complete = await store.find_complete(connection, LAST_STAGE, names)
            except Transient:  # the reports are committed: their response does not depend on the log
                return
            for filename, shards in complete.items():
                _log.info("file_completed", filename=filename, shards=shards)

    async def heartbeat(
        self, stage: Stage, worker: str, keys: Sequence[RowKey] | None, lease_for: timedelta | None = None
    ) -> tuple[datetime, list[RowKey], list[RowKey]]:
        """T14: extend the leases of *keys*, or of all rows that *worker* has claimed.

        Return the new end of the leases, the extended rows, and the lost rows.
        """
        until = self.db.clock.now() + self._choose_lease_duration(lease_for)
        async with self.db.connection() as connection:
            if keys is None:
                keys = await store.find_claims(connection, stage, worker)
            extended = await store.heartbeat(connection, self._leases[stage], keys, until=until)
        return until, [key for key in keys if key in extended], [key for key in keys if key not in extended]

    def _choose_lease_duration(self, lease_for: timedelta | None) -> timedelta:
        return self.lease_for if lease_for is None else lease_for

    async def reap(self) -> int:
        """T14: take back rows with an expired lease, and return their number."""
        total = 0
        for stage, lease in self._leases.items():
            while reaped := await self._reap(stage, lease):
                total += reaped
        return total

    async def _reap(self, stage: Stage, lease: Lease[StageStatus]) -> int:
        async with self.db.connection() as connection:
            reaped = await store.reap(connection, lease, now=self.db.clock.now())
        if reaped:
            self._metrics.count_expiries(stage, len(reaped))
            self._notify(stage, {row.status for row in reaped})
            _log.info("leases_expired", stage=stage, rows=len(reaped))
        for row in reaped:
            if row.status is StageStatus.FAILED:
                error = "the lease expired on the last attempt"
                _log.warning("row_failed", stage=stage, filename=row.filename, shard=row.shard, error=error)
        return len(reaped)

    async def retry_failed(
        self, stage: Stage, failed: FailureFilter, *, limit: int, actor: str, reason: str | None = None
    ) -> int:
        """T19: reset up to *limit* failed rows (files, in event-ingest) that match *failed*; return their number."""
        if stage is FILE_STAGE:
            retried = await self._retry_files(failed, limit, actor, reason)
        else:
            async with self.db.connection() as connection:
                now = self.db.clock.now()
                retried = await store.retry_rows(connection, stage, failed, limit, actor=actor, reason=reason, now=now)
            if retried:
                self._notify(stage, {StageStatus.NEW})
        if retried:
            _log.info("failed_rows_retried", stage=stage, retried=retried, actor=actor)
        return retried

    async def _retry_files(self, failed: FailureFilter, limit: int, actor: str, reason: str | None) -> int:
        if failed.shards is not None:
            hint = "remove `shards` from the request; choose files with the other filters"
            raise Invalid(
                "WHOLE_FILES_ONLY", f"{FILE_STAGE} retries whole files; `shards` cannot be used here", hint=hint
            )
        async with self.db.connection() as connection:
            filenames = await store.find_failed_files(connection, FILE_STAGE, failed, limit)
        retried = 0
        for filename in filenames:
            with suppress(Conflict, NotFound):  # a concurrent request has moved this file already
                await self.move(FILE_STAGE, "retry", filename, actor=actor, reason=reason)
                retried += 1
        return retried

    async def pause(self, stage: Stage, *, actor: str, reason: str | None) -> StagePause:
        """T19: stop claims and starts of *stage*; started rows may end. Return the pause."""
        async with self.db.transaction() as tx:
            why = sanitize_reason(reason) if reason else None
            await store.pause(tx, stage, actor=actor, reason=why, now=self.db.clock.now())
            pause = (await store.list_pauses(tx))[stage]
        _log.info("stage_paused", stage=stage, actor=pause.actor, reason=pause.reason)
        return pause

    async def resume(self, stage: Stage) -> None:
        """T19: end the pause of *stage*."""
        async with self.db.connection() as connection:
            await store.resume(connection, stage)
        self._notifier.notify(stage)
        _log.info("stage_resumed", stage=stage)

    async def list_queue(
        self,
        stage: Stage,
        *,
        after: tuple[datetime, int] = (store.BEGINNING, 0),
        updated_since: datetime | None = None,
        updated_before: datetime | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> Page[WaitingRow]:
        """T5: return the rows that wait for *stage*, oldest first; pages stay consistent while the queue moves."""
        async with self.db.connection() as connection:
            rows = await store.list_queue(
                connection,
                stage,
                after,
                updated_since=updated_since,
                updated_before=updated_before,
                limit=limit + 1,
                offset=offset,
            )
        return make_page(rows, limit, lambda row: (row.due_at, row.id))

    async def find_file(self, filename: str) -> list[ShardRow]:
        """T6: return all shards of a file, or raise NotFound."""
        async with self.db.connection() as connection:
            rows = await store.find_file(connection, filename)
        if not rows:
            raise _make_not_found_error(filename)
        return rows

    async def list_rows(
        self, wanted: RowFilter, *, after: tuple[str, int] = ("", -1), limit: int = 100
    ) -> Page[ShardRow]:
        """T6: return the rows that match *wanted*, by file and shard."""
        async with self.db.transaction() as tx:
            rows = await store.list_rows(tx, wanted, after, limit + 1)
        return make_page(rows, limit, lambda row: (row.filename, row.shard))

    async def list_moves(
        self, filename: str, *, after: tuple[int, int] = (0, 0), limit: int = 1000
    ) -> Page[StoredEntry]:
        """T15: return the moves of all shards of a file, oldest first."""
        rows = await self.find_file(filename)
        async with self.db.connection() as connection:
            entries = await store.list_moves(connection, rows, after, limit + 1)
        return make_page(entries, limit, lambda entry: entry.position[1:])

    async def explain(self, filename: str, shard: int) -> RowExplanation:
        """T16: explain in words why a row has its present status."""
        async with self.db.transaction("repeatable_read") as tx:
            row = await store.find_row(tx, filename, shard)
            if row is None:
                raise _make_not_found_error(filename, shard)
            stage = row.stage or QUEUES[-1]
            waits = row.status[stage] is StageStatus.NEW and stage is not FILE_STAGE
            return explain_row(
                row,
                self.db.clock.now(),
                pause=(await store.list_pauses(tx)).get(stage),
                ahead=await store.count_ahead(tx, stage, row, AHEAD_LIMIT) if waits else 0,
                started=_count_started(await store.count_rows(tx), stage) if waits else 0,
                failure=await store.find_last_failure(tx, stage, row),
            )

    async def count_rows(self) -> list[StageCount]:
        """T7: return the exact number of rows by stage, status and shard, for any number of rows."""
        async with self.db.connection() as connection:
            return await store.count_rows(connection)

    async def list_pauses(self) -> dict[Stage, StagePause]:
        """Return the pauses of the paused stages."""
        async with self.db.connection() as connection:
            return await store.list_pauses(connection)

    async def fold_counts(self) -> int:
        """Fold the changes into the counts, so that reading the counts stays fast."""
        async with self.db.connection() as connection:
            return await store.fold_counts(connection)

    async def read_counts(self) -> PipelineCounts:
        """Return a consistent snapshot of counts, pauses and the age of each queue."""
        async with self.db.transaction("repeatable_read") as tx:
            # Rows before counts, in the lock order of a TRUNCATE; the other order could deadlock with it.
            oldest = {stage: await store.find_oldest(tx, stage) for stage in QUEUES}
            return PipelineCounts(self.db.clock.now(), await store.count_rows(tx), await store.list_pauses(tx), oldest)

    async def list_overdue(self, *, expired_for: timedelta, started_for: timedelta) -> list[OverdueRows]:
        """Count started rows whose lease expired *expired_for* ago, or that started without a lease *started_for* ago.

        The reaper takes back expired rows within seconds, so the former mean that no process runs it. The latter never
        expire: their worker may be dead.
        """
        now = self.db.clock.now()
        limits = {"expired_before": now - expired_for, "started_before": now - started_for}
        async with self.db.connection() as connection:
            return [rows for stage in Stage for rows in await store.list_overdue(connection, stage, **limits)]

    async def update_metrics(self) -> None:
        """T17: set the gauges to the values in the database."""
        snapshot = await self.read_counts()
        self._metrics.update(snapshot.counts, snapshot.oldest, snapshot.pauses, snapshot.at)

    def _notify(self, stage: Stage, targets: set[StageStatus]) -> None:
        """Wake the claims of *stage* and of the next stage that may have work now, and the event streams."""
        next_stages = [queue for queue in QUEUES if queue.before is stage and StageStatus.DONE in targets]
        same_stage = [stage] if StageStatus.NEW in targets else []
        self._notifier.notify(EVENT_TOPIC, *next_stages, *same_stage)


def _count_started(counts: Sequence[StageCount], stage: Stage) -> int:
    return sum(count.rows for count in counts if count.stage is stage and count.status is StageStatus.STARTED)


def _make_not_found_error(filename: str, shard: int | None = None) -> NotFound:
    name = shlex.quote(filename)
    if shard is None:
        hint = f"register it with `penstock track register {name} SHARD…` (POST /files/register)"
        return NotFound("UNKNOWN_FILE", f"no file {filename!r} is registered", hint=hint)
    hint = f"`penstock track show {name}` lists its shards; a new shard is registered with POST /files/register"
    return NotFound("UNKNOWN_ROW", f"file {filename!r} has no shard {shard}, or is not registered", hint=hint)
