"""The SQL statements of refdata as typed functions."""

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
    CommandId,
    CommandRefusal,
    CommandVerdict,
    CommitEntry,
    DictionaryHead,
    DictionaryKey,
    DictionarySummary,
    DriftCheck,
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
    connection: Connection, updates: Sequence[tuple[DictionaryKey, UUID, bytes]], *, now: datetime
) -> set[EventKey]:
    """Store updates as PENDING, and return the keys of the new ones."""
    rows = await connection.fetch(
        SQL["open_updates"],
        [target.tenant_id for target, _, _ in updates],
        [event_id for _, event_id, _ in updates],
        [target.dict_code for target, _, _ in updates],
        [body_hash for _, _, body_hash in updates],
        now,
    )
    return {(row["tenant_id"], row["event_id"]) for row in rows if row["is_new"]}


async def find_updates(connection: Connection, keys: Sequence[EventKey]) -> dict[EventKey, UpdateRecord]:
    """Return the stored updates of *keys*."""
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
    """Return the pending or failed updates of a tenant, latest first."""
    query = SQL["list_pending_updates" if status is UpdateState.PENDING else "list_failed_updates"]
    return [_decode_update(row) for row in await connection.fetch(query, tenant_id, dict_code, *before, limit)]


async def create_dictionaries(connection: Connection, targets: Iterable[DictionaryKey], *, now: datetime) -> None:
    """Insert the missing dictionaries of *targets* at version 0."""
    if keys := sorted(set(targets)):
        await connection.execute(SQL["create_dictionaries"], *_make_columns(keys), now)


async def lock_dictionaries(
    tx: Connection, targets: Iterable[DictionaryKey], *, now: datetime
) -> dict[DictionaryKey, DictionaryHead]:
    """Lock *targets* until the end of *tx*, and return their heads."""
    keys = sorted(set(targets))
    # Insert first, then lock all in one order: inserting while holding locks could deadlock.
    await create_dictionaries(tx, keys, now=now)
    rows = await tx.fetch(SQL["lock_dictionaries"], *_make_columns(keys)) if keys else []
    return {DictionaryKey(tenant, code): DictionaryHead(version, revision) for tenant, code, version, revision in rows}


def _make_columns(targets: Sequence[DictionaryKey]) -> tuple[list[str], list[str]]:
    return [target.tenant_id for target in targets], [target.dict_code for target in targets]


async def mark_processed(tx: Connection, events: Sequence[CommandEvent], *, now: datetime) -> set[EventKey]:
    """Mark *events* as processed by *tx*, and return the keys of those that were not processed before."""
    rows = await tx.fetch(
        SQL["mark_processed"],
        [event.target.tenant_id for event in events],
        [event.event_id for event in events],
        [event.source for event in events],
        now,
    )
    return {(row["tenant_id"], row["event_id"]) for row in rows}


async def advance_heads(tx: Connection, heads: Mapping[DictionaryKey, DictionaryHead], *, now: datetime) -> None:
    """Store the new versions of dictionaries."""
    if heads:
        await tx.execute(
            SQL["advance_heads"],
            [target.tenant_id for target in heads],
            [target.dict_code for target in heads],
            [head.version for head in heads.values()],
            [head.revision for head in heads.values()],
            now,
        )


async def finish_updates(
    tx: Connection, results: Sequence[tuple[CommandId, CommandVerdict]], *, actor: str, now: datetime
) -> set[EventKey]:
    """Store the results of updates, and return the keys of those that are final now and were not before."""
    if not results:
        return set()
    refusals = [verdict.refusal or CommandRefusal("", "") for _, verdict in results]
    rows = await tx.fetch(
        SQL["finish_updates"],
        [command.target.tenant_id for command, _ in results],
        [command.event_id for command, _ in results],
        [command.target.dict_code for command, _ in results],
        [verdict.status.value for _, verdict in results],
        [verdict.version for _, verdict in results],
        [refusal.code or None for refusal in refusals],
        [refusal.message or None for refusal in refusals],
        now,
        actor,
    )
    return {(row["tenant_id"], row["event_id"]) for row in rows}


async def append_outbox(tx: Connection, commits: Sequence[CommandCommit], *, now: datetime) -> None:
    """Append *commits* to the outbox of the relay, which is also the history."""
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
    """Wake the relay and the waiting writers when *tx* commits."""
    await tx.execute(SQL["notify_commit"], CHANNEL)


async def read_committed_version(connection: Connection, target: DictionaryKey) -> int:
    """Return the last version of *target*; 0 before the first commit."""
    return int(await connection.fetchval(SQL["read_committed_version"], *target))


async def read_stamp(connection: Connection, target: DictionaryKey) -> tuple[VersionStamp, str | None] | None:
    """Return the visible version of *target* and the hash of its loadSql; None if *target* is unknown."""
    row = await connection.fetchrow(SQL["read_stamp"], *target)
    return None if row is None else (_decode_stamp(row), row["load_hash"])


async def read_stamps(connection: Connection, codes: Sequence[str]) -> dict[DictionaryKey, VersionStamp]:
    """Return the visible versions of all dictionaries of *codes*."""
    rows = await connection.fetch(SQL["read_stamps"], codes)
    return {DictionaryKey(row["tenant_id"], row["dict_code"]): _decode_stamp(row) for row in rows}


async def list_commits(connection: Connection, target: DictionaryKey, version: int, *, limit: int) -> list[CommitEntry]:
    """Return the commits from *version* on, as far as the history goes back."""
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
    """Return the last version of *target*, and the pinned one."""
    row = await connection.fetchrow(SQL["read_visible_version"], *target)
    return (0, None) if row is None else (row["version"], row["pinned"])


async def list_versions(
    connection: Connection, target: DictionaryKey, *, before: int, limit: int
) -> list[VersionRecord]:
    """Return the versions of a dictionary below *before*, latest first."""
    rows = await connection.fetch(SQL["list_versions"], *target, before, limit)
    return [_decode_version(row) for row in rows]


async def list_dictionaries(connection: Connection, tenant_id: str) -> dict[str, DictionarySummary]:
    """Return the committed versions of the dictionaries of a tenant by code."""
    rows = await connection.fetch(SQL["list_dictionaries"], tenant_id)
    return {row["dict_code"]: DictionarySummary(row["version"], row["updated_at"], row["pinned"]) for row in rows}


async def upsert_items(tx: Connection, code: str, items: Sequence[tuple[str, str, str]], *, now: datetime) -> None:
    """Insert or replace items, each with tenant, key and payload, in `dictionary_item`."""
    if items:
        await tx.execute(SQL["upsert_items"], code, *map(list, zip(*items, strict=True)), now)


async def delete_items(tx: Connection, code: str, keys: Sequence[tuple[str, str]], *, now: datetime) -> None:
    """Mark items, each given by tenant and key, as deleted in `dictionary_item`."""
    if keys:
        await tx.execute(SQL["delete_items"], code, *map(list, zip(*keys, strict=True)), now)


async def replace_items(
    tx: Connection, target: DictionaryKey, entries: Iterable[SnapshotEntry], *, now: datetime
) -> None:
    """Replace all items of *target* in `dictionary_item` by *entries*."""
    await tx.execute(SQL["create_incoming"])
    records = ((entry.key, entry.text) for entry in entries)
    await tx.copy_records_to_table("incoming_item", columns=["item_key", "payload"], records=records)
    await tx.execute(SQL["analyze_incoming"])
    for statement in (
        "remove_items",
        "change_items",
        "add_items",
    ):  # new items last: the statements before do not read them
        await tx.execute(SQL[statement], *target, now)


async def claim_late_updates(
    connection: Connection, *, created_before: datetime, probed_before: datetime, now: datetime, limit: int
) -> list[tuple[DictionaryKey, UUID]]:
    """Return pending updates that are too old, and set their time of the last probe."""
    rows = await connection.fetch(SQL["claim_late_updates"], created_before, probed_before, now, limit)
    return [(DictionaryKey(row["tenant_id"], row["dict_code"]), row["event_id"]) for row in rows]


async def read_definitions(tx: Connection) -> dict[str, str]:
    """Return the hash of the last loadSql of each dictionary code."""
    return {row["dict_code"]: row["load_hash"] for row in await tx.fetch(SQL["read_definitions"])}


async def store_definition(tx: Connection, code: str, load_hash: str, *, now: datetime) -> None:
    """Store the hash of the loadSql of a dictionary code."""
    await tx.execute(SQL["store_definition"], code, load_hash, now)


async def lock_codes(tx: Connection, codes: Sequence[str]) -> dict[DictionaryKey, DictionaryHead]:
    """Lock all dictionaries of *codes* until the end of *tx*, and return their heads."""
    rows = await tx.fetch(SQL["lock_codes"], codes)
    return {DictionaryKey(tenant, code): DictionaryHead(version, revision) for tenant, code, version, revision in rows}


async def list_targets(connection: Connection, code: str) -> list[DictionaryKey]:
    """Return the dictionaries of *code*, one per tenant."""
    return [DictionaryKey(row["tenant_id"], code) for row in await connection.fetch(SQL["list_targets"], code)]


async def read_drift_check(connection: Connection, target: DictionaryKey) -> DriftCheck | None:
    """Return the last drift check of *target*."""
    row = await connection.fetchrow(SQL["read_drift_check"], *target)
    return None if row is None else DriftCheck(*row)


async def store_drift_check(
    connection: Connection, target: DictionaryKey, last: DriftCheck | None, check: DriftCheck
) -> bool:
    """Store *check*; return False if another process has stored one after *last*."""
    expected = (None, None, None) if last is None else last[:3]
    return bool(await connection.fetchval(SQL["store_drift_check"], *target, *check, *expected))


async def prune(tx: Connection, kind: str, before: datetime) -> int:
    """Delete up to PRUNE_BATCH rows of *kind* that are older than *before*, and return their number."""
    return int((await tx.execute(SQL[f"prune_{kind}"], before, PRUNE_BATCH)).rpartition(" ")[2])


async def find_oldest_pending(connection: Connection) -> datetime | None:
    """Return the creation time of the oldest pending update."""
    created_at: datetime | None = await connection.fetchval(SQL["find_oldest_pending"])
    return created_at


def _decode_update(row: asyncpg.Record) -> UpdateRecord:
    return UpdateRecord(**{**dict(row), "status": UpdateState(row["status"])})


def _decode_stamp(row: asyncpg.Record) -> VersionStamp:
    """Return the visible version: the pinned one, otherwise the last one."""
    if row["pinned"] is not None:
        return VersionStamp(row["pinned"], to_stamp(row["pinned_at"]), is_pinned=True)
    return VersionStamp(row["version"], to_stamp(row["updated_at"]))


def to_stamp(moment: datetime) -> int:
    """Return *moment* in µs since 1970, as in a VersionStamp."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _decode_version(row: asyncpg.Record) -> VersionRecord:
    version, event_id, event_type, source, revision, items, keys, committed_at = row
    changed_keys = None if keys is None else msgspec.json.decode(keys)
    return VersionRecord(version, event_id, event_type, source, revision, items, changed_keys, committed_at)
