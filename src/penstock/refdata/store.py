"""A typed function per statement."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import msgspec

from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection
from penstock.refdata.contract import SnapshotEntry, UpdateState
from penstock.refdata.model import (
    SNAPSHOT,
    UPDATE,
    CommandCommit,
    CommandEvent,
    CommandRefusal,
    CommandVerdict,
    CommitEntry,
    DictionaryHead,
    DictionaryKey,
    UpdateRecord,
    VersionRecord,
    VersionStamp,
    invalidation,
)

SQL = sql.load("penstock.refdata", {"update": UPDATE, "snapshot": SNAPSHOT})
CHANNEL = "penstock_refdata"
PRUNED_AT_ONCE = 10_000
EventKey = tuple[str, UUID]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


async def open_requests(
    connection: Connection, asked: Sequence[tuple[DictionaryKey, UUID, bytes]], *, now: datetime
) -> set[EventKey]:
    """Note updates as PENDING; those that were not known before."""
    rows = await connection.fetch(
        SQL["open_requests"],
        [target.tenant_id for target, _, _ in asked],
        [event_id for _, event_id, _ in asked],
        [target.dict_code for target, _, _ in asked],
        [body_hash for _, _, body_hash in asked],
        now,
    )
    return {(row["tenant_id"], row["event_id"]) for row in rows if row["is_new"]}


async def requests(connection: Connection, keys: Sequence[EventKey]) -> dict[EventKey, UpdateRecord]:
    """How updates stand, those that are known."""
    rows = await connection.fetch(SQL["requests"], [tenant for tenant, _ in keys], [event_id for _, event_id in keys])
    return {(row["tenant_id"], row["event_id"]): _update(row) for row in rows}


async def listed_requests(
    connection: Connection,
    status: UpdateState,
    tenant_id: str,
    dict_code: str | None,
    *,
    before: tuple[datetime, UUID],
    limit: int,
) -> list[UpdateRecord]:
    """A tenant's updates under way, or its failed ones, the latest first."""
    query = SQL["pending_requests" if status is UpdateState.PENDING else "failed_requests"]
    return [_update(row) for row in await connection.fetch(query, tenant_id, dict_code, *before, limit)]


async def create_dictionaries(connection: Connection, targets: Iterable[DictionaryKey], *, now: datetime) -> None:
    """Let *targets* stand at version 0 that never stood anywhere."""
    if wanted := sorted(set(targets)):
        await connection.execute(SQL["create_dictionaries"], *_columns(wanted), now)


async def lock_dictionaries(
    tx: Connection, targets: Iterable[DictionaryKey], *, now: datetime
) -> dict[DictionaryKey, DictionaryHead]:
    """Where *targets* stand, nobody else's to change until the end of *tx*."""
    wanted = sorted(set(targets))
    # Made first, then all locked in one order: who holds some and makes others would wait in a circle.
    await create_dictionaries(tx, wanted, now=now)
    found = await tx.fetch(SQL["lock_dictionaries"], *_columns(wanted)) if wanted else []
    return {DictionaryKey(tenant, code): DictionaryHead(version, revision) for tenant, code, version, revision in found}


def _columns(targets: Sequence[DictionaryKey]) -> tuple[list[str], list[str]]:
    return [target.tenant_id for target in targets], [target.dict_code for target in targets]


async def note_processed(tx: Connection, events: Sequence[CommandEvent], *, now: datetime) -> set[EventKey]:
    """Take *events* as this transaction's to judge; those nobody judged before."""
    rows = await tx.fetch(
        SQL["note_processed"],
        [event.target.tenant_id for event in events],
        [event.event_id for event in events],
        [event.source for event in events],
        now,
    )
    return {(row["tenant_id"], row["event_id"]) for row in rows}


async def advance(tx: Connection, standings: Mapping[DictionaryKey, DictionaryHead], *, now: datetime) -> None:
    """Let dictionaries stand at their new versions."""
    if standings:
        await tx.execute(
            SQL["advance"],
            [target.tenant_id for target in standings],
            [target.dict_code for target in standings],
            [standing.version for standing in standings.values()],
            [standing.revision for standing in standings.values()],
            now,
        )


async def finish(
    tx: Connection, ended: Sequence[tuple[DictionaryKey, UUID, CommandVerdict]], *, actor: str, now: datetime
) -> None:
    """Say what became of updates."""
    if not ended:
        return
    refusals = [verdict.refusal or CommandRefusal("", "") for _, _, verdict in ended]
    await tx.execute(
        SQL["finish"],
        [target.tenant_id for target, _, _ in ended],
        [event_id for _, event_id, _ in ended],
        [target.dict_code for target, _, _ in ended],
        [verdict.status.value for _, _, verdict in ended],
        [verdict.version for _, _, verdict in ended],
        [refusal.code or None for refusal in refusals],
        [refusal.message or None for refusal in refusals],
        now,
        actor,
    )


async def tell(tx: Connection, commits: Sequence[CommandCommit], *, now: datetime) -> None:
    """Write down what is to be announced."""
    if commits:
        await tx.execute(
            SQL["tell"],
            [commit.target.tenant_id for commit in commits],
            [commit.event_id for commit in commits],
            [commit.target.dict_code for commit in commits],
            [commit.version for commit in commits],
            [invalidation(commit, now) for commit in commits],
            [commit.event_type for commit in commits],
            [commit.source for commit in commits],
            [commit.items for commit in commits],
            [commit.source_revision for commit in commits],
            now,
        )


async def notify(tx: Connection) -> None:
    """Wake the relay and whoever waits for a commit, when *tx* commits."""
    await tx.execute(SQL["notify"], CHANNEL)


async def committed_version(connection: Connection, target: DictionaryKey) -> int:
    """The version *target* stands at; 0 when nothing was ever committed."""
    return int(await connection.fetchval(SQL["committed_version"], *target))


async def standing(connection: Connection, target: DictionaryKey) -> tuple[VersionStamp, str | None] | None:
    """How *target* stands and how it is read now; None when it never stood anywhere."""
    row = await connection.fetchrow(SQL["standing"], *target)
    return None if row is None else (_mark(row), row["load_hash"])


async def standings(connection: Connection, codes: Sequence[str]) -> dict[DictionaryKey, VersionStamp]:
    """How all dictionaries of *codes* stand."""
    rows = await connection.fetch(SQL["standings"], codes)
    return {DictionaryKey(row["tenant_id"], row["dict_code"]): _mark(row) for row in rows}


async def changes_since(
    connection: Connection, target: DictionaryKey, version: int, *, limit: int
) -> list[CommitEntry]:
    """*version* and those after it, as far as they are remembered."""
    rows = await connection.fetch(SQL["changes_since"], *target, version, limit)
    return [
        CommitEntry(
            VersionStamp(row["version"], stamp_of(row["created_at"])),
            row["event_id"],
            row["source"],
            None if row["keys"] is None else msgspec.json.decode(row["keys"], type=list[str]),
            row["trace"],
        )
        for row in rows
    ]


async def readable_version(connection: Connection, target: DictionaryKey) -> tuple[int, int | None]:
    """The version *target* stands at, and the one that is pinned in its place."""
    row = await connection.fetchrow(SQL["readable_version"], *target)
    return (0, None) if row is None else (row["version"], row["pinned"])


async def history(connection: Connection, target: DictionaryKey, *, before: int, limit: int) -> list[VersionRecord]:
    """The versions of a dictionary below *before*, the latest first."""
    rows = await connection.fetch(SQL["history"], *target, before, limit)
    return [_version(row) for row in rows]


async def upsert_items(tx: Connection, code: str, items: Sequence[tuple[str, str, str]], *, now: datetime) -> None:
    """Put items, each with its tenant, key and payload, into the table of dictionaries without their own."""
    if items:
        await tx.execute(SQL["upsert_items"], code, *map(list, zip(*items, strict=True)), now)


async def delete_items(tx: Connection, code: str, keys: Sequence[tuple[str, str]], *, now: datetime) -> None:
    """Leave tombstones for items, each given by tenant and key."""
    if keys:
        await tx.execute(SQL["delete_items"], code, *map(list, zip(*keys, strict=True)), now)


async def replace_items(
    tx: Connection, target: DictionaryKey, entries: Iterable[SnapshotEntry], *, now: datetime
) -> None:
    """Make the items of *target* just these."""
    await tx.execute(SQL["make_incoming"])
    records = ((entry.key, entry.text) for entry in entries)
    await tx.copy_records_to_table("incoming_item", columns=["item_key", "payload"], records=records)
    await tx.execute(SQL["count_incoming"])
    for statement in ("remove_items", "change_items", "add_items"):  # the new ones last: nobody need look at them
        await tx.execute(SQL[statement], *target, now)


async def look_for(
    connection: Connection, *, created_before: datetime, looked_before: datetime, now: datetime, limit: int
) -> list[tuple[DictionaryKey, UUID]]:
    """Updates that are under way for too long; each is told once in a while."""
    rows = await connection.fetch(SQL["look_for"], created_before, looked_before, now, limit)
    return [(DictionaryKey(row["tenant_id"], row["dict_code"]), row["event_id"]) for row in rows]


async def definitions(tx: Connection) -> dict[str, str]:
    """How dictionaries were last read, by code."""
    return {row["dict_code"]: row["load_hash"] for row in await tx.fetch(SQL["definitions"])}


async def define(tx: Connection, code: str, load_hash: str, *, now: datetime) -> None:
    """Note how a dictionary is read now."""
    await tx.execute(SQL["define"], code, load_hash, now)


async def lock_codes(tx: Connection, codes: Sequence[str]) -> dict[DictionaryKey, DictionaryHead]:
    """Where all dictionaries of some codes stand, nobody else's to change until the end of *tx*."""
    rows = await tx.fetch(SQL["lock_codes"], codes)
    return {DictionaryKey(tenant, code): DictionaryHead(version, revision) for tenant, code, version, revision in rows}


async def targets_of(connection: Connection, code: str) -> list[DictionaryKey]:
    """The dictionaries of a code that have a version."""
    return [DictionaryKey(row["tenant_id"], code) for row in await connection.fetch(SQL["targets_of"], code)]


async def prune(tx: Connection, what: str, before: datetime) -> int:
    """Forget some of *what* is older than *before*; how many."""
    return int((await tx.execute(SQL[f"prune_{what}"], before, PRUNED_AT_ONCE)).rpartition(" ")[2])


async def pending_since(connection: Connection) -> datetime | None:
    """Since when the oldest update is under way."""
    found: datetime | None = await connection.fetchval(SQL["pending_age"])
    return found


def _update(row: asyncpg.Record) -> UpdateRecord:
    return UpdateRecord(**{**dict(row), "status": UpdateState(row["status"])})


def _mark(row: asyncpg.Record) -> VersionStamp:
    """What is read now: the last version, or what is pinned in its place."""
    if row["pinned"] is not None:
        return VersionStamp(row["pinned"], stamp_of(row["pinned_at"]), is_pinned=True)
    return VersionStamp(row["version"], stamp_of(row["updated_at"]))


def stamp_of(moment: datetime) -> int:
    """*moment* in µs, as a mark has it."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _version(row: asyncpg.Record) -> VersionRecord:
    version, event_id, event_type, source, revision, items, keys, committed_at = row
    known = None if keys is None else msgspec.json.decode(keys)
    return VersionRecord(version, event_id, event_type, source, revision, items, known, committed_at)
