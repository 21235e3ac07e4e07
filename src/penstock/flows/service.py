"""F2, F4, F9: runs are made and begin, and their steps are handed out; owns the transactions."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from time import monotonic

from penstock.flows import artifacts, store
from penstock.flows.config import FlowsSection
from penstock.flows.contract import LOG_LINES
from penstock.flows.definition.spec import RunRequest
from penstock.flows.engine import plan
from penstock.flows.engine.advance import Flows, resolved
from penstock.flows.engine.engine import MOVES, RUNS, STEPS, Reports
from penstock.flows.engine.plan import Checks
from penstock.flows.model import Artifact, Claimed, NewRun, NewStep, Settled, no_run, no_step
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.db.locks import transaction_lock
from penstock.kernel.db.notifier import Bell
from penstock.kernel.errors import Conflict, NotFound
from penstock.kernel.ids import new_id
from penstock.kernel.storage import Storage
from penstock.kernel.tasks.wait import happens
from penstock.kernel.text import storable

__all__ = ["MOVES", "RUNS", "STEPS", "FlowEngine"]
POLL = 1.0  # seconds after which a waiting claim looks by itself
LINE_LIMIT = 4_000  # characters of a line of a log


async def _never() -> bool:
    return False


class FlowEngine(Reports):
    """F2, F4, F9, F16: what begins runs, and hands out their steps."""

    def __init__(
        self, db: Database, bell: Bell, storage: Storage, flows: Flows, checks: Checks, section: FlowsSection
    ) -> None:
        super().__init__(db, bell, storage, flows, checks, section)
        self._plans = plan.Plans()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, db: Database, storage: Storage, flows: Flows, checks: Checks, section: FlowsSection
    ) -> "AsyncIterator[FlowEngine]":
        """The engine, with a bell that wakes workers of all processes."""
        async with Bell.hung(db, store.CHANNEL) as bell:
            yield cls(db, bell, storage, flows, checks, section)

    async def create(
        self, request: RunRequest, by: str, *, scheduled_for: datetime | None = None, trace: str | None = None
    ) -> tuple[str, bool]:
        """F2: a run, and whether it is new; Conflict RUN_EXISTS when its id is taken by another."""
        flow, steps, scope, policy = resolved(request, self.flows)
        # Only flows with a name come again.
        planned = self._plans.planned(steps, self.checks) if flow else plan.planned(steps, self.checks)
        run_id = request.run_id or str(new_id(self.db.clock))
        digest = plan.digest(request)
        ends = plan.open_ends(planned)
        new = NewRun(run_id, flow, scope, digest, policy.fail_fast, ends, by, scheduled_for=scheduled_for, trace=trace)
        waits = flow is not None and self.most_active(flow) is not None
        told = await (self._create(new, planned) if ends and not waits else self._create_to_wait(new, planned))
        if told is None:
            await self._refuse_other(run_id, digest)
            return run_id, False
        self.announce(told)
        return run_id, True

    async def _create(self, new: NewRun, steps: Sequence[NewStep]) -> Settled | None:
        """A run that begins at once: in one statement, unless a step must be looked at first."""
        now = self.db.clock.now()
        is_looked_at = any(step.is_looked_at and not step.depends_on for step in steps)
        async with self.db.transaction() if is_looked_at else self.db.connection() as connection:
            made = await store.insert_run(connection, new, steps, now, is_begun=True)
            if made is None:
                return None
            told = Settled(ready={step.kind for step in steps if not step.depends_on}, looks=made[1])
            await self.advance.follow(connection, told, now)
        return told

    async def _create_to_wait(self, new: NewRun, steps: Sequence[NewStep]) -> Settled | None:
        """A run that may have to wait for others of its flow, or has nothing to do."""
        async with self.db.transaction() as tx:
            made = await store.insert_run(tx, new, steps, self.db.clock.now(), is_begun=False)
            return None if made is None else await self.begin(tx, made[0], new.flow)

    async def begin(self, tx: Connection, run: int, flow: str | None) -> Settled:
        """F16: begin, unless as many runs of the flow are under way as there may be."""
        now = self.db.clock.now()
        if flow is not None and (most := self.most_active(flow)) is not None:
            await transaction_lock(tx, f"flows admit {flow}")
            if await store.count_active(tx, flow) >= most:
                return Settled()
        told = await plan.begin(tx, run, now)
        await self.advance.follow(tx, told, now)
        return told

    async def _refuse_other(self, run_id: str, digest: str) -> None:
        row = await self.db.fetchrow(store.SQL["run_named"], run_id)
        if row is not None and row["digest"] != digest:
            hint = "choose another runId; the same one is for the same request"
            raise Conflict("RUN_EXISTS", f"there is a run {run_id} made of something else", hint=hint)

    def stop(self) -> None:
        """Let go of all who wait for a step or watch."""
        self.bell.close()

    def most_active(self, flow: str) -> int | None:
        """F16: how many runs of a flow may be under way; one that is no longer known has no limit."""
        try:
            return self.flows.flow(flow).max_active_runs
        except NotFound:
            return None

    async def claim(
        self,
        worker: str,
        rooms: Mapping[str, int],
        *,
        limit: int,
        lease_for: timedelta | None = None,
        wait: float = 0,
        is_gone: Callable[[], Awaitable[bool]] = _never,
    ) -> list[Claimed]:
        """F4: steps that are now *worker*'s alone; waits up to *wait* seconds for one, unless its caller goes."""
        deadline = monotonic() + wait
        while True:
            rung = self.bell.next(STEPS)
            held = await self._claim(worker, rooms, limit, lease_for or self.section.lease)
            left = deadline - monotonic()
            if held:
                self.bell.ring(MOVES)
            if held or left <= 0 or self.bell.is_closed:
                return held
            await happens(rung, min(left, POLL))
            if await is_gone():
                return []

    async def _claim(self, worker: str, rooms: Mapping[str, int], limit: int, lease_for: timedelta) -> list[Claimed]:
        limited = sorted(kind for kind in rooms if kind in self.section.limits)
        now = self.db.clock.now()
        if not limited:
            async with self.db.connection() as connection:
                return await store.claim(connection, rooms, limit, worker, now, now + lease_for)
        async with self.db.transaction() as tx:
            for kind in limited:
                await transaction_lock(tx, f"flows kind {kind}")
            rows = await tx.fetch(store.SQL["running_of_kinds"], limited)
            running = {row["kind"]: row["running"] for row in rows}
            left = {kind: max(0, self.section.limits[kind] - running.get(kind, 0)) for kind in limited}
            room = {kind: min(count, left.get(kind, count)) for kind, count in rooms.items()}
            return await store.claim(tx, room, limit, worker, now, now + lease_for)

    async def heartbeat(
        self, held: Sequence[tuple[str, str, int]], lease_for: timedelta | None = None
    ) -> dict[tuple[str, str, int], bool]:
        """F9: of steps by run, name and fence those still held, and whether they are to stop."""
        until = self.db.clock.now() + (lease_for or self.section.lease)
        columns = [list(column) for column in zip(*held, strict=True)] if held else [[], [], []]
        rows = await self.db.fetch(store.SQL["heartbeat"], *columns, until)
        return {(row["run_id"], row["step_id"], row["fence"]): row["is_cancelled"] for row in rows}

    async def log(self, run_id: str, step_id: str, fence: int, lines: Sequence[tuple[str, str]]) -> None:
        """F18: keep lines with an attempt; those of one that lost its step are dropped."""
        if not lines:
            return
        names = [[run_id] * len(lines), [step_id] * len(lines), [fence] * len(lines)]
        told = [[level for level, _ in lines], [storable(message, LINE_LIMIT) for _, message in lines]]
        await self.db.execute(store.SQL["insert_logs"], *names, *told, self.db.clock.now(), LOG_LINES)

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        """F6: an artifact of a step; NotFound ARTIFACT_NOT_FOUND when it has none of that name."""
        return (await self.publisher.storage.get((await self.artifact(run_id, step_id, name)).path)).data

    async def artifact(self, run_id: str, step_id: str, name: str) -> Artifact:
        """What is known of an artifact of a step."""
        async with self.db.connection() as connection:
            found = await store.places_of(connection, [(run_id, step_id)])
        if (run_id, step_id) not in found:
            raise no_step(run_id, step_id)
        row = await self._row(found[run_id, step_id][0])
        for one in artifacts.known(row["artifacts"]):
            if one.name == name:
                return one
        hint = f"the step is {row['status']}, and left {len(row['artifacts'] or [])} artifacts"
        raise NotFound("ARTIFACT_NOT_FOUND", f"step {step_id} of run {run_id} left no {name}", hint=hint)

    async def run_named(self, tx: Connection, run_id: str) -> int:
        """The number of a run; NotFound RUN_NOT_FOUND when there is none."""
        row = await tx.fetchrow(store.SQL["run_named"], run_id)
        if row is None:
            raise no_run(run_id)
        return int(row["id"])
