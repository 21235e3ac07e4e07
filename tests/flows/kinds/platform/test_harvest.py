"""harvest.run: a feed is harvested once, whichever worker dies on the way."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from penstock.app.bridges import HarvestAdapter
from penstock.flows.kinds.platform.harvest import harvest_worker
from penstock.flows.step import FlowStep
from penstock.harvest.contract import PLANS
from tests.flows.kinds.platform.running_steps import is_stopped, under_way
from tests.flows.memory_step_io import MemoryStepIO, make_step, run_failing_step, run_step
from tests.harvest.scripted_source import ScriptedSource, scripted_harvest, stones
from tests.harvest.stepper import FEED, HarvestStepper
from tests.support.wait import becomes


@pytest.fixture
async def one(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestStepper]:
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(120))) as stepper:
        yield stepper


def harvesting(attempt: int = 1, step_io: MemoryStepIO | None = None, **more: Any) -> FlowStep:
    return make_step("harvest.run", {"feed": FEED, **more}, attempt=attempt, step_io=step_io)


async def plans(one: HarvestStepper) -> list[UUID]:
    return [row["run_id"] for row in await one.db.fetch("SELECT run_id FROM harvest_plan ORDER BY requested_at")]


async def planned(one: HarvestStepper, count: int = 1) -> UUID:
    """The last of so many runs that are asked for."""

    async def is_so() -> bool:
        return len(await plans(one)) >= count

    await becomes(is_so, f"{count} runs are planned")
    return (await plans(one))[-1]


async def test_a_feed_is_harvested_once_whoever_dies(one: HarvestStepper) -> None:
    """F14: a second attempt takes the run of the first over, under way or ended; the outputs tell what came of it."""
    worker = harvest_worker(HarvestAdapter(one.harvest))
    async with under_way(worker, harvesting(full=True)):
        run_id = await planned(one)
    async with under_way(worker, harvesting(2, full=True)) as task:
        await one.finish()
        outputs = await task
    assert await run_step(worker, harvesting(3, full=True)) == outputs
    assert await plans(one) == [run_id]
    run = await one.run(run_id)
    assert outputs == {
        "runId": str(run_id),
        "state": "completed",
        "records": 120,
        "consolidated": 120,
        "rejected": 0,
        "watermarkAfter": run["watermark_after"].isoformat(),
    }
    assert (run["requested_by"], run["run_type"]) == ("flows:run-1/step-1", "full")


async def test_another_run_of_the_feed_comes_first(one: HarvestStepper) -> None:
    """F14: while somebody else's run is under way the step waits; then it has its own."""
    other, step_io = await one.harvest.start(FEED, "somebody"), MemoryStepIO()
    async with under_way(harvest_worker(HarvestAdapter(one.harvest)), harvesting(step_io=step_io)) as task:

        async def waits() -> bool:
            return bool(step_io.logs)

        await becomes(waits, "the step says what it waits for")
        assert str(other) in step_io.logs[0]
        await one.finish()
        mine = await planned(one, 2)
        await one.finish()
        assert (await task)["runId"] == str(mine) != str(other)


async def test_a_run_that_failed_fails_its_step_and_the_next_attempt_has_another(one: HarvestStepper) -> None:
    """F10, F14: HARVEST_FAILED tells why; whoever tries the step again gets a run of its own."""
    worker = harvest_worker(HarvestAdapter(one.harvest))
    first = asyncio.create_task(run_failing_step(worker, harvesting()))
    run_id = await planned(one)
    await one.harvest.cancel(run_id, "test", "no more")
    error = await first
    assert (error.error.code, error.retryable) == ("HARVEST_FAILED", True)
    assert error.error.details["runId"] == str(run_id)
    assert "no more" in error.error.message
    async with under_way(worker, harvesting(2)) as task:
        again = await planned(one, 2)
        await one.finish()
        assert (await task)["runId"] == str(again) != str(run_id)


async def test_a_step_that_cannot_harvest_says_so(one: HarvestStepper) -> None:
    """F14: a feed nobody knows is final; a step that is told to stop stops, and its run goes on."""
    worker = harvest_worker(HarvestAdapter(one.harvest))
    error = await run_failing_step(worker, make_step("harvest.run", {"feed": "pebbles"}))
    assert (error.error.code, error.retryable) == ("FEED_NOT_FOUND", False)
    await is_stopped(worker, harvesting())
    await one.drain(PLANS)
    assert [row["state"] for row in await one.db.fetch("SELECT state FROM run_metadata")] == ["created"]


async def test_a_run_can_be_started_under_an_id(one: HarvestStepper) -> None:
    """H2, F14: one id is one run, whoever asks for it and however often."""
    wanted = UUID(int=7)
    asked = [one.harvest.start(FEED, "test", run_id=wanted) for _ in range(5)]
    assert set(await asyncio.gather(*asked)) == {wanted}
    assert await plans(one) == [wanted]
