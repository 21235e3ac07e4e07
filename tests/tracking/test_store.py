"""The tables of tracking: the guarantees of the database itself."""

import asyncpg
import pytest

from penstock.kernel.db.database import Database
from penstock.tracking import store
from penstock.tracking.contract import Stage
from penstock.tracking.model import MACHINES
from tests.support.http import problem
from tests.tracking.harness import TrackingHarness


async def test_filename_and_shard_are_unique(db: Database) -> None:
    """T10: a row cannot be inserted twice, not even with SQL that bypasses the API."""
    insert = "INSERT INTO pipeline_tracking (filename, shard) VALUES ('f', 0)"
    await db.execute(insert)
    with pytest.raises(asyncpg.UniqueViolationError, match="uq_filename_shard"):
        await db.execute(insert)


@pytest.mark.parametrize("stage", Stage)
async def test_table_allows_the_states_of_the_machine(db: Database, stage: Stage) -> None:
    """T8: the CHECK of each status column allows exactly the states of the machine."""
    found = await db.fetchval(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'c' AND conname = $1",
        f"pipeline_tracking_{stage.field}_status_check",
    )
    await db.execute(
        f"CREATE TABLE twin (status text CONSTRAINT twin CHECK ({MACHINES[stage].format_sql_check('status')}))"
    )
    twin = await db.fetchval("SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'twin'")
    assert found == twin.replace("status", f"{stage.field}_status")


async def test_counts_include_manual_sql(db: Database) -> None:
    """T7: manual SQL, including deletes and truncation, leaves the counters exact."""
    total = "SELECT coalesce(sum(rows), 0) FROM pipeline_count_change WHERE stage = 'mysql-sender' AND state = $1"
    await db.execute("INSERT INTO pipeline_tracking (filename, shard) SELECT 'f', n FROM generate_series(1, 5) AS n")
    await db.execute("UPDATE pipeline_tracking SET mysql_sender_status = 'failed' WHERE shard <= 3")
    await db.execute("DELETE FROM pipeline_tracking WHERE shard = 1")
    assert await db.fetchval(total, "failed") == 2
    assert await db.fetchval(total, "new") == 2
    await db.execute("TRUNCATE pipeline_tracking")
    assert await db.fetchval("SELECT count(*) FROM pipeline_count_change") == 0


@pytest.mark.parametrize("statement", ["claim", "settle", "reap", "heartbeat"])
async def test_plans_of_an_empty_table_use_the_indexes(database_url: str, statement: str) -> None:
    """T12: cached plans, which are made while the table is empty, must use the indexes too."""
    lease = store.declare_leases(5)[Stage.SHARD_WORKER]
    query = lease._sql[statement].replace("<limit>", "100")
    async with Database.open(database_url, prefers_indexes=True) as db, db.connection() as connection:
        await connection.execute("SET plan_cache_mode = force_generic_plan")
        await connection.execute(f"PREPARE it AS {query}")
        count = await connection.fetchval(
            "SELECT cardinality(parameter_types) FROM pg_prepared_statements WHERE name = 'it'"
        )
        plan = await connection.fetch(f"EXPLAIN EXECUTE it ({', '.join(['NULL'] * count)})")
    text = "\n".join(row[0] for row in plan)
    assert "Seq Scan on pipeline_tracking" not in text
    assert {"claim": "pipeline_tracking_to_work", "reap": "pipeline_tracking_started"}.get(
        statement, "uq_filename_shard"
    ) in text


async def test_slow_listing_is_cancelled(api: TrackingHarness, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """T6: a slow listing ends with a 503 and releases its connection; the next listing works."""
    quick = "SET LOCAL statement_timeout = '50ms'"
    with monkeypatch.context() as impatient:
        impatient.setitem(store._ANY, "limit_listing_time", quick)
        async with db.transaction() as tx:
            await tx.execute("LOCK TABLE pipeline_tracking IN ACCESS EXCLUSIVE MODE")
            problem(await api.http.get("/files"), 503, "DATABASE_BUSY")
    assert await api.get("/files") == {"files": [], "next": None}
