"""Raw records in PostgreSQL, stored as the source sent them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from penstock.harvest.feed.reader import StoredRecord, StoredReject, newest
from penstock.harvest.fetch.partitions import PartitionTask
from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection
from penstock.kernel.text import make_storable

SQL = sql.load("penstock.harvest.fetch", file="raw_store.sql")
# An escape for NUL, half a surrogate, a number of a million digits; brackets by the thousand.
_REFUSED = (asyncpg.DataError, asyncpg.ProgramLimitExceededError)


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What keeping records came to: how many their pass had not seen yet, and how many an earlier one should have."""

    seen: int = 0
    missed: int = 0


async def keep(
    tx: Connection, task: PartitionTask, records: Iterable[StoredRecord], now: datetime
) -> tuple[StoreResult, list[StoredReject]]:
    """Keep the records of a turn; what that came to, and what PostgreSQL could not keep."""
    given = newest(records)
    try:
        async with tx.transaction():
            return await _keep(tx, task, given, now), []
    except _REFUSED:
        good, rejects = await _part(tx, given)
        return await _keep(tx, task, good, now), rejects


async def reject(tx: Connection, task: PartitionTask, rejects: Sequence[StoredReject], now: datetime) -> None:
    """Set records aside, with the reason. Those whose keys are known are seen: they are not gone."""
    if not rejects:
        return
    keys, reasons = [one.key for one in rejects], [make_storable(one.reason, 1_000) for one in rejects]
    texts = [make_storable(one.text, 10_000) for one in rejects]
    await tx.execute(SQL["reject"], task.run_id, task.feed, keys, reasons, texts, now)
    known = [key for key in keys if key is not None]
    await tx.execute(SQL["see"], task.feed, task.run_id, task.partition_id, task.scan, known)


async def _keep(tx: Connection, task: PartitionTask, given: Sequence[StoredRecord], now: datetime) -> StoreResult:
    row = await tx.fetchrow(
        SQL["keep"],
        task.feed,
        task.run_id,
        [record.key for record in given],
        [record.text for record in given],
        [record.updated_at for record in given],
        task.partition_id,
        task.scan,
        task.last_scan_at,
        now,
    )
    return StoreResult(row["seen"], row["missed"]) if row else StoreResult()


async def _part(tx: Connection, given: Sequence[StoredRecord]) -> tuple[list[StoredRecord], list[StoredReject]]:
    """One by one: what PostgreSQL takes, and what it does not."""
    good: list[StoredRecord] = []
    rejects: list[StoredReject] = []
    for record in given:
        try:
            async with tx.transaction():
                await tx.execute(SQL["is_storable"], record.text)
            good.append(record)
        except _REFUSED as error:
            rejects.append(StoredReject(record.key, f"PostgreSQL cannot keep it: {error}", record.text))
    return good, rejects
