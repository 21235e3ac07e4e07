"""tracking.wait: a step waits until all shards of a file have completed a stage."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.app.bridges import TrackingAdapter
from penstock.flows.kinds.platform.tracking import make_tracking_handler
from penstock.flows.step import FlowStep
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Transient
from penstock.tracking.config import TrackingSection
from penstock.tracking.contract import Stage
from penstock.tracking.metrics import TrackingMetrics
from penstock.tracking.service import Tracking
from tests.flows.kinds.platform.running_steps import assert_stops, running_step
from tests.flows.memory_step_io import make_step, run_failing_step, run_step
from tests.support.types import Json
from tests.support.wait import becomes

INGEST, SPLITTER, WORKER, SENDER = Stage


@pytest.fixture
async def tracking(db: Database) -> AsyncIterator[Tracking]:
    async with Tracking.open(db, TrackingSection(), TrackingMetrics(CollectorRegistry())) as tracking:
        yield tracking


class CountingFiles(TrackingAdapter):
    """Count the calls; the first one fails with Transient."""

    calls = 0

    async def list_shards(self, filename: str, stage: Stage) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise Transient("DATABASE_DOWN", "for a moment")
        return await super().list_shards(filename, stage)


async def complete_shards(tracking: Tracking, stage: Stage, *shards: int) -> None:
    for shard in shards:
        await tracking.move(stage, "start", "f", shard, actor="test")
        await tracking.move(stage, "done", "f", shard, actor="test")


def make_wait_step(**more: Any) -> FlowStep:
    return make_step("tracking.wait", {"filename": "f", "pollSeconds": 0.2, **more})


async def test_step_waits_for_all_shards(tracking: Tracking) -> None:
    """F14: for an unregistered file, for all its shards, and while the database is unavailable."""
    files = CountingFiles(tracking)

    async def looked(task: "asyncio.Task[Json]") -> None:
        """Back when it has looked at what there is now, and still waits."""
        before = files.calls

        async def is_so() -> bool:
            return files.calls >= before + 2

        await becomes(is_so, "it looks again")
        assert not task.done()

    async with running_step(make_tracking_handler(files), make_wait_step(stage="shard-splitter")) as task:
        await looked(task)
        await tracking.register("f", [0, 1], worker=None, actor="test")
        await tracking.move(INGEST, "done", "f", actor="test")
        await complete_shards(tracking, SPLITTER, 0)
        await looked(task)
        await complete_shards(tracking, SPLITTER, 1)
        assert await task == {"filename": "f", "stage": "shard-splitter", "shards": 2}
    async with running_step(make_tracking_handler(files), make_wait_step()) as task:
        await complete_shards(tracking, WORKER, 0, 1)
        await complete_shards(tracking, SENDER, 0)
        await looked(task)
        await complete_shards(tracking, SENDER, 1)
        assert (await task)["stage"] == "mysql-sender"


async def test_failed_shard_fails_the_step(tracking: Tracking) -> None:
    """F14: TRACKING_FAILED has the shards and reasons; failures after the requested stage are ignored."""
    await tracking.register("f", [0, 1, 2], worker=None, actor="test")
    await tracking.move(INGEST, "done", "f", actor="test")
    await complete_shards(tracking, SPLITTER, 0, 1, 2)
    await tracking.move(WORKER, "fail", "f", 1, actor="test", reason="disk full")
    worker = make_tracking_handler(TrackingAdapter(tracking))
    error = await run_failing_step(worker, make_wait_step())
    assert (error.error.code, error.retryable) == ("TRACKING_FAILED", True)
    assert list(error.error.details["shards"]) == ["1"]
    assert "disk full" in error.error.message
    assert (await run_step(worker, make_wait_step(stage="shard-splitter")))["shards"] == 3


async def test_waiting_step_stops(tracking: Tracking) -> None:
    """F9, F14: a cancelled step stops, because a file may never come."""
    await assert_stops(make_tracking_handler(TrackingAdapter(tracking)), make_wait_step())
