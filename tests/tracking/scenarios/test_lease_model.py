"""Random claims, heartbeats, expiries and late reports against a plain model: never two workers, never a lost row."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.tracking.lease import Key, LeasedRow, LeaseReport
from tests.support.soak import Campaign, model_examples
from tests.tracking.jobs import JOB, LEASE, MAX_ATTEMPTS, Job, make_jobs

R = TypeVar("R")
ROWS = 6
LEASE_FOR = timedelta(seconds=60)
WORKERS = st.sampled_from(["ann", "bob", "cy"])


@dataclass
class LeaseModelRow:
    """The expected state of a row."""

    status: Job = Job.NEW
    fence: int = 0
    attempts: int = 0
    due: float = 0
    expires: float = 0
    holder: str | None = None
    moves: list[tuple[Job, Job]] = field(default_factory=list)

    def go(self, *path: Job) -> None:
        for target in path:
            JOB.check(self.status, target)
            self.moves.append((self.status, target))
            self.status = target


class LeaseAgainstModel(RuleBasedStateMachine):
    """A lease and a plain model of it, driven by random steps."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.start = self.clock.now()
        self.opened = Database.open(self.url, clock=self.clock, size=2)
        self.db = self.run(self.opened.__aenter__())
        self.run(self.db.execute("TRUNCATE job RESTART IDENTITY; TRUNCATE journal"))
        self.run(
            self.db.execute("INSERT INTO job (due_at) SELECT $1 FROM generate_series(1, $2::int)", self.start, ROWS)
        )
        self.model = {number: LeaseModelRow() for number in range(1, ROWS + 1)}
        self.handed_out: list[tuple[str, LeasedRow]] = []

    def run(self, work: Awaitable[R]) -> R:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.run(self.opened.__aexit__(None, None, None))
        self.loop.close()

    @property
    def now(self) -> float:
        return (self.clock.now() - self.start).total_seconds()

    @rule(worker=WORKERS, limit=st.integers(1, ROWS))
    def claim(self, worker: str, limit: int) -> None:
        async def work() -> list[LeasedRow]:
            async with self.db.transaction() as tx:
                return await LEASE.claim(tx, worker=worker, limit=limit, lease_for=LEASE_FOR, now=self.clock.now())

        leased = self.run(work())
        due = [number for number, row in self.model.items() if row.status is Job.NEW and row.due <= self.now]
        expected = sorted(due, key=lambda number: (self.model[number].due, number))[:limit]
        assert [row.key[0] for row in leased] == expected
        for row in leased:
            model = self.model[row.key[0]]
            model.go(Job.STARTED)
            model.fence, model.attempts, model.holder = model.fence + 1, model.attempts + 1, worker
            model.expires = self.now + LEASE_FOR.total_seconds()
            assert (row.fence, row.attempt) == (model.fence, model.attempts)
            self.handed_out.append((worker, row))

    @precondition(lambda self: self.handed_out)
    @rule(
        data=st.data(),
        outcome=st.sampled_from([Job.DONE, Job.FAILED, Job.NEW]),
        wait=st.integers(0, 90),
        counts=st.booleans(),
    )
    def report(self, data: st.DataObject, outcome: Job, wait: int, counts: bool) -> None:
        _, leased = data.draw(st.sampled_from(self.handed_out))
        counts = counts or outcome is not Job.NEW
        report = LeaseReport(
            leased.key, leased.fence, outcome, "busy", self.clock.now() + timedelta(seconds=wait), counts
        )

        async def work() -> bool:
            async with self.db.transaction() as tx:
                return bool(await LEASE.settle(tx, [report], now=self.clock.now()))

        accepted, model = self.run(work()), self.model[leased.key[0]]
        if model.fence == leased.fence and model.status is Job.STARTED:
            assert accepted
            self._settle(model, outcome, wait, counts)
        elif model.fence == leased.fence:
            exhausted = outcome is Job.NEW and counts and model.attempts >= MAX_ATTEMPTS
            assert accepted is (model.status is (Job.FAILED if exhausted else outcome))
        else:
            assert not accepted

    def _settle(self, model: LeaseModelRow, target: Job, wait: int, counts: bool) -> None:
        model.holder = None
        if target is not Job.NEW:
            model.go(target)
        elif counts and model.attempts >= MAX_ATTEMPTS:
            model.go(Job.FAILED)
        else:
            model.go(Job.FAILED, Job.NEW)
            model.due = self.now + wait
            model.attempts -= 0 if counts else 1

    @precondition(lambda self: self.handed_out)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        _, leased = data.draw(st.sampled_from(self.handed_out))

        async def work() -> set[tuple[Key, int]]:
            async with self.db.transaction() as tx:
                return await LEASE.heartbeat(tx, [(leased.key, leased.fence)], until=self.clock.now() + LEASE_FOR)

        extended, model = self.run(work()), self.model[leased.key[0]]
        assert bool(extended) == (model.status is Job.STARTED and model.fence == leased.fence)
        if extended:
            model.expires = self.now + LEASE_FOR.total_seconds()

    @rule(seconds=st.integers(1, 100))
    def pass_time(self, seconds: int) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    @rule()
    def reap(self) -> None:
        async def work() -> list[tuple[Key, Job]]:
            async with self.db.transaction() as tx:
                return await LEASE.reap(tx, now=self.clock.now())

        reaped = {key[0]: state for key, state in self.run(work())}
        late = {number for number, row in self.model.items() if row.status is Job.STARTED and row.expires < self.now}
        assert set(reaped) == late
        for number in late:
            model = self.model[number]
            model.fence, model.holder, model.due = model.fence + 1, None, self.now
            model.go(Job.FAILED) if model.attempts >= MAX_ATTEMPTS else model.go(Job.FAILED, Job.NEW)
            assert reaped[number] is model.status

    @invariant()
    def table_equals_model(self) -> None:
        """Check that no row is lost, none has two workers, and fences, attempts and moves match the model."""
        rows = self.run(self.db.fetch("SELECT id, status, fence, attempts, worker FROM job ORDER BY id"))
        seen = {row["id"]: (row["status"], row["fence"], row["attempts"]) for row in rows}
        assert seen == {number: (row.status.value, row.fence, row.attempts) for number, row in self.model.items()}
        holders = {row["id"]: row["worker"] for row in rows if row["status"] == "started"}
        assert holders == {number: row.holder for number, row in self.model.items() if row.holder}
        stored = self.run(self.db.fetch("SELECT subject, source, target FROM journal_move ORDER BY id, n"))
        for number, row in self.model.items():
            moves = [(entry["source"], entry["target"]) for entry in stored if entry["subject"] == str(number)]
            assert moves == [(source.value, target.value) for source, target in row.moves]


@pytest.mark.soak
async def test_leases_behave_like_the_model(db: Database, database_url: str, campaign: Campaign) -> None:
    """T12, T13, T14: after any sequence of claims, reports, heartbeats and expiries the table equals a plain model."""
    campaign.rounds = model_examples(25, soak=1000)
    await make_jobs(db, 0)
    machine = type("Run", (LeaseAgainstModel,), {"url": database_url})
    await asyncio.to_thread(
        run_state_machine_as_test,
        machine,
        settings=settings(max_examples=campaign.rounds, stateful_step_count=40, deadline=None),
    )
