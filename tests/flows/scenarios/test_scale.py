"""Many flows at once, and wide ones: all end, and what is done for a step does not grow with those beside it."""

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
async def nothing(step: FlowStep) -> Mapping[str, Any]:
    return {"list": list(range(step.inputs["count"]))} if "count" in step.inputs else {"v": 1}


class StatementCount:
    """How many statements were sent."""

    statements = 0


@contextmanager
def counted() -> Iterator[StatementCount]:
    found = StatementCount()
    with pytest.MonkeyPatch.context() as patched:
        for name in ("execute", "fetch", "fetchrow", "fetchval"):
            patched.setattr(asyncpg.Connection, name, _counting(getattr(asyncpg.Connection, name), found))
        yield found


def _counting(act: Any, found: StatementCount) -> Any:
    async def acting(*args: Any, **told: Any) -> Any:
        found.statements += 1
        return await act(*args, **told)

    return acting


@asynccontextmanager
async def working(url: str, folder: Path) -> AsyncIterator[FlowEngine]:
    """An engine and one who works for it, who has done a few small runs: plans are kept that fit those."""
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
                    await made(engine, shape(3))
                await ended(engine)
            yield engine


async def made(engine: FlowEngine, steps: Mapping[str, Any]) -> None:
    await engine.create(RunRequest.model_validate({"steps": steps}), "tester")


async def ended(engine: FlowEngine) -> None:
    async def is_over() -> bool:
        return not await engine.db.fetchval(UNENDED)

    await becomes(is_over, "all runs end", WITHIN)
    assert await engine.db.fetch("SELECT run_id, reason FROM flow_run WHERE status <> 'SUCCEEDED'") == []


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_many_flows_at_once(database_url: str, tmp_path: Path, campaign: Campaign) -> None:
    """F3, F4: all of two thousand end, however they come together."""
    count = campaign.rounds = examples(200, soak=2_000)
    async with working(database_url, tmp_path) as engine:
        with counted() as found:
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(made(engine, DIAMOND))
            await ended(engine)
        await check_consistency(engine.db)
    assert found.statements / (count * len(DIAMOND)) < 8


def fan(width: int) -> dict[str, Any]:
    """Many steps between one and one."""
    sides = {f"s{n}": work("first") for n in range(width)}
    return {"first": work(), **sides, "last": work(*sides)}


def looked_at(width: int) -> dict[str, Any]:
    """The same, each with inputs that refer to the first."""
    sides = {f"s{n}": work("first", inputs={"v": "${steps.first.outputs.v}"}) for n in range(width)}
    return {"first": work(), **sides, "last": work(*sides)}


def spread(width: int) -> dict[str, Any]:
    """As many items of one map."""
    over = map_step("${steps.first.outputs.list}", "first")
    return {"first": work(inputs={"count": width}), "each": over, "last": work("each")}


def many_maps(width: int) -> dict[str, Any]:
    """Many maps with three items each."""
    return {f"m{n}": map_step([1, 2, 3]) for n in range(-(-width // 4))}


Shape = Callable[[int], dict[str, Any]]
WIDE: dict[str, Shape] = {"fan": fan, "looked at": looked_at, "map": spread, "many maps": many_maps}


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@pytest.mark.parametrize("name", WIDE)
async def test_a_wide_flow_costs_no_more_for_a_step(name: str, database_url: str, tmp_path: Path) -> None:
    """F3, F14: for four times as many steps beside it, a step takes no more statements, and reads no more rows."""
    width = examples(240, soak=10_000)
    narrow = await cost(database_url, tmp_path, WIDE[name], width // 4)
    wide = await cost(database_url, tmp_path, WIDE[name], width)
    assert wide[0] < 6
    assert wide[0] <= narrow[0] * 1.5 + 1
    assert wide[1] <= narrow[1] * 1.5 + 10
    async with Database.open(database_url, size=1) as db:
        await check_consistency(db)


async def cost(url: str, folder: Path, shape: Shape, width: int) -> tuple[float, float]:
    """Statements and rows read for a step."""
    before = await rows_read(url)
    async with working(url, folder):
        pass
    small_ones = await rows_read(url) - before
    async with working(url, folder) as engine:
        with counted() as found:
            await made(engine, shape(width))
            await ended(engine)
    read = await rows_read(url) - before - 2 * small_ones
    return found.statements / width, read / width


async def rows_read(url: str) -> int:
    """What all sessions read that are gone by now."""
    async with Database.open(url, size=1) as db:

        async def is_alone() -> bool:
            return int(await db.fetchval(SESSIONS)) == 1

        await becomes(is_alone, "the other sessions end")
        return int(await db.fetchval(READ))
