"""Versions that no command makes: whoever changes what dictionaries read gives them one, in his own transaction."""

from collections.abc import Collection, Mapping
from datetime import datetime
from uuid import UUID, uuid5

from penstock.kernel.db.database import Connection
from penstock.refdata import store
from penstock.refdata.model import CommandCommit, DictionaryHead, DictionaryKey

EVENT_TYPE = "RENEWAL"
_NAMESPACE = UUID("9a1f0f0e-3d0b-5d55-8a53-0d6f7b1c2e44")


async def bump_versions(
    tx: Connection, targets: Collection[DictionaryKey], *, source: str, items: int, now: datetime
) -> None:
    """R2: *source* has changed so many *items* in the tables that *targets* only read; of these, who has no version yet
    gets one all the same."""
    await store.create_dictionaries(tx, targets, now=now)
    # All tenants of a code read the same tables: whoever kept its version would have other content under it.
    standings = await store.lock_codes(tx, sorted({target.dict_code for target in targets}))
    if not items:
        standings = {target: at for target, at in standings.items() if target in targets and not at.version}
    await advance_heads(tx, standings, event_type=EVENT_TYPE, source=source, items=items, now=now)


async def advance_heads(
    tx: Connection,
    standings: Mapping[DictionaryKey, DictionaryHead],
    *,
    event_type: str,
    source: str,
    items: int,
    now: datetime,
) -> None:
    """Let dictionaries that *tx* has locked stand at their next versions, and have that announced."""
    if not standings:
        return
    advanced = {target: DictionaryHead(at.version + 1, at.revision) for target, at in standings.items()}
    await store.advance_heads(tx, advanced, now=now)
    commits = [
        # Nobody knows which keys `loadSql` makes of what has changed: so pods read it all.
        CommandCommit(target, _event_id(target, at.version), at.version, event_type, source, None, items, keys=None)
        for target, at in advanced.items()
    ]
    await store.append_outbox(tx, commits, now=now)
    await store.notify_commit(tx)


def _event_id(target: DictionaryKey, version: int) -> UUID:
    return uuid5(_NAMESPACE, f"{target.tenant_id}/{target.dict_code}/{version}")
