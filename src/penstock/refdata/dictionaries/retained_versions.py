"""R30: a look before a snapshot replaces everything, and what was before it kept: to be pinned, or gone back to."""

from collections.abc import Sequence
from datetime import datetime
from uuid import uuid4

from msgspec import Raw

from penstock.kernel.db.database import Connection, Database
from penstock.kernel.errors import NotFound
from penstock.refdata import store
from penstock.refdata.contract import Command, CommandItem
from penstock.refdata.dictionaries.catalogue import Dictionary, DictionaryCatalogue
from penstock.refdata.item_files import snapshot_commands
from penstock.refdata.model import CommandRefusal, DictionaryKey, ItemChange, RetainedVersion
from penstock.refdata.store import SQL

PRUNE_BATCH = 10_000


async def check_snapshot(
    tx: Connection, dictionary: Dictionary, change: ItemChange, items: int
) -> CommandRefusal | None:
    """Keep what is there, if that is wanted; the refusal of a snapshot that would take too much of it away."""
    section, target = dictionary.section, change.target
    if section.max_drop_percent is not None and not change.command.allow_row_drop:
        now = await dictionary.provider.count_items(tx, target)
        if items * 100 < now * (100 - section.max_drop_percent):
            said = f"the snapshot has {items} items where {now} are; at most {section.max_drop_percent} % may go"
            return CommandRefusal("ROW_DROP", f"{said} (maxDropPercent, unless it says allowRowDrop)")
    if section.retain_versions and change.version > 1:  # before the first there is nothing to go back to
        await _retain(tx, dictionary, target, change.version - 1, change.applied_at)
    return None


async def prune_retained(tx: Connection, dictionaries: Sequence[Dictionary]) -> int:
    """Remove some of what is kept beyond what is wanted; how many items."""
    codes = [dictionary.section.code for dictionary in dictionaries]
    await tx.execute(SQL["lock_pins"])  # else one that is just being pinned would lose its items
    await tx.execute(SQL["drop_retained"], codes, [dictionary.section.retain_versions for dictionary in dictionaries])
    pruned = int((await tx.execute(SQL["prune_retained_items"], PRUNE_BATCH)).rpartition(" ")[2])
    if not pruned:
        await tx.execute(SQL["delete_retained"])
    return pruned


class VersionRetention:
    """What can be asked of the versions that are kept."""

    def __init__(self, db: Database, catalogue: DictionaryCatalogue) -> None:
        self._db = db
        self._catalogue = catalogue

    async def list_retained(self, target: DictionaryKey) -> list[RetainedVersion]:
        """The versions of a dictionary that are kept, the latest first."""
        self._catalogue.get(target)
        async with self._db.connection() as connection:
            return [RetainedVersion(**row) for row in await connection.fetch(SQL["list_retained"], *target)]

    async def retain(self, target: DictionaryKey) -> int:
        """Keep the last version; which one that is."""
        dictionary, now = self._catalogue.get(target), self._db.clock.now()
        async with self._db.transaction() as tx:
            standing = (await store.lock_dictionaries(tx, [target], now=now))[target]
            await _retain(tx, dictionary, target, standing.version, now)
        return standing.version

    async def pin(self, target: DictionaryKey, version: int) -> None:
        """Have readers get *version* until `unpin`; NotFound unless it is kept, or the last, which then is."""
        dictionary, now = self._catalogue.get(target), self._db.clock.now()
        async with self._db.transaction() as tx:
            standing = (await store.lock_dictionaries(tx, [target], now=now))[target]
            if version == standing.version:
                await _retain(tx, dictionary, target, version, now)
            if not await tx.fetchval(SQL["pin"], *target, version, now):
                raise _not_retained(target, version)

    async def unpin(self, target: DictionaryKey) -> int:
        """Have readers get the last version again; which one was pinned."""
        self._catalogue.get(target)
        async with self._db.connection() as connection:
            version = await connection.fetchval(SQL["unpin"], *target)
        if version is None:
            raise NotFound("NOT_PINNED", f"{target.dict_code} is not pinned", hint="its last version is read")
        return int(version)

    async def make_rollback(self, target: DictionaryKey, version: int) -> list[Command]:
        """The commands that make a dictionary what it was in *version*; NotFound unless that is kept."""
        self._catalogue.get_writable(target)
        async with self._db.transaction("repeatable_read") as tx:
            if version not in [row["version"] for row in await tx.fetch(SQL["list_retained"], *target)]:
                raise _not_retained(target, version)
            rows = await tx.fetch(SQL["read_retained_items"], *target, version)
        items = [CommandItem(row["item_key"], payload=Raw(row["payload"].encode())) for row in rows]
        commands = snapshot_commands(target.dict_code, items, uuid4(), None)
        for command in commands:
            command.allow_row_drop = True  # it is meant
        return commands


async def _retain(tx: Connection, dictionary: Dictionary, target: DictionaryKey, version: int, now: datetime) -> None:
    if await tx.fetchval(SQL["insert_retained"], *target, version, now):
        items = await dictionary.provider.retain(tx, target, version)
        await tx.execute(SQL["set_retained_items"], *target, version, items)


def _not_retained(target: DictionaryKey, version: int) -> NotFound:
    hint = "`penstock dict retained` lists those that are; retainVersions in the configuration keeps more"
    return NotFound("VERSION_NOT_RETAINED", f"version {version} of {target.dict_code} is not kept", hint=hint)
