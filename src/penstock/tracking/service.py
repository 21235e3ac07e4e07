"""What can be done with the pipeline; each use case owns its transaction."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta

from penstock.kernel.db.database import Connection, Database
from penstock.kernel.db.notifier import Notifier
from penstock.kernel.db.page import Page, make_page
from penstock.kernel.errors import Conflict, Invalid, NotFound
from penstock.kernel.machine import Transition
from penstock.kernel.states.event_stream import ChangeNotifications, JournalTail, LiveEvents
from penstock.kernel.states.journal import StoredEntry
from penstock.kernel.tasks.outcome import clean_reason
from penstock.tracking import store
from penstock.tracking.config import TrackingSection
from penstock.tracking.contract import Stage, StageReportAnswer, StageReportKind, StageStatus
from penstock.tracking.explain import AHEAD_LIMIT, RowExplanation, explain
from penstock.tracking.lease import AcceptedReport, Lease
from penstock.tracking.lease import LeaseReport as LeaseReport
from penstock.tracking.metrics import TrackingMetrics
from penstock.tracking.model import (
    FILE_STAGE,
    MACHINES,
    QUEUES,
    STAGE_OF,
    TARGETS,
    ClaimedRow,
    FailureSample,
    PipelineCounts,
    RowKey,
    RowPosition,
    RowReport,
    RowReportResult,
    ShardRow,
    StageCount,
    StagePause,
    WaitingRows,
    changed_meanwhile,
    refusal,
    sealed,
)

RETRY_AFTER = timedelta(seconds=5)  # when a report does not say
WATCHING = "moves"  # the bell's topic for those who watch


async def settle(
    tx: Connection, stage: Stage, lease: Lease[StageStatus], reports: Sequence[RowReport], *, now: datetime
) -> list[RowReportResult]:
    """T13: end what is still held; one result per report, in their order."""
    told = await lease.settle(tx, [_lease_report(report, now) for report in reports], now=now)
    settled = {(*one.key, one.fence): one for one in told}
    missing = [report[:2] for report in reports if report[:3] not in settled]
    standing = await store.statuses(tx, stage, missing) if missing else {}
    answered: set[tuple[str, int, int]] = set()
    return [_result(report, settled, standing, answered) for report in reports]


def _result(
    report: RowReport,
    settled: Mapping[tuple[str, int, int], AcceptedReport[StageStatus]],
    standing: Mapping[tuple[str, int], StageStatus],
    answered: set[tuple[str, int, int]],
) -> RowReportResult:
    """Of two reports on one row the first was believed; the other said the same, or came too late."""
    name = (report.filename, report.shard, report.fence)
    one = settled.get(name)
    if one is None:
        status = standing.get((report.filename, report.shard))
        return RowReportResult(report, StageReportAnswer.SUPERSEDED if status else StageReportAnswer.UNKNOWN, status)
    if one.moved and name not in answered:
        answered.add(name)
        return RowReportResult(report, StageReportAnswer.SETTLED, one.state)
    agrees = one.state is TARGETS[report.said] or (
        report.said is StageReportKind.RETRY and one.state is StageStatus.FAILED
    )
    return RowReportResult(report, StageReportAnswer.UNCHANGED if agrees else StageReportAnswer.SUPERSEDED, one.state)


def _lease_report(report: RowReport, now: datetime) -> LeaseReport[StageStatus]:
    counts = report.said is not StageReportKind.RELEASE
    wait = RETRY_AFTER if report.retry_after is None and counts else report.retry_after
    key, due_at = (report.filename, report.shard), None if wait is None else now + wait
    return LeaseReport(key, report.fence, TARGETS[report.said], report.error, due_at, counts)


class Tracking:
    """The pipeline of one database."""

    def __init__(self, db: Database, notifier: Notifier, section: TrackingSection, metrics: TrackingMetrics) -> None:
        self.lease_for = section.lease
        self.live = LiveEvents([JournalTail(db, STAGE_OF)], [ChangeNotifications(notifier, WATCHING)])
        self.db = db
        self._notifier = notifier
        self._metrics = metrics
        self._leases = store.leases(section.max_attempts)

    @classmethod
    @asynccontextmanager
    async def open(cls, db: Database, section: TrackingSection, metrics: TrackingMetrics) -> "AsyncIterator[Tracking]":
        """The pipeline, in touch with the other processes that serve it."""
        async with Notifier.open(db, store.CHANNEL) as notifier:
            yield cls(db, notifier, section, metrics)

    def stop(self) -> None:
        """Let nobody wait any longer."""
        self._notifier.close()

    async def check(self) -> str:
        """The database's version, or Transient DATABASE_DOWN."""
        return await self.db.check()

    async def register(self, filename: str, shards: Sequence[int], *, worker: str | None, actor: str) -> bool:
        """T1: one row per shard; whether any is new. New shards join the file's state, and its producer."""
        async with self.db.transaction() as tx:
            await store.lock_file(tx, filename)
            known = await store.rows_of_file(tx, filename)
            new = sorted(set(shards) - {row.shard for row in known})
            status = known[0].status[FILE_STAGE] if known else StageStatus.STARTED
            if new and status is StageStatus.DONE:
                raise sealed(filename, new)
            if new:
                now, producer = self.db.clock.now(), known[0].worker if known else worker
                await store.insert_rows(tx, filename, new, status, worker=producer, actor=actor, now=now)
        self._notifier.notify(WATCHING)
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
        """T2, T3, T4, T8: take a step with a row, or a whole file in event-ingest; how many rows now stand so."""
        step = MACHINES[stage].move(name)
        said = clean_reason(reason) if reason else None
        async with self.db.transaction() as tx:
            if shard is None:
                await store.lock_file(tx, filename)
            found = await store.move(
                tx, stage, step, filename, shard, worker=worker, actor=actor, reason=said, now=self.db.clock.now()
            )
            if not found:
                raise _unknown(filename, shard)
            if not any(moved for _, moved in found):
                await self._explain_refusal(tx, stage, step, worker, [row for row, _ in found])
        self._announce(stage, {step.target})
        return len(found)

    async def _explain_refusal(
        self, tx: Connection, stage: Stage, step: Transition[StageStatus], worker: str | None, rows: Sequence[ShardRow]
    ) -> None:
        """Raise why none of *rows* moved, unless they already were where they should go."""
        pause = (await store.pauses(tx)).get(stage)
        for row in rows:
            if refused := refusal(row, stage, step, worker, pause):
                raise refused
        for row in rows:
            if row.status[stage] is not step.target:
                raise changed_meanwhile(row, stage)

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
        """T12: rows nobody else has, oldest first; waits up to *wait* seconds for the first, unless its caller goes."""
        lasts = self._lasting(lease_for)
        return await self._notifier.claim(
            stage, lambda: self._claim_now(stage, worker, limit, lasts), wait=wait, is_gone=is_gone
        )

    async def _claim_now(self, stage: Stage, worker: str, limit: int, lease_for: timedelta) -> list[ClaimedRow]:
        async with self.db.connection() as connection:
            lease, now = self._leases[stage], self.db.clock.now()
            held = await store.claim(connection, lease, worker=worker, limit=limit, lease_for=lease_for, now=now)
        if held:
            self._notifier.notify(WATCHING)
        return held

    async def report(self, stage: Stage, reports: Sequence[RowReport]) -> list[RowReportResult]:
        """T13: end what was claimed; one result each. A report under an old fence changes nothing."""
        async with self.db.connection() as connection:
            results = await settle(connection, stage, self._leases[stage], reports, now=self.db.clock.now())
        moved = {result.status for result in results if result.answer is StageReportAnswer.SETTLED and result.status}
        if moved:
            self._announce(stage, moved)
        return results

    async def heartbeat(
        self, stage: Stage, worker: str, keys: Sequence[RowKey] | None, lease_for: timedelta | None = None
    ) -> tuple[datetime, list[RowKey], list[RowKey]]:
        """T14: extend leases, of *keys* or of all *worker* holds; until when, what is kept and what was lost."""
        until = self.db.clock.now() + self._lasting(lease_for)
        async with self.db.connection() as connection:
            if keys is None:
                keys = await store.held_by(connection, stage, worker)
            kept = await store.heartbeat(connection, self._leases[stage], keys, until=until)
        return until, [key for key in keys if key in kept], [key for key in keys if key not in kept]

    def _lasting(self, lease_for: timedelta | None) -> timedelta:
        return self.lease_for if lease_for is None else lease_for

    async def reap(self) -> int:
        """T14: take back what nobody ended in time; how many rows."""
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
            self._announce(stage, set(reaped))
        return len(reaped)

    async def retry_failed(
        self, stage: Stage, failed: FailureSample, *, limit: int, actor: str, reason: str | None = None
    ) -> int:
        """T19: set back all rows that failed so, up to *limit* rows (files, in event-ingest); how many."""
        if stage is FILE_STAGE:
            return await self._retry_files(failed, limit, actor, reason)
        async with self.db.connection() as connection:
            now = self.db.clock.now()
            retried = await store.retry_rows(connection, stage, failed, limit, actor=actor, reason=reason, now=now)
        if retried:
            self._announce(stage, {StageStatus.NEW})
        return retried

    async def _retry_files(self, failed: FailureSample, limit: int, actor: str, reason: str | None) -> int:
        if failed.shards is not None:
            hint = "leave shards out"
            raise Invalid("WHOLE_FILES_ONLY", f"{FILE_STAGE} moves a whole file, not single shards", hint=hint)
        async with self.db.connection() as connection:
            filenames = await store.failed_files(connection, FILE_STAGE, failed, limit)
        retried = 0
        for filename in filenames:
            with suppress(Conflict, NotFound):  # somebody else was quicker with this one
                await self.move(FILE_STAGE, "retry", filename, actor=actor, reason=reason)
                retried += 1
        return retried

    async def pause(self, stage: Stage, *, actor: str, reason: str | None) -> StagePause:
        """T19: hand out and start nothing of *stage* from now on. What is under way may end."""
        async with self.db.transaction() as tx:
            said = clean_reason(reason) if reason else None
            await store.pause(tx, stage, actor=actor, reason=said, now=self.db.clock.now())
            return (await store.pauses(tx))[stage]

    async def resume(self, stage: Stage) -> None:
        """T19: let *stage* go on."""
        async with self.db.connection() as connection:
            await store.resume(connection, stage)
        self._notifier.notify(stage)

    async def queue(
        self,
        stage: Stage,
        *,
        after: tuple[datetime, int] = (store.BEGINNING, 0),
        updated_since: datetime | None = None,
        updated_before: datetime | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> Page[WaitingRows]:
        """T5: what waits for *stage*, oldest first, in pages a moving queue does not tear."""
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

    async def file(self, filename: str) -> list[ShardRow]:
        """T6: all shards of a file, or NotFound."""
        async with self.db.connection() as connection:
            rows = await store.rows_of_file(connection, filename)
        if not rows:
            raise _unknown(filename)
        return rows

    async def files(
        self, stands: RowPosition, *, after: tuple[str, int] = ("", -1), limit: int = 100
    ) -> Page[ShardRow]:
        """T6: rows that stand so, by file and shard."""
        async with self.db.transaction() as tx:
            rows = await store.list_rows(tx, stands, after, limit + 1)
        return make_page(rows, limit, lambda row: (row.filename, row.shard))

    async def history(self, filename: str, *, after: tuple[int, int] = (0, 0), limit: int = 1000) -> Page[StoredEntry]:
        """T15: every move of every row of a file, oldest first."""
        rows = await self.file(filename)
        async with self.db.connection() as connection:
            noted = await store.history(connection, rows, after, limit + 1)
        return make_page(noted, limit, lambda one: one.position[1:])

    async def why(self, filename: str, shard: int) -> RowExplanation:
        """T16: in words, why a row is where it is."""
        async with self.db.transaction("repeatable_read") as tx:
            row = await store.find_row(tx, filename, shard)
            if row is None:
                raise _unknown(filename, shard)
            stage = row.stage or QUEUES[-1]
            waits = row.status[stage] is StageStatus.NEW and stage is not FILE_STAGE
            return explain(
                row,
                self.db.clock.now(),
                pause=(await store.pauses(tx)).get(stage),
                ahead=await store.count_ahead(tx, stage, row, AHEAD_LIMIT) if waits else 0,
                busy=_under_way(await store.counts(tx), stage) if waits else 0,
                failure=await store.last_failure(tx, stage, row),
            )

    async def counts(self) -> list[StageCount]:
        """T7: how many rows stand where, exactly, however many there are."""
        async with self.db.connection() as connection:
            return await store.counts(connection)

    async def pauses(self) -> dict[Stage, StagePause]:
        async with self.db.connection() as connection:
            return await store.pauses(connection)

    async def fold_counts(self) -> int:
        """Put the changes of the counts together, so that reading them stays quick."""
        async with self.db.connection() as connection:
            return await store.fold_counts(connection)

    async def standing(self) -> PipelineCounts:
        """How all rows stand, and since when the oldest waits."""
        async with self.db.transaction("repeatable_read") as tx:
            # The rows before their counts, as a TRUNCATE takes them: else each could wait for the other.
            oldest = {stage: await store.oldest(tx, stage) for stage in QUEUES}
            return PipelineCounts(self.db.clock.now(), await store.counts(tx), await store.pauses(tx), oldest)

    async def show_metrics(self) -> None:
        """T17: let the gauges tell what the database does."""
        standing = await self.standing()
        self._metrics.show(standing.counts, standing.oldest, standing.pauses, standing.at)

    def _announce(self, stage: Stage, targets: set[StageStatus]) -> None:
        """Wake who waits for rows of *stage*, or of the stage after it, and who watches."""
        following = [queue for queue in QUEUES if queue.before is stage and StageStatus.DONE in targets]
        again = [stage] if StageStatus.NEW in targets else []
        self._notifier.notify(WATCHING, *following, *again)


def _under_way(counts: Sequence[StageCount], stage: Stage) -> int:
    return sum(count.rows for count in counts if count.stage is stage and count.status is StageStatus.STARTED)


def _unknown(filename: str, shard: int | None = None) -> NotFound:
    hint = "register it with POST /files/register"
    if shard is None:
        return NotFound("UNKNOWN_FILE", f"no file {filename!r} is registered", hint=hint)
    return NotFound("UNKNOWN_ROW", f"file {filename!r} has no shard {shard}", hint=hint)
