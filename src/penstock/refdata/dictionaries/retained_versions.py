"""R30: the check of a snapshot before it replaces all items, and the retained versions, for pins and rollbacks."""

from collections.abc import Sequence
from datetime import datetime
from uuid import uuid4

from msgspec import Raw

from penstock.kernel.db.database import Connection, Database
from penstock.kernel.errors import NotFound
from penstock.refdata import store
from penstock.refdata.contract import Command, CommandItem
from penstock.refdata.dictionaries.catalogue import Dictionary, DictionaryCatalogue
from penstock.refdata.item_files import make_snapshot_commands
from penstock.refdata.model import CommandRefusal, DictionaryKey, ItemChange, RetainedVersion
from penstock.refdata.store import SQL

PRUNE_BATCH = 10_000


async def check_snapshot(
    tx: Connection, dictionary: Dictionary, change: ItemChange, items: int
) -> CommandRefusal | None:
    """Retain the version before a snapshot if configured; return a refusal if it would delete too many items."""
    section, target = dictionary.section, change.target
    if section.max_drop_percent is not None and not change.command.allow_row_drop:
        current = await dictionary.provider.count_items(tx, target)
        if items * 100 < current * (100 - section.max_drop_percent):
            sizes = f"the snapshot has {items} instead of {current} items"
            limit = f"maxDropPercent allows a drop of {section.max_drop_percent} %"
            return CommandRefusal("ROW_DROP", f"{sizes}; {limit} unless the command sets allowRowDrop")
    if section.retain_versions and change.version > 1:  # before the first version there is nothing to retain
        await _retain(tx, dictionary, target, change.version - 1, change.applied_at)
    return None


async def prune_retained(tx: Connection, dictionaries: Sequence[Dictionary]) -> int:
    """Delete items of retained versions beyond the configured number, and return the number of deleted items."""
    codes = [dictionary.section.code for dictionary in dictionaries]
    await tx.execute(SQL["lock_pins"])  # else a version that is being pinned could lose its items
    await tx.execute(SQL["drop_retained"], codes, [dictionary.section.retain_versions for dictionary in dictionaries])
    pruned = int((await tx.execute(SQL["prune_retained_items"], PRUNE_BATCH)).rpartition(" ")[2])
    if not pruned:
        await tx.execute(SQL["delete_retained"])
    return pruned


class VersionRetention:
    """The use cases of retained versions."""

    def __init__(self, db: Database, catalogue: DictionaryCatalogue) -> None:
        self._db = db
        self._catalogue = catalogue

    async def list_retained(self, target: DictionaryKey) -> list[RetainedVersion]:
        """Return the retained versions of a dictionary, latest first."""
        self._catalogue.get(target)
        async with self._db.connection() as connection:
            return [RetainedVersion(**row) for row in await connection.fetch(SQL["list_retained"], *target)]

    async def retain(self, target: DictionaryKey) -> int:
        """Retain the last version, and return its number."""
        dictionary, now = self._catalogue.get(target), self._db.clock.now()
        async with self._db.transaction() as tx:
            head = (await store.lock_dictionaries(tx, [target], now=now))[target]
            await _retain(tx, dictionary, target, head.version, now)
        return head.version

    async def pin(self, target: DictionaryKey, version: int) -> None:
        """Make readers get *version* until `unpin`; NotFound unless it is retained or the last one."""
        dictionary, now = self._catalogue.get(target), self._db.clock.now()
        async with self._db.transaction() as tx:
            head = (await store.lock_dictionaries(tx, [target], now=now))[target]
            if version == head.version:
                await _retain(tx, dictionary, target, version, now)
            if not await tx.fetchval(SQL["pin"], *target, version, now):
                raise _make_not_retained_error(target, version)

    async def unpin(self, target: DictionaryKey) -> int:
        """Make readers get the last version again, and return the version that was pinned."""
        self._catalogue.get(target)
        async with self._db.connection() as connection:
            version = await connection.fetchval(SQL["unpin"], *target)
        if version is None:
            raise NotFound(
                "NOT_PINNED", f"{target.dict_code} has no pinned version", hint="readers get the last version"
            )
        return int(version)

    async def make_rollback(self, target: DictionaryKey, version: int) -> list[Command]:
        """Return the commands that restore *version*; NotFound unless it is retained."""
        self._catalogue.get_writable(target)
        async with self._db.transaction("repeatable_read") as tx:
            if version not in [row["version"] for row in await tx.fetch(SQL["list_retained"], *target)]:
                raise _make_not_retained_error(target, version)
            rows = await tx.fetch(SQL["read_retained_items"], *target, version)
        items = [CommandItem(row["item_key"], payload=Raw(row["payload"].encode())) for row in rows]
        commands = make_snapshot_commands(target.dict_code, items, uuid4(), None)
        for command in commands:
            command.allow_row_drop = True  # a rollback may delete any number of items
        return commands


async def _retain(tx: Connection, dictionary: Dictionary, target: DictionaryKey, version: int, now: datetime) -> None:
    if await tx.fetchval(SQL["insert_retained"], *target, version, now):
        items = await dictionary.provider.retain(tx, target, version)
        await tx.execute(SQL["set_retained_items"], *target, version, items)


def _make_not_retained_error(target: DictionaryKey, version: int) -> NotFound:
    hint = f"`penstock dict retained {target.tenant_id} {target.dict_code}` lists the retained versions; "
    hint += "the setting retainVersions of the dictionary retains more"
    return NotFound("VERSION_NOT_RETAINED", f"version {version} of {target.dict_code} is not retained", hint=hint)
