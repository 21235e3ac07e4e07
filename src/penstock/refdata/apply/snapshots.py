"""R13: snapshots, in one piece, or under an id in chunks that come in any order, twice, or never."""

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


async def judge(judging: ApplyTransaction, event: CommandEvent, replace: Replace, *, max_items: int) -> CommandVerdict:
    """Apply a snapshot that is whole, keep a chunk of one that is not yet."""
    if not event.command.is_chunk:
        refusal = check_revision(event.target, event.command.source_revision, judging.standings[event.target])
        if refusal is not None:
            return judging.end(event.target, [event.event_id], CommandVerdict(refusal=refusal))
        change = judging.commit(event, items=len(event.command.items))
        await replace(change, [event.command.entries()])
        return judging.end(event.target, [event.event_id], CommandVerdict(change.version))
    known = await _set_of(judging, event)
    if verdict := await _without_staging(judging, event, known):
        return judging.end(event.target, [event.event_id], verdict)
    return await _stage(judging, event, replace, max_items)


async def refuse(judging: ApplyTransaction, event: CommandEvent, refusal: CommandRefusal) -> CommandVerdict:
    """Let a chunk's whole snapshot fail with it; a set that ended meanwhile stays as it is."""
    snapshot_id = _snapshot_id(event)
    await _set_of(judging, event)
    await snapshot_store.join_set(judging.tx, event.target, snapshot_id, event.event_id, now=judging.now)
    return await _close(judging, event.target, snapshot_id, CommandVerdict(refusal=refusal))


async def expire(db: Database, after: timedelta, actor: str) -> int:
    """Let snapshots fail that got no chunk for so long; how many."""
    async with db.connection() as connection:
        late = await snapshot_store.expired_sets(connection, db.clock.now() - after)
    for target, snapshot_id, total in late:
        async with db.transaction() as tx:
            now = db.clock.now()
            # Locked as an applier locks it, so that no chunk comes in between.
            judging = ApplyTransaction(tx, actor, now, await store.lock_dictionaries(tx, [target], now=now))
            if not await snapshot_store.is_expired(tx, target, snapshot_id, now - after):
                continue
            came = await snapshot_store.chunk_indexes(tx, target, snapshot_id)
            said = (
                f"chunks {describe_missing_chunks(came, total)} of {total} did not come within {format_duration(after)}"
            )
            await _close(
                judging, target, snapshot_id, CommandVerdict(refusal=CommandRefusal("SNAPSHOT_INCOMPLETE", said))
            )
            await judging.write()
    return len(late)


async def _set_of(judging: ApplyTransaction, event: CommandEvent) -> SnapshotSet:
    (_, total), revision = event.command.chunk_position, event.command.source_revision
    return await snapshot_store.open_set(
        judging.tx, event.target, _snapshot_id(event), total, revision, now=judging.now
    )


async def _without_staging(judging: ApplyTransaction, event: CommandEvent, known: SnapshotSet) -> CommandVerdict | None:
    """What is to be said of a chunk that does not belong to its set, or whose set has ended."""
    if refusal := check_chunk(event.command, known) or known.refusal:
        return CommandVerdict(refusal=refusal)
    if known.status is not SnapshotSetStatus.COMMITTED:
        return None
    (index, _), content = event.command.chunk_position, _content(event)
    came = await snapshot_store.chunk_hash(judging.tx, event.target, _snapshot_id(event), index)
    return (
        CommandVerdict(known.committed_version)
        if came == _digest(content)
        else CommandVerdict(refusal=_conflict(event))
    )


async def _stage(judging: ApplyTransaction, event: CommandEvent, replace: Replace, max_items: int) -> CommandVerdict:
    tx, target, command, snapshot_id = judging.tx, event.target, event.command, _snapshot_id(event)
    (index, total), content = command.chunk_position, _content(event)
    if not await snapshot_store.stage_chunk(
        tx, target, snapshot_id, index, len(command.items), content, _digest(content)
    ):
        return judging.end(target, [event.event_id], CommandVerdict(refusal=_conflict(event)))
    came, items = await snapshot_store.join_set(tx, target, snapshot_id, event.event_id, now=judging.now)
    if items > max_items:
        said = f"the snapshot has {items} items or more, at most {max_items} are taken (refdata.snapshots.maxItems)"
        return await _close(
            judging, target, snapshot_id, CommandVerdict(refusal=CommandRefusal("SNAPSHOT_TOO_LARGE", said))
        )
    if came < total:
        return judging.end(target, [event.event_id], CommandVerdict())
    return await _complete(judging, event, items, replace)


async def _complete(judging: ApplyTransaction, event: CommandEvent, items: int, replace: Replace) -> CommandVerdict:
    """The last chunk is here: all of it becomes one version, or nothing of it."""
    target, snapshot_id = event.target, _snapshot_id(event)
    if refusal := check_revision(target, event.command.source_revision, judging.standings[target]):
        return await _close(judging, target, snapshot_id, CommandVerdict(refusal=refusal))
    chunks = await snapshot_store.chunks(judging.tx, target, snapshot_id)
    if len({entry.key for chunk in chunks for entry in chunk}) < items:
        refusal = CommandRefusal("DUPLICATE_KEY", "two chunks of the snapshot name the same key")
        return await _close(judging, target, snapshot_id, CommandVerdict(refusal=refusal))
    change = judging.commit(event, items=items)
    await replace(change, chunks)
    return await _close(judging, target, snapshot_id, CommandVerdict(change.version))


async def _close(
    judging: ApplyTransaction, target: DictionaryKey, snapshot_id: UUID, verdict: CommandVerdict
) -> CommandVerdict:
    await snapshot_store.close_set(judging.tx, target, snapshot_id, verdict, actor=judging.actor, now=judging.now)
    return judging.end(target, await snapshot_store.set_events(judging.tx, target, snapshot_id), verdict)


def _conflict(event: CommandEvent) -> CommandRefusal:
    said = f"chunk {event.command.chunk_index} of this snapshot came before, with another content"
    return CommandRefusal("CHUNK_CONFLICT", said)


def _content(event: CommandEvent) -> bytes:
    """A chunk as it is staged."""
    return msgspec.json.encode(event.command.entries())


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _snapshot_id(event: CommandEvent) -> UUID:
    """Every chunk has one: the contract sees to it."""
    return event.command.snapshot_id or event.event_id
