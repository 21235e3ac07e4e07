"""The use cases of harvest for operators and schedules: start, retry, force and cancel runs."""

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

import msgspec

from penstock.harvest import store
from penstock.harvest.alerts import AlertCode, AlertSeverity, log_failed_run, raise_alert
from penstock.harvest.config import HarvestSection
from penstock.harvest.contract import PLANS, HarvestRunState, HarvestRunType, PartitionState, PlanMessage, PlanState
from penstock.harvest.feed.feeds import find_feed
from penstock.harvest.fetch import partitions
from penstock.harvest.fetch.partitions import (
    EndedPartition,
    FailedPartition,
    end_partitions,
    flush_outbox,
    make_consolidation,
    make_work_item,
)
from penstock.harvest.model import RUN, make_run_not_found_error
from penstock.harvest.store import RunRow
from penstock.kernel.bus import Bus, BusMessage
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.errors import Conflict, Invalid, NotFound
from penstock.kernel.ids import make_id

SCHEDULE = "schedule"


class Harvest:
    """The runs of all feeds. Locks are taken in the order feed, partitions, run."""

    def __init__(self, db: Database, bus: Bus, section: HarvestSection) -> None:
        self.section = section
        self.db = db
        self._bus = bus

    async def start(self, feed: str, by: str, *, full: bool = False, run_id: UUID | None = None) -> UUID:
        """H2: request a run and return its id; raise Conflict RUN_ACTIVE while another run of the feed is active.

        A repeated call with the same *run_id* changes nothing.
        """
        find_feed(self.section, feed)
        async with self.db.transaction() as tx:
            await store.lock_feed(tx, feed)
            if run_id is not None and await store.read_plan(tx, run_id):
                return run_id
            await self._require_inactive(tx, feed)
            await store.close_breaker(tx, feed)
            run_id = await self._request_run(tx, feed, by, full=full, run_id=run_id)
        await flush_outbox(self._bus)
        return run_id

    async def start_due(self, feed: str, every: timedelta, full_every: timedelta) -> UUID | None:
        """Request a run unless one is active or the last request is more recent than *every*."""
        async with self.db.transaction() as tx:
            await store.lock_feed(tx, feed)
            now = self.db.clock.now()
            last_request, last_full = await store.read_last_request(tx, feed), await store.read_last_full(tx, feed)
            is_due = last_request is None or last_request + every <= now
            if not is_due or await store.find_active_run(tx, feed):
                return None
            full = last_full is None or last_full + full_every <= now
            run_id = await self._request_run(tx, feed, SCHEDULE, full=full)
        await flush_outbox(self._bus)
        return run_id

    async def retry(self, run_id: UUID, by: str, partition: str | None = None) -> list[str]:
        """H11: resume failed partitions where they stopped, or the consolidation if all partitions are complete.

        Return the names of the resumed partitions.
        """
        async with self.db.transaction() as tx:
            run = await self._lock_run(tx, run_id)
            await self._require_latest(tx, run)
            await store.close_breaker(tx, run.feed)
            await store.unforce_run(tx, run_id)
            failed = await partitions.list_failed(tx, run_id, partition)
            if failed:
                await self._revive(tx, run, failed, by)
            elif partition is None and run.state is HarvestRunState.FAILED and run.completed == run.expected:
                await store.move_run(tx, run_id, run.state, "resume", by, self.db.clock.now())
                await self._bus.publish([make_consolidation(run_id, run.trace_id)], tx=tx)
            else:
                raise await self._make_nothing_failed_error(tx, run, partition)
        await flush_outbox(self._bus)
        return [part.name for part in failed]

    async def force(self, run_id: UUID, by: str, reason: str) -> None:
        """H5: consolidate a run despite its failures, and record actor and reason."""
        if not reason.strip():
            hint = f"penstock harvest force {run_id} --reason 'confirmed by the supplier'"
            raise Invalid("REASON_MISSING", "a reason is required; it is stored with the run", hint=hint)
        async with self.db.transaction() as tx:
            run = await self._lock_run(tx, run_id)
            await self._require_latest(tx, run)
            now = self.db.clock.now()
            await store.move_run(tx, run_id, run.state, "force", by, now, f"forced: {reason}")
            await store.force_run(tx, run_id, by, reason)
            await self._bus.publish([make_consolidation(run_id, run.trace_id, force=True)], tx=tx)
            message = f"{by} forced the consolidation of run {run_id} of {run.feed}: {reason}"
            await raise_alert(tx, run.feed, run_id, AlertCode.RUN_FORCED, AlertSeverity.WARNING, message, now)
        await flush_outbox(self._bus)

    async def cancel(self, run_id: UUID, by: str, reason: str = "cancelled") -> None:
        """Stop a run that is being planned or fetched; its unfinished partitions count as failed."""
        error = f"CANCELLED: by {by}: {reason}"
        async with self.db.transaction() as tx:
            feed = await store.settle_plan(tx, run_id, PlanState.FAILED, by, self.db.clock.now(), error=error)
            code = AlertCode.PLAN_FAILED if feed else AlertCode.CONSOLIDATION_SKIPPED
            feed = feed or await self._cancel_fetching(tx, run_id, by, error)
        log_failed_run(feed, run_id, code, error)
        await flush_outbox(self._bus)

    async def _cancel_fetching(self, tx: Connection, run_id: UUID, by: str, error: str) -> str:
        run, now = await self._lock_run(tx, run_id), self.db.clock.now()
        if run.state not in RUN.groups["fetching"]:
            hint = "only a run that is being planned or fetched can be cancelled"
            raise Conflict("NOT_FETCHING", f"run {run_id} is {run.state.value}", hint=hint)
        if run.state is HarvestRunState.CREATED:
            await store.move_run(tx, run_id, run.state, "begin", by, now)
        ended = [
            EndedPartition(name, PartitionState.FAILED, seen, error)
            for name, seen in await partitions.list_unfinished(tx, run_id)
        ]
        for part in ended:
            await partitions.record_work(tx, run_id, part, make_id(self.db.clock), by, now)
        await end_partitions(tx, self._bus, run.feed, run_id, run.trace_id, ended, by, now)
        return run.feed

    async def _request_run(self, tx: Connection, feed: str, by: str, *, full: bool, run_id: UUID | None = None) -> UUID:
        run_id, trace_id = run_id or make_id(self.db.clock), make_id(self.db.clock).hex
        run_type = HarvestRunType.FULL if full else None
        await store.insert_plan(tx, run_id, feed, run_type, by, self.db.clock.now(), trace_id)
        message = msgspec.json.encode(PlanMessage(run_id, feed, trace_id))
        await self._bus.publish([BusMessage(PLANS, feed, message)], tx=tx)
        return run_id

    async def _lock_run(self, tx: Connection, run_id: UUID) -> RunRow:
        """Lock the feed, the partitions and the run until the end of the transaction, and return the run."""
        run = await store.read_run(tx, run_id)
        if run is None:
            raise await self._make_missing_run_error(tx, run_id)
        await store.lock_feed(tx, run.feed)
        await partitions.lock_all(tx, run_id)
        return await store.read_run(tx, run_id, lock=True) or run

    async def _revive(self, tx: Connection, run: RunRow, failed: Sequence[FailedPartition], by: str) -> None:
        now, names = self.db.clock.now(), [part.name for part in failed]
        if run.state not in RUN.groups["fetching"]:
            await store.move_run(tx, run.run_id, run.state, "retry", by, now)
        await partitions.revive(tx, run.run_id, names, now)
        revived = [EndedPartition(name, PartitionState.RUNNING, 0) for name in names]
        await partitions.append_moves(tx, run.run_id, revived, PartitionState.FAILED, by, now)
        items = [make_work_item(run.run_id, part.name, part.offset, part.scan, run.trace_id) for part in failed]
        await self._bus.publish(items, tx=tx)

    async def _require_inactive(self, tx: Connection, feed: str, other_than: UUID | None = None) -> None:
        active = await store.find_active_run(tx, feed)
        if active is not None and active != other_than:
            hint = f"wait for its end, or run `penstock harvest cancel {active}`"
            raise Conflict("RUN_ACTIVE", f"run {active} of {feed} is active", hint=hint, runId=str(active))

    async def _require_latest(self, tx: Connection, run: RunRow) -> None:
        """Raise Conflict unless *run* is the last one of its feed: a later run has fetched the same data."""
        await self._require_inactive(tx, run.feed, other_than=run.run_id)
        latest = await store.find_latest_run(tx, run.feed)
        if latest != run.run_id:
            hint = f"a later run fetches the same data; start one: penstock harvest run {run.feed}"
            raise Conflict("RUN_SUPERSEDED", f"run {latest} of {run.feed} is later than run {run.run_id}", hint=hint)

    async def _make_missing_run_error(self, tx: Connection, run_id: UUID) -> Conflict | NotFound:
        if (plan := await store.read_plan(tx, run_id)) is not None:
            hint = f"when it has ended, start another run: penstock harvest run {plan.feed}"
            return Conflict("RUN_NOT_STARTED", f"run {run_id} has not started: it is {plan.state.value}", hint=hint)
        return make_run_not_found_error(run_id)

    async def _make_nothing_failed_error(
        self, tx: Connection, run: RunRow, partition: str | None
    ) -> Conflict | NotFound:
        hint = f"list the partitions: penstock harvest partitions {run.run_id}"
        if partition is None:
            return Conflict("NOTHING_FAILED", f"run {run.run_id} is {run.state.value}; no partition failed", hint=hint)
        if partition not in await partitions.lock_all(tx, run.run_id):
            return NotFound("PARTITION_NOT_FOUND", f"run {run.run_id} has no partition {partition}", hint=hint)
        return Conflict("NOTHING_FAILED", f"partition {partition} of run {run.run_id} has not failed", hint=hint)
