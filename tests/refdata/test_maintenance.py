"""R14: what is remembered and for how long, the tables as the document has them, and what is noted and counted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.machine import Machine
from penstock.kernel.states import journal
from penstock.refdata.contract import Status, decode
from penstock.refdata.maintenance import Upkeep, lag_chore
from penstock.refdata.model import SNAPSHOT, UPDATE
from tests.refdata.harness import (
    RefdataHarness,
    chunk,
    create_schemas,
    delete,
    on_bus,
    opened,
    refdata_settings,
    upsert,
)

DAY, HOUR, SECOND = timedelta(days=1), timedelta(hours=1), timedelta(seconds=1)
KEPT = {"processedEvents": "P10D", "tombstones": "P5D", "updates": "P20D", "history": "P40D"}
# §9 of the founding document, and what stands behind it.
TABLES = {
    "dictionary_meta": (
        ["tenant_id text", "dict_code text", "version bigint", "last_source_revision bigint null",
         "updated_at timestamp with time zone"],
        [],
        ["tenant_id", "dict_code"],
    ),
    "dictionary_item": (
        ["tenant_id text", "dict_code text", "item_key text", "payload jsonb", "deleted boolean",
         "updated_at timestamp with time zone"],
        [],
        ["tenant_id", "dict_code", "item_key"],
    ),
    "processed_event": (
        ["tenant_id text", "event_id uuid", "source text", "processed_at timestamp with time zone"],
        [],
        ["tenant_id", "event_id"],
    ),
    "update_request": (
        ["tenant_id text", "event_id uuid", "dict_code text", "status text", "committed_version bigint null",
         "error_message text null", "created_at timestamp with time zone", "updated_at timestamp with time zone"],
        ["error_code", "body_hash", "looked_for_at"],
        ["tenant_id", "event_id"],
    ),
    "outbox_event": (
        ["id bigint", "tenant_id text", "event_id uuid", "dict_code text", "version bigint", "payload jsonb",
         "created_at timestamp with time zone", "published boolean"],
        ["event_type", "source", "items", "source_revision"],
        ["id"],
    ),
}  # fmt: skip


class RetentionHarness:
    """Refdata in which time stands still, and who keeps it in order."""

    def __init__(self, harness: RefdataHarness, clock: ManualClock) -> None:
        self.harness, self.clock = harness, clock
        platform = harness.platform
        self.upkeep = Upkeep(platform.db, platform.bus, platform.refdata, platform.metrics, "keeper")

    async def after(self, passed: timedelta) -> int:
        """Prune when *passed* went by; how many rows went."""
        self.clock.advance(passed)
        return await self.upkeep.prune()

    async def count(self, table: str, where: str = "true") -> int:
        return int(await self.harness.db.fetchval(f"SELECT count(*) FROM {table} WHERE {where}"))

    async def noted(self) -> list[journal.Entry]:
        """All the journal has, once no transaction of anybody else's on this server holds it back."""
        async with asyncio.timeout(30), self.harness.db.connection() as connection:
            while True:
                noted, _ = await journal.tail_on(connection, journal.BEGINNING, limit=1000)
                if len(noted) == await connection.fetchval("SELECT count(*) FROM journal_move"):
                    return [one.entry for one in noted]

    async def send_chunk(self, snapshot_id: UUID, index: int, total: int, *items: Any, **more: Any) -> UUID:
        body = decode(chunk("LOOSE", snapshot_id, index, total, *items, **more))
        return (await self.harness.refdata.submit("acme", body)).event_id


@pytest.fixture
async def retention(database_url: str, clock: ManualClock) -> AsyncIterator[RetentionHarness]:
    await create_schemas(database_url)
    async with _retention(database_url, clock, retention=KEPT) as retention:
        yield retention


@asynccontextmanager
async def _retention(url: str, clock: ManualClock, **refdata: Any) -> AsyncIterator[RetentionHarness]:
    async with opened(refdata_settings(url, **refdata)) as harness:
        harness.db.clock = clock
        yield RetentionHarness(harness, clock)


async def test_processed_events_are_remembered_for_their_time(retention: RetentionHarness) -> None:
    """R14: a repeated event is known until retention.processedEvents has passed, and not longer."""
    await retention.harness.send("LOOSE", upsert("a", 1))
    await retention.harness.apply()
    assert await retention.after(10 * DAY) == 0
    assert await retention.count("processed_event") == 1
    assert await retention.after(SECOND) == 1
    assert await retention.count("processed_event") == 0


async def test_a_repeated_event_is_not_applied_twice_within_its_time(retention: RetentionHarness) -> None:
    """R11, R14: the last moment counts; nine days and two prunings later it is still the same event."""
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
    """R14: a deleted item is a tombstone until retention.tombstones; what is there is never pruned."""
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
    """R14: an item that was deleted and put again is an item."""
    for item in (upsert("a", 1), delete("a"), upsert("a", 3)):
        await retention.harness.send("LOOSE", item)
        await retention.harness.apply()
    await retention.after(100 * DAY)
    assert await retention.harness.items("LOOSE") == {"a": 3}


async def test_updates_are_remembered_for_their_time(retention: RetentionHarness) -> None:
    """R14: how an update ended is told until retention.updates; one under way is never forgotten."""
    done = await retention.harness.send("LOOSE", upsert("a", 1))
    failed = await retention.harness.send("CURRENCY", upsert("NOK", {"name": "Krone", "digits": 9}))
    await retention.harness.apply()
    pending = await retention.harness.send("LOOSE", upsert("a", 2))
    await retention.after(20 * DAY)
    assert (await retention.harness.update(done)).status is Status.COMMITTED
    assert (await retention.harness.update(failed)).status is Status.FAILED
    await retention.after(SECOND)
    assert await retention.count("update_request") == 1
    assert (await retention.harness.update(pending)).status is Status.PENDING


async def test_an_update_is_remembered_as_long_as_its_event(retention: RetentionHarness) -> None:
    """R8, R14: one that waited long and ended just now is still answered, and sent again it counts once."""
    event_id = await retention.harness.send("LOOSE", upsert("a", 1))
    retention.clock.advance(25 * DAY)
    await retention.harness.apply()
    await retention.upkeep.prune()
    await retention.harness.send("LOOSE", upsert("a", 1), eventId=str(event_id))
    await retention.harness.apply()
    assert (await retention.harness.update(event_id)).committed_version == await retention.harness.version("LOOSE") == 1


async def test_snapshot_sets_are_remembered_for_their_time(retention: RetentionHarness) -> None:
    """R13, R14: an ended set goes with its chunks and events; an open one stays however old it is."""
    ended, begun = uuid4(), uuid4()
    for index in (1, 2):
        await retention.send_chunk(ended, index, 2, upsert(str(index), index))
    await retention.send_chunk(begun, 1, 2, upsert("x", 1))
    await retention.harness.apply()
    await retention.after(20 * DAY)
    assert [await retention.count(f"snapshot_{part}") for part in ("set", "chunk", "event")] == [2, 3, 3]
    await retention.after(SECOND)
    assert [await retention.count(f"snapshot_{part}") for part in ("set", "chunk", "event")] == [1, 1, 1]
    assert await retention.count("snapshot_set", "status = 'OPEN'") == 1
    assert await retention.harness.items("LOOSE") == {"1": 1, "2": 2}


async def test_history_is_remembered_for_its_time(retention: RetentionHarness) -> None:
    """R14, R15: versions go when they were announced and retention.history has passed; never unannounced."""
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
    """R14: pruning goes in small pieces, and to the end."""
    monkeypatch.setattr("penstock.refdata.store.PRUNED_AT_ONCE", 3)
    for number in range(10):
        await retention.harness.send("LOOSE", upsert(f"k{number}", 1))
    await retention.harness.send("LOOSE", event_type="SNAPSHOT")
    await retention.harness.apply()
    await retention.harness.relay()
    assert await retention.after(41 * DAY) == 11 + 11 + 10 + 11  # processed, updates, tombstones, history
    assert await retention.after(SECOND) == 0


async def test_incomplete_snapshots_end_and_are_told(database_url: str, clock: ManualClock) -> None:
    """R13: what gets no chunk for snapshots.expireAfter fails, with the chunks that did not come, once."""
    async with _retention(database_url, clock, snapshots={"expireAfter": "PT1H"}) as retention:
        event_id = await retention.send_chunk(uuid4(), 2, 4, upsert("a", 1))
        await retention.harness.apply()
        clock.advance(HOUR)
        assert await retention.upkeep.expire() == 0
        clock.advance(SECOND)
        assert await retention.upkeep.expire() == 1
        update = await retention.harness.update(event_id)
        assert (update.status, update.error_code) == (Status.FAILED, "SNAPSHOT_INCOMPLETE")
        assert "1, 3, 4 of 4 did not come within 60 minutes" in (update.error_message or "")
        assert await retention.upkeep.expire() == 0
        assert await retention.harness.version("LOOSE") == 0


async def test_a_delta_that_changes_nothing_commits_a_version(retention: RetentionHarness) -> None:
    """R14: the same payload, a key that is not there, no items at all: each is a version of its own."""
    for items in ([upsert("a", 1)], [upsert("a", 1)], [delete("nobody")], []):
        await retention.harness.send("LOOSE", *items)
    await retention.harness.apply()
    assert (await retention.harness.items("LOOSE"), await retention.harness.version("LOOSE")) == ({"a": 1}, 4)
    assert await retention.harness.relay() == 4


@pytest.mark.parametrize(("table", "machine"), [("update_request", UPDATE), ("snapshot_set", SNAPSHOT)])
async def test_the_tables_know_the_machines_states(db: Database, table: str, machine: Machine[Any]) -> None:
    """R14: the CHECK of each status column allows just the states the machine declares."""
    query = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'c' AND conname = $1"
    found = await db.fetchval(query, f"{table}_status_check")
    await db.execute(f"CREATE TABLE twin (status text CONSTRAINT twin CHECK ({machine.sql_check('status')}))")
    assert found == await db.fetchval(query, "twin")


@pytest.mark.parametrize("table", TABLES)
async def test_service_tables_are_those_of_the_document(db: Database, table: str) -> None:
    """R14: the columns of §9, in its order and of its types; whatever else there is stands behind them."""
    columns, extra, key = TABLES[table]
    rows = await db.fetch(
        "SELECT column_name, data_type, is_nullable FROM information_schema.columns "
        "WHERE table_schema = 'public' AND table_name = $1 ORDER BY ordinal_position",
        table,
    )
    told = [f"{name} {kind}{' null' if is_null == 'YES' else ''}" for name, kind, is_null in rows]
    assert told[: len(columns)] == columns
    assert [row["column_name"] for row in rows[len(columns) :]] == extra
    primary = await db.fetchval(
        "SELECT array_agg(a.attname::text ORDER BY array_position(i.indkey::int[], a.attnum::int)) FROM pg_index i "
        "JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey) "
        "WHERE i.indrelid = $1::text::regclass AND i.indisprimary",
        table,
    )
    assert primary == key


async def test_outbox_rows_are_unpublished_unless_said(db: Database) -> None:
    """R14: `published boolean default false`, `id bigserial`, as §9 writes them."""
    query = """
        INSERT INTO outbox_event
            (tenant_id, event_id, dict_code, version, payload, created_at, event_type, source, items)
        VALUES ('t', gen_random_uuid(), 'D', 1, '{}', now(), 'DELTA', 'REST', 0) RETURNING id, published"""
    row = await db.fetchrow(query)
    assert row is not None
    assert tuple(row) == (1, False)


async def test_the_journal_has_each_move_once(retention: RetentionHarness) -> None:
    """R14: commits, refusals, chunks, whole sets and expiries are moves of their machines, each noted once."""
    ended, begun, bad = uuid4(), uuid4(), uuid4()
    done = await retention.harness.send("LOOSE", upsert("a", 1))
    wrong = await retention.harness.send("CURRENCY", upsert("NOK", {"name": "Krone", "digits": 9}))
    chunks = [await retention.send_chunk(ended, index, 2, upsert(str(index), 1)) for index in (2, 1)]
    late = await retention.send_chunk(begun, 1, 2)
    twice = [await retention.send_chunk(bad, index, 2, upsert("same", 1)) for index in (1, 2)]
    await retention.harness.apply()
    retention.clock.advance(2 * HOUR)
    assert await retention.upkeep.expire() == 1
    for event_id in (done, wrong, *chunks, late, *twice):  # told again, nothing moves
        body = b'{"dictCode":"LOOSE","eventType":"DELTA","items":[]}'
        await retention.harness.publish(*on_bus(body, event_id=event_id))
    await retention.harness.apply()
    expected = [
        *(("refdata.update", f"acme/LOOSE/{event_id}", "PENDING", "COMMITTED") for event_id in (done, *chunks)),
        *(("refdata.update", f"acme/LOOSE/{event_id}", "PENDING", "FAILED") for event_id in (late, *twice)),
        ("refdata.update", f"acme/CURRENCY/{wrong}", "PENDING", "FAILED"),
        ("refdata.snapshot", f"acme/LOOSE/{ended}", "OPEN", "COMMITTED"),
        ("refdata.snapshot", f"acme/LOOSE/{begun}", "OPEN", "FAILED"),
        ("refdata.snapshot", f"acme/LOOSE/{bad}", "OPEN", "FAILED"),
    ]
    moves = [(one.machine, one.subject, one.source, one.target) for one in await retention.noted()]
    assert sorted(moves, key=str) == sorted(expected, key=str)


async def test_the_journal_tells_who_and_why(retention: RetentionHarness) -> None:
    """R14: an entry names the worker and the reason's code."""
    await retention.harness.send("CURRENCY", upsert("NOK", {"name": "Krone", "digits": 9}))
    await retention.harness.apply(name="worker-7")
    (noted,) = await retention.noted()
    assert (noted.actor, noted.reason, noted.at) == ("worker-7", "SQL_ERROR", retention.clock.now())


async def test_metrics_are_told_to_prometheus(retention: RetentionHarness) -> None:
    """R26: what was judged, what waits on the bus, in the outbox, and for how long, in a real exposition."""
    harness = retention.harness
    body = b'{"dictCode":"LOOSE","eventType":"DELTA","items":[]}'
    done = await harness.send("LOOSE", upsert("a", 1))
    await harness.send("CURRENCY", upsert("NOK", {"name": "Krone", "digits": 9}))
    await harness.publish(*on_bus(body, event_id=done))
    await retention.send_chunk(uuid4(), 1, 2)
    await harness.publish(b"rubbish")
    await harness.apply()
    await harness.send("LOOSE", upsert("a", 2))
    retention.clock.advance(HOUR)
    await retention.upkeep.show()
    for topic in (harness.topic, "somebody.elses"):
        _, show_lag, _ = lag_chore(harness.bus, topic, harness.platform.metrics)
        await show_lag()
    told = _exposed(harness)
    events = {labels["result"]: value for labels, value in told["penstock_refdata_events_total"]}
    assert events == {"committed": 1, "failed": 2, "staged": 1, "repeated": 1}
    assert told["kafka_consumer_lag"] == [({"topic": harness.topic}, 1), ({"topic": "somebody.elses"}, 0)]
    assert told["penstock_refdata_pending_oldest_seconds"] == [({}, 3600)]
    assert told["penstock_refdata_outbox_waiting"] == [({}, 1)]


async def test_a_change_past_us_is_counted_and_nothing_else(retention: RetentionHarness) -> None:
    """R5, R26: driftCheckSql tells once of rows somebody else changed, and not of our own; the version stays."""
    harness = retention.harness
    for name in ("Krone", "Kroner"):
        await harness.send("CURRENCY", upsert("NOK", {"name": name, "digits": 2}))
        await harness.apply()
        assert await retention.upkeep.look_for_drift() == 0
    await harness.db.execute("UPDATE mdm_currency SET version = 77")
    assert [await retention.upkeep.look_for_drift() for _ in range(2)] == [1, 0]
    assert _exposed(harness)["penstock_refdata_drifts_total"] == [({"dict_code": "CURRENCY"}, 1)]
    assert await harness.version("CURRENCY") == 2


async def test_metrics_are_there_before_anything_happened(retention: RetentionHarness) -> None:
    """R26: every result begins at 0, so that a rate is known from the first event on."""
    await retention.upkeep.show()
    told = _exposed(retention.harness)
    assert {labels["result"] for labels, _ in told["penstock_refdata_events_total"]} == {
        "committed", "failed", "staged", "repeated",
    }  # fmt: skip
    assert {value for _, value in told["penstock_refdata_events_total"]} == {0}
    assert told["penstock_refdata_pending_oldest_seconds"] == [({}, 0)]


def _exposed(harness: RefdataHarness) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples a scrape would read, by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(generate_latest(harness.platform.telemetry.registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


@pytest.mark.parametrize("totals", [(2, 1), (1, 2)])
async def test_a_snapshot_names_one_number_of_chunks(retention: RetentionHarness, totals: tuple[int, int]) -> None:
    """R13: what differs from the set in chunksTotal is FAILED, also when it, or the first, says it is the only one."""
    snapshot_id = uuid4()
    await retention.send_chunk(snapshot_id, 1, totals[0], upsert("a", 1))
    other = await retention.send_chunk(snapshot_id, 1, totals[1], upsert("b", 1))
    await retention.harness.apply()
    assert (await retention.harness.update(other)).error_code == "CHUNKS_TOTAL_DIFFERS"


@pytest.mark.parametrize("numbers", [{}, {"chunkIndex": 1, "chunksTotal": 1}])
async def test_a_snapshot_in_one_piece_counts_once(retention: RetentionHarness, numbers: dict[str, int]) -> None:
    """R13: sent again under its snapshotId it undoes nothing that came since; with another content it is refused."""
    harness, told = retention.harness, dict[str, Any]({"event_type": "SNAPSHOT", "snapshotId": str(uuid4()), **numbers})
    await harness.send("LOOSE", upsert("a", 1), **told)
    await harness.send("LOOSE", upsert("a", 2))
    again = await harness.send("LOOSE", upsert("a", 1), **told)
    other = await harness.send("LOOSE", upsert("a", 3), **told)
    await harness.apply()
    assert (await harness.update(again)).committed_version == 1
    assert (await harness.update(other)).error_code == "CHUNK_CONFLICT"
    assert (await harness.items("LOOSE"), await harness.version("LOOSE")) == ({"a": 2}, 2)
