"""Leases: one holder at a time, no row lost, no late report believed."""

import asyncio
from datetime import timedelta

import pytest

from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Conflict
from penstock.kernel.states import journal
from penstock.tracking.lease import AcceptedReport, Key, Lease, LeasedRow, LeaseReport
from tests.tracking.jobs import JOB, LEASE, Job, make_jobs

LEASE_FOR = timedelta(seconds=60)


class Jobs:
    """The lease with a clock in its hand."""

    def __init__(self, db: Database, clock: ManualClock) -> None:
        self.db, self.clock = db, clock

    async def claim(self, worker: str = "w", limit: int = 1) -> list[LeasedRow]:
        async with self.db.transaction() as tx:
            return await LEASE.claim(tx, worker=worker, limit=limit, lease_for=LEASE_FOR, now=self.clock.now())

    async def settle(self, held: LeasedRow, target: Job = Job.DONE, **more: object) -> bool:
        report = LeaseReport(held.key, held.fence, target, **more)  # type: ignore[arg-type]
        async with self.db.transaction() as tx:
            return bool(await LEASE.settle(tx, [report], now=self.clock.now()))

    async def heartbeat(self, held: LeasedRow) -> bool:
        async with self.db.transaction() as tx:
            return bool(await LEASE.heartbeat(tx, [(held.key, held.fence)], until=self.clock.now() + LEASE_FOR))

    async def reap(self) -> list[tuple[Key, Job]]:
        async with self.db.transaction() as tx:
            return await LEASE.reap(tx, now=self.clock.now())

    async def status(self, id: int = 1) -> str:  # noqa: A002
        return str(await self.db.fetchval("SELECT status FROM job WHERE id = $1", id))

    async def moves(self, id: int = 1) -> list[tuple[str | None, str]]:  # noqa: A002
        async with self.db.connection() as connection:
            numbers = await connection.fetchval("SELECT moves FROM job WHERE id = $1", id)
            noted = await journal.read_history(connection, numbers, [str(id)])
        return [(n.entry.source, n.entry.target) for n in noted]


@pytest.fixture
async def jobs(db: Database, clock: ManualClock) -> Jobs:
    await make_jobs(db, 5)
    return Jobs(db, clock)


async def test_a_claim_hands_out_the_oldest_rows_once(jobs: Jobs) -> None:
    """T12: each claimed row has one holder and a grown fence; the next claimer gets the others."""
    first, second = await jobs.claim("a", 3), await jobs.claim("b", 3)
    assert [held.key[0] for held in first] == [1, 2, 3]
    assert [held.key[0] for held in second] == [4, 5]
    assert {held.fence for held in first + second} == {1}
    assert await jobs.claim("c") == []


async def test_many_claimers_never_share_a_row(db: Database, clock: ManualClock) -> None:
    """T12: 16 claimers at once on 800 rows; none is handed out twice, none is left."""
    await make_jobs(db, 800)
    jobs = Jobs(db, clock)

    async def claimer(name: str) -> list[int]:
        mine: list[int] = []
        while held := await jobs.claim(name, 7):
            mine += [row.key[0] for row in held]
        return mine

    taken = await asyncio.gather(*(claimer(f"w{n}") for n in range(16)))
    ids = [row for mine in taken for row in mine]
    assert sorted(ids) == list(range(1, 801))


async def test_a_lost_lease_cannot_finish_a_row(jobs: Jobs) -> None:
    """T13: a worker whose lease ran out is told so, and the row stays open."""
    (held,) = await jobs.claim()
    jobs.clock.advance(LEASE_FOR + timedelta(seconds=1))
    assert await jobs.reap() == [((1,), Job.NEW)]
    assert not await jobs.settle(held)
    assert await jobs.status() == "new"


async def test_an_old_fence_changes_nothing_while_another_works(jobs: Jobs) -> None:
    """T13: a late report neither ends nor fails the row its successor holds."""
    (old,) = await jobs.claim("old")
    jobs.clock.advance(LEASE_FOR + timedelta(seconds=1))
    await jobs.reap()
    again = next(held for held in await jobs.claim("new", 5) if held.key[0] == old.key[0])
    assert not await jobs.settle(old, Job.FAILED)
    assert not await jobs.heartbeat(old)
    assert await jobs.status() == "started"
    assert await jobs.settle(again)


async def test_repeating_a_report_is_a_success(jobs: Jobs) -> None:
    """F5: the same report again says yes and moves nothing; another one for the ended row says no."""
    (held,) = await jobs.claim()
    assert await jobs.settle(held)
    assert await jobs.settle(held)
    assert not await jobs.settle(held, Job.FAILED)
    assert await jobs.moves() == [("new", "started"), ("started", "done")]


async def test_a_heartbeat_keeps_the_lease(jobs: Jobs) -> None:
    """T14: an extended lease is not reaped at its first end."""
    (held,) = await jobs.claim()
    jobs.clock.advance(LEASE_FOR / 2)
    assert await jobs.heartbeat(held)
    jobs.clock.advance(LEASE_FOR / 2 + timedelta(seconds=1))
    assert await jobs.reap() == []
    assert await jobs.settle(held)


async def test_reaping_goes_by_way_of_failed_and_ends_there(jobs: Jobs) -> None:
    """T14: an expired row returns through failed, both in the history, and fails for good after its attempts."""
    for attempt in (1, 2, 3):
        held = next(h for h in await jobs.claim(limit=5) if h.key[0] == 1)
        assert held.attempt == attempt
        jobs.clock.advance(LEASE_FOR + timedelta(seconds=1))
        await jobs.reap()
    assert await jobs.status() == "failed"
    back = [("new", "started"), ("started", "failed"), ("failed", "new")]
    assert await jobs.moves() == [*back, *back, *back[:2]]


async def test_a_retry_waits_until_it_is_due_and_gives_up_at_last(jobs: Jobs) -> None:
    """T14: a retried row is not handed out before its time, and fails once its attempts are used up."""
    (held,) = await jobs.claim()
    later = jobs.clock.now() + timedelta(minutes=5)
    await jobs.settle(held, Job.NEW, reason="throttled", due_at=later)
    assert 1 not in [h.key[0] for h in await jobs.claim(limit=5)]
    for _ in range(2):
        jobs.clock.advance(timedelta(minutes=5))
        held = next(h for h in await jobs.claim(limit=5) if h.key[0] == 1)
        assert await jobs.settle(held, Job.NEW, reason="throttled", due_at=jobs.clock.now())
    assert await jobs.status() == "failed"


async def test_a_row_given_back_untouched_costs_no_attempt(jobs: Jobs) -> None:
    """A worker that stops returns what it did not begin, with its place in the queue."""
    (held,) = await jobs.claim()
    await jobs.settle(held, Job.NEW, counts=False)
    (again,) = await jobs.claim()
    assert (again.key[0], again.attempt, again.fence) == (1, 1, 2)


async def test_what_does_not_count_is_tried_for_ever(jobs: Jobs) -> None:
    """R11: a failure of the moment costs no attempt, however often, and waits until it is due."""
    for _ in range(10):
        (held,) = await jobs.claim()
        later = jobs.clock.now() + timedelta(seconds=5)
        assert await jobs.settle(held, Job.NEW, reason="database down", due_at=later, counts=False)
        await jobs.db.execute("UPDATE job SET due_at = 'infinity' WHERE id > 1")
        assert await jobs.claim() == []
        jobs.clock.advance(timedelta(seconds=5))
    assert await jobs.status() == "new"


async def test_of_two_reports_on_a_row_the_first_counts(jobs: Jobs) -> None:
    """T13: a batch that contradicts itself has one outcome, that of its first word."""
    (held,) = await jobs.claim()
    reports = [LeaseReport(held.key, held.fence, Job.DONE), LeaseReport(held.key, held.fence, Job.FAILED)]
    async with jobs.db.transaction() as tx:
        settled = await LEASE.settle(tx, reports, now=jobs.clock.now())
    assert settled == [AcceptedReport(held.key, held.fence, Job.DONE, moved=True)]


async def test_a_report_tells_whether_it_moved_the_row(jobs: Jobs) -> None:
    """T7, F3: counters and next steps follow a move once: the repeated report is believed, and moved nothing."""
    (held,) = await jobs.claim()
    report = [LeaseReport(held.key, held.fence, Job.FAILED, "no")]
    async with jobs.db.transaction() as tx:
        first = await LEASE.settle(tx, report, now=jobs.clock.now())
        again = await LEASE.settle(tx, report, now=jobs.clock.now())
    assert (first, again) == (
        [AcceptedReport((1,), 1, Job.FAILED, moved=True)],
        [AcceptedReport((1,), 1, Job.FAILED, moved=False)],
    )


async def test_a_report_into_nowhere_is_refused(jobs: Jobs) -> None:
    """T8: a row cannot be settled into the state of being held."""
    (held,) = await jobs.claim()
    with pytest.raises(Conflict):
        await jobs.settle(held, Job.STARTED)
    assert await jobs.settle(held)


async def test_any_reason_can_be_kept(jobs: Jobs) -> None:
    """T15: a reason with characters no database takes does not leave the row stuck."""
    (held,) = await jobs.claim()
    assert await jobs.settle(held, Job.FAILED, reason="bad \0 byte \ud800" + "x" * 10_000)


async def test_a_heartbeat_never_shortens_a_lease(jobs: Jobs) -> None:
    """T14: a late, shorter heartbeat leaves the longer lease as it is."""
    (held,) = await jobs.claim()
    async with jobs.db.transaction() as tx:
        await LEASE.heartbeat(tx, [(held.key, held.fence)], until=jobs.clock.now() + timedelta(seconds=1))
    jobs.clock.advance(LEASE_FOR - timedelta(seconds=1))
    assert await jobs.reap() == []


async def test_a_report_and_a_reap_at_once_have_one_winner(jobs: Jobs) -> None:
    """T13: a report that waits for the reaper's commit finds its fence gone, and changes nothing."""
    (held,) = await jobs.claim()
    jobs.clock.advance(LEASE_FOR + timedelta(seconds=1))
    async with jobs.db.transaction() as reaper:
        await LEASE.reap(reaper, now=jobs.clock.now())
        late = asyncio.create_task(jobs.settle(held))
        waiting = "SELECT true FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        while not await jobs.db.fetchval(waiting):
            assert not late.done(), "the report did not wait for the reaper"
    assert not await late
    assert await jobs.status() == "new"
    assert ("started", "done") not in await jobs.moves()


async def test_attempts_may_be_a_column_of_the_row(jobs: Jobs) -> None:
    """F10: each row can have a limit of its own."""
    own = Lease("job", JOB, ready=Job.NEW, held=Job.STARTED, done=Job.DONE, failed=Job.FAILED, max_attempts="t.most")
    await jobs.db.execute(
        "ALTER TABLE job ADD COLUMN most int NOT NULL DEFAULT 1; UPDATE job SET most = 5 WHERE id = 2"
    )
    held = await jobs.claim(limit=2)
    reports = [LeaseReport(h.key, h.fence, Job.NEW, "again") for h in held]
    async with jobs.db.transaction() as tx:
        settled = await own.settle(tx, reports, now=jobs.clock.now())
    assert {one.key[0]: one.state for one in settled} == {1: Job.FAILED, 2: Job.NEW}


async def test_every_move_is_in_the_journal_with_its_reason(jobs: Jobs) -> None:
    """T15: who, when and why, in the transaction that moved the row."""
    (held,) = await jobs.claim("daemon-7")
    await jobs.settle(held, Job.FAILED, reason="disk full")
    async with jobs.db.connection() as connection:
        numbers = await connection.fetchval("SELECT moves FROM job WHERE id = 1")
        claimed, failed = [noted.entry for noted in await journal.read_history(connection, numbers, ["1"])]
    assert (claimed.actor, claimed.at, claimed.fence) == ("daemon-7", jobs.clock.now(), 1)
    assert (failed.source, failed.target, failed.reason) == ("started", "failed", "disk full")


def test_a_lease_the_machine_does_not_allow_is_refused() -> None:
    """A declaration whose moves the machine forbids fails when it is made, not at night."""
    with pytest.raises(Conflict):
        Lease("job", JOB, ready=Job.DONE, held=Job.STARTED, done=Job.DONE, failed=Job.FAILED)


async def test_claims_use_the_partial_index(db: Database, clock: ManualClock) -> None:
    """T12: with many finished rows, a claim reads the index of the ready ones, not the table."""
    await make_jobs(db, 20_000)
    await db.execute("UPDATE job SET status = 'done' WHERE id <= 19900")
    await db.execute("VACUUM ANALYZE job")
    claim = LEASE._sql["claim"].replace("<limit>", "10")
    plan = await db.fetch("EXPLAIN " + claim, "w", clock.now(), clock.now())
    text = "\n".join(row[0] for row in plan)
    assert "job_ready" in text
    assert "Seq Scan on job" not in text
