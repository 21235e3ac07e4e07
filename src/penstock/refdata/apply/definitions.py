"""R1: another way to read a dictionary is another version of it, so that pods never differ at one version."""

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
    """What is wrong with the statements of *dictionaries*, by code."""
    wrong: dict[str, str] = {}
    async with db.connection() as connection:
        for dictionary in (one for one in dictionaries if one.section.enabled):
            try:
                await dictionary.provider.check_statements(connection)
            except Invalid as error:
                wrong[dictionary.section.code] = error.message
    return wrong


async def register_definitions(db: Database, dictionaries: Sequence[Dictionary], tenants: Collection[str] = ()) -> int:
    """Compare how *dictionaries* are read with how they were; how many got a new version for every tenant.

    Those of known *tenants* have a version from now on, so that one nobody ever writes has one to change.
    """
    async with db.transaction() as tx:
        await acquire_transaction_lock(tx, "refdata.definitions")
        now, known = db.clock.now(), await store.read_definitions(tx)
        targets = [DictionaryKey(tenant, dictionary.section.code) for tenant in tenants for dictionary in dictionaries]
        await store.create_dictionaries(tx, targets, now=now)
        wanted = {dictionary.section.code: dictionary.provider.load_hash for dictionary in dictionaries}
        differing = sorted(code for code, load_hash in wanted.items() if known.get(code) != load_hash)
        for code in differing:
            await store.store_definition(tx, code, wanted[code], now=now)
        changed = [code for code in differing if code in known]
        if changed:
            standings = await store.lock_codes(tx, changed)
            await version_bump.advance_heads(tx, standings, event_type=EVENT_TYPE, source=SOURCE, items=0, now=now)
            structlog.get_logger().info("dictionaries_redefined", dictCodes=changed, versions=len(standings))
    return len(changed)
