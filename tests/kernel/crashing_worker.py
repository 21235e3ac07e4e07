"""A worker that a test kills: takes jobs through the work loop and notes what it did."""

import asyncio
from multiprocessing.connection import Connection as Pipe

from penstock.kernel.db import Database
from penstock.kernel.lease import Held
from penstock.kernel.lease_queue import LeaseQueue
from penstock.kernel.listener import listen
from penstock.kernel.outcome import Done, Outcome
from penstock.kernel.telemetry import Telemetry
from penstock.kernel.worker import Worker, each
from tests.kernel.jobs import LEASE


def work(url: str, name: str, pipe: Pipe) -> None:
    asyncio.run(_work(url, name, pipe))


async def _work(url: str, name: str, pipe: Pipe) -> None:
    async with Database.open(url, size=2) as db, listen(url, "job") as wake:
        queue = LeaseQueue(db, LEASE, wake, worker=name)

        async def handle(held: Held) -> Outcome:
            await db.execute("INSERT INTO effect (job, fence) VALUES ($1, $2)", held.key[0], held.fence)
            pipe.send(held.key[0])  # from here on the test may kill this process
            return Done()

        await Worker(queue, each(handle, queue, concurrency=2), Telemetry(), batch=4).drain()
