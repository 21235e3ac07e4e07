"""What can be seen of flows: runs, steps, logs, history, and the flows themselves."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import asyncpg

from penstock.flows import store
from penstock.flows.api import schemas
from penstock.flows.api.explain import AHEAD_LIMIT, StepFacts, explain
from penstock.flows.contract import MAP, FlowRunStatus, StepStatus
from penstock.flows.definition import schedule
from penstock.flows.definition.catalogue import FlowCatalogue
from penstock.flows.definition.render import draw_mermaid
from penstock.flows.definition.spec import FlowSpec
from penstock.flows.model import RUN, STEP, run_not_found, step_not_found
from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.db.page import Page, make_page
from penstock.kernel.errors import Conflict
from penstock.kernel.states import journal
from penstock.kernel.states.event_stream import LiveEvents
from penstock.kernel.states.journal import StoredEntry

SQL = sql.load(__package__, {"run": RUN, "step": STEP})
LAST = 2**63 - 1
_UPCOMING = 5
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
    """Steps of a kind that wait for a worker, and how long the oldest does."""

    kind: str
    steps: int
    waits: timedelta


class FailedRun(NamedTuple):
    """A run that failed, and why."""

    run_id: str
    flow: str | None
    reason: str | None
    finished_at: datetime


class FlowEvents(LiveEvents):
    """The stream of changes of runs and steps."""


class FlowViews:
    """Flows as they are seen through the API."""

    def __init__(self, db: Database, catalogue: FlowCatalogue) -> None:
        self._db = db
        self._catalogue = catalogue

    def now(self) -> datetime:
        """The time that all of this is told by."""
        return self._db.clock.now()

    async def under_way(self) -> tuple[dict[FlowRunStatus, int], list[WaitingSteps]]:
        """How many runs are under way, and which steps wait for a worker."""
        active = await self._db.fetch(store.SQL["active_runs"])
        ready = await self._db.fetch(store.SQL["ready_by_kind"], self.now())
        return (
            {FlowRunStatus(status): count for status, count in active},
            [WaitingSteps(kind, count, timedelta(seconds=seconds)) for kind, count, seconds in ready],
        )

    async def failed(self, since: datetime, limit: int) -> list[FailedRun]:
        """F18: the runs that failed *since* then, the latest first."""
        return [FailedRun(*row) for row in await self._db.fetch(SQL["failed_runs"], since, limit)]

    async def runs(
        self, flow: str | None, status: FlowRunStatus | None, since: datetime | None, before: int, limit: int
    ) -> Page[schemas.FlowRunHead]:
        """Runs, the latest first."""
        asked = (before, limit + 1, status and status.value, since)
        rows = await (
            self._db.fetch(SQL["runs"], *asked) if flow is None else self._db.fetch(SQL["runs_of_flow"], *asked, flow)
        )
        found = make_page(rows, limit, lambda row: [row["id"]])
        return Page([schemas.FlowRunHead.model_validate(dict(row)) for row in found.items], found.next)

    async def run(self, run_id: str, *, with_steps: bool = True) -> Json:
        """F1: a run in the document's shape, as it stood at one moment."""
        async with self._db.transaction("repeatable_read") as tx:
            head = await _run(tx, run_id)
            rows = await tx.fetch(SQL["steps"], head["id"]) if with_steps else []
            counts = await tx.fetch(SQL["counts"], head["id"])
        told = schemas.FlowRun.model_validate({**head, "counts": {row["status"]: row["steps"] for row in counts}})
        # The steps are told as they are: there may be many, and each was checked when it came in.
        names = {row["n"]: row["step_id"] for row in rows}
        steps = {row["step_id"]: _step(row, names) for row in rows} if with_steps else None
        return {**told.model_dump(by_alias=True), "steps": steps}

    async def status(self, run_id: str) -> FlowRunStatus:
        """Where a run stands."""
        async with self._db.connection() as connection:
            return FlowRunStatus((await _run(connection, run_id))["status"])

    async def step(self, run_id: str, step_id: str) -> asyncpg.Record:
        """One step; NotFound when there is none."""
        row = await self._db.fetchrow(SQL["step"], run_id, step_id)
        if row is None:
            raise step_not_found(run_id, step_id)
        return row

    async def must_hold(self, run_id: str, step_id: str, fence: int) -> None:
        """F4: Conflict SUPERSEDED unless the step is held under *fence*."""
        row = await self.step(run_id, step_id)
        if row["status"] != StepStatus.RUNNING or row["fence"] != fence or row["lease_until"] is None:
            said = f"step {step_id} of run {run_id} is {row['status']}, and not held under fence {fence}"
            raise Conflict("SUPERSEDED", said, hint="stop working on it: it is somebody else's, or has ended")

    async def statuses(self, names: Sequence[tuple[str, str]]) -> Mapping[tuple[str, str], StepStatus]:
        """Where steps stand, by run and name; those there are."""
        rows = await self._db.fetch(SQL["statuses"], *([name[n] for name in names] for n in (0, 1)))
        return {(row["run_id"], row["step_id"]): StepStatus(row["status"]) for row in rows}

    async def why(self, run_id: str, step_id: str, limits: Mapping[str, int]) -> schemas.StepExplanationView:
        """F18: in words, why a step is where it is; *limits* say how many of a kind may be under way."""
        row = await self.step(run_id, step_id)
        facts = await self._facts(row, limits.get(row["kind"]))
        found = explain(facts, self._db.clock.now())
        return schemas.StepExplanationView(
            run_id=run_id, step_id=step_id, status=facts.status, why=found.why, hint=found.hint
        )

    async def _facts(self, row: asyncpg.Record, limit: int | None) -> StepFacts:
        told = {name: value for name, value in row.items() if name not in ("run", "n", "fence", "max_attempts")}
        told |= {"status": StepStatus(row["status"]), "run_status": FlowRunStatus(row["run_status"]), "limit": limit}
        async with self._db.connection() as connection:
            if row["status"] == StepStatus.PENDING:
                unmet = await connection.fetch(SQL["unmet"], row["run"], row["n"])
                told["unmet"] = [(one["step_id"], one["status"]) for one in unmet]
                if row["flow"] is not None:
                    told["active"] = await store.count_active(connection, row["flow"])
                    flows = self._catalogue.list_flows()
                    told["max_active_runs"] = flows[row["flow"]].max_active_runs if row["flow"] in flows else None
            elif row["status"] == StepStatus.READY:
                queue = await connection.fetchrow(SQL["queue"], row["kind"], row["due_at"], AHEAD_LIMIT)
                told |= dict(queue or {})
            elif row["kind"] == MAP:
                told["items"] = tuple(await connection.fetchrow(SQL["items"], row["run"], row["n"]) or (0, 0))
        return StepFacts(**told)

    async def history(self, run_id: str, after: tuple[int, int], limit: int) -> schemas.FlowHistory:
        """F18: every move of a run and of its steps, oldest first."""
        async with self._db.connection() as connection:
            head = await _run(connection, run_id)
            steps = await connection.fetch(SQL["moves"], head["id"])
            numbers = {*head["moves"], *(number for row in steps for number in row["moves"])}
            subjects = [run_id, *(f"{run_id}/{row['step_id']}" for row in steps)]
            found = await journal.read_history(connection, sorted(numbers), subjects, after=after, limit=limit + 1)
        cut = make_page(found, limit, lambda noted: noted.position[1:])
        return schemas.FlowHistory(run_id=run_id, moves=[move(noted) for noted in cut.items], next=cut.next)

    async def logs(self, run_id: str, step_id: str, attempt: int | None, after: int, limit: int) -> schemas.LogPage:
        """F18: what a step told, of all its attempts or of one."""
        row = await self.step(run_id, step_id)
        rows = await self._db.fetch(SQL["logs"], row["run"], row["n"], after, limit + 1, attempt)
        found = make_page(rows, limit, lambda one: [one["id"]])
        lines = [schemas.LogLine.model_validate(dict(item)) for item in found.items]
        return schemas.LogPage(run_id=run_id, step_id=step_id, lines=lines, next=found.next)

    async def run_logs(self, run_id: str, after: tuple[datetime | None, int], limit: int) -> schemas.RunLogPage:
        """F18: return the log lines of all steps of a run in the order of their time."""
        async with self._db.connection() as connection:
            head = await _run(connection, run_id)
            rows = await connection.fetch(SQL["run_logs"], head["id"], *after, limit + 1)
        found = make_page(rows, limit, lambda line: [line["at"], line["id"]])
        lines = [schemas.RunLogLine.model_validate(dict(line)) for line in found.items]
        return schemas.RunLogPage(run_id=run_id, lines=lines, next=found.next)

    async def flows(self) -> schemas.FlowList:
        """F15: all flows by name, and the files that hold none."""
        known = self._catalogue.list_flows()
        kept = await self._kept([name for name, spec in known.items() if spec.schedule])
        latest = await self._latest_runs(list(known))
        heads = [schemas.FlowHead(**self._head(spec, kept, latest)) for _, spec in sorted(known.items())]
        return schemas.FlowList(flows=heads, errors=dict(self._catalogue.list_errors()))

    async def flow(self, name: str) -> schemas.FlowView:
        """F15: one flow as it is written, and drawn."""
        spec = self._catalogue.get_flow(name)
        document = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        head = self._head(spec, await self._kept([name]), await self._latest_runs([name]))
        return schemas.FlowView(**head, spec=document, mermaid=draw_mermaid(spec.steps))

    async def _kept(self, names: Sequence[str]) -> Mapping[str, asyncpg.Record]:
        return {row["flow"]: row for row in await self._db.fetch(SQL["schedules"], names)}

    async def _latest_runs(self, names: Sequence[str]) -> Mapping[str, schemas.LatestRun]:
        rows = await self._db.fetch(SQL["latest_runs"], names)
        return {row["flow"]: schemas.LatestRun.model_validate(dict(row)) for row in rows}

    def _head(
        self, spec: FlowSpec, kept: Mapping[str, asyncpg.Record], latest: Mapping[str, schemas.LatestRun]
    ) -> Json:
        return {
            "name": spec.name,
            "description": spec.description,
            "steps": len(spec.steps),
            "max_active_runs": spec.max_active_runs,
            "schedule": self._schedule(spec, kept.get(spec.name)),
            "latest_run": latest.get(spec.name),
        }

    def _schedule(self, spec: FlowSpec, kept: asyncpg.Record | None) -> schemas.ScheduleView | None:
        plan = spec.schedule
        if plan is None:
            return None
        is_paused = kept is not None and kept["is_paused"]
        return schemas.ScheduleView(
            cron=plan.cron,
            timezone=plan.timezone,
            overlap=plan.overlap,
            catch_up=plan.catch_up,
            paused=is_paused,
            next=[] if is_paused else list(schedule.upcoming(plan, self._db.clock.now(), _UPCOMING)),
            last_run=kept["last_run"] if kept else None,
            note=kept["note"] if kept else None,
        )


def move(noted: StoredEntry) -> schemas.FlowMove:
    """F18: a move as it is told."""
    entry = noted.entry
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


async def _run(connection: Connection, run_id: str) -> asyncpg.Record:
    row = await connection.fetchrow(SQL["run"], run_id)
    if row is None:
        raise run_not_found(run_id)
    return row


def _step(row: asyncpg.Record, names: Mapping[int, str]) -> Json:
    return {
        "status": row["status"],
        "kind": row["kind"],
        "dependsOn": [names[n] for n in row["depends_on"]],
        "required": row["required"],
        "inputs": row["inputs"] or {},
        **{told: row[name] for name, told in _STEP.items()},
        "artifacts": [{name: one[name] for name in _ARTIFACT} for one in row["artifacts"] or ()],
        "map": names.get(row["map_n"]) if row["map_n"] is not None else None,
    }
