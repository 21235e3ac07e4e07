"""A stepper of flows: no background task is running, so that a test sees every state."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from penstock.flows import artifacts, store
from penstock.flows.config import FlowsSection
from penstock.flows.contract import StepReportAnswer, StepReportKind
from penstock.flows.definition.spec import FlowSpec, RunRequest
from penstock.flows.engine.engine import FlowEngine
from penstock.flows.engine.operations import RunOperations
from penstock.flows.maintenance import FlowMaintenance
from penstock.flows.model import ClaimedStep, StepError, StepReport
from penstock.flows.worker.local import LocalWorkSource
from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.db.notifier import Notifier
from penstock.kernel.errors import NotFound
from penstock.kernel.storage.folder import FolderStorage

WORK = "work"
LEASE = timedelta(seconds=60)
MOVES = """
    SELECT subject, source, target, actor, reason, fence FROM journal_move WHERE machine = $1 ORDER BY id, n"""
VERSIONS = """
    SELECT 'run' AS what, id, ctid::text, xmin::text FROM flow_run
    UNION ALL SELECT 'step', id, ctid::text, xmin::text FROM flow_step ORDER BY 1, 2"""


class CountingNotifier(Notifier):
    """A notifier that counts its notifications."""

    notifications = 0

    def notify(self, *topics: str) -> None:
        self.notifications += 1
        super().notify(*topics)


@dataclass
class MemoryCatalogue:
    """A catalogue of flows in memory."""

    specs: dict[str, FlowSpec] = field(default_factory=dict)

    def get_flow(self, name: str) -> FlowSpec:
        if name not in self.specs:
            raise NotFound("FLOW_NOT_FOUND", f"flow {name} does not exist")
        return self.specs[name]

    def list_flows(self) -> Mapping[str, FlowSpec]:
        return self.specs

    def add(self, name: str, steps: Mapping[str, Any], **more: Any) -> None:
        """Add a flow, or replace it."""
        self.specs[name] = FlowSpec.model_validate({"name": name, "steps": steps, **more})


class CrashingStorage(FolderStorage):
    """A folder storage that simulates the death of its process when `is_dying` is set."""

    is_dying = False

    async def put_file(self, path: str, source: Path, **more: Any) -> Any:
        if self.is_dying:
            raise ProcessDied
        return await super().put_file(path, source, **more)


class ProcessDied(Exception):
    """The simulated death of the process."""


@dataclass
class FlowsStepper:
    """The services of flows, without background tasks."""

    db: Database
    clock: ManualClock
    notifier: CountingNotifier
    storage: CrashingStorage
    catalogue: MemoryCatalogue
    engine: FlowEngine
    operations: RunOperations
    maintenance: FlowMaintenance
    work_source: LocalWorkSource

    async def start(self, steps: Mapping[str, Any] | None = None, run_id: str = "r", **more: Any) -> str:
        """Create a run of inline steps or of a flow, and return its name."""
        inline = {"steps": steps} if steps is not None else {}
        request = RunRequest.model_validate({"runId": run_id, **inline, **more})
        return (await self.engine.create(request, "tester"))[0]

    async def claim(
        self, limit: int = 100, worker: str = "w", kinds: Sequence[str] = (WORK,)
    ) -> dict[str, ClaimedStep]:
        """Claim steps, and return them by name."""
        claimed = await self.engine.claim(worker, dict.fromkeys(kinds, limit), limit=limit)
        return {step.step_id: step for step in claimed}

    async def report(
        self, claimed: ClaimedStep, outcome: StepReportKind = StepReportKind.SUCCEEDED, **more: Any
    ) -> StepReportAnswer:
        """Report the outcome of a step, and return the answer."""
        return (await self.engine.report([make_report(claimed, outcome, **more)], "w"))[0]

    async def work(self, *failing: str, worker: str = "w", kinds: Sequence[str] = (WORK,)) -> list[str]:
        """Execute all ready steps, one after the other, and return their names in order."""
        done: list[str] = []
        while claimed := await self.claim(1, worker, kinds):
            for name, step in claimed.items():
                await self.report(step, StepReportKind.FAILED if name in failing else StepReportKind.SUCCEEDED)
                done.append(name)
        return done

    async def work_step(self) -> None:
        """Execute one ready step, if any."""
        for step in (await self.claim(1)).values():
            await self.report(step)

    async def write(self, claimed: ClaimedStep, name: str = "out.txt", data: bytes | None = None) -> None:
        """Write an artifact under an attempt; the default content identifies the attempt."""
        content = data or attempt_content(claimed)
        await artifacts.write(self.storage, claimed.run_id, claimed.step_id, claimed.fence, name, content)

    async def expire_leases(self) -> int:
        """Let all leases expire, and reap their steps."""
        self.clock.advance(LEASE + timedelta(seconds=1))
        return await self.engine.reap()

    async def settle_sub_runs(self) -> None:
        """Report the end of inner runs until every outer step has received it."""
        while await self.db.fetch(store.SQL["unreported_runs"], 1):
            await self.maintenance.settle_sub_runs()

    async def status(self, run_id: str = "r") -> str:
        return str(await self.db.fetchval("SELECT status FROM flow_run WHERE run_id = $1", run_id))

    async def steps(self, run_id: str = "r") -> dict[str, str]:
        """Return the status of each step of a run."""
        query = """
            SELECT t.step_id, t.status FROM flow_step t JOIN flow_run r ON r.id = t.run
            WHERE r.run_id = $1 ORDER BY t.n"""
        return {row["step_id"]: row["status"] for row in await self.db.fetch(query, run_id)}

    async def step(self, step_id: str, run_id: str = "r") -> Mapping[str, Any]:
        """Return the row of a step."""
        query = "SELECT t.* FROM flow_step t JOIN flow_run r ON r.id = t.run WHERE r.run_id = $1 AND t.step_id = $2"
        row = await self.db.fetchrow(query, run_id, step_id)
        assert row is not None
        return dict(row)

    async def moves(self, machine: str = "flows.step") -> list[tuple[str, str, str, str]]:
        """Return the subject, source, target and actor of every move so far."""
        return [
            (row["subject"], row["source"], row["target"], row["actor"]) for row in await self.db.fetch(MOVES, machine)
        ]

    async def fingerprint(self) -> tuple[Any, ...]:
        """Return a value that changes with every write, journal entry and notification."""
        rows = [tuple(row) for row in await self.db.fetch(VERSIONS)]
        return rows, await self.db.fetchval("SELECT count(*) FROM journal"), self.notifier.notifications


def make_report(claimed: ClaimedStep, outcome: StepReportKind = StepReportKind.SUCCEEDED, **more: Any) -> StepReport:
    """Return a report on a step that is or was claimed."""
    if outcome is StepReportKind.FAILED:
        more.setdefault("error", StepError("BROKEN", "it broke"))
    return StepReport(claimed.run_id, claimed.step_id, claimed.fence, outcome, **more)


def attempt_content(claimed: ClaimedStep) -> bytes:
    """Return content that only this attempt writes."""
    return f"{claimed.run_id}/{claimed.step_id}/{claimed.fence}".encode()


def work(*depends_on: str, **more: Any) -> dict[str, Any]:
    """Return a step for a worker."""
    return {"kind": WORK, "dependsOn": list(depends_on), **more}


def map_step(over: Any, *depends_on: str, do: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return a map with items for workers."""
    item = {"kind": WORK, "inputs": {"item": "${item}"}, **(do or {})}
    return {"kind": "map", "over": over, "do": item, "dependsOn": list(depends_on), **more}


def flow_step(steps: Mapping[str, Any], *depends_on: str, **more: Any) -> dict[str, Any]:
    """Return a step with an inner flow."""
    return {"kind": "flow", "inputs": {"steps": steps}, "dependsOn": list(depends_on), **more}


@asynccontextmanager
async def flows_stepper(url: str, folder: Path, *, size: int = 10, **section: Any) -> AsyncIterator[FlowsStepper]:
    """Open a stepper of flows on the database at *url*; *section* are settings of flows."""
    clock = ManualClock()
    async with Database.open(url, clock=clock, prefers_indexes=True, size=size) as db:
        notifier, storage, catalogue = CountingNotifier(db, "stepper"), CrashingStorage(folder), MemoryCatalogue()
        settings = FlowsSection.model_validate({"lease": LEASE, **section})
        engine = FlowEngine(db, notifier, storage, catalogue, {}, settings)
        operations = RunOperations(engine, storage)
        maintenance = FlowMaintenance(engine, catalogue, storage)  # type: ignore[arg-type]  # uses two methods of it
        yield FlowsStepper(
            db, clock, notifier, storage, catalogue, engine, operations, maintenance, LocalWorkSource(engine, storage)
        )


DIAMOND = {"a": work(), "b": work("a"), "c": work("a"), "d": work("b", "c")}
