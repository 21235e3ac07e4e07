"""Snapshots that come in chunks, as they are kept until the last one is here: a typed function per statement."""

import asyncio
from datetime import datetime
from uuid import UUID

import msgspec

from penstock.kernel.db.database import Connection
from penstock.refdata.contract import SnapshotEntry
from penstock.refdata.model import CommandRefusal, CommandVerdict, DictionaryKey, SnapshotSet, SnapshotSetStatus
from penstock.refdata.store import SQL

_ENTRIES = msgspec.json.Decoder(list[SnapshotEntry])


async def open_set(
    tx: Connection, target: DictionaryKey, snapshot_id: UUID, total: int, revision: int | None, *, now: datetime
) -> SnapshotSet:
    """The set a chunk belongs to, made when it is the first."""
    await tx.execute(SQL["open_set"], *target, snapshot_id, total, revision, now)
    return await get_set(tx, target, snapshot_id) or SnapshotSet(SnapshotSetStatus.OPEN, total, revision)


async def get_set(tx: Connection, target: DictionaryKey, snapshot_id: UUID) -> SnapshotSet | None:
    """The set of a snapshot that comes in chunks, if any came."""
    row = await tx.fetchrow(SQL["get_set"], *target, snapshot_id)
    if row is None:
        return None
    refusal = CommandRefusal(row["error_code"], row["error_message"]) if row["error_code"] else None
    status = SnapshotSetStatus(row["status"])
    return SnapshotSet(status, row["chunks_total"], row["source_revision"], row["committed_version"], refusal)


async def stage_chunk(
    tx: Connection,
    target: DictionaryKey,
    snapshot_id: UUID,
    index: int,
    count: int,
    content: bytes,
    content_hash: bytes,
) -> bool:
    """Keep a chunk; False when that chunk is there with another content."""
    place = (*target, snapshot_id, index)
    if await tx.fetchval(SQL["stage_chunk"], *place, count, content_hash, content):
        return True
    return await chunk_hash(tx, target, snapshot_id, index) == content_hash


async def chunk_hash(tx: Connection, target: DictionaryKey, snapshot_id: UUID, index: int) -> bytes | None:
    """What a chunk was made of."""
    found: bytes | None = await tx.fetchval(SQL["read_chunk_hash"], *target, snapshot_id, index)
    return found


async def join_set(
    tx: Connection, target: DictionaryKey, snapshot_id: UUID, event_id: UUID, *, now: datetime
) -> tuple[int, int]:
    """Count an event among those of a snapshot; how many chunks and items are there."""
    row = await tx.fetchrow(SQL["join_set"], *target, snapshot_id, event_id, now)
    return (row[0], row[1]) if row else (0, 0)


async def chunks(tx: Connection, target: DictionaryKey, snapshot_id: UUID) -> list[list[SnapshotEntry]]:
    """All that was staged of a snapshot."""
    found: list[list[SnapshotEntry]] = []
    async for row in tx.cursor(SQL["read_chunks"], *target, snapshot_id, prefetch=8):
        found.append(_ENTRIES.decode(row["items"]))
        await asyncio.sleep(0)  # a million items take seconds: let others have their turn
    return found


async def chunk_indexes(tx: Connection, target: DictionaryKey, snapshot_id: UUID) -> list[int]:
    """Which chunks of a snapshot came."""
    return [row[0] for row in await tx.fetch(SQL["list_chunk_indexes"], *target, snapshot_id)]


async def set_events(tx: Connection, target: DictionaryKey, snapshot_id: UUID) -> list[UUID]:
    """The events whose chunks make a snapshot."""
    return [row[0] for row in await tx.fetch(SQL["list_set_events"], *target, snapshot_id)]


async def close_set(
    tx: Connection, target: DictionaryKey, snapshot_id: UUID, verdict: CommandVerdict, *, actor: str, now: datetime
) -> None:
    """End a snapshot as *verdict* says."""
    status = SnapshotSetStatus.FAILED if verdict.refusal else SnapshotSetStatus.COMMITTED
    code, message = verdict.refusal or (None, None)
    await tx.execute(SQL["close_set"], *target, snapshot_id, status.value, verdict.version, code, message, now, actor)


async def expired_sets(
    connection: Connection, before: datetime, *, limit: int = 100
) -> list[tuple[DictionaryKey, UUID, int]]:
    """Incomplete snapshots that got no chunk since *before*: whose, which, and of how many chunks."""
    rows = await connection.fetch(SQL["list_expired_sets"], before, limit)
    return [(DictionaryKey(tenant, code), snapshot_id, total) for tenant, code, snapshot_id, total in rows]


async def is_expired(tx: Connection, target: DictionaryKey, snapshot_id: UUID, before: datetime) -> bool:
    """Whether a snapshot is still incomplete and got no chunk since *before*."""
    return bool(await tx.fetchval(SQL["is_expired"], *target, snapshot_id, before))
