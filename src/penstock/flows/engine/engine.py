"""The engine of flows: creation of runs, claims, reports, and steps whose lease has expired."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta

import asyncpg
import structlog

from penstock.flows import artifacts, store
from penstock.flows.config import FlowsSection
from penstock.flows.contract import (
    LOG_LINES,
    MUTABLE_OUTPUTS,
    FlowRunStatus,
    StepReportAnswer,
    StepReportKind,
    StepStatus,
)
from penstock.flows.definition.spec import RunRequest
from penstock.flows.engine import decide, plan
from penstock.flows.engine.advance import Advance, FlowLookup, resolve_request
from penstock.flows.engine.log import log_changes
from penstock.flows.engine.plan import Checks
from penstock.flows.engine.publish import FlowPublisher
from penstock.flows.model import (
    ClaimedStep,
    NewRun,
    NewStep,
    Prefetch,
    RunChange,
    StepArtifact,
    StepEnd,
    StepKey,
    StepReport,
    StepSettlement,
    make_run_not_found_error,
    make_step_not_found_error,
)
from penstock.flows.step import ReportCheck
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.db.locks import acquire_transaction_lock, try_advisory_lock
from penstock.kernel.db.notifier import Notifier
from penstock.kernel.errors import Conflict, NotFound, Transient
from penstock.kernel.ids import make_id
from penstock.kernel.storage import Storage
from penstock.kernel.text import make_storable

STEPS, RUNS, MOVES = "steps", "runs", "moves"  # notifier topics: steps are ready, runs ended, a status changed
REAP_LIMIT = 500
_CONCURRENT_PUBLICATIONS = 4  # each uses a connection
PUBLISH_TIMEOUT = timedelta(seconds=10)  # after this time another process publishes the artifacts of an accepted report
LINE_LIMIT = 4_000  # characters of a log line
_NO_CHECKS: Mapping[str, ReportCheck] = {}
_log = structlog.get_logger()


class FlowEngine:
    """F2–F6, F9, F11, F16: the engine creates runs, hands out steps and settles reports; it owns the transactions.

    A transaction that changes a run or its steps locks the run. Several runs are locked in the order of their numbers.
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
        self._publications = asyncio.Semaphore(_CONCURRENT_PUBLICATIONS)

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
        """Yield the engine, with a notifier that wakes the workers of all processes."""
        async with Notifier.open(db, store.CHANNEL) as notifier:
            yield cls(db, notifier, storage, flows, checks, section, report_checks)

    async def create(
        self, request: RunRequest, by: str, *, scheduled_for: datetime | None = None, trace: str | None = None
    ) -> tuple[str, bool]:
        """F2: create a run; return its id and whether it is new; Conflict RUN_EXISTS if another request used the id."""
        flow, steps, scope, policy = resolve_request(request, self.flows)
        # The plan of inline steps is not cached, because they rarely run again.
        planned = self._plans.plan_steps(steps, self.checks) if flow else plan.plan_steps(steps, self.checks)
        run_id = request.run_id or str(make_id(self.db.clock))
        digest = plan.compute_digest(request)
        ends = plan.count_open_ends(planned)
        new = NewRun(run_id, flow, scope, digest, policy.fail_fast, ends, by, scheduled_for=scheduled_for, trace=trace)
        may_wait = flow is not None and self.get_max_active_runs(flow) is not None
        settlement = await (
            self._create_started(new, planned) if ends and not may_wait else self._create_waiting(new, planned)
        )
        if settlement is None:
            await self._check_same_request(run_id, digest)
            return run_id, False
        self.announce(settlement)
        return run_id, True

    async def _create_started(self, new: NewRun, steps: Sequence[NewStep]) -> StepSettlement | None:
        """Create a run that starts at once: in one statement, unless a step must be evaluated first."""
        now = self.db.clock.now()
        needs_evaluation = any(step.needs_evaluation and not step.depends_on for step in steps)
        async with self.db.transaction() if needs_evaluation else self.db.connection() as connection:
            inserted = await store.insert_run(connection, new, steps, now, is_started=True)
            if inserted is None:
                return None
            run, to_evaluate = inserted
            started = RunChange(run, new.run_id, new.flow, FlowRunStatus.RUNNING)
            ready = {step.kind for step in steps if not step.depends_on}
            settlement = StepSettlement(ready=ready, to_evaluate=to_evaluate, started=[started])
            await self.advance.follow(connection, settlement, now)
        return settlement

    async def _create_waiting(self, new: NewRun, steps: Sequence[NewStep]) -> StepSettlement | None:
        """Create a run that may have to wait for other runs of its flow, or that has no steps."""
        async with self.db.transaction() as tx:
            inserted = await store.insert_run(tx, new, steps, self.db.clock.now(), is_started=False)
            return None if inserted is None else await self.start_run(tx, inserted[0], new.flow)

    async def start_run(self, tx: Connection, run: int, flow: str | None) -> StepSettlement:
        """F16: start a run, unless `max_active_runs` runs of the flow are running."""
        now = self.db.clock.now()
        if flow is not None and (limit := self.get_max_active_runs(flow)) is not None:
            await acquire_transaction_lock(tx, f"flows admit {flow}")
            if await store.count_running_runs(tx, flow) >= limit:
                return StepSettlement()
        settlement = await plan.start_run(tx, run, now)
        await self.advance.follow(tx, settlement, now)
        return settlement

    async def _check_same_request(self, run_id: str, digest: str) -> None:
        row = await self.db.fetchrow(store.SQL["find_run"], run_id)
        if row is not None and row["digest"] != digest:
            hint = "choose another runId; a repeated runId is accepted only with the same request"
            raise Conflict("RUN_EXISTS", f"run {run_id} exists already, with a different request", hint=hint)

    def stop(self) -> None:
        """End all waiting claims and event streams."""
        self.notifier.close()

    def get_max_active_runs(self, flow: str) -> int | None:
        """F16: return the limit of concurrent runs of a flow; None without a limit, or if the flow was removed."""
        try:
            return self.flows.get_flow(flow).max_active_runs
        except NotFound:
            return None

    async def claim(
        self,
        worker: str,
        capacities: Mapping[str, int],
        *,
        limit: int,
        lease_for: timedelta | None = None,
        wait: float = 0,
        is_gone: Callable[[], Awaitable[bool]] | None = None,
    ) -> list[ClaimedStep]:
        """F4: claim steps for *worker*; wait up to *wait* seconds for the first one.

        The wait ends early when *is_gone* returns true, i.e. the client has disconnected.
        """
        duration = lease_for or self.section.lease

        async def claim() -> list[ClaimedStep]:
            claimed = await self._claim_now(worker, capacities, limit, duration)
            if claimed:
                self.notifier.notify(MOVES)
            return claimed

        return await self.notifier.claim(STEPS, claim, wait=wait, is_gone=is_gone)

    async def _claim_now(
        self, worker: str, capacities: Mapping[str, int], limit: int, lease_for: timedelta
    ) -> list[ClaimedStep]:
        limited = sorted(kind for kind in capacities if kind in self.section.limits)
        now = self.db.clock.now()
        if not limited:
            async with self.db.connection() as connection:
                return await store.claim(connection, capacities, limit, worker, now, now + lease_for)
        async with self.db.transaction() as tx:
            for kind in limited:
                await acquire_transaction_lock(tx, f"flows kind {kind}")
            rows = await tx.fetch(store.SQL["count_running_steps"], limited)
            running = {row["kind"]: row["running"] for row in rows}
            free = {kind: max(0, self.section.limits[kind] - running.get(kind, 0)) for kind in limited}
            capacities = {kind: min(count, free.get(kind, count)) for kind, count in capacities.items()}
            return await store.claim(tx, capacities, limit, worker, now, now + lease_for)

    async def heartbeat(
        self, claims: Sequence[tuple[str, str, int]], lease_for: timedelta | None = None
    ) -> dict[tuple[str, str, int], bool]:
        """F9: extend the leases of steps, given by run, name and fence.

        Return the steps that are still claimed, and whether each must stop.
        """
        until = self.db.clock.now() + (lease_for or self.section.lease)
        columns = [list(column) for column in zip(*claims, strict=True)] if claims else [[], [], []]
        rows = await self.db.fetch(store.SQL["heartbeat"], *columns, until)
        return {(row["run_id"], row["step_id"], row["fence"]): row["is_cancelled"] for row in rows}

    async def log(self, run_id: str, step_id: str, fence: int, lines: Sequence[tuple[str, str]]) -> None:
        """F18: store log lines of an attempt; lines of an attempt that lost its step are dropped."""
        if not lines:
            return
        names = [[run_id] * len(lines), [step_id] * len(lines), [fence] * len(lines)]
        texts = [[level for level, _ in lines], [make_storable(message, LINE_LIMIT) for _, message in lines]]
        await self.db.execute(store.SQL["insert_logs"], *names, *texts, self.db.clock.now(), LOG_LINES)

    async def read_artifact(self, run_id: str, step_id: str, name: str) -> bytes:
        """F6: return the content of an artifact; NotFound ARTIFACT_NOT_FOUND if the step has none of that name."""
        return (await self.publisher.storage.get((await self.find_artifact(run_id, step_id, name)).path)).data

    async def find_artifact(self, run_id: str, step_id: str, name: str) -> StepArtifact:
        """Return the description of an artifact; NotFound ARTIFACT_NOT_FOUND if the step has none of that name."""
        async with self.db.connection() as connection:
            steps = await store.find_steps(connection, [(run_id, step_id)])
        if (run_id, step_id) not in steps:
            raise make_step_not_found_error(run_id, step_id)
        row = await self._read_step(steps[run_id, step_id][0])
        for artifact in artifacts.decode(row["artifacts"]):
            if artifact.name == name:
                return artifact
        hint = f"the step is {row['status']} and has {len(row['artifacts'] or [])} artifacts"
        raise NotFound("ARTIFACT_NOT_FOUND", f"step {step_id} of run {run_id} has no artifact {name}", hint=hint)

    async def find_run(self, tx: Connection, run_id: str) -> int:
        """Return the number of a run; NotFound RUN_NOT_FOUND if it does not exist."""
        row = await tx.fetchrow(store.SQL["find_run"], run_id)
        if row is None:
            raise make_run_not_found_error(run_id)
        return int(row["id"])

    async def settle_succeeded(
        self, reports: Sequence[tuple[ClaimedStep, StepReport]], prefetch: Prefetch
    ) -> tuple[list[StepReportAnswer], StepSettlement]:
        """F5: end steps that succeeded without artifacts; plain steps in one statement."""
        now = self.db.clock.now()
        is_plain = all(step.is_plain for step, _ in reports)
        if is_plain and len(reports) == 1 and prefetch.capacity:
            [(step, report)] = reports
            digest = decide.compute_digest(report)
            async with self.db.connection() as connection:
                claimed = await store.settle_and_claim(connection, step, dict(report.outputs), digest, now, prefetch)
            if claimed is not None:
                self.notifier.notify(MOVES)
                return [StepReportAnswer.SETTLED], StepSettlement(prefetched=claimed)
        ends = [_make_success(step, report) for step, report in reports]
        async with self.db.connection() if is_plain else self.db.transaction() as connection:
            settlement = await store.settle(connection, ends, now, prefetch.worker, prefetch)
            if not is_plain:
                await self.advance.follow(connection, settlement, now)
        self.announce(settlement)
        settled = {ended.key for ended in settlement.ended}
        if len(settled) == len(reports):
            return [StepReportAnswer.SETTLED] * len(reports), settlement
        answers = iter(await self._answer_lost([report for step, report in reports if step.key not in settled]))
        return [StepReportAnswer.SETTLED if step.key in settled else next(answers) for step, _ in reports], settlement

    async def _answer_lost(self, reports: Sequence[StepReport]) -> list[StepReportAnswer]:
        """Return the answers to reports that settled nothing.

        An error here must not lose the steps that were claimed for the worker by the other reports.
        """
        try:
            return await self.report(reports)
        except Transient:
            return [StepReportAnswer.SUPERSEDED] * len(reports)

    async def report(self, reports: Sequence[StepReport], worker: str = "worker") -> list[StepReportAnswer]:
        """F5: settle reports of workers; return one answer per report."""
        async with self.db.connection() as connection:
            steps = await store.find_steps(connection, [(report.run_id, report.step_id) for report in reports])
        located = [(report, *steps.get((report.run_id, report.step_id), (None, ""))) for report in reports]
        plain = [
            n
            for n, (report, key, kind) in enumerate(located)
            if key is not None and not self._needs_publication(report, kind)
        ]
        settled = await self._settle([(located[n][0], located[n][1] or (0, 0)) for n in plain], worker)
        answers = dict(zip(plain, settled, strict=True))
        for n, (report, key, _) in enumerate(located):
            if key is None:
                answers[n] = StepReportAnswer.UNKNOWN
            elif n not in answers:
                answers[n] = await self._settle_with_artifacts(report, key, worker)
        return [answers[n] for n in range(len(reports))]

    def _needs_publication(self, report: StepReport, kind: str) -> bool:
        """Return whether there are artifacts to publish, or a document to check."""
        return report.outcome in (StepReportKind.SUCCEEDED, StepReportKind.FAILED) and (
            bool(report.artifacts) or kind in self.report_checks
        )

    async def _settle(self, reports: Sequence[tuple[StepReport, StepKey]], worker: str) -> list[StepReportAnswer]:
        if not reports:
            return []
        async with self.db.transaction() as tx:
            now = self.db.clock.now()
            rows = await self._lock_steps(tx, [key for _, key in reports])
            ends: dict[StepKey, StepEnd] = {}
            decisions: list[StepEnd | StepReportAnswer] = []
            for report, key in reports:
                decision = await self._decide(tx, rows[key], report, now)
                if isinstance(decision, StepEnd):
                    first = ends.setdefault(key, decision)
                    if first is not decision:  # of two reports in one batch the first counts
                        decision = (
                            StepReportAnswer.UNCHANGED if first.digest == decision.digest else StepReportAnswer.CONFLICT
                        )
                decisions.append(decision)
            settlement = await store.settle(tx, list(ends.values()), now, worker) if ends else StepSettlement()
            await self.advance.follow(tx, settlement, now)
        self.announce(settlement)
        return [
            decision if isinstance(decision, StepReportAnswer) else StepReportAnswer.SETTLED for decision in decisions
        ]

    async def _settle_with_artifacts(self, report: StepReport, key: StepKey, worker: str) -> StepReportAnswer:
        """F6: accept a report, then publish its artifacts, then end the step."""
        row = await self._read_step(key)
        checked = await self.publisher.check_report(row, report) if decide.is_claimed(row, report.fence) else report
        async with self.db.transaction() as tx:
            now = self.db.clock.now()
            row = (await self._lock_steps(tx, [key]))[key]
            decision = await self._decide(tx, row, checked, now)
            if isinstance(decision, StepEnd):
                decision = decision._replace(digest=decide.compute_digest(report))
            if isinstance(decision, StepEnd) and decision.target is StepStatus.READY:
                settlement = await store.settle(tx, [decision], now, worker)
                await self.advance.follow(tx, settlement, now)
            elif isinstance(decision, StepEnd):
                await self.publisher.seal(tx, decision, checked, worker, now)
        if isinstance(decision, StepReportAnswer) and row["sealed"] is None:
            return decision
        if isinstance(decision, StepEnd) and decision.target is StepStatus.READY:
            self.announce(settlement)
            return StepReportAnswer.SETTLED
        if decision is not StepReportAnswer.CONFLICT:
            with suppress(Conflict):  # another process has published it
                await self.finish_sealed(key)
        return StepReportAnswer.SETTLED if isinstance(decision, StepEnd) else decision

    async def finish_sealed(self, key: StepKey) -> None:
        """F6: publish the artifacts of the accepted report, and end its step; safe to repeat.

        One process publishes at a time. A process that lost the lock must not change objects that another process has
        published since: before every change it checks, over the connection of the lock, that the step is still sealed.
        """
        async with (
            self._publications,
            self.db.session() as session,
            try_advisory_lock(session, f"flows publish {key}") as is_locked,
        ):
            [row] = await store.read_steps(session, [key])
            if not is_locked or row["sealed"] is None:
                return

            async def check_ownership() -> None:
                if not await session.fetchval(store.SQL["is_sealed"], *key, row["fence"]):
                    raise Conflict("SUPERSEDED", f"step {row['step_id']} was ended by another process")

            end, worker = await self.publisher.publish(row, check_ownership)
            async with session.transaction():
                now = self.db.clock.now()
                await store.lock_runs(session, [key[0]])
                settlement = await store.settle(session, [end], now, worker)
                await self.advance.follow(session, settlement, now)
        self.announce(settlement)
        if settlement.ended:
            await artifacts.delete_attempts(self.publisher.storage, row["run_id"], row["step_id"])

    async def _decide(
        self, tx: Connection, row: asyncpg.Record, report: StepReport, now: datetime
    ) -> StepEnd | StepReportAnswer:
        if decide.is_claimed(row, report.fence):
            return decide.decide_end(row, report, now)
        answer = decide.answer_late_report(row, report)
        if answer is StepReportAnswer.UNCHANGED:
            late = {name: value for name, value in report.outputs.items() if name in MUTABLE_OUTPUTS}
            if late:
                await tx.execute(store.SQL["add_late_outputs"], row["run"], row["n"], row["fence"], late)
        return answer

    async def _lock_steps(self, tx: Connection, keys: Sequence[StepKey]) -> dict[StepKey, asyncpg.Record]:
        """Lock the runs of steps, and return the steps."""
        await store.lock_runs(tx, [run for run, _ in keys])
        return {(row["run"], row["n"]): row for row in await store.read_steps(tx, keys)}

    async def _read_step(self, key: StepKey) -> asyncpg.Record:
        async with self.db.connection() as connection:
            return (await store.read_steps(connection, [key]))[0]

    async def reap(self) -> int:
        """F11: take back steps with an expired lease; return their number."""
        now = self.db.clock.now()
        expired = [(row["run"], row["n"]) for row in await self.db.fetch(store.SQL["expired_leases"], now, REAP_LIMIT)]
        if not expired:
            return 0
        async with self.db.transaction() as tx:
            rows = await self._lock_steps(tx, expired)
            ends = [
                decide.decide_expiry(row, now, self.section.max_lost)
                for row in rows.values()
                if row["status"] == StepStatus.RUNNING and row["lease_until"] is not None and row["lease_until"] < now
            ]
            settlement = await store.settle(tx, ends, now, "reaper") if ends else StepSettlement()
            await self.advance.follow(tx, settlement, now)
        if ends:
            _log.info("flow_leases_expired", steps=len(ends))
        self.announce(settlement)
        return len(ends)

    def announce(self, settlement: StepSettlement) -> None:
        """Log a committed settlement, and wake waiting workers, waiting runs and event streams."""
        log_changes(settlement)
        if settlement.ended or settlement.ready or settlement.runs:
            self.notifier.notify(MOVES)
        # F16: the end of a step of a limited kind allows the next step of this kind.
        if settlement.ready or any(step.kind in self.section.limits for step in settlement.ended):
            self.notifier.notify(STEPS)
        if settlement.runs or settlement.has_waiting:
            self.notifier.notify(RUNS)


def _make_success(step: ClaimedStep, report: StepReport) -> StepEnd:
    digest = decide.compute_digest(report)
    source, target = StepStatus.RUNNING, StepStatus.SUCCEEDED
    return StepEnd(step.run, step.n, step.fence, source, target, outputs=dict(report.outputs), digest=digest)
