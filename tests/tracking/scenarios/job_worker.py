"""A worker for tests that kill it: claims jobs, records its effects, and settles them."""

import asyncio
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe

from penstock.kernel.db.database import Database
from penstock.tracking.lease import LeasedRow, LeaseReport
from tests.tracking.jobs import LEASE, Job


def work(url: str, name: str, pipe: Pipe) -> None:
    """Run a worker until the queue is empty."""
    asyncio.run(_work(url, name, pipe))


async def _work(url: str, name: str, pipe: Pipe) -> None:
    """Claim and settle jobs until the queue is empty or the test ends this process."""
    async with Database.open(url, size=2) as db:

        async def handle(leased: LeasedRow) -> None:
            await db.execute("INSERT INTO effect (job, fence) VALUES ($1, $2)", leased.key[0], leased.fence)
            pipe.send(leased.key[0])  # from here on the test may kill this process

        while claimed := await _claim(db, name):
            await asyncio.gather(*map(handle, claimed))
            async with db.transaction() as tx:
                reports = [LeaseReport(leased.key, leased.fence, Job.DONE) for leased in claimed]
                await LEASE.settle(tx, reports, now=db.clock.now())


async def _claim(db: Database, name: str) -> list[LeasedRow]:
    async with db.transaction() as tx:
        return await LEASE.claim(tx, worker=name, limit=4, lease_for=timedelta(seconds=60), now=db.clock.now())
