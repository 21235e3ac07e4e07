"""The read side of the API: flows, runs, steps, logs and history."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg

from penstock.flows import store
from penstock.flows.api import schemas
from penstock.flows.api.explain import AHEAD_LIMIT, StepFacts, explain
from penstock.flows.contract import MAP, FlowRunStatus, StepStatus
from penstock.flows.definition import schedule
from penstock.flows.definition.catalogue import FlowCatalogue, FlowFileError
from penstock.flows.definition.render import draw_mermaid
from penstock.flows.definition.spec import FlowSpec
from penstock.flows.model import RUN, STEP, make_run_not_found_error, make_step_not_found_error, make_superseded_error
from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.db.page import Page, make_page
from penstock.kernel.states import journal
from penstock.kernel.states.event_stream import LiveEvents
from penstock.kernel.states.journal import StoredEntry

SQL = sql.load(__package__, {"run": RUN, "step": STEP})
LAST = 2**63 - 1
_NEXT_TIMES = 5  # times of a schedule in a response
_ARTIFACT = ("name", "uri", "sha256", "size")
_STEP = {
    "outputs": "outputs",
    "error": "error",
    "reason": "reason",
    "attempts": "attempts",
    "max_attempts": "maxAttempts",
    "fence": "fence",
    "worker": "worker",
    "lease_until": "leaseUntil",
    "due_at": "dueAt",
    "started_at": "startedAt",
    "finished_at": "finishedAt",
}
Json = dict[str, Any]


class WaitingSteps(NamedTuple):
    """The number of READY steps of a kind, and the waiting time of the oldest."""

    kind: str
    steps: int
    oldest: timedelta


class FailedRun(NamedTuple):
    """A failed run with its reason."""

    run_id: str
    flow: str | None
    reason: str | None
    finished_at: datetime


class FlowEvents(LiveEvents):
    """The event stream of runs and steps."""


class FlowViews:
    """The queries of the API."""

    def __init__(self, db: Database, catalogue: FlowCatalogue) -> None:
        self._db = db
        self._catalogue = catalogue

    @property
    def folder(self) -> Path | None:
        """Return the folder of flow files, if configured."""
        return self._catalogue.folder

    def list_file_errors(self) -> Mapping[str, FlowFileError]:
        """F15: return the errors of flow files and of their folder, by path."""
        return self._catalogue.list_errors()

    def read_clock(self) -> datetime:
        """Return the present time."""
        return self._db.clock.now()

    async def count_active_runs(self) -> int:
        """Return the number of active runs."""
        return sum(count for _, count in await self._db.fetch(store.SQL["count_active_runs"]))

    async def list_waiting_steps(self) -> list[WaitingSteps]:
        """Return the steps that wait for a worker, by kind."""
        rows = await self._db.fetch(store.SQL["count_ready_steps"], self.read_clock())
        return [WaitingSteps(kind, count, timedelta(seconds=seconds)) for kind, count, seconds in rows]

    async def list_failed_runs(self, since: datetime, limit: int) -> list[FailedRun]:
        """F18: return the runs that failed after *since*, the latest first."""
        return [FailedRun(*row) for row in await self._db.fetch(SQL["failed_runs"], since, limit)]

    async def list_runs(
        self, flow: str | None, status: FlowRunStatus | None, since: datetime | None, before: int, limit: int
    ) -> Page[schemas.FlowRunHead]:
        """Return the runs that match the filters, the latest first."""
        parameters = (before, limit + 1, status and status.value, since)
        rows = await (
            self._db.fetch(SQL["runs"], *parameters)
            if flow is None
            else self._db.fetch(SQL["runs_of_flow"], *parameters, flow)
        )
        page = make_page(rows, limit, lambda row: [row["id"]])
        return Page([schemas.FlowRunHead.model_validate(dict(row)) for row in page.items], page.next)

    async def read_run(self, run_id: str, *, with_steps: bool = True) -> Json:
        """F1: return a run as JSON in the format of the founding document, from one snapshot."""
        async with self._db.transaction("repeatable_read") as tx:
            head = await _read_run(tx, run_id)
            rows = await tx.fetch(SQL["steps"], head["id"]) if with_steps else []
            counts = await tx.fetch(SQL["counts"], head["id"])
        run = schemas.FlowRun.model_validate({**head, "counts": {row["status"]: row["steps"] for row in counts}})
        # Steps are not validated again: a run may have many.
        names = {row["n"]: row["step_id"] for row in rows}
        steps = {row["step_id"]: _view_step(row, names) for row in rows} if with_steps else None
        return {**run.model_dump(by_alias=True), "steps": steps}

    async def read_run_status(self, run_id: str) -> FlowRunStatus:
        """Return the status of a run."""
        async with self._db.connection() as connection:
            return FlowRunStatus((await _read_run(connection, run_id))["status"])

    async def read_step(self, run_id: str, step_id: str) -> asyncpg.Record:
        """Return the row of a step; raise NotFound if it does not exist."""
        row = await self._db.fetchrow(SQL["step"], run_id, step_id)
        if row is None:
            raise make_step_not_found_error(run_id, step_id)
        return row

    async def check_claim(self, run_id: str, step_id: str, fence: int) -> None:
        """F4: raise Conflict SUPERSEDED unless the step is claimed under *fence*."""
        row = await self.read_step(run_id, step_id)
        if row["status"] != StepStatus.RUNNING or row["fence"] != fence or row["lease_until"] is None:
            raise make_superseded_error(run_id, step_id, fence)

    async def list_step_statuses(self, names: Sequence[tuple[str, str]]) -> Mapping[tuple[str, str], StepStatus]:
        """Return the status of each existing step, by run and step."""
        rows = await self._db.fetch(SQL["statuses"], *([name[n] for name in names] for n in (0, 1)))
        return {(row["run_id"], row["step_id"]): StepStatus(row["status"]) for row in rows}

    async def explain(self, run_id: str, step_id: str, limits: Mapping[str, int]) -> schemas.StepExplanationView:
        """F18: explain the status of a step; *limits* are the limits of running steps by kind."""
        row = await self.read_step(run_id, step_id)
        facts = await self._collect_facts(row, limits.get(row["kind"]))
        explanation = explain(facts, self._db.clock.now())
        return schemas.StepExplanationView(
            run_id=run_id, step_id=step_id, status=facts.status, why=explanation.why, hint=explanation.hint
        )

    async def _collect_facts(self, row: asyncpg.Record, limit: int | None) -> StepFacts:
        facts = {name: value for name, value in row.items() if name not in ("run", "n", "fence", "max_attempts")}
        facts |= {"status": StepStatus(row["status"]), "run_status": FlowRunStatus(row["run_status"]), "limit": limit}
        async with self._db.connection() as connection:
            if row["status"] == StepStatus.PENDING:
                unmet = await connection.fetch(SQL["unmet"], row["run"], row["n"])
                facts["unmet"] = [(step["step_id"], step["status"]) for step in unmet]
                if row["flow"] is not None:
                    facts["active"] = await store.count_running_runs(connection, row["flow"])
                    flows = self._catalogue.list_flows()
                    facts["max_active_runs"] = flows[row["flow"]].max_active_runs if row["flow"] in flows else None
            elif row["status"] == StepStatus.READY:
                queue = await connection.fetchrow(SQL["queue"], row["kind"], row["due_at"], AHEAD_LIMIT)
                facts |= dict(queue or {})
            elif row["kind"] == MAP:
                facts["items"] = tuple(await connection.fetchrow(SQL["items"], row["run"], row["n"]) or (0, 0))
        return StepFacts(**facts)

    async def read_history(self, run_id: str, after: tuple[int, int], limit: int) -> schemas.FlowHistory:
        """F18: return the moves of a run and of its steps, the oldest first."""
        async with self._db.connection() as connection:
            head = await _read_run(connection, run_id)
            steps = await connection.fetch(SQL["moves"], head["id"])
            numbers = {*head["moves"], *(number for row in steps for number in row["moves"])}
            subjects = [run_id, *(f"{run_id}/{row['step_id']}" for row in steps)]
            entries = await journal.read_history(connection, sorted(numbers), subjects, after=after, limit=limit + 1)
        page = make_page(entries, limit, lambda entry: entry.position[1:])
        return schemas.FlowHistory(run_id=run_id, moves=[view_move(entry) for entry in page.items], next=page.next)

    async def read_logs(
        self, run_id: str, step_id: str, attempt: int | None, after: int, limit: int
    ) -> schemas.LogPage:
        """F18: return the log lines of a step, of all attempts or of one attempt."""
        row = await self.read_step(run_id, step_id)
        rows = await self._db.fetch(SQL["logs"], row["run"], row["n"], after, limit + 1, attempt)
        page = make_page(rows, limit, lambda line: [line["id"]])
        lines = [schemas.LogLine.model_validate(dict(line)) for line in page.items]
        return schemas.LogPage(run_id=run_id, step_id=step_id, lines=lines, next=page.next)

    async def read_run_logs(self, run_id: str, after: tuple[datetime | None, int], limit: int) -> schemas.RunLogPage:
        """F18: return the log lines of all steps of a run in the order of their time."""
        async with self._db.connection() as connection:
            head = await _read_run(connection, run_id)
            rows = await connection.fetch(SQL["run_logs"], head["id"], *after, limit + 1)
        page = make_page(rows, limit, lambda line: [line["at"], line["id"]])
        lines = [schemas.RunLogLine.model_validate(dict(line)) for line in page.items]
        return schemas.RunLogPage(run_id=run_id, lines=lines, next=page.next)

    async def list_flows(self) -> schemas.FlowList:
        """F15: return all flows by name, and the errors of flow files."""
        flows = self._catalogue.list_flows()
        states = await self._read_schedules([name for name, spec in flows.items() if spec.schedule])
        latest = await self._read_latest_runs(list(flows))
        heads = [schemas.FlowHead(**self._build_head(spec, states, latest)) for _, spec in sorted(flows.items())]
        errors = {path: error.message for path, error in self._catalogue.list_errors().items()}
        return schemas.FlowList(flows=heads, errors=errors)

    async def read_flow(self, name: str) -> schemas.FlowView:
        """F15: return a flow with its definition and its drawing."""
        spec = self._catalogue.get_flow(name)
        document = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        head = self._build_head(spec, await self._read_schedules([name]), await self._read_latest_runs([name]))
        return schemas.FlowView(**head, spec=document, mermaid=draw_mermaid(spec.steps))

    async def _read_schedules(self, names: Sequence[str]) -> Mapping[str, asyncpg.Record]:
        return {row["flow"]: row for row in await self._db.fetch(SQL["schedules"], names)}

    async def _read_latest_runs(self, names: Sequence[str]) -> Mapping[str, schemas.LatestRun]:
        rows = await self._db.fetch(SQL["latest_runs"], names)
        return {row["flow"]: schemas.LatestRun.model_validate(dict(row)) for row in rows}

    def _build_head(
        self, spec: FlowSpec, states: Mapping[str, asyncpg.Record], latest: Mapping[str, schemas.LatestRun]
    ) -> Json:
        return {
            "name": spec.name,
            "description": spec.description,
            "steps": len(spec.steps),
            "max_active_runs": spec.max_active_runs,
            "schedule": self._view_schedule(spec, states.get(spec.name)),
            "latest_run": latest.get(spec.name),
        }

    def _view_schedule(self, spec: FlowSpec, state: asyncpg.Record | None) -> schemas.ScheduleView | None:
        plan = spec.schedule
        if plan is None:
            return None
        is_paused = state is not None and state["is_paused"]
        return schemas.ScheduleView(
            cron=plan.cron,
            timezone=plan.timezone,
            overlap=plan.overlap,
            catch_up=plan.catch_up,
            paused=is_paused,
            next=[] if is_paused else list(schedule.list_upcoming(plan, self._db.clock.now(), _NEXT_TIMES)),
            last_run=state["last_run"] if state else None,
            note=state["note"] if state else None,
        )


def view_move(stored: StoredEntry) -> schemas.FlowMove:
    """F18: return a journal entry as a move of the API."""
    entry = stored.entry
    run_id, _, step_id = entry.subject.partition("/")
    return schemas.FlowMove(
        run_id=run_id,
        step_id=step_id or None,
        source=entry.source,
        target=entry.target,
        actor=entry.actor,
        at=entry.at,
        reason=entry.reason,
        fence=entry.fence,
    )


async def _read_run(connection: Connection, run_id: str) -> asyncpg.Record:
    row = await connection.fetchrow(SQL["run"], run_id)
    if row is None:
        raise make_run_not_found_error(run_id)
    return row


def _view_step(row: asyncpg.Record, names: Mapping[int, str]) -> Json:
    return {
        "status": row["status"],
        "kind": row["kind"],
        "dependsOn": [names[n] for n in row["depends_on"]],
        "required": row["required"],
        "inputs": row["inputs"] or {},
        **{field: row[name] for name, field in _STEP.items()},
        "artifacts": [{name: artifact[name] for name in _ARTIFACT} for artifact in row["artifacts"] or ()],
        "map": names.get(row["map_n"]) if row["map_n"] is not None else None,
    }
