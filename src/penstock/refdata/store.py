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
    DictionarySummary,
    UpdateRecord,
    VersionRecord,
    VersionStamp,
    encode_invalidation,
)

SQL = sql.load("penstock.refdata", {"update": UPDATE, "snapshot": SNAPSHOT})
CHANNEL = "penstock_refdata"
PRUNE_BATCH = 10_000
EventKey = tuple[str, UUID]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


async def open_updates(
    connection: Connection, asked: Sequence[tuple[DictionaryKey, UUID, bytes]], *, now: datetime
) -> set[EventKey]:
    """Note updates as PENDING; those that were not known before."""
    rows = await connection.fetch(
        SQL["open_updates"],
        [target.tenant_id for target, _, _ in asked],
        [event_id for _, event_id, _ in asked],
        [target.dict_code for target, _, _ in asked],
        [body_hash for _, _, body_hash in asked],
        now,
    )
    return {(row["tenant_id"], row["event_id"]) for row in rows if row["is_new"]}


async def find_updates(connection: Connection, keys: Sequence[EventKey]) -> dict[EventKey, UpdateRecord]:
    """How updates stand, those that are known."""
    rows = await connection.fetch(
        SQL["find_updates"], [tenant for tenant, _ in keys], [event_id for _, event_id in keys]
    )
    return {(row["tenant_id"], row["event_id"]): _decode_update(row) for row in rows}


async def list_updates(
    connection: Connection,
    status: UpdateState,
    tenant_id: str,
    dict_code: str | None,
    *,
    before: tuple[datetime, UUID],
    limit: int,
) -> list[UpdateRecord]:
    """A tenant's updates under way, or its failed ones, the latest first."""
    query = SQL["list_pending_updates" if status is UpdateState.PENDING else "list_failed_updates"]
    return [_decode_update(row) for row in await connection.fetch(query, tenant_id, dict_code, *before, limit)]


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


async def mark_processed(tx: Connection, events: Sequence[CommandEvent], *, now: datetime) -> set[EventKey]:
    """Take *events* as this transaction's to judge; those nobody judged before."""
    rows = await tx.fetch(
        SQL["mark_processed"],
        [event.target.tenant_id for event in events],
        [event.event_id for event in events],
        [event.source for event in events],
        now,
    )
    return {(row["tenant_id"], row["event_id"]) for row in rows}


async def advance_heads(tx: Connection, standings: Mapping[DictionaryKey, DictionaryHead], *, now: datetime) -> None:
    """Let dictionaries stand at their new versions."""
    if standings:
        await tx.execute(
            SQL["advance_heads"],
            [target.tenant_id for target in standings],
            [target.dict_code for target in standings],
            [standing.version for standing in standings.values()],
            [standing.revision for standing in standings.values()],
            now,
        )


async def finish_updates(
    tx: Connection, ended: Sequence[tuple[DictionaryKey, UUID, CommandVerdict]], *, actor: str, now: datetime
) -> None:
    """Say what became of updates."""
    if not ended:
        return
    refusals = [verdict.refusal or CommandRefusal("", "") for _, _, verdict in ended]
    await tx.execute(
        SQL["finish_updates"],
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


async def append_outbox(tx: Connection, commits: Sequence[CommandCommit], *, now: datetime) -> None:
    """Write down what is to be announced."""
    if commits:
        await tx.execute(
            SQL["append_outbox"],
            [commit.target.tenant_id for commit in commits],
            [commit.event_id for commit in commits],
            [commit.target.dict_code for commit in commits],
            [commit.version for commit in commits],
            [encode_invalidation(commit, now) for commit in commits],
            [commit.event_type for commit in commits],
            [commit.source for commit in commits],
            [commit.items for commit in commits],
            [commit.source_revision for commit in commits],
            now,
        )


async def notify_commit(tx: Connection) -> None:
    """Wake the relay and whoever waits for a commit, when *tx* commits."""
    await tx.execute(SQL["notify_commit"], CHANNEL)


async def read_committed_version(connection: Connection, target: DictionaryKey) -> int:
    """The version *target* stands at; 0 when nothing was ever committed."""
    return int(await connection.fetchval(SQL["read_committed_version"], *target))


async def read_stamp(connection: Connection, target: DictionaryKey) -> tuple[VersionStamp, str | None] | None:
    """How *target* stands and how it is read now; None when it never stood anywhere."""
    row = await connection.fetchrow(SQL["read_stamp"], *target)
    return None if row is None else (_decode_stamp(row), row["load_hash"])


async def read_stamps(connection: Connection, codes: Sequence[str]) -> dict[DictionaryKey, VersionStamp]:
    """How all dictionaries of *codes* stand."""
    rows = await connection.fetch(SQL["read_stamps"], codes)
    return {DictionaryKey(row["tenant_id"], row["dict_code"]): _decode_stamp(row) for row in rows}


async def list_commits(connection: Connection, target: DictionaryKey, version: int, *, limit: int) -> list[CommitEntry]:
    """*version* and those after it, as far as they are remembered."""
    rows = await connection.fetch(SQL["list_commits"], *target, version, limit)
    return [
        CommitEntry(
            VersionStamp(row["version"], to_stamp(row["created_at"])),
            row["event_id"],
            row["source"],
            None if row["keys"] is None else msgspec.json.decode(row["keys"], type=list[str]),
            row["trace"],
        )
        for row in rows
    ]


async def read_visible_version(connection: Connection, target: DictionaryKey) -> tuple[int, int | None]:
    """The version *target* stands at, and the one that is pinned in its place."""
    row = await connection.fetchrow(SQL["read_visible_version"], *target)
    return (0, None) if row is None else (row["version"], row["pinned"])


async def list_versions(
    connection: Connection, target: DictionaryKey, *, before: int, limit: int
) -> list[VersionRecord]:
    """The versions of a dictionary below *before*, the latest first."""
    rows = await connection.fetch(SQL["list_versions"], *target, before, limit)
    return [_decode_version(row) for row in rows]


async def list_dictionaries(connection: Connection, tenant_id: str) -> dict[str, DictionarySummary]:
    """Return the committed versions of the dictionaries of a tenant by code."""
    rows = await connection.fetch(SQL["list_dictionaries"], tenant_id)
    return {row["dict_code"]: DictionarySummary(row["version"], row["updated_at"], row["pinned"]) for row in rows}


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
    await tx.execute(SQL["create_incoming"])
    records = ((entry.key, entry.text) for entry in entries)
    await tx.copy_records_to_table("incoming_item", columns=["item_key", "payload"], records=records)
    await tx.execute(SQL["analyze_incoming"])
    for statement in ("remove_items", "change_items", "add_items"):  # the new ones last: nobody need look at them
        await tx.execute(SQL[statement], *target, now)


async def claim_late_updates(
    connection: Connection, *, created_before: datetime, looked_before: datetime, now: datetime, limit: int
) -> list[tuple[DictionaryKey, UUID]]:
    """Updates that are under way for too long; each is told once in a while."""
    rows = await connection.fetch(SQL["claim_late_updates"], created_before, looked_before, now, limit)
    return [(DictionaryKey(row["tenant_id"], row["dict_code"]), row["event_id"]) for row in rows]


async def read_definitions(tx: Connection) -> dict[str, str]:
    """How dictionaries were last read, by code."""
    return {row["dict_code"]: row["load_hash"] for row in await tx.fetch(SQL["read_definitions"])}


async def store_definition(tx: Connection, code: str, load_hash: str, *, now: datetime) -> None:
    """Note how a dictionary is read now."""
    await tx.execute(SQL["store_definition"], code, load_hash, now)


async def lock_codes(tx: Connection, codes: Sequence[str]) -> dict[DictionaryKey, DictionaryHead]:
    """Where all dictionaries of some codes stand, nobody else's to change until the end of *tx*."""
    rows = await tx.fetch(SQL["lock_codes"], codes)
    return {DictionaryKey(tenant, code): DictionaryHead(version, revision) for tenant, code, version, revision in rows}


async def list_targets(connection: Connection, code: str) -> list[DictionaryKey]:
    """The dictionaries of a code that have a version."""
    return [DictionaryKey(row["tenant_id"], code) for row in await connection.fetch(SQL["list_targets"], code)]


async def prune(tx: Connection, what: str, before: datetime) -> int:
    """Forget some of *what* is older than *before*; how many."""
    return int((await tx.execute(SQL[f"prune_{what}"], before, PRUNE_BATCH)).rpartition(" ")[2])


async def find_oldest_pending(connection: Connection) -> datetime | None:
    """Since when the oldest update is under way."""
    found: datetime | None = await connection.fetchval(SQL["find_oldest_pending"])
    return found


def _decode_update(row: asyncpg.Record) -> UpdateRecord:
    return UpdateRecord(**{**dict(row), "status": UpdateState(row["status"])})


def _decode_stamp(row: asyncpg.Record) -> VersionStamp:
    """What is read now: the last version, or what is pinned in its place."""
    if row["pinned"] is not None:
        return VersionStamp(row["pinned"], to_stamp(row["pinned_at"]), is_pinned=True)
    return VersionStamp(row["version"], to_stamp(row["updated_at"]))


def to_stamp(moment: datetime) -> int:
    """*moment* in µs, as a mark has it."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _decode_version(row: asyncpg.Record) -> VersionRecord:
    version, event_id, event_type, source, revision, items, keys, committed_at = row
    known = None if keys is None else msgspec.json.decode(keys)
    return VersionRecord(version, event_id, event_type, source, revision, items, known, committed_at)
