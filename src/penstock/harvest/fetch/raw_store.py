"""Raw records in PostgreSQL, stored as the source sent them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from penstock.harvest.feed.reader import StoredRecord, StoredReject, keep_newest
from penstock.harvest.fetch.partitions import PartitionTask
from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection
from penstock.kernel.text import make_storable

SQL = sql.load("penstock.harvest.fetch", file="raw_store.sql")
# Escapes of NUL or of half a surrogate, numbers of a million digits, thousands of nested brackets.
_REFUSED = (asyncpg.DataError, asyncpg.ProgramLimitExceededError)


@dataclass(frozen=True, slots=True)
class StoreResult:
    """The number of records that the pass had not seen yet, and of those that an earlier pass should have seen."""

    seen: int = 0
    missed: int = 0


async def store_records(
    tx: Connection, task: PartitionTask, records: Iterable[StoredRecord], now: datetime
) -> tuple[StoreResult, list[StoredReject]]:
    """Store the records of a turn; return the result, and the records that PostgreSQL cannot store."""
    distinct = keep_newest(records)
    try:
        async with tx.transaction():
            return await _store(tx, task, distinct, now), []
    except _REFUSED:
        storable, rejects = await _separate(tx, distinct)
        return await _store(tx, task, storable, now), rejects


async def store_rejects(tx: Connection, task: PartitionTask, rejects: Sequence[StoredReject], now: datetime) -> None:
    """Store rejected records with their reasons, and mark their keys as seen: they still exist in the source."""
    if not rejects:
        return
    keys, reasons = [reject.key for reject in rejects], [make_storable(reject.reason, 1_000) for reject in rejects]
    texts = [make_storable(reject.text, 10_000) for reject in rejects]
    await tx.execute(SQL["insert_rejects"], task.run_id, task.feed, keys, reasons, texts, now)
    present = [key for key in keys if key is not None]
    await tx.execute(SQL["mark_seen"], task.feed, task.run_id, task.partition_id, task.scan, present)


async def _store(tx: Connection, task: PartitionTask, records: Sequence[StoredRecord], now: datetime) -> StoreResult:
    row = await tx.fetchrow(
        SQL["store_records"],
        task.feed,
        task.run_id,
        [record.key for record in records],
        [record.text for record in records],
        [record.updated_at for record in records],
        task.partition_id,
        task.scan,
        task.last_scan_at,
        now,
    )
    return StoreResult(row["seen"], row["missed"]) if row else StoreResult()


async def _separate(tx: Connection, records: Sequence[StoredRecord]) -> tuple[list[StoredRecord], list[StoredReject]]:
    """Test each record, and return the storable and the rejected ones."""
    storable: list[StoredRecord] = []
    rejects: list[StoredReject] = []
    for record in records:
        try:
            async with tx.transaction():
                await tx.execute(SQL["is_storable"], record.text)
            storable.append(record)
        except _REFUSED as error:
            rejects.append(StoredReject(record.key, f"PostgreSQL cannot store the record: {error}", record.text))
    return storable, rejects
