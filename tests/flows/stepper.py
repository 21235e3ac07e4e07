"""Advance flows step by step: nothing runs by itself, so that a test sees every state."""

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


class CountingBell(Notifier):
    """A bell that counts its rings."""

    rings = 0

    def notify(self, *topics: str) -> None:
        self.rings += 1
        super().notify(*topics)


@dataclass
class NamedFlows:
    """Flows by their names, as a catalogue has them."""

    known: dict[str, FlowSpec] = field(default_factory=dict)

    def flow(self, name: str) -> FlowSpec:
        if name not in self.known:
            raise NotFound("FLOW_NOT_FOUND", f"there is no flow {name}")
        return self.known[name]

    def flows(self) -> Mapping[str, FlowSpec]:
        return self.known

    def add(self, name: str, steps: Mapping[str, Any], **more: Any) -> None:
        """Write a flow, or write it anew."""
        self.known[name] = FlowSpec.model_validate({"name": name, "steps": steps, **more})


class CrashingStorage(FolderStorage):
    """A folder storage that simulates the death of its process when `is_dying` is set."""

    is_dying = False

    async def put_file(self, path: str, source: Path, **more: Any) -> Any:
        if self.is_dying:
            raise ProcessDied
        return await super().put_file(path, source, **more)


class ProcessDied(Exception):
    """The process ended here."""


@dataclass
class FlowsStepper:
    """Everything of flows, and nothing that moves by itself."""

    db: Database
    clock: ManualClock
    notifier: CountingBell
    storage: CrashingStorage
    named: NamedFlows
    engine: FlowEngine
    management: RunOperations
    keeper: FlowMaintenance
    counter: LocalWorkSource

    async def start(self, steps: Mapping[str, Any] | None = None, run_id: str = "r", **more: Any) -> str:
        """A run of steps given inline, or of a flow; its name."""
        told = {"steps": steps} if steps is not None else {}
        request = RunRequest.model_validate({"runId": run_id, **told, **more})
        return (await self.engine.create(request, "tester"))[0]

    async def claim(
        self, limit: int = 100, worker: str = "w", kinds: Sequence[str] = (WORK,)
    ) -> dict[str, ClaimedStep]:
        """What a worker gets, by the names of the steps."""
        held = await self.engine.claim(worker, dict.fromkeys(kinds, limit), limit=limit)
        return {one.step_id: one for one in held}

    async def say(
        self, held: ClaimedStep, said: StepReportKind = StepReportKind.SUCCEEDED, **more: Any
    ) -> StepReportAnswer:
        """What became of one report."""
        return (await self.engine.report([report(held, said, **more)], "w"))[0]

    async def work(self, *failing: str, worker: str = "w", kinds: Sequence[str] = (WORK,)) -> list[str]:
        """Do everything that is there to be done, step by step; the names in the order they were done."""
        done: list[str] = []
        while held := await self.claim(1, worker, kinds):
            for name, one in held.items():
                await self.say(one, StepReportKind.FAILED if name in failing else StepReportKind.SUCCEEDED)
                done.append(name)
        return done

    async def work_one(self) -> None:
        """Do one step, if there is one."""
        for one in (await self.claim(1)).values():
            await self.say(one)

    async def write(self, held: ClaimedStep, name: str = "out.txt", data: bytes | None = None) -> None:
        """Write what tells who wrote it."""
        await artifacts.write(self.storage, held.run_id, held.step_id, held.fence, name, data or written_by(held))

    async def lose(self) -> int:
        """Have all leases run out, and what was lost taken back."""
        self.clock.advance(LEASE + timedelta(seconds=1))
        return await self.engine.reap()

    async def tell_outer(self) -> None:
        """Until every step knows what became of the run inside it."""
        while await self.db.fetch(store.SQL["untold"], 1):
            await self.keeper.tell_outer()

    async def status(self, run_id: str = "r") -> str:
        return str(await self.db.fetchval("SELECT status FROM flow_run WHERE run_id = $1", run_id))

    async def steps(self, run_id: str = "r") -> dict[str, str]:
        """How the steps of a run stand."""
        query = """
            SELECT t.step_id, t.status FROM flow_step t JOIN flow_run r ON r.id = t.run
            WHERE r.run_id = $1 ORDER BY t.n"""
        return {row["step_id"]: row["status"] for row in await self.db.fetch(query, run_id)}

    async def step(self, step_id: str, run_id: str = "r") -> Mapping[str, Any]:
        """All that is kept of one step."""
        query = "SELECT t.* FROM flow_step t JOIN flow_run r ON r.id = t.run WHERE r.run_id = $1 AND t.step_id = $2"
        row = await self.db.fetchrow(query, run_id, step_id)
        assert row is not None
        return dict(row)

    async def moves(self, machine: str = "flows.step") -> list[tuple[str, str, str, str]]:
        """Every move so far: what, from where, to where, by whom."""
        return [
            (row["subject"], row["source"], row["target"], row["actor"]) for row in await self.db.fetch(MOVES, machine)
        ]

    async def fingerprint(self) -> tuple[Any, ...]:
        """Different as soon as anything was written, noted or rung."""
        rows = [tuple(row) for row in await self.db.fetch(VERSIONS)]
        return rows, await self.db.fetchval("SELECT count(*) FROM journal"), self.notifier.rings


def report(held: ClaimedStep, said: StepReportKind = StepReportKind.SUCCEEDED, **more: Any) -> StepReport:
    """What is said of a step that is, or was, held."""
    if said is StepReportKind.FAILED:
        more.setdefault("error", StepError("BROKEN", "it broke"))
    return StepReport(held.run_id, held.step_id, held.fence, said, **more)


def written_by(held: ClaimedStep) -> bytes:
    """What only this attempt writes."""
    return f"{held.run_id}/{held.step_id}/{held.fence}".encode()


def work(*depends_on: str, **more: Any) -> dict[str, Any]:
    """A step a worker does."""
    return {"kind": WORK, "dependsOn": list(depends_on), **more}


def mapped(over: Any, *depends_on: str, do: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A map whose items workers do."""
    each = {"kind": WORK, "inputs": {"item": "${item}"}, **(do or {})}
    return {"kind": "map", "over": over, "do": each, "dependsOn": list(depends_on), **more}


def inner(steps: Mapping[str, Any], *depends_on: str, **more: Any) -> dict[str, Any]:
    """A flow within."""
    return {"kind": "flow", "inputs": {"steps": steps}, "dependsOn": list(depends_on), **more}


@asynccontextmanager
async def flows_stepper(url: str, folder: Path, *, size: int = 10, **section: Any) -> AsyncIterator[FlowsStepper]:
    """Open a stepper of flows on the database at *url*; *section* are settings of flows."""
    clock = ManualClock()
    async with Database.open(url, clock=clock, prefers_indexes=True, size=size) as db:
        notifier, storage, named = CountingBell(db, "stepper"), CrashingStorage(folder), NamedFlows()
        settings = FlowsSection.model_validate({"lease": LEASE, **section})
        engine = FlowEngine(db, notifier, storage, named, {}, settings)
        management = RunOperations(engine, storage)
        keeper = FlowMaintenance(engine, named, storage)  # type: ignore[arg-type]  # all it asks for is flows by name
        yield FlowsStepper(
            db, clock, notifier, storage, named, engine, management, keeper, LocalWorkSource(engine, storage)
        )


DIAMOND = {"a": work(), "b": work("a"), "c": work("a"), "d": work("b", "c")}
