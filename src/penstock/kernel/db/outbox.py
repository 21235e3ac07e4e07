"""What must happen after a commit is written in that commit; a relay then makes it happen, at least once."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from penstock.kernel.db.database import Database
from penstock.kernel.db.locks import advisory_key

Publish = Callable[[Sequence[asyncpg.Record]], Awaitable[None]]


@dataclass(frozen=True)
class Outbox:
    """A declaration over a table with `id bigint`, `created_at timestamptz` and `published boolean`.

    Rows of one key are relayed in the order their writers took whatever lock orders them, because each drew its id
    under that lock; rows of different keys have no order.
    """

    table: str

    async def relay(self, db: Database, publish: Publish, *, limit: int = 500) -> int:
        """Publish what waits, oldest first, then mark it; returns how many. One relay at a time: the others get 0.

        Asked by flag, never by "id above the last one": ids do not commit in order.
        """
        async with db.transaction() as tx:
            if not await tx.fetchval("SELECT pg_try_advisory_xact_lock($1)", advisory_key(f"outbox.{self.table}")):
                return 0
            rows = await tx.fetch(f"SELECT * FROM {self.table} WHERE NOT published ORDER BY id LIMIT $1", limit)
            if rows:
                # Publish before marking: a crash between the two repeats, it never loses.
                await publish(rows)
                ids = [row["id"] for row in rows]
                await tx.execute(f"UPDATE {self.table} SET published = true WHERE id = ANY ($1::bigint[])", ids)
            return len(rows)

    async def prune(self, db: Database, before: datetime, *, limit: int = 10_000) -> int:
        """Remove what is published and older than *before* among the first *limit* rows; returns how many."""
        # Looking at the first only: the rest are younger, and need no index to be found so.
        query = f"""
            WITH oldest AS (
                SELECT id, published, created_at FROM {self.table} ORDER BY id LIMIT $2
            ), gone AS (
                DELETE FROM {self.table}
                WHERE id = ANY (ARRAY(SELECT id FROM oldest WHERE published AND created_at < $1))
                RETURNING 1
            ) SELECT count(*) FROM gone"""
        return int(await db.fetchval(query, before, limit))

    async def waiting(self, db: Database) -> int:
        """How many rows are not published yet."""
        return int(await db.fetchval(f"SELECT count(*) FROM {self.table} WHERE NOT published"))
