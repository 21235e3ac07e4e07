"""The SQL statements for snapshots that are sent in chunks, as typed functions."""

import asyncio
from datetime import datetime
from uuid import UUID

import msgspec

from penstock.kernel.db.database import Connection
from penstock.refdata.contract import SnapshotEntry
from penstock.refdata.model import (
    CommandId,
    CommandRefusal,
    CommandVerdict,
    DictionaryKey,
    SnapshotSet,
    SnapshotSetStatus,
)
from penstock.refdata.store import SQL

_ENTRIES = msgspec.json.Decoder(list[SnapshotEntry])


async def open_set(
    tx: Connection, target: DictionaryKey, snapshot_id: UUID, total: int, revision: int | None, *, now: datetime
) -> SnapshotSet:
    """Return the set of a snapshot, inserted if it is missing."""
    await tx.execute(SQL["open_set"], *target, snapshot_id, total, revision, now)
    return await get_set(tx, target, snapshot_id) or SnapshotSet(SnapshotSetStatus.OPEN, total, revision)


async def get_set(tx: Connection, target: DictionaryKey, snapshot_id: UUID) -> SnapshotSet | None:
    """Return the set of a snapshot, if a chunk has been received."""
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
    """Store a chunk; return False if that chunk is stored with another content."""
    if await tx.fetchval(SQL["stage_chunk"], *target, snapshot_id, index, count, content_hash, content):
        return True
    return await read_chunk_hash(tx, target, snapshot_id, index) == content_hash


async def read_chunk_hash(tx: Connection, target: DictionaryKey, snapshot_id: UUID, index: int) -> bytes | None:
    """Return the hash of the content of a stored chunk."""
    content_hash: bytes | None = await tx.fetchval(SQL["read_chunk_hash"], *target, snapshot_id, index)
    return content_hash


async def join_set(
    tx: Connection, target: DictionaryKey, snapshot_id: UUID, event_id: UUID, *, now: datetime
) -> tuple[int, int]:
    """Add an event to a snapshot, and return the number of its chunks and items."""
    row = await tx.fetchrow(SQL["join_set"], *target, snapshot_id, event_id, now)
    return (row[0], row[1]) if row else (0, 0)


async def read_chunks(tx: Connection, target: DictionaryKey, snapshot_id: UUID) -> list[list[SnapshotEntry]]:
    """Return the items of all chunks of a snapshot."""
    chunks: list[list[SnapshotEntry]] = []
    async for row in tx.cursor(SQL["read_chunks"], *target, snapshot_id, prefetch=8):
        chunks.append(_ENTRIES.decode(row["items"]))
        await asyncio.sleep(0)  # a million items take seconds: let other tasks run
    return chunks


async def list_chunk_indexes(tx: Connection, target: DictionaryKey, snapshot_id: UUID) -> list[int]:
    """Return the indexes of the stored chunks of a snapshot."""
    return [row[0] for row in await tx.fetch(SQL["list_chunk_indexes"], *target, snapshot_id)]


async def list_commands(tx: Connection, target: DictionaryKey, snapshot_id: UUID) -> list[CommandId]:
    """Return the commands with the chunks of a snapshot."""
    rows = await tx.fetch(SQL["list_set_events"], *target, snapshot_id)
    return [CommandId(target, event_id, source) for event_id, source in rows]


async def close_set(
    tx: Connection, target: DictionaryKey, snapshot_id: UUID, verdict: CommandVerdict, *, actor: str, now: datetime
) -> None:
    """End a snapshot as committed or failed, depending on *verdict*."""
    status = SnapshotSetStatus.FAILED if verdict.refusal else SnapshotSetStatus.COMMITTED
    code, message = verdict.refusal or (None, None)
    await tx.execute(SQL["close_set"], *target, snapshot_id, status.value, verdict.version, code, message, now, actor)


async def list_expired_sets(
    connection: Connection, before: datetime, *, limit: int = 100
) -> list[tuple[DictionaryKey, UUID, int]]:
    """Return dictionary, id and number of chunks of the open snapshots without a new chunk since *before*."""
    rows = await connection.fetch(SQL["list_expired_sets"], before, limit)
    return [(DictionaryKey(tenant, code), snapshot_id, total) for tenant, code, snapshot_id, total in rows]


async def is_expired(tx: Connection, target: DictionaryKey, snapshot_id: UUID, before: datetime) -> bool:
    """Return whether a snapshot is open and has had no new chunk since *before*."""
    return bool(await tx.fetchval(SQL["is_expired"], *target, snapshot_id, before))
