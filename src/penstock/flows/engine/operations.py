"""F9, F10, F19: what people do with runs: cancel, try again, skip, resume."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import asyncpg

from penstock.flows import artifacts, store
from penstock.flows.contract import FlowRunStatus, StepStatus
from penstock.flows.definition.spec import StepSpec
from penstock.flows.engine import plan
from penstock.flows.engine.engine import FlowEngine
from penstock.flows.model import RUN, STEP, NewRun, NewStep, StepEnd, StepSettlement, run_not_found, step_not_found
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Conflict
from penstock.kernel.ids import new_id
from penstock.kernel.storage import Storage


@dataclass(frozen=True)
class RunShape:
    """All steps of a run, and what hangs on what."""

    rows: Mapping[int, asyncpg.Record]

    def named(self, step_id: str, run_id: str) -> asyncpg.Record:
        """The step of that name, or NotFound."""
        for row in self.rows.values():
            if row["step_id"] == step_id:
                return row
        raise step_not_found(run_id, step_id)

    def within(self, statuses: Iterable[StepStatus]) -> set[int]:
        """The places of steps that stand so; items of maps are left out: they go with their map."""
        wanted = {status.value for status in statuses}
        return {n for n, row in self.rows.items() if row["status"] in wanted and row["map_n"] is None}

    def items_within(self, places: Iterable[int]) -> set[int]:
        """The items of the maps among some steps."""
        maps = set(places)
        return {n for n, row in self.rows.items() if row["map_n"] in maps}

    def before(self, place: int) -> set[int]:
        """All that comes before a step."""
        found: set[int] = set()
        ahead = [place]
        while ahead:
            row = self.rows[ahead.pop()]
            for n in row["depends_on"]:
                if n not in found:
                    found.add(n)
                    ahead.append(n)
        return found

    def after(self, places: Iterable[int]) -> set[int]:
        """All that comes after some steps."""
        found: set[int] = set()
        ahead = list(places)
        while ahead:
            place = ahead.pop()
            for n in self.rows[place]["children"]:
                if n not in found:
                    found.add(n)
                    ahead.append(n)
        return found


class RunOperations:
    """Operations of people about runs."""

    def __init__(self, engine: FlowEngine, storage: Storage) -> None:
        self._engine = engine
        self._db = engine.db
        self._storage = storage

    async def cancel(self, run_id: str, by: str, reason: str = "cancelled") -> FlowRunStatus:
        """F9: what waits does not begin; what is under way is told at its next heartbeat. The first end wins."""
        async with self._db.transaction() as tx:
            run, status = await self._held(tx, run_id)
            if status is FlowRunStatus.CANCELLED:
                return status
            if status not in RUN.groups["active"]:
                raise Conflict("RUN_ENDED", f"run {run_id} has {status.value}", hint="there is nothing to cancel")
            now = self._db.clock.now()
            await store.move_run(tx, run, status, FlowRunStatus.CANCELLED, by, now, reason)
            await store.cancel_waiting(tx, run, reason, by, now)
        self._engine.announce(StepSettlement(runs=[(run, run_id, FlowRunStatus.CANCELLED)]))
        return FlowRunStatus.CANCELLED

    async def retry(self, run_id: str, by: str, step_id: str | None = None) -> list[str]:
        """F10: try a step again, or all that failed, with what was cancelled because of it; the run goes on."""
        async with self._db.transaction() as tx:
            run, status = await self._held(tx, run_id)
            await self._refuse_inner(tx, run, run_id)
            if status is FlowRunStatus.SUCCEEDED:
                hint = "resume it from a step: that makes a new run"
                raise Conflict("CANNOT_RETRY", f"run {run_id} has succeeded", hint=hint)
            shape = await _shape(tx, run)
            wanted = _to_retry(shape, run_id, step_id)
            opened = await self._reopen(tx, run, status, shape, wanted, by, "tried again")
            told = await self._go_on(tx, run)
        self._engine.announce(told)
        return [shape.rows[n]["step_id"] for n in sorted(opened)]

    async def skip(self, run_id: str, step_id: str, by: str, reason: str = "skipped by hand") -> None:
        """F10: do without a step; what comes after it has its turn. A step under way cannot be skipped."""
        async with self._db.transaction() as tx:
            run, status = await self._held(tx, run_id)
            shape = await _shape(tx, run)
            row = shape.named(step_id, run_id)
            if row["status"] == StepStatus.SKIPPED:
                return
            await self._refuse_inner(tx, run, run_id)
            current = StepStatus(row["status"])
            if current in (StepStatus.RUNNING, StepStatus.SUCCEEDED) or row["map_n"] is not None:
                hint = "cancel the run, or wait for the step" if current is StepStatus.RUNNING else "leave it as it is"
                raise Conflict("CANNOT_SKIP", f"step {step_id} is {current.value}", hint=hint)
            if status is FlowRunStatus.CANCELLED:
                raise Conflict("RUN_CANCELLED", f"run {run_id} was cancelled", hint="retry it first")
            if status is FlowRunStatus.PENDING:
                raise Conflict("RUN_NOT_STARTED", f"run {run_id} has not begun", hint="wait until it has")
            if current in STEP.groups["waiting"]:
                await tx.fetch(store.SQL["recount_run"], run, True)
            else:
                _refuse_behind_failure(shape, row)
                await self._reopen(tx, run, status, shape, {row["n"]}, by, "reopened to be skipped", is_skipped=True)
                current = StepStatus.PENDING
            now = self._db.clock.now()
            end = StepEnd(run, row["n"], row["fence"], current, StepStatus.SKIPPED, reason=reason)
            told = await store.settle(tx, [end], now, by)
            if not told.ended:
                raise Conflict(
                    "CANNOT_SKIP", f"step {step_id} was begun just now", hint="wait for it, or cancel the run"
                )
            await self._engine.advance.follow(tx, told, now)
            told.add(await self._go_on(tx, run))
        self._engine.announce(told)

    async def resume(self, run_id: str, step_id: str, by: str, new_run_id: str | None = None) -> str:
        """F19: a new run that begins at a step, with what the old one did before it, as far as it still holds."""
        async with self._db.connection() as connection:
            run = await self._engine.run_named(connection, run_id)
            head = await connection.fetchrow(store.SQL["run_document"], run)
            rows = await connection.fetch(store.SQL["steps_document"], run)
        if head is None:
            raise run_not_found(run_id)
        known = [row for row in rows if row["map_n"] is None]
        steps = {row["step_id"]: StepSpec.model_validate(row["spec"]) for row in known}
        planned = plan.planned(steps, self._engine.checks)
        kept = await self._kept(run_id, step_id, planned, rows)
        name = new_run_id or str(new_id(self._db.clock))
        open_ends = sum(not one.children and one.n not in kept for one in planned)
        new = NewRun(name, head["flow"], head["scope"], head["digest"], head["fail_fast"], open_ends, by)
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            made = await store.insert_run(tx, new, planned, now, is_begun=False)
            if made is None:
                raise Conflict("RUN_EXISTS", f"there is a run {name} already", hint="choose another runId")
            created, _ = made
            if kept:
                why = f"taken over from run {run_id}"
                reused = [
                    (n, row["status"], row["outputs"], row["error"], _left(row), _why_kept(row, why))
                    for n, row in kept.items()
                ]
                await store.reuse_steps(tx, created, reused, now, by)
                await tx.execute(store.SQL["resumed_from"], created, run)
                await tx.execute(store.SQL["recount"], created)
            told = await self._engine.begin(tx, created, head["flow"])
        self._engine.announce(told)
        return name

    async def pause_schedule(self, flow: str, *, is_paused: bool) -> None:
        """F16: keep a flow's schedule no longer, or again; what passed meanwhile is not caught up."""
        if self._engine.flows.get_flow(flow).schedule is None:
            raise Conflict("NO_SCHEDULE", f"flow {flow} does not run by itself", hint="give it a `schedule`")
        await self._db.execute(store.SQL["pause_schedule"], flow, self._db.clock.now(), is_paused)

    async def _kept(
        self, run_id: str, step_id: str, planned: Sequence[NewStep], all_rows: Sequence[asyncpg.Record]
    ) -> dict[int, asyncpg.Record]:
        """What need not be done again: before the step, done, with artifacts that are still what they were."""
        rows = {row["step_id"]: row for row in all_rows}
        if step_id not in {one.step_id for one in planned}:
            raise step_not_found(run_id, step_id)
        items: dict[int, list[asyncpg.Record]] = defaultdict(list)
        for row in all_rows:
            if row["map_n"] is not None:
                items[row["map_n"]].append(row)
        kept: dict[int, asyncpg.Record] = {}
        for one in planned:  # in the order of the graph: who comes after what is done anew is done anew
            row = rows[one.step_id]
            is_done = StepStatus(row["status"]) in STEP.groups["satisfied"] and one.step_id != step_id
            left = [row, *items[row["n"]]]
            if is_done and all(n in kept for n in one.depends_on) and await self._hold(left):
                kept[one.n] = row
        return kept

    async def _hold(self, rows: Sequence[asyncpg.Record]) -> bool:
        """Whether all that some steps left is still there, and still the same."""
        left = [artifact for row in rows for artifact in artifacts.known(row["artifacts"])]
        return all([await artifacts.holds(self._storage, one) for one in left])

    async def _held(self, tx: Connection, run_id: str) -> tuple[int, FlowRunStatus]:
        run = await self._engine.run_named(tx, run_id)
        return run, FlowRunStatus((await store.lock_runs(tx, [run]))[run]["status"])

    async def _refuse_inner(self, tx: Connection, run: int, run_id: str) -> None:
        """An inner run that has ended goes on with its step, not by itself."""
        head = await tx.fetchrow(store.SQL["run_document"], run)
        if head is not None and head["parent_run"] is not None and FlowRunStatus(head["status"]) in RUN.groups["ended"]:
            hint = "retry the step it belongs to"
            raise Conflict("SUB_RUN", f"run {run_id} is the inside of a step of another run", hint=hint)

    async def _reopen(
        self,
        tx: Connection,
        run: int,
        status: FlowRunStatus,
        shape: RunShape,
        wanted: set[int],
        by: str,
        why: str,
        *,
        is_skipped: bool = False,
    ) -> set[int]:
        """Set back *wanted*, and what was cancelled, save what comes after other failures; count anew.

        A map is set back with its items, unless it is only to be skipped.
        """
        now = self._db.clock.now()
        still_failed = shape.within([StepStatus.FAILED]) - wanted
        opened = wanted | (shape.within([StepStatus.CANCELLED]) - shape.after(still_failed))
        again = (StepStatus.FAILED, StepStatus.CANCELLED)
        maps = opened - wanted if is_skipped else opened
        opened |= {n for n in shape.items_within(maps) if shape.rows[n]["status"] in again}
        if status in RUN.groups["ended"]:
            await store.move_run(tx, run, status, FlowRunStatus.RUNNING, by, now, why)
        await tx.fetch(store.SQL["reopen"], run, sorted(opened), now, by, why)
        await tx.fetch(store.SQL["recount"], run)
        await tx.fetch(store.SQL["recount_run"], run, True)
        return opened

    async def _go_on(self, tx: Connection, run: int) -> StepSettlement:
        now = self._db.clock.now()
        told = await store.advance(tx, [run], now)
        await self._engine.advance.follow(tx, told, now)
        return told


def _left(row: asyncpg.Record) -> str:
    return artifacts.document(artifacts.known(row["artifacts"]))


def _why_kept(row: asyncpg.Record, why: str) -> str:
    return why if row["status"] == StepStatus.SUCCEEDED else f"{why}: {row['reason'] or 'skipped'}"


def _to_retry(shape: RunShape, run_id: str, step_id: str | None) -> set[int]:
    """What is to be tried again; Conflict when nothing of it can be."""
    if step_id is None:
        wanted = shape.within([StepStatus.FAILED])
        if not wanted and not shape.within([StepStatus.CANCELLED]):
            raise Conflict("NOTHING_FAILED", f"nothing of run {run_id} failed", hint="`resume` makes a new run of it")
        return wanted
    row = shape.named(step_id, run_id)
    if row["map_n"] is not None:
        hint = f"retry {shape.rows[row['map_n']]['step_id']}: what failed of it is done again"
        raise Conflict("CANNOT_RETRY", f"{step_id} is an item of a map", hint=hint)
    if row["status"] not in (StepStatus.FAILED, StepStatus.CANCELLED, StepStatus.SKIPPED):
        hint = (
            "resume the run from it: that makes a new one" if row["status"] == StepStatus.SUCCEEDED else "wait for it"
        )
        raise Conflict("CANNOT_RETRY", f"step {step_id} is {row['status']}", hint=hint)
    _refuse_behind_failure(shape, row)
    if row["status"] == StepStatus.SKIPPED and any(_has_begun(shape, n) for n in row["children"]):
        hint = "resume the run from it: that makes a new one"
        raise Conflict("CANNOT_RETRY", f"what comes after step {step_id} has begun without it", hint=hint)
    return {row["n"]}


def _refuse_behind_failure(shape: RunShape, row: asyncpg.Record) -> None:
    """A step that waits for one that failed would wait for ever."""
    if failed := sorted(shape.before(row["n"]) & shape.within([StepStatus.FAILED])):
        name = shape.rows[failed[0]]["step_id"]
        raise Conflict(
            "BLOCKED_BY_FAILURE", f"step {row['step_id']} waits for {name}, which failed", hint=f"retry {name}"
        )


def _has_begun(shape: RunShape, n: int) -> bool:
    """A map that was cancelled may have items under way."""
    waits = shape.rows[n]["status"] in (StepStatus.PENDING, StepStatus.CANCELLED)
    return not waits or bool(shape.items_within([n]))


async def _shape(tx: Connection, run: int) -> RunShape:
    return RunShape({row["n"]: row for row in await tx.fetch(store.SQL["graph_of"], run)})
