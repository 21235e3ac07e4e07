"""Scenarios of runs whose workers die: their steps, their expected end, and the invariants to check."""

import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from penstock.flows.config import FlowsSection
from penstock.flows.contract import ENGINE_KINDS, FlowRunStatus, StepStatus
from penstock.flows.definition.spec import RunRequest
from penstock.flows.engine.engine import FlowEngine
from penstock.flows.engine.operations import RunOperations
from penstock.flows.maintenance import FlowMaintenance
from penstock.flows.model import RUN, STEP
from penstock.kernel.db.database import Database
from penstock.kernel.machine import StateMachine
from penstock.kernel.storage.folder import FolderStorage
from tests.flows.scenarios.worker_process import ARTIFACT
from tests.flows.stepper import MemoryCatalogue
from tests.support.types import Json

S = StepStatus
RETRY = {"maxAttempts": 1_000, "backoff": 0}
STEPS = """
    SELECT r.run_id, t.* FROM flow_step t JOIN flow_run r ON r.id = t.run ORDER BY t.run, t.n"""
MISCOUNTED_RUNS = """
    SELECT r.run_id, r.status, r.open, r.failed, truth.* FROM flow_run r CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE t.status NOT IN ('SUCCEEDED', 'FAILED', 'SKIPPED', 'CANCELLED')
                                      AND (r.is_counted OR t.children = '{}')) AS really_open,
               count(*) FILTER (WHERE t.status = 'FAILED' AND t.map_n IS NULL) AS really_failed
        FROM flow_step t WHERE t.run = r.id) AS truth
    WHERE r.failed <> really_failed OR r.status = 'SUCCEEDED' AND r.open <> really_open"""
MISCOUNTED_STEPS = """
    WITH waited AS (
        SELECT t.run, t.n, before.n AS other FROM flow_step t CROSS JOIN unnest(t.depends_on) AS before (n)
        WHERE t.kind <> 'map' OR t.fence = 0
        UNION ALL
        SELECT i.run, i.map_n, i.n FROM flow_step i WHERE i.map_n IS NOT NULL
    ), truth AS (
        SELECT w.run, w.n, count(*) FILTER (WHERE p.status NOT IN ('SUCCEEDED', 'SKIPPED')) AS unmet
        FROM waited w JOIN flow_step p ON p.run = w.run AND p.n = w.other GROUP BY w.run, w.n
    )
    SELECT r.run_id, t.step_id, t.status, t.unmet, truth.unmet AS really
    FROM flow_step t JOIN flow_run r ON r.id = t.run LEFT JOIN truth ON truth.run = t.run AND truth.n = t.n
    WHERE t.unmet <> coalesce(truth.unmet, 0)"""
MOVES = """
    SELECT id, subject, source, target, fence FROM journal_move WHERE machine = $1 ORDER BY id, n"""


@dataclass(frozen=True)
class RunScenario:
    """A run, and the expected end of its steps if workers die: SUCCEEDED, except for those in *ends*."""

    steps: Json
    ends: Mapping[str, StepStatus] = field(default_factory=dict)
    status: FlowRunStatus = FlowRunStatus.SUCCEEDED


def work(kind: str, *depends_on: str, **inputs: Any) -> Json:
    """Return a step for a worker."""
    retry = {"retry": RETRY} if kind == "flaky" else {}
    return {"kind": kind, "dependsOn": list(depends_on), "inputs": inputs, **retry}


def chain(length: int, kind: str = "noop", **inputs: Any) -> RunScenario:
    """Return a scenario with sequential steps."""
    return RunScenario({f"s{n}": work(kind, *([f"s{n - 1}"] if n else []), **inputs) for n in range(length)})


def fan(width: int, kind: str = "noop", **inputs: Any) -> RunScenario:
    """Return a scenario with parallel steps between a first and a last step."""
    sides = {f"side{n}": work(kind, "first", **inputs) for n in range(width)}
    return RunScenario({"first": work("noop"), **sides, "last": work("noop", *sides)})


def artifact_chain(length: int) -> RunScenario:
    """Return a scenario with sequential steps, each of which reads the artifact of the step before."""
    steps: Json = {"s0": work("leave")}
    for n in range(1, length):
        before = f"s{n - 1}"
        steps[f"s{n}"] = work("leave", before, after={"step": before, "token": f"${{steps.{before}.outputs.token}}"})
    return RunScenario(steps)


def map_over(count: int, kind: str = "noop", **inputs: Any) -> RunScenario:
    """Return a scenario with a map over the list of a step."""
    each = {name: value for name, value in work(kind, **inputs).items() if name != "dependsOn"}
    over = {"kind": "map", "dependsOn": ["first"], "over": "${steps.first.outputs.list}", "do": each}
    return RunScenario({"first": work("list", count=count), "each": over, "last": work("noop", "each")})


def nested(inner: RunScenario) -> RunScenario:
    """Return a scenario with a sub-run."""
    return RunScenario({"in": {"kind": "flow", "inputs": {"steps": inner.steps}}, "last": work("noop", "in")})


def optional_failure() -> RunScenario:
    """Return a scenario with a failed step that is not required."""
    bad = {**work("flaky", "first", failures=10_000), "retry": {"maxAttempts": 2, "backoff": 0}, "required": False}
    return RunScenario({"first": work("noop"), "bad": bad, "last": work("noop", "bad")}, {"bad": S.SKIPPED})


def failure() -> RunScenario:
    """Return a scenario with a failed step that is required."""
    bad = {**work("flaky", "first", failures=10_000), "retry": {"maxAttempts": 1_000, "final": ["FLAKY"]}}
    ends = {"bad": S.FAILED, "last": S.CANCELLED}
    return RunScenario({"first": work("noop"), "bad": bad, "last": work("noop", "bad")}, ends, FlowRunStatus.FAILED)


def random_scenario(random: Random) -> RunScenario:
    """Return one of the scenarios."""
    kind, inputs = random.choice([("noop", {}), ("noop", {}), ("leave", {}), ("flaky", {"failures": 1})])
    plain = [
        lambda: chain(random.randint(1, 8), kind, **inputs),
        lambda: fan(random.randint(1, 8), kind, **inputs),
        lambda: artifact_chain(random.randint(1, 4)),
        lambda: map_over(random.randint(0, 6), kind, **inputs),
    ]
    more = [
        lambda: nested(random.choice(plain)()),
        lambda: nested(nested(random.choice(plain)())),
        optional_failure,
        failure,
    ]
    return random.choice([*plain, *more])()


class FlowsCrashHarness:
    """Create runs, read their state and check invariants; no worker runs in this process."""

    def __init__(self, db: Database, folder: Path, catalogue: MemoryCatalogue, engine: FlowEngine) -> None:
        self.db = db
        self.engine = engine
        self.storage = FolderStorage(folder / "objects")
        self.maintenance = FlowMaintenance(engine, catalogue, self.storage)  # type: ignore[arg-type]  # uses two methods of it
        self.operations = RunOperations(engine, self.storage)
        self.scenarios: dict[str, RunScenario] = {}
        self._done = folder / "done"

    async def start_runs(self, scenarios: Sequence[RunScenario], name: str) -> None:
        """Create a run per scenario."""
        for number, scenario in enumerate(scenarios):
            run_id = f"{name}.{number}"
            self.scenarios[run_id] = scenario
            await self.engine.create(RunRequest.model_validate({"runId": run_id, "steps": scenario.steps}), "tester")

    def count_lines(self) -> int:
        """Return the number of completed attempts so far."""
        return self._done.read_bytes().count(b"\n") if self._done.exists() else 0

    async def is_over(self) -> bool:
        """Return whether all runs and all their steps have ended."""
        left = """
            SELECT EXISTS (SELECT FROM flow_run WHERE status IN ('PENDING', 'RUNNING'))
                OR EXISTS (SELECT FROM flow_step WHERE status IN ('PENDING', 'READY', 'RUNNING'))
                OR EXISTS (SELECT FROM flow_run WHERE parent_run IS NOT NULL AND NOT is_reported)"""
        return not await self.db.fetchval(left)

    async def read_step_states(self) -> dict[tuple[str, str], tuple[str, int, int]]:
        """Return status, fence and attempts of the steps of workers, by run id and step id."""
        query = """
            SELECT r.run_id, t.step_id, t.status, t.fence, t.attempts
            FROM flow_step t JOIN flow_run r ON r.id = t.run WHERE t.kind NOT IN ('map', 'flow')"""
        return {(row[0], row[1]): (row[2], row[3], row[4]) for row in await self.db.fetch(query)}

    async def describe_unended(self) -> str:
        """Return the runs and steps that have not ended, for the message of a failed test."""
        query = """
            SELECT r.run_id, r.status AS run, t.step_id, t.kind, t.status, t.unmet, t.fence, t.attempts, t.lease_until,
                   t.sealed
            FROM flow_step t JOIN flow_run r ON r.id = t.run
            WHERE t.status IN ('PENDING', 'READY', 'RUNNING') OR r.status IN ('PENDING', 'RUNNING') LIMIT 20"""
        return json.dumps([dict(row) for row in await self.db.fetch(query)], default=str, indent=1)

    async def check(self) -> None:
        """Check all invariants of ended runs."""
        rows = [dict(row) for row in await self.db.fetch(STEPS)]
        self._check_ends(rows, {row["run_id"]: row["status"] for row in await self.db.fetch("TABLE flow_run")})
        self._check_attempts(rows)
        await self._check_artifacts(rows)
        await check_consistency(self.db)
        assert await self.maintenance.repair() == 0

    def _check_ends(self, rows: Sequence[Json], runs: Mapping[str, str]) -> None:
        for run_id, scenario in self.scenarios.items():
            assert runs[run_id] == scenario.status, run_id
        for row in rows:
            outer = self.scenarios[row["run_id"].partition("~")[0]]
            expected = outer.ends.get(row["step_id"], S.SUCCEEDED) if "~" not in row["run_id"] else S.SUCCEEDED
            assert row["status"] == expected, (row["run_id"], row["step_id"], row["error"], row["reason"])

    def _check_attempts(self, rows: Sequence[Json]) -> None:
        """Check that no fence was executed twice, and that outputs are those of the accepted attempt."""
        done = list(self._lines())
        duplicates = [what for what, times in Counter(line[:3] for line in done).items() if times > 1]
        assert duplicates == []
        for row in rows:
            if row["status"] == S.SUCCEEDED and row["kind"] not in ENGINE_KINDS:
                outputs = row["outputs"]
                assert row["reported_fence"] == row["fence"] == outputs["fence"], row
                assert (row["run_id"], row["step_id"], row["fence"], outputs["token"]) in done, row

    def _lines(self) -> Iterator[tuple[str, str, int, str]]:
        for line in self._done.read_text().splitlines():
            run_id, step_id, fence, token = line.split(" ")
            yield run_id, step_id, int(fence), token

    async def _check_artifacts(self, rows: Sequence[Json]) -> None:
        for row in rows:
            artifacts = row["artifacts"] or []
            assert [artifact["name"] for artifact in artifacts] == ([ARTIFACT] if row["kind"] == "leave" else []), row
            for artifact in artifacts:
                data = (await self.storage.get(artifact["path"])).data
                assert artifact["path"] == f"runs/{row['run_id']}/{row['step_id']}/{ARTIFACT}"
                assert (data.decode(), len(data)) == (row["outputs"]["token"], artifact["size"]), row
                assert hashlib.sha256(data).hexdigest() == artifact["sha256"], row


async def check_consistency(db: Database) -> None:
    """Check counters, claims of ended steps, and the history of all runs and steps."""
    assert await db.fetch(MISCOUNTED_RUNS) == []
    assert await db.fetch(MISCOUNTED_STEPS) == []
    steps = {f"{row['run_id']}/{row['step_id']}": dict(row) for row in await db.fetch(STEPS)}
    assert [name for name, row in steps.items() if row["sealed"] is not None or row["lease_until"] is not None] == []
    await _check_history(db, STEP, steps)
    await _check_history(db, RUN, {row["run_id"]: dict(row) for row in await db.fetch("TABLE flow_run")})


async def _check_history(db: Database, machine: StateMachine[Any], rows: Mapping[str, Json]) -> None:
    """Check that each history starts at the initial state, has valid moves and fences, and ends at the status."""
    paths: dict[str, list[Json]] = {name: [] for name in rows}
    for row in await db.fetch(MOVES, machine.name):
        paths[row["subject"]].append(dict(row))
    for name, path in paths.items():
        assert path[0]["source"] == machine.initial, (name, path)
        assert path[-1]["target"] == rows[name]["status"], (name, path)
        for move in path:
            assert machine.can(machine.states(move["source"]), machine.states(move["target"])), (name, path)
        for before, after in pairwise(path):
            assert before["target"] == after["source"], (name, path)
            assert (before["fence"] or 0) <= (after["fence"] or 0), (name, path)
        assert list(dict.fromkeys(move["id"] for move in path)) == list(dict.fromkeys(rows[name]["moves"])), name


@asynccontextmanager
async def crash_harness(url: str, folder: Path, section: Mapping[str, Any]) -> AsyncIterator[FlowsCrashHarness]:
    """Yield a harness with an engine on the database at *url*, without workers."""
    catalogue, storage = MemoryCatalogue(), FolderStorage(folder / "objects")
    async with (
        Database.open(url, prefers_indexes=True) as db,
        FlowEngine.open(db, storage, catalogue, {}, FlowsSection.model_validate(section)) as engine,
    ):
        yield FlowsCrashHarness(db, folder, catalogue, engine)
