"""Workers are killed while they work: every item is done exactly once."""

import asyncio
import os
import random
import signal
from datetime import timedelta

import pytest

from penstock.kernel.db.database import Database
from penstock.tracking.lease import Lease
from tests.support.fork_server import FORKED
from tests.support.soak import Campaign, examples
from tests.tracking.jobs import LEASE, make_jobs
from tests.tracking.scenarios.job_worker import work

ROUNDS = examples(50, soak=500)
JOBS_PER_ROUND = 6
MANY = Lease("job", LEASE.machine, LEASE.ready, LEASE.claimed, LEASE.done, LEASE.failed, max_attempts=10**6)


@pytest.mark.soak
async def test_killed_workers_lose_and_repeat_nothing(db: Database, database_url: str, campaign: Campaign) -> None:
    """T13, T14: after many SIGKILLs each job has its effect and exactly one move to done."""
    campaign.counts_items = True
    jobs = ROUNDS * JOBS_PER_ROUND
    await make_jobs(db, jobs)
    await db.execute("CREATE TABLE effect (job bigint, fence bigint, PRIMARY KEY (job, fence))")
    for _ in range(ROUNDS):
        was_killed = await asyncio.to_thread(start_and_kill, database_url, random.randint(1, JOBS_PER_ROUND))
        await reap_all(db)
        campaign.end_round(faults=was_killed)
    while await db.fetchval("SELECT count(*) FROM job WHERE status <> 'done'"):
        await asyncio.to_thread(start_and_kill, database_url, jobs + 1)
        await reap_all(db)
    assert campaign.faults >= ROUNDS // 2, "the campaign killed too few workers to mean anything"
    await check_done_once(db, jobs)


async def check_done_once(db: Database, jobs: int) -> None:
    """Check that every job has one move to done, under a fence whose effect exists."""
    done = await db.fetch("SELECT subject::bigint AS job, fence FROM journal_move WHERE target = 'done' ORDER BY 1")
    assert [row["job"] for row in done] == list(range(1, jobs + 1))
    without_effect = await db.fetch(
        "SELECT subject FROM journal_move j WHERE target = 'done'"
        " AND NOT EXISTS (SELECT FROM effect e WHERE e.job = j.subject::bigint AND e.fence = j.fence)"
    )
    assert without_effect == []


async def reap_all(db: Database) -> None:
    """Reap as if an hour had passed: every lease has expired, also that of a live worker."""
    async with db.transaction() as tx:
        while await MANY.reap(tx, now=db.clock.now() + timedelta(hours=1)):
            pass
        await tx.execute("UPDATE job SET attempts = 0, due_at = '-infinity' WHERE status = 'new'")


def start_and_kill(url: str, after: int) -> bool:
    """Start a worker and kill it after *after* jobs; return whether it was killed before it finished all."""
    ours, theirs = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=work, args=(url, f"w{after}", theirs))
    process.start()
    theirs.close()
    try:
        for _ in range(after):
            ours.recv()
    except EOFError:
        process.join()
        return False
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return True
