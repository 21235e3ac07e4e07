"""R14: retention times, tables of the document, journal and metrics."""

from datetime import timedelta
from uuid import uuid4

import pytest

from penstock.kernel.clock import ManualClock
from penstock.refdata.config import RefdataSection
from penstock.refdata.contract import UpdateState
from penstock.refdata.dictionaries.catalogue import DictionaryCatalogue
from penstock.refdata.maintenance import DriftWatch
from tests.refdata.exposition import samples_of
from tests.refdata.harness import (
    RefdataHarness,
    delete,
    on_bus,
    upsert,
)
from tests.refdata.retention import RetentionHarness, opened_retention

DAY, HOUR, SECOND = timedelta(days=1), timedelta(hours=1), timedelta(seconds=1)
DRIFTS = 'penstock_refdata_drifts_total{dict_code="COUNTRY"}'


async def test_processed_events_are_remembered_for_their_time(retention: RetentionHarness) -> None:
    """R14: a repeated event is recognised until retention.processedEvents has passed."""
    await retention.harness.send("LOOSE", upsert("a", 1))
    await retention.harness.apply()
    assert await retention.after(10 * DAY) == 0
    assert await retention.count("processed_event") == 1
    assert await retention.after(SECOND) == 1
    assert await retention.count("processed_event") == 0


async def test_a_repeated_event_is_not_applied_twice_within_its_time(retention: RetentionHarness) -> None:
    """R11, R14: after nine days and two prunings a repeated event is still recognised."""
    event_id, later = uuid4(), uuid4()
    first = on_bus(b'{"dictCode":"LOOSE","eventType":"DELTA","items":[{"key":"a","payload":1}]}', event_id=event_id)
    other = on_bus(b'{"dictCode":"LOOSE","eventType":"DELTA","items":[{"key":"a","payload":2}]}', event_id=later)
    for value, key in (first, other):
        await retention.harness.publish(value, key)
    await retention.harness.apply()
    for _ in range(2):
        await retention.after(5 * DAY)
        await retention.harness.publish(*first)
        await retention.harness.apply()
    assert (await retention.harness.items("LOOSE"), await retention.harness.version("LOOSE")) == ({"a": 2}, 2)


async def test_tombstones_are_remembered_for_their_time(retention: RetentionHarness) -> None:
    """R14: a deleted item is a tombstone until retention.tombstones; existing items are never pruned."""
    await retention.harness.send("LOOSE", upsert("a", 1), upsert("b", 2))
    await retention.harness.apply()
    retention.clock.advance(3 * DAY)
    await retention.harness.send("LOOSE", delete("a"))
    await retention.harness.apply()
    assert await retention.count("dictionary_item", "deleted") == 1
    await retention.after(5 * DAY)
    assert await retention.count("dictionary_item", "deleted") == 1
    await retention.after(SECOND)
    assert await retention.count("dictionary_item", "deleted") == 0
    assert await retention.harness.items("LOOSE") == {"b": 2}


async def test_a_tombstone_that_came_back_to_life_stays(retention: RetentionHarness) -> None:
    """R14: an item that was deleted and inserted again is an item."""
    for item in (upsert("a", 1), delete("a"), upsert("a", 3)):
        await retention.harness.send("LOOSE", item)
        await retention.harness.apply()
    await retention.after(100 * DAY)
    assert await retention.harness.items("LOOSE") == {"a": 3}


async def test_updates_are_remembered_for_their_time(retention: RetentionHarness) -> None:
    """R14: the result of an update is available until retention.updates; a pending update is never deleted."""
    done = await retention.harness.send("LOOSE", upsert("a", 1))
    failed = await retention.harness.send("CURRENCY", upsert("NOK", {"name": "Krone", "digits": 9}))
    await retention.harness.apply()
    pending = await retention.harness.send("LOOSE", upsert("a", 2))
    await retention.after(20 * DAY)
    assert (await retention.harness.update(done)).status is UpdateState.COMMITTED
    assert (await retention.harness.update(failed)).status is UpdateState.FAILED
    await retention.after(SECOND)
    assert await retention.count("update_request") == 1
    assert (await retention.harness.update(pending)).status is UpdateState.PENDING


async def test_an_update_is_remembered_as_long_as_its_event(retention: RetentionHarness) -> None:
    """R8, R14: an update that waited long and ended just now is still available, and its repetition is recognised."""
    event_id = await retention.harness.send("LOOSE", upsert("a", 1))
    retention.clock.advance(25 * DAY)
    await retention.harness.apply()
    await retention.upkeep.prune()
    await retention.harness.send("LOOSE", upsert("a", 1), eventId=str(event_id))
    await retention.harness.apply()
    assert (await retention.harness.update(event_id)).committed_version == await retention.harness.version("LOOSE") == 1


async def test_snapshot_sets_are_remembered_for_their_time(retention: RetentionHarness) -> None:
    """R13, R14: a final set is deleted with its chunks and events; an open one is not, at any age."""
    ended, opened_set = uuid4(), uuid4()
    for index in (1, 2):
        await retention.send_chunk(ended, index, 2, upsert(str(index), index))
    await retention.send_chunk(opened_set, 1, 2, upsert("x", 1))
    await retention.harness.apply()
    await retention.after(20 * DAY)
    assert [await retention.count(f"snapshot_{part}") for part in ("set", "chunk", "event")] == [2, 3, 3]
    await retention.after(SECOND)
    assert [await retention.count(f"snapshot_{part}") for part in ("set", "chunk", "event")] == [1, 1, 1]
    assert await retention.count("snapshot_set", "status = 'OPEN'") == 1
    assert await retention.harness.items("LOOSE") == {"1": 1, "2": 2}


async def test_history_is_remembered_for_its_time(retention: RetentionHarness) -> None:
    """R14, R15: versions are deleted after their announcement and retention.history; never before the announcement."""
    await retention.harness.send("LOOSE", upsert("a", 1))
    await retention.harness.apply()
    assert await retention.harness.relay() == 1
    await retention.harness.send("LOOSE", upsert("a", 2))
    await retention.harness.apply()
    await retention.after(40 * DAY)
    assert await retention.count("outbox_event") == 2
    await retention.after(SECOND)
    assert await retention.harness.db.fetchval("SELECT array_agg(version) FROM outbox_event") == [2]
    assert await retention.harness.version("LOOSE") == 2


async def test_all_of_the_old_goes_however_much_it_is(
    retention: RetentionHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R14: pruning runs in small batches until the end."""
    monkeypatch.setattr("penstock.refdata.store.PRUNE_BATCH", 3)
    for number in range(10):
        await retention.harness.send("LOOSE", upsert(f"k{number}", 1))
    await retention.harness.send("LOOSE", event_type="SNAPSHOT")
    await retention.harness.apply()
    await retention.harness.relay()
    assert await retention.after(41 * DAY) == 11 + 11 + 10 + 11  # processed, updates, tombstones, history
    assert await retention.after(SECOND) == 0


async def test_incomplete_snapshots_fail(database_url: str, clock: ManualClock) -> None:
    """R13: a snapshot without a new chunk for snapshots.expireAfter fails once, with the missing chunks."""
    async with opened_retention(database_url, clock, snapshots={"expireAfter": "PT1H"}) as retention:
        event_id = await retention.send_chunk(uuid4(), 2, 4, upsert("a", 1))
        await retention.harness.apply()
        clock.advance(HOUR)
        assert await retention.upkeep.expire_snapshots() == 0
        clock.advance(SECOND)
        assert await retention.upkeep.expire_snapshots() == 1
        update = await retention.harness.update(event_id)
        assert (update.status, update.error_code) == (UpdateState.FAILED, "SNAPSHOT_INCOMPLETE")
        assert "1, 3, 4 of 4 did not arrive within 60 minutes" in (update.error_message or "")
        assert await retention.upkeep.expire_snapshots() == 0
        assert await retention.harness.version("LOOSE") == 0


async def test_a_delta_that_changes_nothing_commits_a_version(retention: RetentionHarness) -> None:
    """R14: the same payload, an unknown key, or no items at all: each is a new version."""
    for items in ([upsert("a", 1)], [upsert("a", 1)], [delete("unknown")], []):
        await retention.harness.send("LOOSE", *items)
    await retention.harness.apply()
    assert (await retention.harness.items("LOOSE"), await retention.harness.version("LOOSE")) == ({"a": 1}, 4)
    assert await retention.harness.relay() == 4


async def test_a_direct_change_is_counted(retention: RetentionHarness) -> None:
    """R5, R26: driftCheckSql reports changes of other clients once, and not those of commands; the version stays."""
    harness = retention.harness
    for name in ("Krone", "Kroner"):
        await harness.send("CURRENCY", upsert("NOK", {"name": name, "digits": 2}))
        await harness.apply()
        assert await retention.upkeep.check_drift() == 0
    await harness.db.execute("UPDATE mdm_currency SET version = 77")
    assert [await retention.upkeep.check_drift() for _ in range(2)] == [1, 0]
    assert samples_of(harness)["penstock_refdata_drifts_total"] == [({"dict_code": "CURRENCY"}, 1)]
    assert await harness.version("CURRENCY") == 2


@pytest.fixture
def bus_kind() -> str:
    return "postgres"


async def test_a_direct_change_is_reported_and_changes_nothing(harness: RefdataHarness) -> None:
    """R5: driftCheckSql finds changes without a version; versions and reads do not change."""
    watch = DriftWatch(harness.db, harness.platform.metrics)
    known = harness.refdata.catalogue.list_all()
    await harness.send("COUNTRY", upsert("NO", {"name": "Norway"}))
    await harness.apply()
    assert await watch.check_all(known) == 0  # the first look has nothing to compare with
    await harness.send("COUNTRY", upsert("NO", {"name": "Noreg"}))
    await harness.apply()
    assert await watch.check_all(known) == 0  # a change of ours has a version
    await harness.db.execute("UPDATE mdm_country SET updated_at_epoch = updated_at_epoch + 1")
    assert await watch.check_all(known) == 1
    assert await watch.check_all(known) == 0  # reported once
    assert await harness.version("COUNTRY") == 2
    assert f"{DRIFTS} 1.0" in harness.platform.telemetry.format_metrics().decode()


async def test_a_drift_check_that_fails_stops_nothing(harness: RefdataHarness) -> None:
    """R5: a statement that fails is logged, and the next one runs."""
    watch = DriftWatch(harness.db, harness.platform.metrics)
    load, drift = "select :tenantId as k, '1'::jsonb as v", "select length(:tenantId) / 0"
    broken = {"code": "COUNTRY", "loadSql": load, "driftCheckSql": drift}
    await harness.send("COUNTRY", upsert("NO", {"name": "Norway"}))
    await harness.apply()
    assert (
        await watch.check_all(DictionaryCatalogue(RefdataSection.model_validate({"dictionaries": [broken]})).list_all())
        == 0
    )
