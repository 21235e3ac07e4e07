"""The tables of refdata as in the founding document, and their journal."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from penstock.kernel.db.database import Database
from penstock.kernel.machine import StateMachine
from penstock.refdata.model import SNAPSHOT, UPDATE
from tests.refdata.harness import on_bus, upsert
from tests.refdata.retention import RetentionHarness

DAY, HOUR, SECOND = timedelta(days=1), timedelta(hours=1), timedelta(seconds=1)
# §9 of the founding document, and the additional columns.
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
        ["error_code", "body_hash", "probed_at"],
        ["tenant_id", "event_id"],
    ),
    "outbox_event": (
        ["id bigint", "tenant_id text", "event_id uuid", "dict_code text", "version bigint", "payload jsonb",
         "created_at timestamp with time zone", "published boolean"],
        ["event_type", "source", "items", "source_revision"],
        ["id"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("table", "machine"), [("update_request", UPDATE), ("snapshot_set", SNAPSHOT)])
async def test_the_tables_know_the_machines_states(db: Database, table: str, machine: StateMachine[Any]) -> None:
    """R14: the CHECK of each status column allows exactly the states of the machine."""
    query = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'c' AND conname = $1"
    found = await db.fetchval(query, f"{table}_status_check")
    await db.execute(f"CREATE TABLE twin (status text CONSTRAINT twin CHECK ({machine.format_sql_check('status')}))")
    assert found == await db.fetchval(query, "twin")


@pytest.mark.parametrize("table", TABLES)
async def test_service_tables_are_those_of_the_document(db: Database, table: str) -> None:
    """R14: the columns of §9 in its order and with its types; additional columns follow."""
    columns, extra, key = TABLES[table]
    rows = await db.fetch(
        "SELECT column_name, data_type, is_nullable FROM information_schema.columns "
        "WHERE table_schema = 'public' AND table_name = $1 ORDER BY ordinal_position",
        table,
    )
    found_columns = [f"{name} {kind}{' null' if is_null == 'YES' else ''}" for name, kind, is_null in rows]
    assert found_columns[: len(columns)] == columns
    assert [row["column_name"] for row in rows[len(columns) :]] == extra
    primary = await db.fetchval(
        "SELECT array_agg(a.attname::text ORDER BY array_position(i.indkey::int[], a.attnum::int)) FROM pg_index i "
        "JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey) "
        "WHERE i.indrelid = $1::text::regclass AND i.indisprimary",
        table,
    )
    assert primary == key


async def test_outbox_rows_are_unpublished_by_default(db: Database) -> None:
    """R14: `published boolean default false`, `id bigserial`, as in §9."""
    query = """
        INSERT INTO outbox_event
            (tenant_id, event_id, dict_code, version, payload, created_at, event_type, source, items)
        VALUES ('t', gen_random_uuid(), 'D', 1, '{}', now(), 'DELTA', 'REST', 0) RETURNING id, published"""
    row = await db.fetchrow(query)
    assert row is not None
    assert tuple(row) == (1, False)


async def test_the_journal_has_each_move_once(retention: RetentionHarness) -> None:
    """R14: commits, rejections, chunks, sets and expiries are moves of their machines, each in the journal once."""
    ended, opened_set, bad = uuid4(), uuid4(), uuid4()
    done = await retention.harness.send("LOOSE", upsert("a", 1))
    wrong = await retention.harness.send("CURRENCY", upsert("NOK", {"name": "Krone", "digits": 9}))
    chunks = [await retention.send_chunk(ended, index, 2, upsert(str(index), 1)) for index in (2, 1)]
    late = await retention.send_chunk(opened_set, 1, 2)
    twice = [await retention.send_chunk(bad, index, 2, upsert("same", 1)) for index in (1, 2)]
    await retention.harness.apply()
    retention.clock.advance(2 * HOUR)
    assert await retention.upkeep.expire_snapshots() == 1
    for event_id in (done, wrong, *chunks, late, *twice):  # sent again, nothing moves
        body = b'{"dictCode":"LOOSE","eventType":"DELTA","items":[]}'
        await retention.harness.publish(*on_bus(body, event_id=event_id))
    await retention.harness.apply()
    expected = [
        *(("refdata.update", f"acme/LOOSE/{event_id}", "PENDING", "COMMITTED") for event_id in (done, *chunks)),
        *(("refdata.update", f"acme/LOOSE/{event_id}", "PENDING", "FAILED") for event_id in (late, *twice)),
        ("refdata.update", f"acme/CURRENCY/{wrong}", "PENDING", "FAILED"),
        ("refdata.snapshot", f"acme/LOOSE/{ended}", "OPEN", "COMMITTED"),
        ("refdata.snapshot", f"acme/LOOSE/{opened_set}", "OPEN", "FAILED"),
        ("refdata.snapshot", f"acme/LOOSE/{bad}", "OPEN", "FAILED"),
    ]
    moves = [(entry.machine, entry.subject, entry.source, entry.target) for entry in await retention.noted()]
    assert sorted(moves, key=str) == sorted(expected, key=str)


async def test_the_journal_tells_who_and_why(retention: RetentionHarness) -> None:
    """R14: an entry names the worker and the code of the reason."""
    await retention.harness.send("CURRENCY", upsert("NOK", {"name": "Krone", "digits": 9}))
    await retention.harness.apply(name="worker-7")
    (noted,) = await retention.noted()
    assert (noted.actor, noted.reason, noted.at) == ("worker-7", "SQL_ERROR", retention.clock.now())
