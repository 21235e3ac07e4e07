"""What flows do by themselves, now and then: take back, repair, begin what waited, keep schedules, forget."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta

import asyncpg
import orjson
import structlog
from opentelemetry.trace import NoOpTracer, Tracer

from penstock.flows import artifacts, store
from penstock.flows.contract import ARTIFACT_FOLDERS, DOCUMENT_LIMIT, FlowRunStatus, StepStatus
from penstock.flows.definition import schedule
from penstock.flows.definition.catalogue import FlowCatalogue
from penstock.flows.definition.spec import FlowSpec, RunRequest
from penstock.flows.engine.decide import given_up, is_to_stop
from penstock.flows.engine.engine import PUBLISHING, RUNS, FlowEngine
from penstock.flows.engine.operations import RunOperations
from penstock.flows.engine.plan import ADVANCE, begin
from penstock.flows.metrics import FlowMetrics
from penstock.flows.model import RUN, StepEnd, StepError, StepSettlement
from penstock.kernel.db.database import Connection
from penstock.kernel.db.locks import acquire_transaction_lock
from penstock.kernel.errors import Conflict, PenstockError, Transient
from penstock.kernel.storage import Storage
from penstock.kernel.tasks.periodic import PeriodicTask
from penstock.kernel.tasks.wait import wait_event
from penstock.kernel.telemetry.telemetry import current_traceparent

SCHEDULE = "schedule"
_MANY = 100
_PAGE = 500  # runs that are looked over at once
_SECOND = timedelta(seconds=1)
_LOOK = 1.0  # seconds after which ends nobody rang for are looked for


class FlowMaintenance:
    """Does what nobody asks for. Any number of processes may do it at once."""

    def __init__(
        self,
        engine: FlowEngine,
        catalogue: FlowCatalogue,
        storage: Storage,
        metrics: FlowMetrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._engine = engine
        self._tracer = tracer or NoOpTracer()
        self._metrics = metrics
        self._db = engine.db
        self._catalogue = catalogue
        self._storage = storage
        self._operations = RunOperations(engine, storage)

    def chores(self) -> Sequence[tuple[str, PeriodicTask, timedelta]]:
        """Each with its name and how often it is done."""
        return [
            ("flows reaper", self.reap, _SECOND),
            ("flows ends", self.follow_ends, _SECOND / 50),
            ("flows schedule", self.keep_schedules, _SECOND),
            ("flows publishing", self.publish_again, 5 * _SECOND),
            ("flows repair", self.repair, 60 * _SECOND),
            ("flows metrics", self.show_metrics, 5 * _SECOND),
            ("flows retention", self.forget_old_runs, 600 * _SECOND),
        ]

    async def reap(self) -> None:
        """F11: take back what was lost."""
        while await self._engine.reap():
            pass

    async def publish_again(self) -> None:
        """F6: publish what reports left whose process died before it could."""
        before = self._db.clock.now() - PUBLISHING
        for row in await self._db.fetch(store.SQL["sealed_since"], before, _MANY):
            try:
                await self._engine.finish_sealed((row["run"], row["n"]))
            except PenstockError as error:  # one that cannot be published must not hold up the others
                structlog.get_logger().warning("publishing_failed", run=row["run"], n=row["n"], error=error.message)

    async def repair(self) -> int:
        """F3: set right what a crash left; returns how many runs were astray."""
        last, total = 0, 0
        while page := [row["id"] for row in await self._db.fetch(store.SQL["runs_under_way"], last, _PAGE)]:
            for row in await self._db.fetch(store.SQL["astray"], page):
                total += await self._repair_run(row["id"])
            last = page[-1]
        if self._metrics is not None:
            self._metrics.repaired(total)
        return total

    async def show_metrics(self) -> None:
        """F18: tell how much waits."""
        if self._metrics is not None:
            ready = await self._db.fetch(store.SQL["ready_by_kind"], self._db.clock.now())
            self._metrics.standing(ready, await self._db.fetch(store.SQL["active_runs"]))

    async def _repair_run(self, run: int) -> bool:
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            held = await store.lock_runs(tx, [run])
            if run not in held or held[run]["status"] != FlowRunStatus.RUNNING:
                return False
            wrong = await tx.fetch(store.SQL["recount"], run)
            await tx.fetch(store.SQL["recount_run"], run, False)
            told = await store.advance(tx, [run], now)
            told.to_evaluate += [(row["run"], row["n"]) for row in await tx.fetch(store.SQL["ready_maps"], run)]
            is_astray = bool(wrong or told.ready or told.to_evaluate)
            await self._engine.advance.follow(tx, told, now)
            is_ended = await self._end_if_done(tx, run, told, now)
        self._engine.announce(told)
        if is_astray or is_ended:
            structlog.get_logger().warning("flow_run_repaired", run=held[run]["run_id"])
        return is_astray or is_ended

    async def _end_if_done(self, tx: Connection, run: int, told: StepSettlement, now: datetime) -> bool:
        standing = await tx.fetchrow(store.SQL["standing_of"], run)
        if standing is None or standing["status"] != FlowRunStatus.RUNNING or standing["open"]:
            return False
        target = FlowRunStatus.FAILED if standing["failed"] else FlowRunStatus.SUCCEEDED
        await store.move_run(tx, run, FlowRunStatus.RUNNING, target, ADVANCE, now)
        told.runs.append((run, "", target))
        return True

    async def follow_ends(self) -> None:
        """F14, F16: when a run has ended, its outer step ends, and one that waited may begin."""
        notified = self._engine.notifier.next_event(RUNS)
        await self.tell_outer()
        await self.admit()
        await wait_event(notified, _LOOK)

    async def tell_outer(self) -> None:
        """F14: end the steps of inner runs that ended, and cancel inner runs whose steps are over."""
        for row in await self._db.fetch(store.SQL["untold"], _MANY):
            try:
                await self._follow_inner(row)
            except Transient:
                raise
            except (PenstockError, ValueError) as error:  # one that cannot be told must not hold up the others
                structlog.get_logger().error("inner_run_untold", run=row["run_id"], error=str(error))

    async def _follow_inner(self, row: asyncpg.Record) -> None:
        if FlowRunStatus(row["status"]) in RUN.groups["ended"]:
            await self._tell(row)
            return
        with suppress(Conflict):  # it has ended meanwhile
            await self._operations.cancel(row["run_id"], ADVANCE, "the step it belongs to is over")

    async def _tell(self, inner: asyncpg.Record) -> None:
        place = (inner["parent_run"], inner["parent_n"])
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            await store.lock_runs(tx, [place[0]])
            await tx.execute(store.SQL["tell"], inner["id"])
            [row] = await store.steps_at(tx, [place])
            told = StepSettlement()
            if row["status"] == StepStatus.RUNNING and (row["given"] or {}).get("runId") == inner["run_id"]:
                told = await store.settle(tx, [await _outcome(tx, row, inner)], now, ADVANCE)
                await self._engine.advance.follow(tx, told, now)
        self._engine.announce(told)

    async def admit(self) -> None:
        """F16: begin runs that waited for others of their flow to end."""
        for row in await self._db.fetch(store.SQL["waiting_flows"]):
            await self._admit(row["flow"])

    async def _admit(self, flow: str) -> None:
        most = self._engine.most_active(flow)
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            await acquire_transaction_lock(tx, f"flows admit {flow}")
            room = _MANY if most is None else most - await store.count_active(tx, flow)
            told = StepSettlement()
            for row in await tx.fetch(store.SQL["waiting_runs"], flow, room) if room > 0 else []:
                told.add(await begin(tx, row["id"], now))
            await self._engine.advance.follow(tx, told, now)
        self._engine.announce(told)

    async def keep_schedules(self) -> None:
        """F16: start the runs whose time has come."""
        for spec in self._catalogue.list_flows().values():
            if spec.schedule is not None:
                try:
                    await self._keep_schedule(spec)
                except Transient:
                    raise
                except (PenstockError, ValueError) as error:  # one flow that makes no sense must not hold up the others
                    structlog.get_logger().error("flow_schedule_failed", flow=spec.name, error=str(error))

    async def _keep_schedule(self, spec: FlowSpec) -> None:
        plan = spec.schedule
        if plan is None:
            return
        now = self._db.clock.now()
        kept = await self._db.fetchrow(store.SQL["schedule_of"], spec.name)
        if kept is None:
            await self._db.execute(store.SQL["begin_schedule"], spec.name, now)
            return
        due = [] if kept["is_paused"] else schedule.list_due(plan, kept["kept_until"], now)
        if not due:
            return
        is_active = not plan.overlap and await self._db.fetchval(store.SQL["is_active"], kept["last_run"])
        if is_active:
            if plan.catch_up != "all":
                await self._db.execute(
                    store.SQL["schedule_kept"], spec.name, due[0], None, "its last run was under way"
                )
            return
        # The run's name is its time: whoever else keeps the schedule makes the same one, not another.
        name = f"{spec.name}-{due[0]:%Y%m%dT%H%M%SZ}"
        with suppress(Conflict):  # made before the flow was written anew
            request = RunRequest(run_id=name, flow=spec.name, scope=plan.scope)
            with self._tracer.start_as_current_span("flow.schedule"):
                await self._engine.create(request, SCHEDULE, scheduled_for=due[0], trace=current_traceparent())
        await self._db.execute(store.SQL["schedule_kept"], spec.name, due[0], name, None)

    async def forget_old_runs(self) -> None:
        """Forget runs that ended long ago, with what they left."""
        before = self._db.clock.now() - self._engine.section.retention
        while old := await self._db.fetch(store.SQL["old_runs"], before, _MANY):
            # What they left first: nobody would know of it without them.
            for row in old:
                for folder in ("attempts", "runs", *ARTIFACT_FOLDERS.values()):
                    await artifacts.forget(self._storage, f"{folder}/{row['run_id']}")
            await self._db.execute(store.SQL["prune_runs"], [row["id"] for row in old], before)


async def _outcome(tx: Connection, row: asyncpg.Record, inner: asyncpg.Record) -> StepEnd:
    if inner["status"] == FlowRunStatus.CANCELLED and is_to_stop(row):
        return StepEnd(
            row["run"], row["n"], row["fence"], StepStatus.RUNNING, StepStatus.CANCELLED, reason=inner["reason"]
        )
    if inner["status"] == FlowRunStatus.SUCCEEDED:
        last = await tx.fetch(store.SQL["last_outputs"], inner["id"])
        given = {one["step_id"]: one["outputs"] for one in last}
        is_whole = len(orjson.dumps(given)) <= DOCUMENT_LIMIT
        outputs = {"runId": inner["run_id"], "outputs": given if is_whole else None, "truncated": not is_whole}
        return StepEnd(row["run"], row["n"], row["fence"], StepStatus.RUNNING, StepStatus.SUCCEEDED, outputs=outputs)
    code = "INNER_RUN_FAILED" if inner["status"] == FlowRunStatus.FAILED else "INNER_RUN_CANCELLED"
    error = StepError(code, f"run {inner['run_id']}: {inner['reason'] or inner['status']}", {"runId": inner["run_id"]})
    return given_up(row, error)
