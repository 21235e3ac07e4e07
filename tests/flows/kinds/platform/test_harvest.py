"""harvest.run: a feed is harvested once, also if workers die."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from penstock.app.bridges import HarvestAdapter
from penstock.flows.kinds.platform.harvest import make_harvest_handler
from penstock.flows.step import FlowStep
from penstock.harvest.contract import PLANS
from penstock.kernel.text import format_time
from tests.flows.kinds.platform.running_steps import assert_stops, running_step
from tests.flows.memory_step_io import MemoryStepIO, make_step, run_failing_step, run_step
from tests.harvest.scripted_source import ScriptedSource, scripted_harvest, stones
from tests.harvest.stepper import FEED, HarvestStepper
from tests.support.wait import becomes


@pytest.fixture
async def stepper(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestStepper]:
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(120))) as opened:
        yield opened


def make_harvest_step(attempt: int = 1, step_io: MemoryStepIO | None = None, **more: Any) -> FlowStep:
    return make_step("harvest.run", {"feed": FEED, **more}, attempt=attempt, step_io=step_io)


async def list_plans(stepper: HarvestStepper) -> list[UUID]:
    return [row["run_id"] for row in await stepper.db.fetch("SELECT run_id FROM harvest_plan ORDER BY requested_at")]


async def wait_for_plan(stepper: HarvestStepper, count: int = 1) -> UUID:
    """Wait for *count* planned runs, and return the last."""

    async def is_so() -> bool:
        return len(await list_plans(stepper)) >= count

    await becomes(is_so, f"{count} runs are planned")
    return (await list_plans(stepper))[-1]


async def test_feed_is_harvested_once(stepper: HarvestStepper) -> None:
    """F14: a second attempt continues with the run of the first, active or ended; its result is the outputs."""
    worker = make_harvest_handler(HarvestAdapter(stepper.harvest))
    async with running_step(worker, make_harvest_step(full=True)):
        run_id = await wait_for_plan(stepper)
    async with running_step(worker, make_harvest_step(2, full=True)) as task:
        await stepper.finish()
        outputs = await task
    assert await run_step(worker, make_harvest_step(3, full=True)) == outputs
    assert await list_plans(stepper) == [run_id]
    run = await stepper.run(run_id)
    assert outputs == {
        "runId": str(run_id),
        "state": "completed",
        "records": 120,
        "consolidated": 120,
        "rejected": 0,
        "watermarkAfter": format_time(run["watermark_after"]),
    }
    assert (run["requested_by"], run["run_type"]) == ("flows:run-1/step-1", "full")


async def test_step_waits_for_another_run(stepper: HarvestStepper) -> None:
    """F14: while another run of the feed is active the step waits; then it starts its own."""
    other, step_io = await stepper.harvest.start(FEED, "other"), MemoryStepIO()
    async with running_step(
        make_harvest_handler(HarvestAdapter(stepper.harvest)), make_harvest_step(step_io=step_io)
    ) as task:

        async def waits() -> bool:
            return bool(step_io.logs)

        await becomes(waits, "the step says what it waits for")
        assert str(other) in step_io.logs[0]
        await stepper.finish()
        mine = await wait_for_plan(stepper, 2)
        await stepper.finish()
        assert (await task)["runId"] == str(mine) != str(other)


async def test_failed_run_fails_its_step(stepper: HarvestStepper) -> None:
    """F10, F14: HARVEST_FAILED has the error; the next attempt starts another run."""
    worker = make_harvest_handler(HarvestAdapter(stepper.harvest))
    first = asyncio.create_task(run_failing_step(worker, make_harvest_step()))
    run_id = await wait_for_plan(stepper)
    await stepper.harvest.cancel(run_id, "test", "no more")
    error = await first
    assert (error.error.code, error.retryable) == ("HARVEST_FAILED", True)
    assert error.error.details["runId"] == str(run_id)
    assert "no more" in error.error.message
    async with running_step(worker, make_harvest_step(2)) as task:
        again = await wait_for_plan(stepper, 2)
        await stepper.finish()
        assert (await task)["runId"] == str(again) != str(run_id)


async def test_unknown_feed_and_cancellation(stepper: HarvestStepper) -> None:
    """F14: an unknown feed is final; a cancelled step stops, and its run continues."""
    worker = make_harvest_handler(HarvestAdapter(stepper.harvest))
    error = await run_failing_step(worker, make_step("harvest.run", {"feed": "pebbles"}))
    assert (error.error.code, error.retryable) == ("FEED_NOT_FOUND", False)
    await assert_stops(worker, make_harvest_step())
    await stepper.drain(PLANS)
    assert [row["state"] for row in await stepper.db.fetch("SELECT state FROM run_metadata")] == ["created"]


async def test_run_id_identifies_one_run(stepper: HarvestStepper) -> None:
    """H2, F14: repeated requests with the same id start one run."""
    run_id = UUID(int=7)
    requests = [stepper.harvest.start(FEED, "test", run_id=run_id) for _ in range(5)]
    assert set(await asyncio.gather(*requests)) == {run_id}
    assert await list_plans(stepper) == [run_id]
