"""Leases: one worker per row at a time, no row lost, no late report accepted."""

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
    """The lease of the table `job`, on a manual clock."""

    def __init__(self, db: Database, clock: ManualClock) -> None:
        self.db, self.clock = db, clock

    async def claim(self, worker: str = "w", limit: int = 1) -> list[LeasedRow]:
        async with self.db.transaction() as tx:
            return await LEASE.claim(tx, worker=worker, limit=limit, lease_for=LEASE_FOR, now=self.clock.now())

    async def settle(self, leased: LeasedRow, target: Job = Job.DONE, **more: object) -> bool:
        report = LeaseReport(leased.key, leased.fence, target, **more)  # type: ignore[arg-type]
        async with self.db.transaction() as tx:
            return bool(await LEASE.settle(tx, [report], now=self.clock.now()))

    async def heartbeat(self, leased: LeasedRow) -> bool:
        async with self.db.transaction() as tx:
            return bool(await LEASE.heartbeat(tx, [(leased.key, leased.fence)], until=self.clock.now() + LEASE_FOR))

    async def reap(self) -> list[tuple[Key, Job]]:
        async with self.db.transaction() as tx:
            return await LEASE.reap(tx, now=self.clock.now())

    async def status(self, id: int = 1) -> str:  # noqa: A002
        return str(await self.db.fetchval("SELECT status FROM job WHERE id = $1", id))

    async def moves(self, id: int = 1) -> list[tuple[str | None, str]]:  # noqa: A002
        async with self.db.connection() as connection:
            numbers = await connection.fetchval("SELECT moves FROM job WHERE id = $1", id)
            stored = await journal.read_history(connection, numbers, [str(id)])
        return [(n.entry.source, n.entry.target) for n in stored]


@pytest.fixture
async def jobs(db: Database, clock: ManualClock) -> Jobs:
    await make_jobs(db, 5)
    return Jobs(db, clock)


async def test_claim_returns_the_oldest_rows_once(jobs: Jobs) -> None:
    """T12: each claimed row has one worker and a new fence; the next claim returns other rows."""
    first, second = await jobs.claim("a", 3), await jobs.claim("b", 3)
    assert [leased.key[0] for leased in first] == [1, 2, 3]
    assert [leased.key[0] for leased in second] == [4, 5]
    assert {leased.fence for leased in first + second} == {1}
    assert await jobs.claim("c") == []


async def test_concurrent_claims_never_share_a_row(db: Database, clock: ManualClock) -> None:
    """T12: 16 concurrent claimers on 800 rows claim each row exactly once."""
    await make_jobs(db, 800)
    jobs = Jobs(db, clock)

    async def claimer(name: str) -> list[int]:
        mine: list[int] = []
        while leased := await jobs.claim(name, 7):
            mine += [row.key[0] for row in leased]
        return mine

    taken = await asyncio.gather(*(claimer(f"w{n}") for n in range(16)))
    ids = [row for mine in taken for row in mine]
    assert sorted(ids) == list(range(1, 801))


async def test_expired_lease_cannot_finish_a_row(jobs: Jobs) -> None:
    """T13: a report under an expired lease is refused, and the row stays open."""
    (leased,) = await jobs.claim()
    jobs.clock.advance(LEASE_FOR + timedelta(seconds=1))
    assert await jobs.reap() == [((1,), Job.NEW)]
    assert not await jobs.settle(leased)
    assert await jobs.status() == "new"


async def test_old_fence_changes_nothing_for_the_next_worker(jobs: Jobs) -> None:
    """T13: a late report neither ends nor fails the row that another worker has claimed."""
    (old,) = await jobs.claim("old")
    jobs.clock.advance(LEASE_FOR + timedelta(seconds=1))
    await jobs.reap()
    again = next(leased for leased in await jobs.claim("new", 5) if leased.key[0] == old.key[0])
    assert not await jobs.settle(old, Job.FAILED)
    assert not await jobs.heartbeat(old)
    assert await jobs.status() == "started"
    assert await jobs.settle(again)


async def test_repeated_report_succeeds(jobs: Jobs) -> None:
    """F5: a repeated report is accepted and moves nothing; a different report on the settled row is refused."""
    (leased,) = await jobs.claim()
    assert await jobs.settle(leased)
    assert await jobs.settle(leased)
    assert not await jobs.settle(leased, Job.FAILED)
    assert await jobs.moves() == [("new", "started"), ("started", "done")]


async def test_heartbeat_extends_the_lease(jobs: Jobs) -> None:
    """T14: an extended lease is not reaped at its first end."""
    (leased,) = await jobs.claim()
    jobs.clock.advance(LEASE_FOR / 2)
    assert await jobs.heartbeat(leased)
    jobs.clock.advance(LEASE_FOR / 2 + timedelta(seconds=1))
    assert await jobs.reap() == []
    assert await jobs.settle(leased)


async def test_reap_returns_through_failed_and_stops_there(jobs: Jobs) -> None:
    """T14: an expired row returns through failed, both moves in the history, and fails for good after its attempts."""
    for attempt in (1, 2, 3):
        leased = next(h for h in await jobs.claim(limit=5) if h.key[0] == 1)
        assert leased.attempt == attempt
        jobs.clock.advance(LEASE_FOR + timedelta(seconds=1))
        await jobs.reap()
    assert await jobs.status() == "failed"
    back = [("new", "started"), ("started", "failed"), ("failed", "new")]
    assert await jobs.moves() == [*back, *back, *back[:2]]


async def test_retry_waits_until_due_and_fails_at_last(jobs: Jobs) -> None:
    """T14: a retried row cannot be claimed before it is due, and fails once its attempts are used up."""
    (leased,) = await jobs.claim()
    later = jobs.clock.now() + timedelta(minutes=5)
    await jobs.settle(leased, Job.NEW, reason="throttled", due_at=later)
    assert 1 not in [h.key[0] for h in await jobs.claim(limit=5)]
    for _ in range(2):
        jobs.clock.advance(timedelta(minutes=5))
        leased = next(h for h in await jobs.claim(limit=5) if h.key[0] == 1)
        assert await jobs.settle(leased, Job.NEW, reason="throttled", due_at=jobs.clock.now())
    assert await jobs.status() == "failed"


async def test_released_row_costs_no_attempt(jobs: Jobs) -> None:
    """A worker that stops releases its unprocessed rows, which return to their positions in the queue."""
    (leased,) = await jobs.claim()
    await jobs.settle(leased, Job.NEW, counts_attempt=False)
    (again,) = await jobs.claim()
    assert (again.key[0], again.attempt, again.fence) == (1, 1, 2)


async def test_uncounted_attempts_are_unlimited(jobs: Jobs) -> None:
    """R11: a transient failure costs no attempt, however often it occurs, and waits until it is due."""
    for _ in range(10):
        (leased,) = await jobs.claim()
        later = jobs.clock.now() + timedelta(seconds=5)
        assert await jobs.settle(leased, Job.NEW, reason="database down", due_at=later, counts_attempt=False)
        await jobs.db.execute("UPDATE job SET due_at = 'infinity' WHERE id > 1")
        assert await jobs.claim() == []
        jobs.clock.advance(timedelta(seconds=5))
    assert await jobs.status() == "new"


async def test_first_of_two_reports_on_a_row_counts(jobs: Jobs) -> None:
    """T13: a batch with contradicting reports has one outcome, that of the first report."""
    (leased,) = await jobs.claim()
    reports = [LeaseReport(leased.key, leased.fence, Job.DONE), LeaseReport(leased.key, leased.fence, Job.FAILED)]
    async with jobs.db.transaction() as tx:
        settled = await LEASE.settle(tx, reports, now=jobs.clock.now())
    assert settled == [AcceptedReport(leased.key, leased.fence, Job.DONE, moved=True)]


async def test_report_shows_whether_it_moved_the_row(jobs: Jobs) -> None:
    """T7, F3: counters and next steps follow a move once: a repeated report is accepted, but moved nothing."""
    (leased,) = await jobs.claim()
    report = [LeaseReport(leased.key, leased.fence, Job.FAILED, "no")]
    async with jobs.db.transaction() as tx:
        first = await LEASE.settle(tx, report, now=jobs.clock.now())
        again = await LEASE.settle(tx, report, now=jobs.clock.now())
    assert (first, again) == (
        [AcceptedReport((1,), 1, Job.FAILED, moved=True)],
        [AcceptedReport((1,), 1, Job.FAILED, moved=False)],
    )


async def test_report_of_an_impossible_target_is_refused(jobs: Jobs) -> None:
    """T8: a row cannot be settled into the state of claimed rows."""
    (leased,) = await jobs.claim()
    with pytest.raises(Conflict):
        await jobs.settle(leased, Job.STARTED)
    assert await jobs.settle(leased)


async def test_any_reason_can_be_stored(jobs: Jobs) -> None:
    """T15: a reason with characters that no database accepts does not leave the row stuck."""
    (leased,) = await jobs.claim()
    assert await jobs.settle(leased, Job.FAILED, reason="bad \0 byte \ud800" + "x" * 10_000)


async def test_heartbeat_never_shortens_a_lease(jobs: Jobs) -> None:
    """T14: a late, shorter heartbeat leaves the longer lease unchanged."""
    (leased,) = await jobs.claim()
    async with jobs.db.transaction() as tx:
        await LEASE.heartbeat(tx, [(leased.key, leased.fence)], until=jobs.clock.now() + timedelta(seconds=1))
    jobs.clock.advance(LEASE_FOR - timedelta(seconds=1))
    assert await jobs.reap() == []


async def test_concurrent_report_and_reap_have_one_winner(jobs: Jobs) -> None:
    """T13: a report that waits for the commit of the reaper finds a new fence, and changes nothing."""
    (leased,) = await jobs.claim()
    jobs.clock.advance(LEASE_FOR + timedelta(seconds=1))
    async with jobs.db.transaction() as reaper:
        await LEASE.reap(reaper, now=jobs.clock.now())
        late = asyncio.create_task(jobs.settle(leased))
        waiting = "SELECT true FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        while not await jobs.db.fetchval(waiting):
            assert not late.done(), "the report did not wait for the reaper"
    assert not await late
    assert await jobs.status() == "new"
    assert ("started", "done") not in await jobs.moves()


async def test_max_attempts_can_be_a_column(jobs: Jobs) -> None:
    """F10: each row can have its own limit of attempts."""
    own = Lease("job", JOB, ready=Job.NEW, claimed=Job.STARTED, done=Job.DONE, failed=Job.FAILED, max_attempts="t.most")
    await jobs.db.execute(
        "ALTER TABLE job ADD COLUMN most int NOT NULL DEFAULT 1; UPDATE job SET most = 5 WHERE id = 2"
    )
    leased = await jobs.claim(limit=2)
    reports = [LeaseReport(h.key, h.fence, Job.NEW, "again") for h in leased]
    async with jobs.db.transaction() as tx:
        settled = await own.settle(tx, reports, now=jobs.clock.now())
    assert {report.key[0]: report.state for report in settled} == {1: Job.FAILED, 2: Job.NEW}


async def test_every_move_is_in_the_journal_with_its_reason(jobs: Jobs) -> None:
    """T15: the journal has actor, time and reason, written in the transaction that moves the row."""
    (leased,) = await jobs.claim("daemon-7")
    await jobs.settle(leased, Job.FAILED, reason="disk full")
    async with jobs.db.connection() as connection:
        numbers = await connection.fetchval("SELECT moves FROM job WHERE id = 1")
        claimed, failed = [stored.entry for stored in await journal.read_history(connection, numbers, ["1"])]
    assert (claimed.actor, claimed.at, claimed.fence) == ("daemon-7", jobs.clock.now(), 1)
    assert (failed.source, failed.target, failed.reason) == ("started", "failed", "disk full")


def test_lease_with_impossible_moves_is_refused() -> None:
    """A declaration whose moves the machine forbids fails when it is created."""
    with pytest.raises(Conflict):
        Lease("job", JOB, ready=Job.DONE, claimed=Job.STARTED, done=Job.DONE, failed=Job.FAILED)


async def test_claims_use_the_partial_index(db: Database, clock: ManualClock) -> None:
    """T12: with many finished rows, a claim reads the index of ready rows, not the table."""
    await make_jobs(db, 20_000)
    await db.execute("UPDATE job SET status = 'done' WHERE id <= 19900")
    await db.execute("VACUUM ANALYZE job")
    claim = LEASE._sql["claim"].replace("<limit>", "10")
    plan = await db.fetch("EXPLAIN " + claim, "w", clock.now(), clock.now())
    text = "\n".join(row[0] for row in plan)
    assert "job_ready" in text
    assert "Seq Scan on job" not in text
