"""Loads that are slow, deletions of missing keys, and pins during retention."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.kernel.db import page
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import NotFound, Transient
from penstock.refdata import store
from penstock.refdata.dictionaries import retained_versions
from penstock.refdata.dictionaries.reader import DictionarySnapshot, Rows
from penstock.refdata.model import DictionaryKey
from penstock.refdata.pod.load import loader
from penstock.refdata.pod.load.loader import DictionaryLoader
from penstock.refdata.store import to_stamp
from tests.refdata.harness import delete
from tests.refdata.pod.harness import PodHarness

LOOSE = DictionaryKey("acme", "LOOSE")


def loaded(pod: PodHarness, code: str, kind: str) -> float:
    """Return the number of loads of a kind."""
    labels = {"dict_code": code, "kind": kind}
    return pod.pod._telemetry.registry.get_sample_value("cache_reload_duration_seconds_count", labels) or 0.0


async def test_slow_key_lookups_cause_full_loads(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R20, R23: after two timeouts of key lookups a dictionary is loaded in full; one has no lasting effect."""
    await pod.put_and_load("LOOSE", {"a": 1})
    tries = 0

    async def never(_snapshot: DictionarySnapshot, _keys: Sequence[str]) -> Rows | None:
        nonlocal tries
        tries += 1
        await asyncio.Event().wait()
        return None

    only = DictionarySnapshot.read_keys
    monkeypatch.setattr(DictionarySnapshot, "read_keys", never)
    with monkeypatch.context() as impatient:
        impatient.setattr(loader, "_CHANGES_TIMEOUT", 0.05)
        await pod.put_and_load("LOOSE", {"a": "once"})
    monkeypatch.setattr(DictionarySnapshot, "read_keys", only)
    before = loaded(pod, "LOOSE", "delta")
    await pod.put_and_load("LOOSE", {"a": "quick again"})
    assert (tries, loaded(pod, "LOOSE", "delta")) == (1, before + 1)
    monkeypatch.setattr(loader, "_CHANGES_TIMEOUT", 0.05)
    monkeypatch.setattr(DictionarySnapshot, "read_keys", never)
    for number in range(4):
        await pod.put_and_load("LOOSE", {"a": number})
        assert (await pod.get("LOOSE/items/a")).json == number
    assert tries == 1 + 2  # after two timeouts in a row, no key lookups


async def test_the_deletion_of_a_missing_key_is_a_delta(pod: PodHarness) -> None:
    """R20, R29: in the table of Penstock keys are spelled exactly, so no full load is needed."""
    await pod.put_and_load("LOOSE", {"a": 1})
    before = loaded(pod, "LOOSE", "full")
    for _ in range(3):
        await pod.harness.send("LOOSE", delete("never"))
        await pod.harness.apply()
        await pod.load("LOOSE", await pod.harness.version("LOOSE"))
    assert (loaded(pod, "LOOSE", "full"), loaded(pod, "LOOSE", "delta") >= 3) == (before, True)
    assert (await pod.get("LOOSE/all")).json["items"] == [{"key": "a", "value": 1}]


async def test_a_load_without_progress_marks_old_data(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R23: a dictionary whose load does not end is marked as old while the primary is reachable."""
    version = await pod.put_and_load("LOOSE", {"a": 1})
    assert pod.pod._loader is not None
    pod.pod._loader._stale_after = 0.1
    may_load = asyncio.Event()
    load = DictionaryLoader.__call__

    async def wait_until_blocked(self: DictionaryLoader, state: Any, *, full: bool) -> Any:
        await may_load.wait()
        return await load(self, state, full=full)

    monkeypatch.setattr(DictionaryLoader, "__call__", wait_until_blocked)
    await pod.put("LOOSE", {"a": 2})
    while "X-Data-Age" not in (found := await pod.get("LOOSE/items/a")).headers:
        assert (found.json, found.version) == (1, version)
        await pod.pod._loader.reconcile()
    may_load.set()
    await pod.load("LOOSE", version + 1)
    found = await pod.get("LOOSE/items/a")
    assert (found.json, "X-Data-Age" in found.headers) == (2, False)


async def test_a_version_being_deleted_cannot_be_pinned(pod: PodHarness) -> None:
    """R30: a version that is being deleted cannot be pinned, and a pinned version is not deleted."""
    await pod.put("LOOSE", {"a": 1})
    await pod.harness.refdata.retention.retain(LOOSE)
    await pod.put("LOOSE", {"a": 2})
    await pod.harness.refdata.retention.retain(LOOSE)
    db, catalogue = pod.harness.db, pod.harness.refdata.catalogue
    async with db.transaction() as tx:
        await retained_versions.prune_retained(tx, catalogue.list_all())  # deletes version 1
        pinning = asyncio.create_task(pod.harness.refdata.retention.pin(LOOSE, 1))
        await asyncio.wait([pinning], timeout=0.3)
        assert not pinning.done()
    with pytest.raises(NotFound):
        await pinning
    await pod.harness.refdata.retention.pin(LOOSE, 2)
    await pod.harness.refdata.retention.retain(LOOSE)
    async with db.transaction() as tx:
        await retained_versions.prune_retained(tx, catalogue.list_all())
    assert [row.version for row in await pod.harness.refdata.retention.list_retained(LOOSE)] == [2]
    assert await db.fetchval("SELECT count(*) FROM retained_item WHERE version = 2") == 1


async def test_readers_of_a_pinned_dictionary_do_not_load_the_primary(
    pod: PodHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R21, R30: all readers of a version above the pin share the queries, and no items are read."""
    await pod.harness.refdata.retention.pin(LOOSE, await pod.put_and_load("LOOSE", {"a": 1}))
    version = await pod.put("LOOSE", {"a": 2})
    ask, asked, read = store.read_visible_version, 0, DictionarySnapshot.read_existing

    async def counted(connection: Connection, target: DictionaryKey) -> tuple[int, int | None]:
        nonlocal asked
        asked += 1
        return await ask(connection, target)

    async def unread(_snapshot: DictionarySnapshot, _keys: Sequence[str]) -> Rows:
        raise AssertionError(f"{read.__name__} was called")

    monkeypatch.setattr(store, "read_visible_version", counted)
    monkeypatch.setattr(DictionarySnapshot, "read_existing", unread)
    answers = await asyncio.gather(*(pod.get("LOOSE/items/a", min_version=version) for _ in range(200)))
    assert {(answer.status, answer.json["code"]) for answer in answers} == {(409, "VERSION_PINNED")}
    assert asked < 100


async def test_a_cursor_of_a_later_version_waits_for_the_load(pod: PodHarness) -> None:
    """R17: a cursor of a version that this pod has not loaded yet is served after the load."""
    await pod.put_and_load("LOOSE", {"a": 1, "b": 2})
    version = await pod.put("LOOSE", {"c": 3})
    query = "SELECT updated_at FROM dictionary_meta WHERE tenant_id = $1 AND dict_code = $2"
    at = await pod.harness.db.fetchval(query, *LOOSE)
    cursor = page.encode_cursor([version, to_stamp(at), False, b"\0a".hex()])
    found = await pod.get(f"LOOSE/all?cursor={cursor}")
    assert (found.status, [item["key"] for item in found.json["items"]]) == (200, ["b", "c"])


async def test_one_audit_at_a_time(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R32: a second audit is refused while another one is running."""
    await pod.put_and_load("LOOSE", {"a": 1})
    request_handler = pod.pod.request_handler._services
    assert request_handler is not None
    async with request_handler[2]._lock:
        with pytest.raises(Transient, match="already"):
            await request_handler[2].audit(LOOSE)
        assert (await pod.get("LOOSE/audit")).json["code"] == "AUDIT_BUSY"
    assert (await pod.get("LOOSE/audit")).json["matches"]
