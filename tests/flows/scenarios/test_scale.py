"""Many flows at a time, and wide flows: all end, and the cost of a step does not depend on the other steps."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock.flows.config import FlowsSection
from penstock.flows.definition.spec import RunRequest
from penstock.flows.engine.engine import FlowEngine
from penstock.flows.step import FlowStep, Workers
from penstock.flows.worker.local import LocalWorkSource
from penstock.flows.worker.loop import StepWorker
from penstock.kernel.db.database import Database
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.telemetry.telemetry import Telemetry
from tests.flows.scenarios.crash_scenarios import check_consistency
from tests.flows.stepper import MemoryCatalogue, map_step, work
from tests.support.soak import Campaign, examples
from tests.support.wait import becomes

LEASE = timedelta(minutes=5)
WITHIN = 600.0
DIAMOND = {"a": work(), "b": work("a"), "c": work("a"), "d": work("b", "c")}
UNENDED = "SELECT count(*) FROM flow_run WHERE status IN ('PENDING', 'RUNNING')"
READ = """
    SELECT sum(seq_tup_read + idx_tup_fetch)::bigint FROM pg_stat_user_tables
    WHERE relname IN ('flow_step', 'flow_run')"""
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
workers = Workers()


@workers.worker("work")
async def noop(step: FlowStep) -> Mapping[str, Any]:
    return {"list": list(range(step.inputs["count"]))} if "count" in step.inputs else {"v": 1}


class StatementCount:
    """The number of statements that were sent."""

    statements = 0


@contextmanager
def count_statements() -> Iterator[StatementCount]:
    counter = StatementCount()
    with pytest.MonkeyPatch.context() as patched:
        for name in ("execute", "fetch", "fetchrow", "fetchval"):
            patched.setattr(asyncpg.Connection, name, _wrap(getattr(asyncpg.Connection, name), counter))
        yield counter


def _wrap(method: Any, counter: StatementCount) -> Any:
    async def call(*args: Any, **kwargs: Any) -> Any:
        counter.statements += 1
        return await method(*args, **kwargs)

    return call


@asynccontextmanager
async def running_engine(url: str, folder: Path) -> AsyncIterator[FlowEngine]:
    """Yield an engine with a worker that has completed small runs: the plans are those of small tables."""
    storage, section = FolderStorage(folder), FlowsSection(lease=LEASE)
    async with (
        Database.open(url, prefers_indexes=True) as db,
        FlowEngine.open(db, storage, MemoryCatalogue(), {}, section) as engine,
    ):
        worker = StepWorker(
            LocalWorkSource(engine, storage), workers, Telemetry(), name="w", concurrency=1_000, lease_for=LEASE
        )
        async with worker.run():
            for shape in WIDE.values():
                for _ in range(8):
                    await create_run(engine, shape(3))
                await wait_for_end(engine)
            yield engine


async def create_run(engine: FlowEngine, steps: Mapping[str, Any]) -> None:
    await engine.create(RunRequest.model_validate({"steps": steps}), "tester")


async def wait_for_end(engine: FlowEngine) -> None:
    async def is_over() -> bool:
        return not await engine.db.fetchval(UNENDED)

    await becomes(is_over, "all runs end", WITHIN)
    assert await engine.db.fetch("SELECT run_id, reason FROM flow_run WHERE status <> 'SUCCEEDED'") == []


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_many_concurrent_flows(database_url: str, tmp_path: Path, campaign: Campaign) -> None:
    """F3, F4: all of two thousand runs end."""
    count = campaign.rounds = examples(200, soak=2_000)
    async with running_engine(database_url, tmp_path) as engine:
        with count_statements() as counter:
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(create_run(engine, DIAMOND))
            await wait_for_end(engine)
        await check_consistency(engine.db)
    assert counter.statements / (count * len(DIAMOND)) < 8


def fan(width: int) -> dict[str, Any]:
    """Return parallel steps between a first and a last step."""
    sides = {f"s{n}": work("first") for n in range(width)}
    return {"first": work(), **sides, "last": work(*sides)}


def evaluated_fan(width: int) -> dict[str, Any]:
    """Return the same, with inputs that refer to the first step."""
    sides = {f"s{n}": work("first", inputs={"v": "${steps.first.outputs.v}"}) for n in range(width)}
    return {"first": work(), **sides, "last": work(*sides)}


def wide_map(width: int) -> dict[str, Any]:
    """Return a map with many items."""
    over = map_step("${steps.first.outputs.list}", "first")
    return {"first": work(inputs={"count": width}), "each": over, "last": work("each")}


def many_maps(width: int) -> dict[str, Any]:
    """Return many maps with three items each."""
    return {f"m{n}": map_step([1, 2, 3]) for n in range(-(-width // 4))}


Shape = Callable[[int], dict[str, Any]]
WIDE: dict[str, Shape] = {"fan": fan, "looked at": evaluated_fan, "map": wide_map, "many maps": many_maps}


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@pytest.mark.parametrize("name", WIDE)
async def test_width_does_not_change_the_cost_of_a_step(name: str, database_url: str, tmp_path: Path) -> None:
    """F3, F14: with four times as many steps, a step takes no more statements, and reads no more rows."""
    width = examples(240, soak=10_000)
    narrow = await measure(database_url, tmp_path, WIDE[name], width // 4)
    wide = await measure(database_url, tmp_path, WIDE[name], width)
    assert wide[0] < 6
    assert wide[0] <= narrow[0] * 1.5 + 1
    assert wide[1] <= narrow[1] * 1.5 + 10
    async with Database.open(database_url, size=1) as db:
        await check_consistency(db)


async def measure(url: str, folder: Path, shape: Shape, width: int) -> tuple[float, float]:
    """Return the statements and the read rows per step."""
    before = await read_row_count(url)
    async with running_engine(url, folder):
        pass
    small_ones = await read_row_count(url) - before
    async with running_engine(url, folder) as engine:
        with count_statements() as counter:
            await create_run(engine, shape(width))
            await wait_for_end(engine)
    read = await read_row_count(url) - before - 2 * small_ones
    return counter.statements / width, read / width


async def read_row_count(url: str) -> int:
    """Return the rows that all ended sessions have read."""
    async with Database.open(url, size=1) as db:

        async def is_alone() -> bool:
            return int(await db.fetchval(SESSIONS)) == 1

        await becomes(is_alone, "the other sessions end")
        return int(await db.fetchval(READ))
