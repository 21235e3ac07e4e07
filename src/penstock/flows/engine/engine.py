"""The engine of flows: runs are created, steps are handed out, reports are settled, lost workers are noticed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta

import asyncpg

from penstock.flows import artifacts, store
from penstock.flows.config import FlowsSection
from penstock.flows.contract import LOG_LINES, MUTABLE_OUTPUTS, StepReportAnswer, StepReportKind, StepStatus
from penstock.flows.definition.spec import RunRequest
from penstock.flows.engine import decide, plan
from penstock.flows.engine.advance import Advance, FlowLookup, resolved
from penstock.flows.engine.plan import Checks
from penstock.flows.engine.publish import FlowPublisher
from penstock.flows.model import (
    ClaimedStep,
    NewRun,
    NewStep,
    Prefetch,
    StepArtifact,
    StepEnd,
    StepKey,
    StepReport,
    StepSettlement,
    run_not_found,
    step_not_found,
)
from penstock.flows.step import ReportCheck
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.db.locks import acquire_transaction_lock, try_advisory_lock
from penstock.kernel.db.notifier import Notifier
from penstock.kernel.errors import Conflict, NotFound, Transient
from penstock.kernel.ids import new_id
from penstock.kernel.storage import Storage
from penstock.kernel.text import make_storable

STEPS, RUNS, MOVES = "steps", "runs", "moves"  # the bell's topics: steps have their turn, runs ended, something moved
REAP_LIMIT = 500
_AT_ONCE = 4  # steps whose artifacts are published: each holds a connection meanwhile
PUBLISHING = timedelta(seconds=10)  # after which somebody else looks whether what a report left is published
LINE_LIMIT = 4_000  # characters of a line of a log
_NO_CHECKS: Mapping[str, ReportCheck] = {}


class FlowEngine:
    """F2–F6, F9, F11, F16: creates runs, hands out their steps and settles reports; owns the transactions.

    A transaction that moves a run or its steps locks the run; one that locks several takes them in order.
    """

    def __init__(
        self,
        db: Database,
        notifier: Notifier,
        storage: Storage,
        flows: FlowLookup,
        checks: Checks,
        section: FlowsSection,
        report_checks: Mapping[str, ReportCheck] = _NO_CHECKS,
    ) -> None:
        self.db = db
        self.notifier = notifier
        self.section = section
        self.flows = flows
        self.checks = checks
        self.report_checks = report_checks
        self.advance = Advance(flows, checks)
        self.publisher = FlowPublisher(storage, report_checks)
        self._plans = plan.RunPlans()
        self._publishings = asyncio.Semaphore(_AT_ONCE)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        db: Database,
        storage: Storage,
        flows: FlowLookup,
        checks: Checks,
        section: FlowsSection,
        report_checks: Mapping[str, ReportCheck] = _NO_CHECKS,
    ) -> "AsyncIterator[FlowEngine]":
        """The engine, with a bell that wakes workers of all processes."""
        async with Notifier.open(db, store.CHANNEL) as notifier:
            yield cls(db, notifier, storage, flows, checks, section, report_checks)

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

    async def _create(self, new: NewRun, steps: Sequence[NewStep]) -> StepSettlement | None:
        """A run that begins at once: in one statement, unless a step must be looked at first."""
        now = self.db.clock.now()
        needs_evaluation = any(step.needs_evaluation and not step.depends_on for step in steps)
        async with self.db.transaction() if needs_evaluation else self.db.connection() as connection:
            made = await store.insert_run(connection, new, steps, now, is_begun=True)
            if made is None:
                return None
            told = StepSettlement(ready={step.kind for step in steps if not step.depends_on}, to_evaluate=made[1])
            await self.advance.follow(connection, told, now)
        return told

    async def _create_to_wait(self, new: NewRun, steps: Sequence[NewStep]) -> StepSettlement | None:
        """A run that may have to wait for others of its flow, or has nothing to do."""
        async with self.db.transaction() as tx:
            made = await store.insert_run(tx, new, steps, self.db.clock.now(), is_begun=False)
            return None if made is None else await self.begin(tx, made[0], new.flow)

    async def begin(self, tx: Connection, run: int, flow: str | None) -> StepSettlement:
        """F16: begin, unless as many runs of the flow are under way as there may be."""
        now = self.db.clock.now()
        if flow is not None and (most := self.most_active(flow)) is not None:
            await acquire_transaction_lock(tx, f"flows admit {flow}")
            if await store.count_active(tx, flow) >= most:
                return StepSettlement()
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
        self.notifier.close()

    def most_active(self, flow: str) -> int | None:
        """F16: how many runs of a flow may be under way; one that is no longer known has no limit."""
        try:
            return self.flows.get_flow(flow).max_active_runs
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
        is_gone: Callable[[], Awaitable[bool]] | None = None,
    ) -> list[ClaimedStep]:
        """F4: steps that are now *worker*'s alone; waits up to *wait* seconds for one, unless its caller goes."""
        lasts = lease_for or self.section.lease

        async def claim() -> list[ClaimedStep]:
            held = await self._claim(worker, rooms, limit, lasts)
            if held:
                self.notifier.notify(MOVES)
            return held

        return await self.notifier.claim(STEPS, claim, wait=wait, is_gone=is_gone)

    async def _claim(
        self, worker: str, rooms: Mapping[str, int], limit: int, lease_for: timedelta
    ) -> list[ClaimedStep]:
        limited = sorted(kind for kind in rooms if kind in self.section.limits)
        now = self.db.clock.now()
        if not limited:
            async with self.db.connection() as connection:
                return await store.claim(connection, rooms, limit, worker, now, now + lease_for)
        async with self.db.transaction() as tx:
            for kind in limited:
                await acquire_transaction_lock(tx, f"flows kind {kind}")
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
        told = [[level for level, _ in lines], [make_storable(message, LINE_LIMIT) for _, message in lines]]
        await self.db.execute(store.SQL["insert_logs"], *names, *told, self.db.clock.now(), LOG_LINES)

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        """F6: an artifact of a step; NotFound ARTIFACT_NOT_FOUND when it has none of that name."""
        return (await self.publisher.storage.get((await self.artifact(run_id, step_id, name)).path)).data

    async def artifact(self, run_id: str, step_id: str, name: str) -> StepArtifact:
        """What is known of an artifact of a step."""
        async with self.db.connection() as connection:
            found = await store.places_of(connection, [(run_id, step_id)])
        if (run_id, step_id) not in found:
            raise step_not_found(run_id, step_id)
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
            raise run_not_found(run_id)
        return int(row["id"])

    async def succeed(
        self, held: Sequence[tuple[ClaimedStep, StepReport]], appetite: Prefetch
    ) -> tuple[list[StepReportAnswer], StepSettlement]:
        """F5: end steps that succeeded and left nothing behind; plain ones in one statement."""
        ends = [
            StepEnd(
                one.run,
                one.n,
                one.fence,
                StepStatus.RUNNING,
                StepStatus.SUCCEEDED,
                outputs=dict(report.outputs),
                digest=decide.digest(report),
            )
            for one, report in held
        ]
        now = self.db.clock.now()
        is_plain = all(one.is_plain for one, _ in held)
        if is_plain and len(held) == 1 and appetite.capacity:
            [end], [(one, _)] = ends, held
            async with self.db.connection() as connection:
                following = await store.pass_on(connection, one, end.outputs or {}, end.digest or "", now, appetite)
            if following is not None:
                self.notifier.notify(MOVES)
                return [StepReportAnswer.SETTLED], StepSettlement(prefetched=following)
        async with self.db.connection() if is_plain else self.db.transaction() as connection:
            told = await store.settle(connection, ends, now, appetite.worker, appetite)
            if not is_plain:
                await self.advance.follow(connection, told, now)
        self.announce(told)
        settled = {one.key for one in told.ended}
        if len(settled) == len(held):
            return [StepReportAnswer.SETTLED] * len(held), told
        lost = [(one.run, one.n) not in settled for one, _ in held]
        answers = iter(await self._answered([report for (_, report), gone in zip(held, lost, strict=True) if gone]))
        return [next(answers) if is_lost else StepReportAnswer.SETTLED for is_lost in lost], told

    async def _answered(self, reports: Sequence[StepReport]) -> list[StepReportAnswer]:
        """What became of reports that settled nothing; whatever happens, what was handed over must not be forgotten."""
        try:
            return await self.report(reports)
        except Transient:
            return [StepReportAnswer.SUPERSEDED] * len(reports)

    async def report(self, reports: Sequence[StepReport], worker: str = "worker") -> list[StepReportAnswer]:
        """F5: what workers say of steps they held; each is answered for itself."""
        async with self.db.connection() as connection:
            found = await store.places_of(connection, [(one.run_id, one.step_id) for one in reports])
        known = [(one, *found.get((one.run_id, one.step_id), (None, ""))) for one in reports]
        plain = [n for n, (one, place, kind) in enumerate(known) if place and not self._leaves_something(one, kind)]
        settled = await self._settle([(known[n][0], known[n][1] or (0, 0)) for n in plain], worker)
        answers = dict(zip(plain, settled, strict=True))
        for n, (one, place, _) in enumerate(known):
            if place is None:
                answers[n] = StepReportAnswer.UNKNOWN
            elif n not in answers:
                answers[n] = await self._settle_with_artifacts(one, place, worker)
        return [answers[n] for n in range(len(reports))]

    def _leaves_something(self, report: StepReport, kind: str) -> bool:
        """Return whether there are artifacts to publish, or a document to check."""
        return report.outcome in (StepReportKind.SUCCEEDED, StepReportKind.FAILED) and (
            bool(report.artifacts) or kind in self.report_checks
        )

    async def _settle(self, reports: Sequence[tuple[StepReport, StepKey]], worker: str) -> list[StepReportAnswer]:
        if not reports:
            return []
        async with self.db.transaction() as tx:
            now = self.db.clock.now()
            rows = await self._held(tx, [place for _, place in reports])
            ends: dict[StepKey, StepEnd] = {}
            decisions: list[StepEnd | StepReportAnswer] = []
            for report, place in reports:
                decision = await self._decided(tx, rows[place], report, now)
                if isinstance(decision, StepEnd):
                    first = ends.setdefault(place, decision)
                    if first is not decision:  # of two reports in one batch the first counts
                        decision = (
                            StepReportAnswer.UNCHANGED if first.digest == decision.digest else StepReportAnswer.CONFLICT
                        )
                decisions.append(decision)
            told = await store.settle(tx, list(ends.values()), now, worker) if ends else StepSettlement()
            await self.advance.follow(tx, told, now)
        self.announce(told)
        return [one if isinstance(one, StepReportAnswer) else StepReportAnswer.SETTLED for one in decisions]

    async def _settle_with_artifacts(self, report: StepReport, place: StepKey, worker: str) -> StepReportAnswer:
        """F6: decide first which report counts, then publish what it left, then end the step."""
        row = await self._row(place)
        believed = await self.publisher.judged(row, report) if decide.is_held(row, report.fence) else report
        async with self.db.transaction() as tx:
            now = self.db.clock.now()
            row = (await self._held(tx, [place]))[place]
            decision = await self._decided(tx, row, believed, now)
            if isinstance(decision, StepEnd):
                decision = decision._replace(digest=decide.digest(report))
            if isinstance(decision, StepEnd) and decision.target is StepStatus.READY:
                told = await store.settle(tx, [decision], now, worker)
                await self.advance.follow(tx, told, now)
            elif isinstance(decision, StepEnd):
                await self.publisher.seal(tx, decision, believed, worker, now)
        if isinstance(decision, StepReportAnswer) and row["sealed"] is None:
            return decision
        if isinstance(decision, StepEnd) and decision.target is StepStatus.READY:
            self.announce(told)
            return StepReportAnswer.SETTLED
        if decision is not StepReportAnswer.CONFLICT:
            with suppress(Conflict):  # somebody else has published it
                await self.finish_sealed(place)
        return StepReportAnswer.SETTLED if isinstance(decision, StepEnd) else decision

    async def finish_sealed(self, place: StepKey) -> None:
        """F6: publish what the report that counts left, and end its step; again and again, if need be.

        One publishes at a time. Nobody's late hand may touch what another has published since: so it is asked before
        every object whether it is still to be published, over the connection that holds the lock.
        """
        async with (
            self._publishings,
            self.db.session() as session,
            try_advisory_lock(session, f"flows publish {place}") as is_mine,
        ):
            [row] = await store.steps_at(session, [place])
            if not is_mine or row["sealed"] is None:
                return

            async def is_ours() -> None:
                if not await session.fetchval(store.SQL["is_sealed"], *place, row["fence"]):
                    raise Conflict("SUPERSEDED", f"step {row['step_id']} has ended meanwhile")

            end, worker = await self.publisher.publish(row, is_ours)
            async with session.transaction():
                now = self.db.clock.now()
                await store.lock_runs(session, [place[0]])
                told = await store.settle(session, [end], now, worker)
                await self.advance.follow(session, told, now)
        self.announce(told)
        if told.ended:
            await artifacts.forget_attempts(self.publisher.storage, row["run_id"], row["step_id"])

    async def _decided(
        self, tx: Connection, row: asyncpg.Record, report: StepReport, now: datetime
    ) -> StepEnd | StepReportAnswer:
        if decide.is_held(row, report.fence):
            return decide.decided(row, report, now)
        answer = decide.answered(row, report)
        if answer is StepReportAnswer.UNCHANGED:
            late = {name: value for name, value in report.outputs.items() if name in MUTABLE_OUTPUTS}
            if late:
                await tx.execute(store.SQL["add_late_outputs"], row["run"], row["n"], row["fence"], late)
        return answer

    async def _held(self, tx: Connection, places: Sequence[StepKey]) -> dict[StepKey, asyncpg.Record]:
        """Steps as they are while their runs are held."""
        await store.lock_runs(tx, [run for run, _ in places])
        return {(row["run"], row["n"]): row for row in await store.steps_at(tx, places)}

    async def _row(self, place: StepKey) -> asyncpg.Record:
        async with self.db.connection() as connection:
            return (await store.steps_at(connection, [place]))[0]

    async def reap(self) -> int:
        """F11: take back steps whose workers were not heard of in time; returns how many."""
        now = self.db.clock.now()
        late = [(row["run"], row["n"]) for row in await self.db.fetch(store.SQL["expired"], now, REAP_LIMIT)]
        if not late:
            return 0
        async with self.db.transaction() as tx:
            rows = await self._held(tx, late)
            ends = [
                decide.expired(row, now, self.section.max_lost)
                for row in rows.values()
                if row["status"] == StepStatus.RUNNING and row["lease_until"] is not None and row["lease_until"] < now
            ]
            told = await store.settle(tx, ends, now, "reaper") if ends else StepSettlement()
            await self.advance.follow(tx, told, now)
        self.announce(told)
        return len(ends)

    def announce(self, told: StepSettlement) -> None:
        """Wake those who wait for steps whose turn has come, or for runs that ended, and those who watch."""
        if told.ended or told.ready or told.runs:
            self.notifier.notify(MOVES)
        # F16: where a kind has a limit, the end of one is another's turn.
        if told.ready or any(one.kind in self.section.limits for one in told.ended):
            self.notifier.notify(STEPS)
        if told.runs or told.has_waiting:
            self.notifier.notify(RUNS)
