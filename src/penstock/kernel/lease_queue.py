"""A table under lease, as a queue for the work loop."""

from collections.abc import Awaitable, Callable, Hashable, Sequence
from datetime import datetime, timedelta
from typing import Generic, Protocol

from penstock.kernel.db import Connection, Database
from penstock.kernel.lease import Held, Lease, Report, Settled
from penstock.kernel.machine import S
from penstock.kernel.outcome import Done, Failed, Outcome, Retry


class Wake(Protocol):
    """Says when there may be work: an inbox of the listener."""

    async def wait(self, timeout: float) -> bool: ...


OnSettled = Callable[[Connection, Sequence[Settled[S]]], Awaitable[None]]


async def _nothing_more(_tx: Connection, _settled: Sequence[Settled[S]]) -> None:
    """For tables whose rows move alone."""


class LeaseQueue(Generic[S]):
    """What *worker* claims, extends and settles of one leased table.

    *on_settled* does, in the transaction that settles, what must follow: counters, the next step, a message.
    """

    def __init__(
        self,
        db: Database,
        lease: Lease[S],
        wake: Wake,
        *,
        worker: str,
        lease_for: timedelta = timedelta(seconds=60),
        on_settled: OnSettled[S] = _nothing_more,
    ) -> None:
        self.name = lease.table
        self.lease_for = lease_for
        self._db = db
        self._lease = lease
        self._wake = wake
        self._worker = worker
        self._on_settled = on_settled

    async def take(self, limit: int) -> Sequence[Held]:
        async with self._db.connection() as connection:
            return await self._lease.claim(
                connection, worker=self._worker, limit=limit, lease_for=self.lease_for, now=self._db.clock.now()
            )

    async def wait(self, timeout: float) -> None:
        await self._wake.wait(timeout)

    async def extend(self, items: Sequence[Held]) -> None:
        async with self._db.connection() as connection:
            held = [(item.key, item.fence) for item in items]
            await self._lease.heartbeat(connection, held, until=self._db.clock.now() + self.lease_for)

    async def settle(self, results: Sequence[tuple[Held, Outcome | None]]) -> int:
        now = self._db.clock.now()
        reports = [self._report(held, outcome, now) for held, outcome in results]
        async with self._db.transaction() as tx:
            settled = await self._lease.settle(tx, reports, actor=self._worker, now=now)
            await self._on_settled(tx, settled)
        return len(reports) - len(settled)

    def lane(self, item: Held) -> Hashable:
        return item.key

    def _report(self, held: Held, outcome: Outcome | None, now: datetime) -> Report[S]:
        lease = self._lease
        match outcome:
            case Done():
                return Report(held.key, held.fence, lease.done)
            case Failed(reason):
                return Report(held.key, held.fence, lease.failed, reason)
            case Retry(reason, counts=counts):
                return Report(held.key, held.fence, lease.ready, reason, now + outcome.wait(held.attempt), counts)
            case None:
                return Report(held.key, held.fence, lease.ready, "given back", counts=False)
