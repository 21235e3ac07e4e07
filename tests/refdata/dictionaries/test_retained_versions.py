"""R30: the check before a snapshot, retained versions, and rollbacks."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from penstock.kernel.errors import NotFound
from penstock.refdata.contract import UpdateState, decode_command
from penstock.refdata.maintenance import RefdataMaintenance
from penstock.refdata.model import DictionaryKey
from penstock.settings import Settings
from tests.refdata.harness import (
    DOCUMENT,
    OTHER,
    RefdataHarness,
    chunk,
    command,
    create_schemas,
    dictionaries,
    opened,
    refdata_settings,
    upsert,
)

LOOSE, COUNTRY = DictionaryKey("acme", "LOOSE"), DictionaryKey("acme", "COUNTRY")


@pytest.fixture
async def kept_settings(database_url: str) -> Settings:
    """Return settings with which every dictionary retains two versions and may not lose more than half of its items."""
    await create_schemas(database_url)
    known = [*dictionaries(DOCUMENT), *dictionaries(OTHER)]
    return refdata_settings(
        database_url, dictionaries=[{**section, "retainVersions": 2, "maxDropPercent": 50} for section in known]
    )


async def snapshot(harness: RefdataHarness, code: str, *keys: str, value: int = 1, **more: Any) -> UpdateState:
    """Send a SNAPSHOT with *keys*, and return the state of its update."""
    items = [upsert(key, {"name": f"{key}{value}"}) for key in keys]
    update = await harness.refdata.submit("acme", decode_command(command(code, *items, event_type="SNAPSHOT", **more)))
    await harness.apply()
    return (await harness.update(update.event_id)).status


@pytest.mark.parametrize("code", ["LOOSE", "COUNTRY"])
async def test_a_snapshot_that_drops_too_much_fails(kept_settings: Settings, code: str) -> None:
    """R30: an incomplete list is rejected with the reason and nothing of it is visible; allowRowDrop accepts it."""
    async with opened(kept_settings) as harness:
        assert await snapshot(harness, code, "a", "b", "c", "d") is UpdateState.COMMITTED
        assert await snapshot(harness, code, "a", "b") is UpdateState.COMMITTED  # just half of them
        await snapshot(harness, code, "a", "b", "c", "d")
        event_id = await harness.send(code, upsert("a", {"name": "a"}), event_type="SNAPSHOT")
        await harness.apply()
        refused = await harness.update(event_id)
        assert (refused.status, refused.error_code) == (UpdateState.FAILED, "ROW_DROP")
        assert sorted(await harness.items(code)) == ["a", "b", "c", "d"]
        assert await snapshot(harness, code, "a", allowRowDrop=True) is UpdateState.COMMITTED
        assert sorted(await harness.items(code)) == ["a"]


async def test_chunks_that_drop_too_much_fail_together(kept_settings: Settings) -> None:
    """R30, R13: a snapshot in chunks is checked when it is complete, and fails as a whole."""
    async with opened(kept_settings) as harness:
        await snapshot(harness, "LOOSE", *"abcdef")
        whole, ids = uuid4(), []
        for index, key in enumerate("ab", 1):
            body = chunk("LOOSE", whole, index, 2, upsert(key, {"name": key}))
            ids.append((await harness.refdata.submit("acme", decode_command(body))).event_id)
        await harness.apply()
        assert {(await harness.update(event_id)).error_code for event_id in ids} == {"ROW_DROP"}
        assert sorted(await harness.items("LOOSE")) == list("abcdef")


@pytest.mark.parametrize("code", ["LOOSE", "COUNTRY"])
async def test_what_was_before_a_snapshot_can_be_gone_back_to(kept_settings: Settings, code: str) -> None:
    """R30: a rollback makes a new version with the content of an old one."""
    async with opened(kept_settings) as harness:
        target = DictionaryKey("acme", code)
        await snapshot(harness, code, "a", "b")
        await harness.send(code, upsert("c", {"name": "c1"}))
        await harness.apply()
        before = {key: value["name"] for key, value in (await harness.items(code)).items()}
        await snapshot(harness, code, "x", "y", "z")
        assert [version.version for version in await harness.refdata.retention.list_retained(target)] == [2]
        update = await harness.refdata.roll_back(target, 2, timedelta(milliseconds=50))
        await harness.apply()
        ended = await harness.update(update.event_id)
        assert (ended.status, ended.committed_version) == (UpdateState.COMMITTED, 4)
        assert {key: value["name"] for key, value in (await harness.items(code)).items()} == before


async def test_only_so_many_versions_are_kept(kept_settings: Settings) -> None:
    """R30: the oldest versions are deleted with all their items; the pinned one is retained."""
    async with opened(kept_settings) as harness:
        for number in range(6):
            await snapshot(harness, "LOOSE", "a", "b", value=number)
        await harness.refdata.retention.pin(LOOSE, 1)
        upkeep = RefdataMaintenance(harness.db, harness.bus, harness.refdata, harness.platform.metrics, "test")
        await upkeep.prune()
        assert [version.version for version in await harness.refdata.retention.list_retained(LOOSE)] == [5, 4, 1]
        left = await harness.db.fetch("SELECT DISTINCT version FROM retained_item ORDER BY version")
        assert [row[0] for row in left] == [1, 4, 5]


async def test_tenants_keep_their_own(kept_settings: Settings) -> None:
    """R25, R30: retained versions and pins of a tenant do not affect other tenants."""
    async with opened(kept_settings) as harness:
        await snapshot(harness, "LOOSE", "a")
        await harness.refdata.retention.pin(LOOSE, 1)
        assert await harness.refdata.retention.list_retained(DictionaryKey("globex", "LOOSE")) == []
        with pytest.raises(NotFound, match="not retained"):
            await harness.refdata.retention.pin(DictionaryKey("globex", "LOOSE"), 1)
        with pytest.raises(NotFound, match="no pinned version"):
            await harness.refdata.retention.unpin(DictionaryKey("globex", "LOOSE"))


async def test_what_is_not_kept_cannot_be_had(kept_settings: Settings) -> None:
    """R30: an unknown version can be neither pinned nor restored; the last one can be retained by hand, repeatedly."""
    async with opened(kept_settings) as harness:
        await snapshot(harness, "LOOSE", "a")
        for call in (harness.refdata.retention.pin(LOOSE, 9), harness.refdata.roll_back(LOOSE, 9, timedelta(0))):
            with pytest.raises(NotFound, match="version 9 of LOOSE is not retained"):
                await call
        assert [await harness.refdata.retention.retain(LOOSE) for _ in range(2)] == [1, 1]
        assert [
            (version.version, version.items) for version in await harness.refdata.retention.list_retained(LOOSE)
        ] == [(1, 1)]
