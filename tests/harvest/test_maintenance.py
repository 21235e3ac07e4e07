"""Unattended operation of harvest: schedules, restarts, several processes, rescue of stalled work, and retention."""

import asyncio
import re
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import asyncpg
import httpx
import pytest
from ruamel.yaml import YAML

from penstock.harvest import contract
from penstock.harvest.maintenance import RESCUES
from penstock.harvest.service import Harvest
from penstock.harvest.store import SQL
from penstock.kernel.bus.postgres import PostgresBus
from penstock.kernel.db.database import Database
from penstock.kernel.tasks.outcome import Done
from penstock.settings import Settings
from tests.harvest.simulator_process import COMMAND, SimulatorProcess
from tests.harvest.stepper import FEED, HarvestStepper, feed, harvest_stepper
from tests.harvest.test_config import EXAMPLE
from tests.support.processes import Up, Work, penstock
from tests.support.settings import write_config
from tests.support.wait import becomes, until

RECORDS = 600
PASSWORD = {"NIVODA_PASSWORD": "demo"}


@pytest.fixture
def source() -> Iterator[SimulatorProcess]:
    process = SimulatorProcess(RECORDS)
    yield process
    process.stop()


def metric(api: str, name: str, feed: str) -> float:
    text = httpx.get(f"{api}/actuator/prometheus").text
    match = re.search(rf'^penstock_harvest_{name}{{feed="{feed}"}} (\S+)$', text, re.MULTILINE)
    return float(match[1]) if match else 0.0


@pytest.mark.full
async def test_example_runs_by_schedule_and_through_a_restart(
    source: SimulatorProcess, database_url: str, tmp_path: Path
) -> None:
    """H2, H4, H13: the schedule starts a run, SIGTERM does not fail it, and a waiting command gets its result."""
    config = YAML(typ="safe").load(EXAMPLE.read_text())
    config["database"] = {"url": database_url}
    feeds = config["harvest"]["feeds"]
    feeds["diamonds"]["source"]["url"] = f"{source.url}/graphql"
    feeds["diamonds"]["partitions"] |= {"count": 4, "min_records": 50}
    feeds["diamonds"] |= {"every": "PT1H", "page_size": 5, "pages_per_turn": 1}
    feeds[FEED] = {**feed(source.url), "page_size": 10, "pages_per_turn": 1}
    write_config(tmp_path, config)
    source.fail(latency_ms=300)
    with Up(tmp_path, env=PASSWORD) as up:
        port = up.port
        command = [*COMMAND, "harvest", "run", FEED, "--wait", "--url", up.api]
        waiting = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        for name in ("diamonds", FEED):
            until(lambda name=name: metric(up.api, "records_total", name) > 0, f"{name} is fetched")  # type: ignore[misc]
        assert up.stop() == 0
    assert "Traceback" not in up.log_file.read_text()
    assert waiting.stderr is not None
    assert b"still waiting" in await waiting.stderr.readline()
    connection = await asyncpg.connect(database_url)
    try:
        rows = await connection.fetch(
            "SELECT feed, state, failed_workers, requested_by FROM run_metadata ORDER BY feed"
        )
        assert [(row["feed"], row["requested_by"]) for row in rows] == [("diamonds", "schedule"), (FEED, "operator")]
        assert {(row["state"], row["failed_workers"]) for row in rows} == {("workers_running", 0)}
        source.fail()
        with Up(tmp_path, "--port", str(port), env=PASSWORD) as up:
            out, err = await waiting.communicate()
            assert (waiting.returncode, out.startswith(b"completed  ")) == (0, True), err

            async def is_completed() -> bool:
                query = "SELECT count(*) FROM run_metadata WHERE state = 'completed'"
                return bool(await connection.fetchval(query) == 2)

            await becomes(is_completed, "both runs complete")
            for name in ("diamonds", FEED):
                assert metric(up.api, "records_total", name) < RECORDS  # the rest was fetched before
                assert metric(up.api, "pages_total", name) > 0
                watermark = await connection.fetchval("SELECT watermark FROM harvest_feed WHERE feed = $1", name)
                until(lambda name=name: metric(up.api, "watermark_seconds", name) > 0, "the watermark is exported")  # type: ignore[misc]
                assert metric(up.api, "watermark_seconds", name) == pytest.approx(watermark.timestamp())
            assert metric(up.api, "interval_seconds", "diamonds") == 3600
            assert metric(up.api, "interval_seconds", FEED) == 0
            assert up.stop() == 0
        records = await connection.fetch("SELECT feed, key FROM canonical_record WHERE deleted_at IS NULL")
        keys = source.keys()
        assert sorted((row["feed"], row["key"]) for row in records) == sorted(
            (name, key) for name in ("diamonds", FEED) for key in keys
        )
        assert await connection.fetchval("SELECT count(*) FROM run_metadata") == 2
    finally:
        await connection.close()


def test_workers_without_feeds(tmp_path: Path) -> None:
    """H13: exit code 3, with a hint that names the setting."""
    done = penstock("work", "harvest", cwd=tmp_path)
    assert (done.code, done.out) == (3, "")
    assert done.err.endswith("error: no feeds are configured\nhint: configure feeds in harvest.feeds\n")


@pytest.mark.full
async def test_two_processes_share_a_run(source: SimulatorProcess, database_url: str, tmp_path: Path) -> None:
    """H4, H7: both processes take part, each partition is counted once, and no record is doubled."""
    section = {**feed(source.url), "pages_per_turn": 1, "partitions": {"count": 12, "min_records": 20}, "page_size": 10}
    config = {"database": {"url": database_url}, "harvest": {"workers": 1, "feeds": {FEED: section}}}
    write_config(tmp_path, config)
    source.fail(latency_ms=30)
    with Work(tmp_path, "harvest") as first, Work(tmp_path, "harvest") as second:
        async with Database.open(database_url) as db:
            run_id = await Harvest(db, PostgresBus(db), Settings.model_validate(config).harvest).start(FEED, "test")

            async def is_completed() -> bool:
                query = "SELECT state FROM run_metadata WHERE run_id = $1"
                return bool(await db.fetchval(query, run_id) == "completed")

            await becomes(is_completed, "the run completes")
            rows = await db.fetch("SELECT worker_id, status, records_processed FROM worker_runs")
            run = await db.fetchrow("SELECT * FROM run_metadata WHERE run_id = $1", run_id)
            keys = [row["key"] for row in await db.fetch("SELECT key FROM canonical_record")]
        assert {row["status"] for row in rows} == {"completed"}
        workers = {row["worker_id"] for row in rows}
        assert len(workers) == 2
        assert all(any(str(process.pid) in worker for worker in workers) for process in (first, second)), workers
        assert sum(row["records_processed"] for row in rows) == RECORDS
        assert run is not None
        assert (run["completed_workers"], run["failed_workers"]) == (len(rows), 0)
        assert run["consolidated"] == RECORDS
        assert sorted(keys) == sorted(source.keys())
        fetched = [metric(process.api, "records_total", FEED) for process in (first, second)]
        assert sum(fetched) == RECORDS
        assert min(fetched) > 0
        assert [first.stop(), second.stop()] == [0, 0]


@pytest.fixture
async def stones(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestStepper]:
    async with harvest_stepper(database_url, tmp_path, records=60) as stepper:
        yield stepper


async def lose(stones: HarvestStepper, topic: str) -> None:
    """Delete the messages of a topic, as if they had killed their workers."""
    async with stones.bus.subscribe(topic, worker="thief") as queue:
        while deliveries := await queue.take(10):
            await queue.settle([(delivery, Done()) for delivery in deliveries])


async def stall(stones: HarvestStepper) -> None:
    """Make the last progress of all work one hour old."""
    for table, column in (
        ("harvest_plan", "touched_at"),
        ("run_metadata", "touched_at"),
        ("partition_progress", "updated_at"),
    ):
        await stones.db.execute(f"UPDATE {table} SET {column} = {column} - interval '1 hour'")


async def lose_and_rescue(stones: HarvestStepper, topic: str) -> int:
    """Lose the messages of a topic, rescue once, and return the number of new messages."""
    await lose(stones, topic)
    await stall(stones)
    await stones.rescuer.rescue()
    return await stones.bus.count_backlog(topic)


async def test_recent_and_ended_work_is_not_rescued(stones: HarvestStepper) -> None:
    """H6: work with recent progress, and ended work, is not rescued."""
    await stones.harvest.start(FEED, "test")
    await lose(stones, contract.PLANS)
    await stones.rescuer.rescue()
    assert await stones.bus.count_backlog(contract.PLANS) == 0
    assert await lose_and_rescue(stones, contract.PLANS) == 1
    await stones.finish()
    await stall(stones)
    await stones.rescuer.rescue()
    for topic in (contract.PLANS, contract.WORK_ITEMS, contract.CONSOLIDATIONS):
        assert await stones.bus.count_backlog(topic) == 0


async def test_lost_plan(stones: HarvestStepper) -> None:
    """H6, H12: the message of a plan is sent again three times; then the plan fails with an alert."""
    run_id = await stones.harvest.start(FEED, "test")
    for _ in range(RESCUES):
        assert await lose_and_rescue(stones, contract.PLANS) == 1
    assert await lose_and_rescue(stones, contract.PLANS) == 0
    plan = await stones.db.fetchrow("SELECT state, error, rescues FROM harvest_plan WHERE run_id = $1", run_id)
    assert plan is not None
    assert (plan["state"], plan["rescues"], plan["error"].partition(":")[0]) == ("failed", RESCUES, "STALLED")
    assert await stones.db.fetchval("SELECT code FROM harvest_alert") == "PLAN_FAILED"
    second = await stones.harvest.start(FEED, "test")
    assert await lose_and_rescue(stones, contract.PLANS) == 1
    await stones.finish()
    assert (await stones.run(second))["state"] == "completed"


async def test_lost_partitions(stones: HarvestStepper) -> None:
    """H4, H6: each partition is sent again at its position, three times; then it fails."""
    run_id = await stones.plan_run()
    expected = (await stones.run(run_id))["expected_workers"]
    for _ in range(RESCUES):
        assert await lose_and_rescue(stones, contract.WORK_ITEMS) == expected
    assert await lose_and_rescue(stones, contract.WORK_ITEMS) == 0
    run = await stones.run(run_id)
    assert (run["state"], run["failed_workers"]) == ("consolidation_skipped", expected)
    errors = await stones.db.fetch("SELECT DISTINCT error_message FROM worker_runs")
    assert [row["error_message"].partition(":")[0] for row in errors] == ["STALLED"]
    await stones.harvest.retry(run_id, "test")
    assert await lose_and_rescue(stones, contract.WORK_ITEMS) == expected
    await stones.finish()
    assert (await stones.run(run_id))["state"] == "completed"
    assert (await stones.read_canonical()).keys() == stones.source.read_truth().keys()


async def test_lost_consolidation(stones: HarvestStepper) -> None:
    """H6, H12: the message is sent again three times; then the run fails, and an operator can retry it."""
    run_id = await stones.plan_run()
    await stones.drain(contract.WORK_ITEMS)
    for _ in range(RESCUES):
        assert await lose_and_rescue(stones, contract.CONSOLIDATIONS) == 1
    assert await lose_and_rescue(stones, contract.CONSOLIDATIONS) == 0
    run = await stones.run(run_id)
    assert (run["state"], run["error"].partition(":")[0], run["completed_at"]) == ("failed", "STALLED", None)
    assert await stones.db.fetchval("SELECT code FROM harvest_alert") == "CONSOLIDATION_FAILED"
    await stones.harvest.retry(run_id, "test")
    assert await lose_and_rescue(stones, contract.CONSOLIDATIONS) == 1
    await stones.finish()
    assert (await stones.run(run_id))["state"] == "completed"


async def test_late_message_has_no_effect(stones: HarvestStepper) -> None:
    """H4: if the late and the repeated message are delivered, the work is done once."""
    run_id = await stones.plan_run()
    expected = (await stones.run(run_id))["expected_workers"]
    await stones.db.execute("UPDATE partition_progress SET updated_at = updated_at - interval '1 day'")
    await stones.rescuer.rescue()
    assert await stones.bus.count_backlog(contract.WORK_ITEMS) == 2 * expected
    await stones.finish()
    run = await stones.run(run_id)
    assert (run["state"], run["completed_workers"], run["consolidated"]) == ("completed", expected, 60)


async def test_slow_work_is_rescued_later(stones: HarvestStepper) -> None:
    """H6: while the bus has messages, work counts as stalled only after a longer time."""
    await stones.plan_run()
    before = await stones.bus.count_backlog(contract.WORK_ITEMS)
    await stones.db.execute("UPDATE partition_progress SET updated_at = updated_at - interval '10 minutes'")
    await stones.rescuer.rescue()
    assert await stones.bus.count_backlog(contract.WORK_ITEMS) == before


async def prune_all(stones: HarvestStepper) -> int:
    """Prune as if all runs were old, and return the number of deleted runs."""
    later = stones.db.clock.now() + timedelta(hours=1)
    return int(await stones.db.fetchval(SQL["prune_runs"], later))


async def count_rows(stones: HarvestStepper) -> dict[str, int]:
    tables = ("run_metadata", "worker_runs", "partition_progress", "harvest_plan", "harvest_reject", "harvest_alert")
    return {table: await stones.db.fetchval(f"SELECT count(*) FROM {table}") for table in tables}


async def test_old_runs_are_deleted_except_the_last(stones: HarvestStepper) -> None:
    """H13: runs are deleted with partitions, plans, rejects and alerts; records, watermark and the last run stay."""
    first = await stones.plan_run()
    await stones.finish()
    reject = "INSERT INTO harvest_reject (run_id, feed, reason, rejected_at) VALUES ($1, $2, 'x', now())"
    await stones.db.execute(reject, first, FEED)
    cancelled = await stones.harvest.start(FEED, "test")
    await stones.harvest.cancel(cancelled, "test")
    second = await stones.plan_run(full=True)
    await stones.finish()
    await stones.db.execute(reject, second, FEED)
    alert = """
        INSERT INTO harvest_alert (feed, code, severity, message, raised_at, due_at)
        VALUES ($1, 'X', 'ERROR', 'm', now(), now())
    """
    await stones.db.execute(alert, FEED)
    before = await count_rows(stones)
    assert await stones.db.fetchval(SQL["prune_runs"], stones.db.clock.now() - timedelta(hours=1)) == 0
    assert await count_rows(stones) == before
    assert await prune_all(stones) == 1
    remaining = await count_rows(stones)
    expected = (await stones.run(second))["expected_workers"]
    assert remaining == {
        "run_metadata": 1,
        "worker_runs": expected,
        "partition_progress": expected,
        "harvest_plan": 1,
        "harvest_reject": 1,
        "harvest_alert": 0,
    }
    assert await prune_all(stones) == 0
    assert len(await stones.read_canonical()) == 60
    assert await stones.db.fetchval("SELECT watermark FROM harvest_feed") is not None


async def test_active_run_is_never_deleted(stones: HarvestStepper) -> None:
    """H13: an active run is not deleted, however old it is."""
    first = await stones.plan_run()
    assert await prune_all(stones) == 0
    await stones.finish()
    assert (await stones.run(first))["state"] == "completed"
    second = await stones.plan_run()
    assert await prune_all(stones) == 1
    await stones.finish()
    assert (await stones.run(second))["state"] == "completed"
