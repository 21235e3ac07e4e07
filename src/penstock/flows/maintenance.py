"""Periodic maintenance of flows: reap, publish, repair, start waiting and scheduled runs, delete old runs."""

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
from penstock.flows.engine.decide import make_failure, must_stop
from penstock.flows.engine.engine import PUBLISH_TIMEOUT, RUNS, FlowEngine
from penstock.flows.engine.operations import RunOperations
from penstock.flows.engine.plan import ADVANCE, start_run
from penstock.flows.metrics import FlowMetrics
from penstock.flows.model import RUN, StepEnd, StepError, StepSettlement
from penstock.kernel.db.database import Connection
from penstock.kernel.db.locks import acquire_transaction_lock
from penstock.kernel.errors import Conflict, PenstockError, Transient
from penstock.kernel.storage import Storage
from penstock.kernel.tasks.periodic import PeriodicTask
from penstock.kernel.tasks.wait import wait_event
from penstock.kernel.telemetry.telemetry import format_traceparent

SCHEDULE = "schedule"
_BATCH = 100
_PAGE = 500  # runs that one statement checks
_SECOND = timedelta(seconds=1)
_POLL = 1.0  # seconds; a lost notification of an ended run delays its effects by this time at most
_log = structlog.get_logger()


class FlowMaintenance:
    """Periodic maintenance of runs; several processes may execute it at the same time."""

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

    def list_periodic_tasks(self) -> Sequence[tuple[str, PeriodicTask, timedelta]]:
        """Return the tasks, each with its name and its interval."""
        return [
            ("flows reaper", self.reap, _SECOND),
            ("flows ends", self.handle_ended_runs, _SECOND / 50),
            ("flows schedule", self.start_scheduled_runs, _SECOND),
            ("flows publishing", self.publish_sealed, 5 * _SECOND),
            ("flows repair", self.repair, 60 * _SECOND),
            ("flows metrics", self.update_metrics, 5 * _SECOND),
            ("flows retention", self.delete_old_runs, 600 * _SECOND),
        ]

    async def reap(self) -> None:
        """F11: take back steps with an expired lease."""
        while await self._engine.reap():
            pass

    async def publish_sealed(self) -> None:
        """F6: publish the artifacts of accepted reports whose process died before it could."""
        before = self._db.clock.now() - PUBLISH_TIMEOUT
        for row in await self._db.fetch(store.SQL["sealed_before"], before, _BATCH):
            try:
                await self._engine.finish_sealed((row["run"], row["n"]))
            except PenstockError as error:  # one failure must not delay the other steps
                name = {"run": row["run_id"], "step": row["step_id"]}
                _log.warning("flow_publication_failed", **name, code=error.code, error=error.message)

    async def repair(self) -> int:
        """F3: repair inconsistent runs after a crash; return their number."""
        last, total = 0, 0
        while page := [row["id"] for row in await self._db.fetch(store.SQL["running_runs"], last, _PAGE)]:
            for row in await self._db.fetch(store.SQL["inconsistent_runs"], page):
                total += await self._repair_run(row["id"])
            last = page[-1]
        if self._metrics is not None:
            self._metrics.count_repaired(total)
        return total

    async def update_metrics(self) -> None:
        """F18: update the gauges of ready steps and active runs."""
        if self._metrics is not None:
            ready = await self._db.fetch(store.SQL["count_ready_steps"], self._db.clock.now())
            self._metrics.set_gauges(ready, await self._db.fetch(store.SQL["count_active_runs"]))

    async def _repair_run(self, run: int) -> bool:
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            locked = await store.lock_runs(tx, [run])
            if run not in locked or locked[run]["status"] != FlowRunStatus.RUNNING:
                return False
            recounted = await tx.fetch(store.SQL["recount"], run)
            await tx.fetch(store.SQL["recount_run"], run, False)
            settlement = await store.advance(tx, [run], now)
            settlement.to_evaluate += [
                (row["run"], row["n"]) for row in await tx.fetch(store.SQL["completed_maps"], run)
            ]
            is_repaired = bool(recounted or settlement.ready or settlement.to_evaluate)
            await self._engine.advance.follow(tx, settlement, now)
            is_ended = await self._end_if_complete(tx, run, settlement, now)
        if is_repaired or is_ended:
            _log.warning("flow_run_repaired", run=locked[run]["run_id"], flow=locked[run]["flow"])
        self._engine.announce(settlement)
        return is_repaired or is_ended

    async def _end_if_complete(self, tx: Connection, run: int, settlement: StepSettlement, now: datetime) -> bool:
        progress = await tx.fetchrow(store.SQL["run_progress"], run)
        if progress is None or progress["status"] != FlowRunStatus.RUNNING or progress["open"]:
            return False
        target = FlowRunStatus.FAILED if progress["failed"] else FlowRunStatus.SUCCEEDED
        settlement.runs.append(await store.move_run(tx, run, FlowRunStatus.RUNNING, target, ADVANCE, now))
        return True

    async def handle_ended_runs(self) -> None:
        """F14, F16: settle the steps of ended sub-runs, and start runs that waited for an ended run."""
        notified = self._engine.notifier.get_next_event(RUNS)
        await self.settle_sub_runs()
        await self.start_waiting_runs()
        await wait_event(notified, _POLL)

    async def settle_sub_runs(self) -> None:
        """F14: end the steps of sub-runs that have ended, and cancel sub-runs whose steps have ended."""
        for row in await self._db.fetch(store.SQL["unreported_runs"], _BATCH):
            try:
                await self._settle_sub_run(row)
            except Transient:
                raise
            except (PenstockError, ValueError) as error:  # one failure must not delay the other sub-runs
                _log.error("flow_sub_run_report_failed", run=row["run_id"], error=str(error))

    async def _settle_sub_run(self, row: asyncpg.Record) -> None:
        if FlowRunStatus(row["status"]) in RUN.groups["ended"]:
            await self._report_to_parent(row)
            return
        with suppress(Conflict):  # the sub-run has ended meanwhile
            await self._operations.cancel(row["run_id"], ADVANCE, "the step of the sub-run has ended")

    async def _report_to_parent(self, sub_run: asyncpg.Record) -> None:
        key = (sub_run["parent_run"], sub_run["parent_n"])
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            await store.lock_runs(tx, [key[0]])
            await tx.execute(store.SQL["mark_reported"], sub_run["id"])
            [row] = await store.read_steps(tx, [key])
            settlement = StepSettlement()
            if row["status"] == StepStatus.RUNNING and (row["resolved_inputs"] or {}).get("runId") == sub_run["run_id"]:
                settlement = await store.settle(tx, [await _make_parent_end(tx, row, sub_run)], now, ADVANCE)
                await self._engine.advance.follow(tx, settlement, now)
        self._engine.announce(settlement)

    async def start_waiting_runs(self) -> None:
        """F16: start runs that waited for other runs of their flow to end."""
        for row in await self._db.fetch(store.SQL["waiting_flows"]):
            await self._start_waiting_runs(row["flow"])

    async def _start_waiting_runs(self, flow: str) -> None:
        limit = self._engine.get_max_active_runs(flow)
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            await acquire_transaction_lock(tx, f"flows admit {flow}")
            capacity = _BATCH if limit is None else limit - await store.count_running_runs(tx, flow)
            settlement = StepSettlement()
            for row in await tx.fetch(store.SQL["waiting_runs"], flow, capacity) if capacity > 0 else []:
                settlement.add(await start_run(tx, row["id"], now))
            await self._engine.advance.follow(tx, settlement, now)
        self._engine.announce(settlement)

    async def start_scheduled_runs(self) -> None:
        """F16: start the runs that are due by the schedules of their flows."""
        for spec in self._catalogue.list_flows().values():
            if spec.schedule is not None:
                try:
                    await self._apply_schedule(spec)
                except Transient:
                    raise
                except (PenstockError, ValueError) as error:  # one failure must not delay the other flows
                    _log.error("flow_schedule_failed", flow=spec.name, error=str(error))

    async def _apply_schedule(self, spec: FlowSpec) -> None:
        plan = spec.schedule
        if plan is None:
            return
        now = self._db.clock.now()
        state = await self._db.fetchrow(store.SQL["find_schedule"], spec.name)
        if state is None:
            await self._db.execute(store.SQL["insert_schedule"], spec.name, now)
            return
        due = [] if state["is_paused"] else schedule.list_due(plan, state["evaluated_until"], now)
        if not due:
            return
        is_active = not plan.overlap and await self._db.fetchval(store.SQL["is_run_active"], state["last_run"])
        if is_active:
            if plan.catch_up != "all":
                note = "the previous run was still active"
                await self._db.execute(store.SQL["update_schedule"], spec.name, due[0], None, note)
            return
        # The run id is derived from the time, so that several processes create the same run, not several.
        name = f"{spec.name}-{due[0]:%Y%m%dT%H%M%SZ}"
        with suppress(Conflict):  # created before the flow was changed
            request = RunRequest(run_id=name, flow=spec.name, scope=plan.scope)
            with self._tracer.start_as_current_span("flow.schedule"):
                await self._engine.create(request, SCHEDULE, scheduled_for=due[0], trace=format_traceparent())
        await self._db.execute(store.SQL["update_schedule"], spec.name, due[0], name, None)

    async def delete_old_runs(self) -> None:
        """Delete runs that ended before the retention time, with their artifacts."""
        before = self._db.clock.now() - self._engine.section.retention
        while runs := await self._db.fetch(store.SQL["expired_runs"], before, _BATCH):
            # The artifacts first: after the rows are deleted, no record of them is left.
            for row in runs:
                for folder in ("attempts", "runs", *ARTIFACT_FOLDERS.values()):
                    await artifacts.delete_folder(self._storage, f"{folder}/{row['run_id']}")
            await self._db.execute(store.SQL["delete_runs"], [row["id"] for row in runs], before)


async def _make_parent_end(tx: Connection, row: asyncpg.Record, sub_run: asyncpg.Record) -> StepEnd:
    """Return the end of the step that started an ended sub-run."""
    run_id = sub_run["run_id"]
    end = StepEnd(row["run"], row["n"], row["fence"], StepStatus.RUNNING, StepStatus.SUCCEEDED)
    if sub_run["status"] == FlowRunStatus.CANCELLED and must_stop(row):
        return end._replace(target=StepStatus.CANCELLED, reason=sub_run["reason"])
    if sub_run["status"] == FlowRunStatus.SUCCEEDED:
        steps = await tx.fetch(store.SQL["last_outputs"], sub_run["id"])
        outputs = {step["step_id"]: step["outputs"] for step in steps}
        is_complete = len(orjson.dumps(outputs)) <= DOCUMENT_LIMIT
        document = {"runId": run_id, "outputs": outputs if is_complete else None, "truncated": not is_complete}
        return end._replace(outputs=document)
    code = "INNER_RUN_FAILED" if sub_run["status"] == FlowRunStatus.FAILED else "INNER_RUN_CANCELLED"
    error = StepError(code, f"sub-run {run_id}: {sub_run['reason'] or sub_run['status']}", {"runId": run_id})
    return make_failure(row, error)
