"""H1: the tables, the state table and the queries of the founding document, in every state of a run."""

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest

from penstock.harvest import contract
from penstock.harvest.model import PARTITION, PLAN, RUN
from penstock.harvest.simulator.faults import Faults
from penstock.kernel.db import sql
from penstock.kernel.db.database import Database
from tests.harvest.stepper import HarvestStepper, harvest_stepper

QUERIES = sql.parse((Path(__file__).parent / "document.sql").read_text(), {})
DOWN = Faults(rate_500=1.0)


@pytest.fixture
async def stones(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestStepper]:
    async with harvest_stepper(database_url, tmp_path) as stepper:
        yield stepper


async def run_query(stones: HarvestStepper, query: str, run_id: UUID) -> list[asyncpg.Record]:
    """Return the result of a query of the document for this run."""
    return await stones.db.fetch(QUERIES[query].replace("abc123", str(run_id)))


async def read_status(stones: HarvestStepper, run_id: UUID) -> tuple[str, str, int]:
    (row,) = await run_query(stones, "status", run_id)
    (recent,) = [run for run in await run_query(stones, "recent_runs", run_id) if run["run_id"] == run_id]
    assert recent["progress"] == row["progress"]
    assert recent["status"] == (row["status"] if row["status"] != "consolidating" else "in_progress")
    active = [run["run_id"] for run in await run_query(stones, "active_runs", run_id)]
    assert (run_id in active) == (row["status"] != "completed")
    assert row["duration_minutes"] >= 0
    return row["status"], row["progress"], row["failed_workers"]


async def read_counters(stones: HarvestStepper, run_id: UUID) -> tuple[int, int, bool, bool]:
    row = await stones.run(run_id)
    ended = row["completed_at"] is not None, row["watermark_after"] is not None
    return row["completed_workers"], row["failed_workers"], *ended


async def test_successful_run(stones: HarvestStepper) -> None:
    """H1, H5: the states of a successful run are those of the state table and of the queries of the document."""
    run_id = await stones.plan_run()
    row = await stones.run(run_id)
    expected = row["expected_workers"]
    assert expected > 2
    assert (row["state"], await read_counters(stones, run_id)) == ("created", (0, 0, False, False))
    assert await read_status(stones, run_id) == ("in_progress", f"0/{expected}", 0)
    assert await run_query(stones, "worker_breakdown", run_id) == []
    assert [row["next_offset"] for row in await run_query(stones, "progress", run_id)] == [0] * expected

    await stones.deliver(contract.WORK_ITEMS)
    row = await stones.run(run_id)
    assert row["state"] == "workers_running"
    (worker,) = await run_query(stones, "worker_breakdown", run_id)
    assert worker["status"] in ("running", "completed")
    assert worker["records_processed"] > 0

    seen = set()
    while (await stones.run(run_id))["state"] == "workers_running":
        completed, failed, *ended = await read_counters(stones, run_id)
        assert (failed, ended) == (0, [False, False])
        assert await read_status(stones, run_id) == ("in_progress", f"{completed}/{expected}", 0)
        workers = await run_query(stones, "worker_breakdown", run_id)
        assert sum(row["status"] == "completed" for row in workers) == completed
        assert sum(row["completed"] for row in await run_query(stones, "progress", run_id)) == completed
        seen.add(completed)
        await stones.deliver(contract.WORK_ITEMS)
    assert len(seen) > 1

    assert await read_counters(stones, run_id) == (expected, 0, False, False)
    assert await read_status(stones, run_id) == ("consolidating", f"{expected}/{expected}", 0)
    workers = await run_query(stones, "worker_breakdown", run_id)
    assert sum(row["records_processed"] for row in workers) == len(stones.source.read_truth())

    await stones.drain(contract.CONSOLIDATIONS)
    assert await read_counters(stones, run_id) == (expected, 0, True, True)
    assert await read_status(stones, run_id) == ("completed", f"{expected}/{expected}", 0)
    assert await run_query(stones, "failed_workers", run_id) == []
    assert await run_query(stones, "progress_at_failure", run_id) == []


async def test_run_with_a_failed_partition(stones: HarvestStepper) -> None:
    """H1, H5, H11: a run with failed partitions is failed, and is in progress again after a retry."""
    run_id = await stones.plan_run()
    expected = (await stones.run(run_id))["expected_workers"]
    await stones.deliver(contract.WORK_ITEMS)
    stones.source.set_faults(DOWN)
    await stones.drain(contract.WORK_ITEMS)
    row = await stones.run(run_id)
    failed = row["failed_workers"]
    assert (row["state"], failed > 0) == ("consolidation_skipped", True)
    assert await read_counters(stones, run_id) == (expected - failed, failed, False, False)
    assert await read_status(stones, run_id) == ("failed", f"{expected - failed}/{expected}", failed)
    failures = await run_query(stones, "failed_workers", run_id)
    assert len(failures) == failed
    assert all("SOURCE_ERROR" in row["error_message"] for row in failures)
    assert len(await run_query(stones, "progress_at_failure", run_id)) == failed
    assert await stones.bus.count_backlog(contract.CONSOLIDATIONS) == 0

    stones.source.set_faults()
    await stones.harvest.retry(run_id, "test")
    assert await read_status(stones, run_id) == ("in_progress", f"{expected - failed}/{expected}", 0)
    await stones.finish()
    assert await read_status(stones, run_id) == ("completed", f"{expected}/{expected}", 0)
    assert (await stones.read_canonical()).keys() == stones.source.read_truth().keys()


async def test_forced_run(stones: HarvestStepper) -> None:
    """H5: a forced run completes with its failures, with actor and reason, and the watermark does not move."""
    run_id = await stones.plan_run()
    stones.source.set_faults(DOWN)
    await stones.drain(contract.WORK_ITEMS)
    stones.source.set_faults()
    await stones.harvest.force(run_id, "ann", "confirmed by the supplier")
    row = await stones.run(run_id)
    assert (row["forced_by"], row["force_reason"]) == ("ann", "confirmed by the supplier")
    await stones.drain(contract.CONSOLIDATIONS)
    assert (await read_status(stones, run_id))[0] == "completed"
    assert (await stones.run(run_id))["watermark_after"] is None
    assert await stones.db.fetchval("SELECT watermark FROM harvest_feed") is None


async def test_cancelled_run(stones: HarvestStepper) -> None:
    """H1: a cancelled run is failed, and its unfinished partitions count as failed."""
    run_id = await stones.plan_run()
    await stones.deliver(contract.WORK_ITEMS)
    await stones.harvest.cancel(run_id, "ann", "wrong feed")
    completed, failed, *ended = await read_counters(stones, run_id)
    assert (completed + failed, ended) == ((await stones.run(run_id))["expected_workers"], [False, False])
    assert (await read_status(stones, run_id))[0] == "failed"
    await stones.drain(contract.WORK_ITEMS)
    assert (await read_counters(stones, run_id))[:2] == (completed, failed)


async def test_checks_of_the_tables_have_the_declared_states(db: Database) -> None:
    """H1: the checks of the tables allow exactly the states of the state machines."""
    for machine, table, column in (
        (RUN, "run_metadata", "state"),
        (PARTITION, "worker_runs", "status"),
        (PLAN, "harvest_plan", "state"),
    ):
        query = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = $1::regclass AND conname = $2"
        definition = await db.fetchval(query, table, f"{table}_{column}_check")
        assert definition.split("'")[1::2] == [state.value for state in machine.states]
