"""What people and schedules do with feeds: start runs, take failed ones up again, force or cancel them."""

from datetime import timedelta
from uuid import UUID

import msgspec

from penstock.harvest import store
from penstock.harvest.alerts import AlertCode, AlertSeverity, raise_alert
from penstock.harvest.config import HarvestSection
from penstock.harvest.contract import PLANS, HarvestRunState, HarvestRunType, PartitionState, PlanMessage, PlanState
from penstock.harvest.feed.feeds import known_feed
from penstock.harvest.fetch import partitions
from penstock.harvest.fetch.partitions import EndedPartition, consolidation, end_partitions, hurry, work_item
from penstock.harvest.model import RUN, no_run
from penstock.harvest.store import RunRow
from penstock.kernel.bus import Bus, BusMessage
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.errors import Conflict, Invalid, NotFound
from penstock.kernel.ids import new_id

SCHEDULE = "schedule"


class Harvest:
    """Decisions about runs. Whoever takes several locks takes the feed's first, then partitions', then the run's."""

    def __init__(self, db: Database, bus: Bus, section: HarvestSection) -> None:
        self.section = section
        self.db = db
        self._bus = bus

    async def start(self, feed: str, by: str, *, full: bool = False, run_id: UUID | None = None) -> UUID:
        """H2: have a run planned; Conflict RUN_ACTIVE while one is under way. One that has that *run_id* is the one."""
        known_feed(self.section, feed)
        async with self.db.transaction() as tx:
            await store.lock_feed(tx, feed)
            if run_id is not None and await store.plan(tx, run_id):
                return run_id
            await self._refuse_active(tx, feed)
            await store.close_breaker(tx, feed)
            run_id = await self._ask(tx, feed, by, full=full, run_id=run_id)
        await hurry(self._bus)
        return run_id

    async def start_due(self, feed: str, every: timedelta, full_every: timedelta) -> UUID | None:
        """Have a run planned, now and then a full one, unless one is under way or was asked for not long ago."""
        async with self.db.transaction() as tx:
            await store.lock_feed(tx, feed)
            now, last, last_full = (
                self.db.clock.now(),
                await store.last_asked(tx, feed),
                await store.last_full(tx, feed),
            )
            is_due = last is None or last + every <= now
            if not is_due or await store.active_run(tx, feed):
                return None
            full = last_full is None or last_full + full_every <= now
            run_id = await self._ask(tx, feed, SCHEDULE, full=full)
        await hurry(self._bus)
        return run_id

    async def retry(self, run_id: UUID, by: str, partition: str | None = None) -> list[str]:
        """H11: take failed partitions up where they stopped, or consolidation where all partitions are there."""
        async with self.db.transaction() as tx:
            run = await self._held(tx, run_id)
            await self._refuse_superseded(tx, run)
            await store.close_breaker(tx, run.feed)
            await store.unforce(tx, run_id)
            failed = await partitions.failed_partitions(tx, run_id, partition)
            if failed:
                await self._revive(tx, run, failed, by)
            elif partition is None and run.state is HarvestRunState.FAILED and run.completed == run.expected:
                await store.move_run(tx, run_id, run.state, "resume", by, self.db.clock.now())
                await self._bus.publish([consolidation(run_id, run.trace_id)], tx=tx)
            else:
                raise await self._nothing_failed(tx, run, partition)
        await hurry(self._bus)
        return [name for name, _, _ in failed]

    async def force(self, run_id: UUID, by: str, reason: str) -> None:
        """H5: consolidate in spite of failures; who wanted it and why is kept."""
        if not reason.strip():
            raise Invalid("REASON_MISSING", "say why: it is kept with the run", hint="--reason 'supplier confirmed …'")
        async with self.db.transaction() as tx:
            run = await self._held(tx, run_id)
            await self._refuse_superseded(tx, run)
            now = self.db.clock.now()
            await store.move_run(tx, run_id, run.state, "force", by, now, f"forced: {reason}")
            await store.force(tx, run_id, by, reason)
            await self._bus.publish([consolidation(run_id, run.trace_id, force=True)], tx=tx)
            message = f"{by} forced the consolidation of run {run_id} of {run.feed}: {reason}"
            await raise_alert(tx, run.feed, run_id, AlertCode.RUN_FORCED, AlertSeverity.WARNING, message, now)
        await hurry(self._bus)

    async def cancel(self, run_id: UUID, by: str, reason: str = "cancelled") -> None:
        """Stop a run whose partitions are being fetched: those not at their end count as failed."""
        async with self.db.transaction() as tx:
            now, error = self.db.clock.now(), f"CANCELLED: by {by}: {reason}"
            if await store.settle_plan(tx, run_id, PlanState.FAILED, by, now, error=error):
                return
            run = await self._held(tx, run_id)
            if run.state not in RUN.groups["fetching"]:
                raise Conflict("NOT_FETCHING", f"run {run_id} is {run.state.value}", hint="there is nothing to cancel")
            if run.state is HarvestRunState.CREATED:
                await store.move_run(tx, run_id, run.state, "begin", by, now)
            ended = [
                EndedPartition(name, PartitionState.FAILED, seen, error)
                for name, seen in await partitions.unfinished_partitions(tx, run_id)
            ]
            for one in ended:
                await partitions.note_work(tx, run_id, one, new_id(self.db.clock), by, now)
            await end_partitions(tx, self._bus, run.feed, run_id, run.trace_id, ended, by, now)
        await hurry(self._bus)

    async def _ask(self, tx: Connection, feed: str, by: str, *, full: bool, run_id: UUID | None = None) -> UUID:
        run_id, trace_id = run_id or new_id(self.db.clock), new_id(self.db.clock).hex
        wanted = HarvestRunType.FULL if full else None
        await store.ask(tx, run_id, feed, wanted, by, self.db.clock.now(), trace_id)
        message = msgspec.json.encode(PlanMessage(run_id, feed, trace_id))
        await self._bus.publish([BusMessage(PLANS, feed, message)], tx=tx)
        return run_id

    async def _held(self, tx: Connection, run_id: UUID) -> RunRow:
        """The run with its feed and partitions, held until the end of the transaction."""
        run = await store.run(tx, run_id)
        if run is None:
            raise await self._no_run(tx, run_id)
        await store.lock_feed(tx, run.feed)
        await partitions.lock_partitions(tx, run_id)
        return await store.run(tx, run_id, lock=True) or run

    async def _revive(self, tx: Connection, run: RunRow, failed: list[tuple[str, int, int]], by: str) -> None:
        now, names = self.db.clock.now(), [name for name, _, _ in failed]
        if run.state not in RUN.groups["fetching"]:
            await store.move_run(tx, run.run_id, run.state, "retry", by, now)
        await partitions.revive(tx, run.run_id, names, now)
        ended = [EndedPartition(name, PartitionState.RUNNING, 0) for name in names]
        await partitions.note_partitions(tx, run.run_id, ended, PartitionState.FAILED, by, now)
        items = [work_item(run.run_id, name, offset, scan, run.trace_id) for name, offset, scan in failed]
        await self._bus.publish(items, tx=tx)

    async def _refuse_active(self, tx: Connection, feed: str, but: UUID | None = None) -> None:
        active = await store.active_run(tx, feed)
        if active is not None and active != but:
            hint = "wait for it, or `penstock harvest cancel` it"
            raise Conflict("RUN_ACTIVE", f"run {active} of {feed} is under way", hint=hint, runId=str(active))

    async def _refuse_superseded(self, tx: Connection, run: RunRow) -> None:
        """An old run is not taken up again: a later one took what it would take."""
        await self._refuse_active(tx, run.feed, but=run.run_id)
        if await store.latest_run(tx, run.feed) != run.run_id:
            hint = "the next run takes the same data again"
            raise Conflict("RUN_SUPERSEDED", f"a later run of {run.feed} exists", hint=hint)

    async def _no_run(self, tx: Connection, run_id: UUID) -> Conflict | NotFound:
        if (plan := await store.plan(tx, run_id)) is not None:
            hint = "`penstock harvest run` starts another, once this one is at its end"
            return Conflict("RUN_NOT_STARTED", f"run {run_id} has not begun: it is {plan.state.value}", hint=hint)
        return no_run(run_id)

    async def _nothing_failed(self, tx: Connection, run: RunRow, partition: str | None) -> Conflict | NotFound:
        if partition is not None and partition not in await partitions.lock_partitions(tx, run.run_id):
            hint = f"`penstock harvest partitions {run.run_id}` lists them"
            return NotFound("PARTITION_NOT_FOUND", f"run {run.run_id} has no {partition}", hint=hint)
        what = partition or f"run {run.run_id}"
        return Conflict("NOTHING_FAILED", f"nothing of {what} failed", hint=f"the run is {run.state.value}")
