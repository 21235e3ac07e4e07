"""R1: a changed loadSql makes a new version of its dictionaries, so that pods never differ at one version."""

from collections.abc import Collection, Iterable, Sequence

import structlog

from penstock.kernel.db.database import Database
from penstock.kernel.db.locks import acquire_transaction_lock
from penstock.kernel.errors import Invalid
from penstock.refdata import store
from penstock.refdata.apply import version_bump
from penstock.refdata.dictionaries.catalogue import Dictionary
from penstock.refdata.model import DictionaryKey

SOURCE = EVENT_TYPE = "CONFIG"


async def check_statements(db: Database, dictionaries: Iterable[Dictionary]) -> dict[str, str]:
    """Return the error of each dictionary of *dictionaries* whose SQL PostgreSQL rejects, by code."""
    errors: dict[str, str] = {}
    async with db.connection() as connection:
        for dictionary in dictionaries:
            if not dictionary.section.enabled:
                continue
            try:
                await dictionary.provider.check_statements(connection)
            except Invalid as error:
                errors[dictionary.section.code] = error.message
    return errors


async def register_definitions(db: Database, dictionaries: Sequence[Dictionary], tenants: Collection[str] = ()) -> int:
    """Store the loadSql of *dictionaries*, and return the number of those that changed and got a new version.

    The dictionaries of known *tenants* are created, so that a dictionary without writes also has a version to change.
    """
    async with db.transaction() as tx:
        await acquire_transaction_lock(tx, "refdata.definitions")
        now, stored = db.clock.now(), await store.read_definitions(tx)
        targets = [DictionaryKey(tenant, dictionary.section.code) for tenant in tenants for dictionary in dictionaries]
        await store.create_dictionaries(tx, targets, now=now)
        hashes = {dictionary.section.code: dictionary.provider.load_hash for dictionary in dictionaries}
        differing = sorted(code for code, load_hash in hashes.items() if stored.get(code) != load_hash)
        for code in differing:
            await store.store_definition(tx, code, hashes[code], now=now)
        changed = [code for code in differing if code in stored]
        if changed:
            heads = await store.lock_codes(tx, changed)
            await version_bump.advance_heads(tx, heads, event_type=EVENT_TYPE, source=SOURCE, items=0, now=now)
            structlog.get_logger().info("dictionaries_redefined", dictCodes=changed, versions=len(heads))
    return len(changed)
