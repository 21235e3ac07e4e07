"""New versions without a command, for changes of the tables or of the SQL that dictionaries read."""

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
    """R2: give new versions to the dictionaries that read the tables in which *source* changed *items* items.

    Without changed items only the *targets* that have no version yet get one.
    """
    await store.create_dictionaries(tx, targets, now=now)
    # All tenants of a code read the same tables. Without a new version, a tenant would have other items under the old.
    heads = await store.lock_codes(tx, sorted({target.dict_code for target in targets}))
    if not items:
        heads = {target: head for target, head in heads.items() if target in targets and not head.version}
    await advance_heads(tx, heads, event_type=EVENT_TYPE, source=source, items=items, now=now)


async def advance_heads(
    tx: Connection,
    heads: Mapping[DictionaryKey, DictionaryHead],
    *,
    event_type: str,
    source: str,
    items: int,
    now: datetime,
) -> None:
    """Store and announce the next versions of the dictionaries in *heads*, which *tx* has locked."""
    if not heads:
        return
    advanced = {target: DictionaryHead(head.version + 1, head.revision) for target, head in heads.items()}
    await store.advance_heads(tx, advanced, now=now)
    commits = [
        # The keys that `loadSql` makes of the change are unknown, so pods load all items.
        CommandCommit(
            target, _make_event_id(target, head.version), head.version, event_type, source, None, items, keys=None
        )
        for target, head in advanced.items()
    ]
    await store.append_outbox(tx, commits, now=now)
    await store.notify_commit(tx)


def _make_event_id(target: DictionaryKey, version: int) -> UUID:
    return uuid5(_NAMESPACE, f"{target.tenant_id}/{target.dict_code}/{version}")
