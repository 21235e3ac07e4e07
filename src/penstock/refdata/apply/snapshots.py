"""R13: snapshots, sent as one command, or under an id in chunks, which arrive in any order, repeatedly, or never."""

import hashlib
from collections.abc import Awaitable, Callable
from datetime import timedelta
from uuid import UUID

import msgspec

from penstock.kernel.db.database import Database
from penstock.kernel.text import format_duration
from penstock.refdata import store
from penstock.refdata.apply import snapshot_store
from penstock.refdata.apply.apply_transaction import ApplyTransaction
from penstock.refdata.dictionaries.provider import Chunks
from penstock.refdata.model import (
    CommandEvent,
    CommandRefusal,
    CommandVerdict,
    DictionaryKey,
    ItemChange,
    SnapshotSet,
    SnapshotSetStatus,
    check_chunk,
    check_revision,
    describe_missing_chunks,
)

Replace = Callable[[ItemChange, Chunks], Awaitable[None]]


async def apply_snapshot(
    batch: ApplyTransaction, event: CommandEvent, replace: Replace, *, max_items: int
) -> CommandVerdict:
    """Apply a complete snapshot, or store a chunk of an incomplete one."""
    if not event.command.is_chunk:
        if refusal := check_revision(event.target, event.command.source_revision, batch.heads[event.target]):
            return batch.finish([event.id], CommandVerdict(refusal=refusal))
        change = batch.commit(event, items=len(event.command.items))
        await replace(change, [event.command.list_entries()])
        return batch.finish([event.id], CommandVerdict(change.version))
    chunks = await _open_set(batch, event)
    if verdict := await _answer_without_staging(batch, event, chunks):
        return batch.finish([event.id], verdict)
    return await _stage(batch, event, replace, max_items)


async def refuse_chunk(batch: ApplyTransaction, event: CommandEvent, refusal: CommandRefusal) -> CommandVerdict:
    """Fail the whole snapshot of a chunk; a set that has ended meanwhile does not change."""
    snapshot_id = _get_snapshot_id(event)
    await _open_set(batch, event)
    await snapshot_store.join_set(batch.tx, event.target, snapshot_id, event.event_id, now=batch.now)
    return await _close(batch, event.target, snapshot_id, CommandVerdict(refusal=refusal))


async def expire_snapshots(db: Database, after: timedelta, actor: str) -> int:
    """Fail the snapshots without a new chunk for *after*, and return their number."""
    async with db.connection() as connection:
        late = await snapshot_store.list_expired_sets(connection, db.clock.now() - after)
    for target, snapshot_id, total in late:
        async with db.transaction() as tx:
            now = db.clock.now()
            # Lock the dictionary as an applier does, so that no chunk is staged meanwhile.
            batch = ApplyTransaction(tx, actor, now, await store.lock_dictionaries(tx, [target], now=now))
            if not await snapshot_store.is_expired(tx, target, snapshot_id, now - after):
                continue
            received = await snapshot_store.list_chunk_indexes(tx, target, snapshot_id)
            missing = f"{describe_missing_chunks(received, total)} of {total}"
            message = f"chunks {missing} did not arrive within {format_duration(after)}"
            refusal = CommandRefusal("SNAPSHOT_INCOMPLETE", message)
            await _close(batch, target, snapshot_id, CommandVerdict(refusal=refusal))
            await batch.write()
        batch.log()
    return len(late)


async def _open_set(batch: ApplyTransaction, event: CommandEvent) -> SnapshotSet:
    (_, total), revision = event.command.chunk_position, event.command.source_revision
    return await snapshot_store.open_set(
        batch.tx, event.target, _get_snapshot_id(event), total, revision, now=batch.now
    )


async def _answer_without_staging(
    batch: ApplyTransaction, event: CommandEvent, chunks: SnapshotSet
) -> CommandVerdict | None:
    """Return the result of a chunk that does not fit its snapshot, or whose snapshot has ended; None otherwise."""
    if refusal := check_chunk(event.command, chunks) or chunks.refusal:
        return CommandVerdict(refusal=refusal)
    if chunks.status is not SnapshotSetStatus.COMMITTED:
        return None
    index, _ = event.command.chunk_position
    stored_hash = await snapshot_store.read_chunk_hash(batch.tx, event.target, _get_snapshot_id(event), index)
    is_repeated = stored_hash == _hash(_encode_content(event))
    return CommandVerdict(chunks.committed_version) if is_repeated else CommandVerdict(refusal=_make_conflict(event))


async def _stage(batch: ApplyTransaction, event: CommandEvent, replace: Replace, max_items: int) -> CommandVerdict:
    tx, target, command, snapshot_id = batch.tx, event.target, event.command, _get_snapshot_id(event)
    (index, total), content = command.chunk_position, _encode_content(event)
    if not await snapshot_store.stage_chunk(
        tx, target, snapshot_id, index, len(command.items), content, _hash(content)
    ):
        return batch.finish([event.id], CommandVerdict(refusal=_make_conflict(event)))
    received, items = await snapshot_store.join_set(tx, target, snapshot_id, event.event_id, now=batch.now)
    if items > max_items:
        message = f"the snapshot has at least {items} items; the limit is {max_items} (refdata.snapshots.maxItems)"
        refusal = CommandRefusal("SNAPSHOT_TOO_LARGE", message)
        return await _close(batch, target, snapshot_id, CommandVerdict(refusal=refusal))
    if received < total:
        return batch.finish([event.id], CommandVerdict())
    return await _complete(batch, event, items, replace)


async def _complete(batch: ApplyTransaction, event: CommandEvent, items: int, replace: Replace) -> CommandVerdict:
    """Apply a snapshot whose last chunk has arrived: all of it becomes one version, or nothing."""
    target, snapshot_id = event.target, _get_snapshot_id(event)
    if refusal := check_revision(target, event.command.source_revision, batch.heads[target]):
        return await _close(batch, target, snapshot_id, CommandVerdict(refusal=refusal))
    chunks = await snapshot_store.read_chunks(batch.tx, target, snapshot_id)
    if len({entry.key for chunk in chunks for entry in chunk}) < items:
        refusal = CommandRefusal("DUPLICATE_KEY", "two chunks of the snapshot contain the same key")
        return await _close(batch, target, snapshot_id, CommandVerdict(refusal=refusal))
    change = batch.commit(event, items=items)
    await replace(change, chunks)
    return await _close(batch, target, snapshot_id, CommandVerdict(change.version))


async def _close(
    batch: ApplyTransaction, target: DictionaryKey, snapshot_id: UUID, verdict: CommandVerdict
) -> CommandVerdict:
    await snapshot_store.close_set(batch.tx, target, snapshot_id, verdict, actor=batch.actor, now=batch.now)
    return batch.finish(await snapshot_store.list_commands(batch.tx, target, snapshot_id), verdict)


def _make_conflict(event: CommandEvent) -> CommandRefusal:
    message = f"chunk {event.command.chunk_index} of the snapshot was received before with another content"
    return CommandRefusal("CHUNK_CONFLICT", message)


def _encode_content(event: CommandEvent) -> bytes:
    """Return the content of a chunk as it is staged."""
    return msgspec.json.encode(event.command.list_entries())


def _hash(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _get_snapshot_id(event: CommandEvent) -> UUID:
    """Return the id of the snapshot; the contract guarantees one for every chunk."""
    return event.command.snapshot_id or event.event_id
