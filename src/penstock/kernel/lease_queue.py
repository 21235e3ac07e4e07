"""A table under lease, as a queue for the work loop."""

from collections.abc import Hashable, Sequence
from datetime import datetime, timedelta
from typing import Generic, Protocol

from penstock.kernel.backoff import delay
from penstock.kernel.db import Database
from penstock.kernel.lease import Held, Lease, Report
from penstock.kernel.machine import S
from penstock.kernel.outcome import Done, Failed, Outcome, Retry


class Wake(Protocol):
    """Says when there may be work: an inbox of the listener."""

    async def wait(self, timeout: float) -> bool: ...


class LeaseQueue(Generic[S]):
    """What *worker* claims, extends and settles of one leased table. Each is one statement: its own transaction."""

    def __init__(
        self,
        db: Database,
        lease: Lease[S],
        wake: Wake,
        *,
        worker: str,
        lease_for: timedelta = timedelta(seconds=60),
    ) -> None:
        self.name = lease.table
        self.lease_for = lease_for
        self._db = db
        self._lease = lease
        self._wake = wake
        self._worker = worker

    async def take(self, limit: int) -> Sequence[Held]:
        async with self._db.connection() as connection:
            return await self._lease.claim(
                connection, worker=self._worker, limit=limit, lease_for=self.lease_for, now=self._db.clock.now()
            )

    async def wait(self, timeout: float) -> None:
        await self._wake.wait(timeout)

    async def extend(self, items: Sequence[Held]) -> None:
        async with self._db.connection() as connection:
            await self._lease.heartbeat(connection, items, until=self._db.clock.now() + self.lease_for)

    async def settle(self, results: Sequence[tuple[Held, Outcome | None]]) -> int:
        now = self._db.clock.now()
        reports = [self._report(held, outcome, now) for held, outcome in results]
        async with self._db.connection() as connection:
            settled = await self._lease.settle(connection, reports, actor=self._worker, now=now)
        return len(reports) - len(settled)

    def lane(self, item: Held) -> Hashable:
        return item.id

    def _report(self, held: Held, outcome: Outcome | None, now: datetime) -> Report[S]:
        lease = self._lease
        match outcome:
            case Done():
                return Report(held.id, held.fence, lease.done)
            case Failed(reason):
                return Report(held.id, held.fence, lease.failed, reason)
            case Retry(reason, after):
                due_at = now + (after if after is not None else delay(held.attempt))
                return Report(held.id, held.fence, lease.ready, reason, due_at)
            case None:
                return Report(held.id, held.fence, lease.ready, "given back", now, counts=False)
