"""F5, F6, F11: what follows from reports, and from workers that are not heard of; owns the transactions."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta

import asyncpg

from penstock.flows import artifacts, store
from penstock.flows.config import FlowsSection
from penstock.flows.contract import CHART_EXPORT, LATE_OUTPUTS, Answer, Said, StepStatus
from penstock.flows.engine import decide
from penstock.flows.engine.advance import Advance, Flows
from penstock.flows.engine.plan import Checks
from penstock.flows.engine.publish import Publisher
from penstock.flows.model import Appetite, Claimed, End, Place, Report, Settled
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.db.locks import try_advisory_lock
from penstock.kernel.db.notifier import Bell
from penstock.kernel.errors import Conflict, Transient
from penstock.kernel.storage import Storage

STEPS, RUNS, MOVES = "steps", "runs", "moves"  # the bell's topics: steps have their turn, runs ended, something moved
REAP_LIMIT = 500
_AT_ONCE = 4  # steps whose artifacts are published: each holds a connection meanwhile
PUBLISHING = timedelta(seconds=10)  # after which somebody else looks whether what a report left is published


class Reports:
    """Runs of flows. Whoever moves a run or its steps holds the run; whoever holds several takes them in order."""

    def __init__(
        self, db: Database, bell: Bell, storage: Storage, flows: Flows, checks: Checks, section: FlowsSection
    ) -> None:
        self.db = db
        self.bell = bell
        self.section = section
        self.flows = flows
        self.checks = checks
        self.advance = Advance(flows, checks)
        self.publisher = Publisher(storage)
        self._publishings = asyncio.Semaphore(_AT_ONCE)

    async def succeed(self, held: Sequence[tuple[Claimed, Report]], appetite: Appetite) -> tuple[list[Answer], Settled]:
        """F5: end steps that succeeded and left nothing behind; plain ones in one statement."""
        ends = [
            End(
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
        if is_plain and len(held) == 1 and appetite.room:
            [end], [(one, _)] = ends, held
            async with self.db.connection() as connection:
                following = await store.pass_on(connection, one, end.outputs or {}, end.digest or "", now, appetite)
            if following is not None:
                self.bell.ring(MOVES)
                return [Answer.SETTLED], Settled(handed=following)
        async with self.db.connection() if is_plain else self.db.transaction() as connection:
            told = await store.settle(connection, ends, now, appetite.worker, appetite)
            if not is_plain:
                await self.advance.follow(connection, told, now)
        self.announce(told)
        settled = {one.place for one in told.ended}
        if len(settled) == len(held):
            return [Answer.SETTLED] * len(held), told
        lost = [(one.run, one.n) not in settled for one, _ in held]
        answers = iter(await self._answered([report for (_, report), gone in zip(held, lost, strict=True) if gone]))
        return [next(answers) if is_lost else Answer.SETTLED for is_lost in lost], told

    async def _answered(self, reports: Sequence[Report]) -> list[Answer]:
        """What became of reports that settled nothing; whatever happens, what was handed over must not be forgotten."""
        try:
            return await self.report(reports)
        except Transient:
            return [Answer.SUPERSEDED] * len(reports)

    async def report(self, reports: Sequence[Report], worker: str = "worker") -> list[Answer]:
        """F5: what workers say of steps they held; each is answered for itself."""
        async with self.db.connection() as connection:
            found = await store.places_of(connection, [(one.run_id, one.step_id) for one in reports])
        known = [(one, *found.get((one.run_id, one.step_id), (None, ""))) for one in reports]
        plain = [n for n, (one, place, kind) in enumerate(known) if place and not _leaves_something(one, kind)]
        settled = await self._settle([(known[n][0], known[n][1] or (0, 0)) for n in plain], worker)
        answers = dict(zip(plain, settled, strict=True))
        for n, (one, place, _) in enumerate(known):
            if place is None:
                answers[n] = Answer.UNKNOWN
            elif n not in answers:
                answers[n] = await self._settle_with_artifacts(one, place, worker)
        return [answers[n] for n in range(len(reports))]

    async def _settle(self, reports: Sequence[tuple[Report, Place]], worker: str) -> list[Answer]:
        if not reports:
            return []
        async with self.db.transaction() as tx:
            now = self.db.clock.now()
            rows = await self._held(tx, [place for _, place in reports])
            ends: dict[Place, End] = {}
            decisions: list[End | Answer] = []
            for report, place in reports:
                decision = await self._decided(tx, rows[place], report, now)
                if isinstance(decision, End):
                    first = ends.setdefault(place, decision)
                    if first is not decision:  # of two reports in one batch the first counts
                        decision = Answer.UNCHANGED if first.digest == decision.digest else Answer.CONFLICT
                decisions.append(decision)
            told = await store.settle(tx, list(ends.values()), now, worker) if ends else Settled()
            await self.advance.follow(tx, told, now)
        self.announce(told)
        return [one if isinstance(one, Answer) else Answer.SETTLED for one in decisions]

    async def _settle_with_artifacts(self, report: Report, place: Place, worker: str) -> Answer:
        """F6: decide first which report counts, then publish what it left, then end the step."""
        row = await self._row(place)
        believed = await self.publisher.judged(row, report) if decide.is_held(row, report.fence) else report
        async with self.db.transaction() as tx:
            now = self.db.clock.now()
            row = (await self._held(tx, [place]))[place]
            decision = await self._decided(tx, row, believed, now)
            if isinstance(decision, End):
                decision = decision._replace(digest=decide.digest(report))
            if isinstance(decision, End) and decision.target is StepStatus.READY:
                told = await store.settle(tx, [decision], now, worker)
                await self.advance.follow(tx, told, now)
            elif isinstance(decision, End):
                await self.publisher.seal(tx, decision, believed, worker, now)
        if isinstance(decision, Answer) and row["sealed"] is None:
            return decision
        if isinstance(decision, End) and decision.target is StepStatus.READY:
            self.announce(told)
            return Answer.SETTLED
        if decision is not Answer.CONFLICT:
            with suppress(Conflict):  # somebody else has published it
                await self.finish_sealed(place)
        return Answer.SETTLED if isinstance(decision, End) else decision

    async def finish_sealed(self, place: Place) -> None:
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

    async def _decided(self, tx: Connection, row: asyncpg.Record, report: Report, now: datetime) -> End | Answer:
        if decide.is_held(row, report.fence):
            return decide.decided(row, report, now)
        answer = decide.answered(row, report)
        if answer is Answer.UNCHANGED:
            late = {name: value for name, value in report.outputs.items() if name in LATE_OUTPUTS}
            if late:
                await tx.execute(store.SQL["add_late_outputs"], row["run"], row["n"], row["fence"], late)
        return answer

    async def _held(self, tx: Connection, places: Sequence[Place]) -> dict[Place, asyncpg.Record]:
        """Steps as they are while their runs are held."""
        await store.lock_runs(tx, [run for run, _ in places])
        return {(row["run"], row["n"]): row for row in await store.steps_at(tx, places)}

    async def _row(self, place: Place) -> asyncpg.Record:
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
            told = await store.settle(tx, ends, now, "reaper") if ends else Settled()
            await self.advance.follow(tx, told, now)
        self.announce(told)
        return len(ends)

    def announce(self, told: Settled) -> None:
        """Wake those who wait for steps whose turn has come, or for runs that ended, and those who watch."""
        if told.ended or told.ready or told.runs:
            self.bell.ring(MOVES)
        # F16: where a kind has a limit, the end of one is another's turn.
        if told.ready or any(one.kind in self.section.limits for one in told.ended):
            self.bell.ring(STEPS)
        if told.runs or told.has_waiting:
            self.bell.ring(RUNS)


def _leaves_something(report: Report, kind: str) -> bool:
    """Whether there are artifacts, or a manifest that must be looked at."""
    return report.said in (Said.SUCCEEDED, Said.FAILED) and (bool(report.artifacts) or kind == CHART_EXPORT)
