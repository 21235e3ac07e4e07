"""The transactional outbox: messages are written in the transaction that causes them, and relayed at least once."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from penstock.kernel.db.database import Database
from penstock.kernel.db.locks import compute_advisory_key

Publish = Callable[[Sequence[asyncpg.Record]], Awaitable[None]]


@dataclass(frozen=True)
class Outbox:
    """An outbox over a table with `id bigint`, `created_at timestamptz` and `published boolean`.

    Writers that order the rows of a key by a lock take the id under that lock, so these rows are relayed in their
    order. Rows of different keys have no order.
    """

    table: str

    async def relay(self, db: Database, publish: Publish, *, limit: int = 500) -> int:
        """Publish unpublished rows, oldest first, then mark them, and return their number.

        One relay runs at a time: a concurrent call returns 0. Rows are selected by the flag, never by "id above the
        last one", because ids do not commit in order.
        """
        async with db.transaction() as tx:
            if not await tx.fetchval(
                "SELECT pg_try_advisory_xact_lock($1)", compute_advisory_key(f"outbox.{self.table}")
            ):
                return 0
            rows = await tx.fetch(f"SELECT * FROM {self.table} WHERE NOT published ORDER BY id LIMIT $1", limit)
            if rows:
                # Publish before marking: a crash between the two repeats messages, but never loses one.
                await publish(rows)
                ids = [row["id"] for row in rows]
                await tx.execute(f"UPDATE {self.table} SET published = true WHERE id = ANY ($1::bigint[])", ids)
            return len(rows)

    async def prune(self, db: Database, before: datetime, *, limit: int = 10_000) -> int:
        """Delete the published rows older than *before* among the first *limit* rows, and return their number."""
        # The first rows are the oldest, and the primary key finds them: no further index is needed.
        query = f"""
            WITH oldest AS (
                SELECT id, published, created_at FROM {self.table} ORDER BY id LIMIT $2
            ), deleted AS (
                DELETE FROM {self.table}
                WHERE id = ANY (ARRAY(SELECT id FROM oldest WHERE published AND created_at < $1))
                RETURNING 1
            ) SELECT count(*) FROM deleted"""
        return int(await db.fetchval(query, before, limit))

    async def count_unpublished(self, db: Database) -> int:
        """Return the number of rows that are not published yet."""
        return int(await db.fetchval(f"SELECT count(*) FROM {self.table} WHERE NOT published"))
