"""F9, F10, F19: the operations of users on runs: cancel, retry, skip, resume."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import asyncpg
import structlog

from penstock.flows import artifacts, store
from penstock.flows.contract import FlowRunStatus, StepStatus
from penstock.flows.definition.spec import StepSpec
from penstock.flows.engine import plan
from penstock.flows.engine.engine import FlowEngine
from penstock.flows.model import (
    RUN,
    STEP,
    Json,
    NewRun,
    NewStep,
    StepEnd,
    StepSettlement,
    make_run_not_found_error,
    make_step_not_found_error,
)
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Conflict
from penstock.kernel.ids import make_id
from penstock.kernel.storage import Storage

_log = structlog.get_logger()


@dataclass(frozen=True)
class RunGraph:
    """All steps of a run with their dependencies, by index."""

    rows: Mapping[int, asyncpg.Record]

    def find_step(self, step_id: str, run_id: str) -> asyncpg.Record:
        """Return the step with this name, or raise NotFound."""
        for row in self.rows.values():
            if row["step_id"] == step_id:
                return row
        raise make_step_not_found_error(run_id, step_id)

    def select(self, statuses: Iterable[StepStatus]) -> set[int]:
        """Return the indexes of the steps in these statuses, without the items of maps."""
        selected = {status.value for status in statuses}
        return {n for n, row in self.rows.items() if row["status"] in selected and row["map_n"] is None}

    def select_items(self, indexes: Iterable[int]) -> set[int]:
        """Return the indexes of the items of the maps among some steps."""
        maps = set(indexes)
        return {n for n, row in self.rows.items() if row["map_n"] in maps}

    def collect_ancestors(self, index: int) -> set[int]:
        """Return the indexes of all steps that a step depends on, directly or not."""
        return self._collect([index], "depends_on")

    def collect_descendants(self, indexes: Iterable[int]) -> set[int]:
        """Return the indexes of all steps that depend on some steps, directly or not."""
        return self._collect(indexes, "children")

    def _collect(self, indexes: Iterable[int], column: str) -> set[int]:
        collected: set[int] = set()
        pending = list(indexes)
        while pending:
            new = set(self.rows[pending.pop()][column]) - collected
            collected |= new
            pending.extend(new)
        return collected


class RunOperations:
    """The operations of users on runs."""

    def __init__(self, engine: FlowEngine, storage: Storage) -> None:
        self._engine = engine
        self._db = engine.db
        self._storage = storage

    async def cancel(self, run_id: str, by: str, reason: str = "cancelled") -> FlowRunStatus:
        """F9: cancel a run: waiting steps do not start, and running steps must stop at their next heartbeat.

        The run stays as it is if it was cancelled before; Conflict RUN_ENDED if it has succeeded or failed.
        """
        async with self._db.transaction() as tx:
            run, status = await self._lock_run(tx, run_id)
            if status is FlowRunStatus.CANCELLED:
                return status
            if status not in RUN.groups["active"]:
                raise Conflict(
                    "RUN_ENDED", f"run {run_id} has {status.value}", hint="only an active run can be cancelled"
                )
            now = self._db.clock.now()
            change = await store.move_run(tx, run, status, FlowRunStatus.CANCELLED, by, now, reason)
            await store.cancel_waiting(tx, run, reason, by, now)
        self._engine.announce(StepSettlement(runs=[change]))
        return FlowRunStatus.CANCELLED

    async def retry(self, run_id: str, by: str, step_id: str | None = None) -> list[str]:
        """F10: retry a step, or all failed steps, with the steps that were cancelled because of them.

        Return the names of the reset steps.
        """
        async with self._db.transaction() as tx:
            run, status = await self._lock_run(tx, run_id)
            await self._refuse_sub_run(tx, run, run_id)
            if status is FlowRunStatus.SUCCEEDED:
                hint = f"start a new run from a step: `penstock flow run --resume {run_id} --from STEP`"
                raise Conflict("CANNOT_RETRY", f"run {run_id} has succeeded", hint=hint)
            graph = await _read_graph(tx, run)
            selected = _select_for_retry(graph, run_id, step_id)
            reset = await self._reopen(tx, run, status, graph, selected, by, "retried")
            settlement = await self._continue(tx, run)
        _log.info("flow_run_retried", run=run_id, steps=len(reset), actor=by)
        self._engine.announce(settlement)
        return [graph.rows[n]["step_id"] for n in sorted(reset)]

    async def skip(self, run_id: str, step_id: str, by: str, reason: str = "skipped by an operator") -> None:
        """F10: skip a step, so that the steps that depend on it can start. A running step cannot be skipped."""
        async with self._db.transaction() as tx:
            run, status = await self._lock_run(tx, run_id)
            graph = await _read_graph(tx, run)
            row = graph.find_step(step_id, run_id)
            if row["status"] == StepStatus.SKIPPED:
                return
            await self._refuse_sub_run(tx, run, run_id)
            current = StepStatus(row["status"])
            _check_skip(run_id, status, row)
            if current in STEP.groups["waiting"]:
                await tx.fetch(store.SQL["recount_run"], run, True)
            else:
                _refuse_blocked(graph, run_id, row)
                await self._reopen(tx, run, status, graph, {row["n"]}, by, "reopened to be skipped", is_skipped=True)
                current = StepStatus.PENDING
            now = self._db.clock.now()
            end = StepEnd(run, row["n"], row["fence"], current, StepStatus.SKIPPED, reason=reason)
            settlement = await store.settle(tx, [end], now, by)
            if not settlement.ended:
                message = f"step {step_id} of run {run_id} was started by a worker just now"
                raise Conflict("CANNOT_SKIP", message, hint="wait for its end, or cancel the run")
            await self._engine.advance.follow(tx, settlement, now)
            settlement.add(await self._continue(tx, run))
        _log.info("flow_step_skipped", run=run_id, step=step_id, actor=by, reason=reason)
        self._engine.announce(settlement)

    async def resume(self, run_id: str, step_id: str, by: str, new_run_id: str | None = None) -> str:
        """F19: create a run that starts at a step, and reuses the steps of the old run before it; return its id.

        Steps whose artifacts were changed or deleted are executed again.
        """
        async with self._db.connection() as connection:
            run = await self._engine.find_run(connection, run_id)
            document = await connection.fetchrow(store.SQL["read_run"], run)
            rows = await connection.fetch(store.SQL["read_run_steps"], run)
        if document is None:
            raise make_run_not_found_error(run_id)
        steps = {row["step_id"]: StepSpec.model_validate(row["spec"]) for row in rows if row["map_n"] is None}
        planned = plan.plan_steps(steps, self._engine.checks)
        reused = await self._find_reusable(run_id, step_id, planned, rows)
        name = new_run_id or str(make_id(self._db.clock))
        ends = sum(not step.children and step.n not in reused for step in planned)
        new = NewRun(name, document["flow"], document["scope"], document["digest"], document["fail_fast"], ends, by)
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            inserted = await store.insert_run(tx, new, planned, now, is_started=False)
            if inserted is None:
                raise Conflict("RUN_EXISTS", f"run {name} exists already", hint="choose another runId")
            if reused:
                copies = [_copy_step(n, row, run_id) for n, row in reused.items()]
                await store.reuse_steps(tx, inserted[0], copies, now, by)
                await tx.execute(store.SQL["set_resumed_from"], inserted[0], run)
                await tx.execute(store.SQL["recount"], inserted[0])
            settlement = await self._engine.start_run(tx, inserted[0], document["flow"])
        _log.info("flow_run_resumed", run=name, resumed_from=run_id, step=step_id, actor=by)
        self._engine.announce(settlement)
        return name

    async def pause_schedule(self, flow: str, *, is_paused: bool) -> None:
        """F16: pause or resume the schedule of a flow. Times that pass during the pause are not caught up."""
        if self._engine.flows.get_flow(flow).schedule is None:
            raise Conflict("NO_SCHEDULE", f"flow {flow} has no schedule", hint="add a `schedule` to the flow")
        await self._db.execute(store.SQL["pause_schedule"], flow, self._db.clock.now(), is_paused)

    async def _find_reusable(
        self, run_id: str, step_id: str, planned: Sequence[NewStep], all_rows: Sequence[asyncpg.Record]
    ) -> dict[int, asyncpg.Record]:
        """Return the steps before *step_id* that need not run again: ended, with unchanged artifacts."""
        rows = {row["step_id"]: row for row in all_rows}
        if step_id not in {step.step_id for step in planned}:
            raise make_step_not_found_error(run_id, step_id)
        items: dict[int, list[asyncpg.Record]] = defaultdict(list)
        for row in all_rows:
            if row["map_n"] is not None:
                items[row["map_n"]].append(row)
        reusable: dict[int, asyncpg.Record] = {}
        for step in planned:  # in the order of the graph: a step after one that runs again runs again
            row = rows[step.step_id]
            is_satisfied = StepStatus(row["status"]) in STEP.groups["satisfied"] and step.step_id != step_id
            if (
                is_satisfied
                and all(n in reusable for n in step.depends_on)
                and await self._are_artifacts_unchanged([row, *items[row["n"]]])
            ):
                reusable[step.n] = row
        return reusable

    async def _are_artifacts_unchanged(self, rows: Sequence[asyncpg.Record]) -> bool:
        published = [artifact for row in rows for artifact in artifacts.decode(row["artifacts"])]
        return all([await artifacts.is_unchanged(self._storage, artifact) for artifact in published])

    async def _lock_run(self, tx: Connection, run_id: str) -> tuple[int, FlowRunStatus]:
        run = await self._engine.find_run(tx, run_id)
        return run, FlowRunStatus((await store.lock_runs(tx, [run]))[run]["status"])

    async def _refuse_sub_run(self, tx: Connection, run: int, run_id: str) -> None:
        """Raise Conflict for a sub-run that has ended: it can continue only with its step."""
        parent = await tx.fetchrow(store.SQL["parent_of_ended"], run)
        if parent is not None:
            outer, step = parent["run_id"], parent["step_id"]
            hint = f"retry that step: `penstock flow retry {outer} {step}`"
            raise Conflict("SUB_RUN", f"run {run_id} is a sub-run of step {step} in run {outer}", hint=hint)

    async def _reopen(
        self,
        tx: Connection,
        run: int,
        status: FlowRunStatus,
        graph: RunGraph,
        selected: set[int],
        by: str,
        reason: str,
        *,
        is_skipped: bool = False,
    ) -> set[int]:
        """Reset *selected* and the cancelled steps, except those after other failures; return all reset steps.

        A map is reset with its items, unless it is reset only to be skipped.
        """
        now = self._db.clock.now()
        still_failed = graph.select([StepStatus.FAILED]) - selected
        reset = selected | (graph.select([StepStatus.CANCELLED]) - graph.collect_descendants(still_failed))
        maps = reset - selected if is_skipped else reset
        unsuccessful = (StepStatus.FAILED, StepStatus.CANCELLED)
        reset |= {n for n in graph.select_items(maps) if graph.rows[n]["status"] in unsuccessful}
        if status in RUN.groups["ended"]:
            await store.move_run(tx, run, status, FlowRunStatus.RUNNING, by, now, reason)
        await tx.fetch(store.SQL["reopen"], run, sorted(reset), now, by, reason)
        await tx.fetch(store.SQL["recount"], run)
        await tx.fetch(store.SQL["recount_run"], run, True)
        return reset

    async def _continue(self, tx: Connection, run: int) -> StepSettlement:
        now = self._db.clock.now()
        settlement = await store.advance(tx, [run], now)
        await self._engine.advance.follow(tx, settlement, now)
        return settlement


def _copy_step(n: int, row: asyncpg.Record, run_id: str) -> tuple[int, str, Json | None, Json | None, str, str]:
    """Return a reused step as `store.reuse_steps` expects it."""
    reason = f"reused from run {run_id}"
    if row["status"] != StepStatus.SUCCEEDED:
        reason = f"{reason}: {row['reason'] or 'skipped'}"
    encoded = artifacts.encode(artifacts.decode(row["artifacts"]))
    return n, row["status"], row["outputs"], row["error"], encoded, reason


def _select_for_retry(graph: RunGraph, run_id: str, step_id: str | None) -> set[int]:
    """Return the steps to retry; Conflict if there is none."""
    resume = f"start a new run from a step: `penstock flow run --resume {run_id} --from {step_id or 'STEP'}`"
    if step_id is None:
        failed = graph.select([StepStatus.FAILED])
        if not failed and not graph.select([StepStatus.CANCELLED]):
            raise Conflict("NOTHING_FAILED", f"no step of run {run_id} has failed", hint=resume)
        return failed
    row = graph.find_step(step_id, run_id)
    if row["map_n"] is not None:
        hint = f"retry the map: `penstock flow retry {run_id} {graph.rows[row['map_n']]['step_id']}`"
        raise Conflict("CANNOT_RETRY", f"step {step_id} is an item of a map", hint=hint)
    if row["status"] not in (StepStatus.FAILED, StepStatus.CANCELLED, StepStatus.SKIPPED):
        hint = resume if row["status"] == StepStatus.SUCCEEDED else "wait for its end, or cancel the run"
        raise Conflict("CANNOT_RETRY", f"step {step_id} of run {run_id} is {row['status']}", hint=hint)
    _refuse_blocked(graph, run_id, row)
    if row["status"] == StepStatus.SKIPPED and any(_has_started(graph, n) for n in row["children"]):
        message = f"step {step_id} was skipped, and steps that depend on it have started"
        raise Conflict("CANNOT_RETRY", message, hint=resume)
    return {row["n"]}


def _check_skip(run_id: str, run_status: FlowRunStatus, row: asyncpg.Record) -> None:
    """Raise Conflict if the step or its run is in a status that does not allow a skip."""
    step_id, status = row["step_id"], row["status"]
    if row["map_n"] is not None:
        raise Conflict("CANNOT_SKIP", f"step {step_id} is an item of a map", hint="skip the map")
    if status == StepStatus.RUNNING:
        hint = "wait for its end, or cancel the run"
        raise Conflict("CANNOT_SKIP", f"step {step_id} of run {run_id} is RUNNING", hint=hint)
    if status == StepStatus.SUCCEEDED:
        hint = "only a step that has not succeeded can be skipped"
        raise Conflict("CANNOT_SKIP", f"step {step_id} of run {run_id} is SUCCEEDED", hint=hint)
    if run_status is FlowRunStatus.CANCELLED:
        hint = f"retry the run first: `penstock flow retry {run_id}`"
        raise Conflict("RUN_CANCELLED", f"run {run_id} was cancelled", hint=hint)
    if run_status is FlowRunStatus.PENDING:
        hint = "wait until it starts: it waits for other runs of its flow"
        raise Conflict("RUN_NOT_STARTED", f"run {run_id} has not started", hint=hint)


def _refuse_blocked(graph: RunGraph, run_id: str, row: asyncpg.Record) -> None:
    """Raise Conflict for a step after a failed step, because it could never start."""
    if failed := sorted(graph.collect_ancestors(row["n"]) & graph.select([StepStatus.FAILED])):
        name = graph.rows[failed[0]]["step_id"]
        hint = f"retry that step: `penstock flow retry {run_id} {name}`"
        raise Conflict("BLOCKED_BY_FAILURE", f"step {row['step_id']} depends on {name}, which failed", hint=hint)


def _has_started(graph: RunGraph, n: int) -> bool:
    """Return whether a step has started; a cancelled map may still have running items."""
    is_waiting = graph.rows[n]["status"] in (StepStatus.PENDING, StepStatus.CANCELLED)
    return not is_waiting or bool(graph.select_items([n]))


async def _read_graph(tx: Connection, run: int) -> RunGraph:
    return RunGraph({row["n"]: row for row in await tx.fetch(store.SQL["run_graph"], run)})
