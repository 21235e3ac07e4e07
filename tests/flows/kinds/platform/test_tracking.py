"""tracking.wait: a step waits until all shards of a file are through."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.app.bridges import TrackingAdapter
from penstock.flows.kinds.platform.tracking import tracking_worker
from penstock.flows.step import FlowStep
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Transient
from penstock.tracking.config import TrackingSection
from penstock.tracking.contract import Stage
from penstock.tracking.metrics import TrackingMetrics
from penstock.tracking.service import Tracking
from tests.flows.kinds.platform.running_steps import is_stopped, under_way
from tests.flows.memory_step_io import make_step, run_failing_step, run_step
from tests.support.types import Json
from tests.support.wait import becomes

INGEST, SPLITTER, WORKER, SENDER = Stage


@pytest.fixture
async def tracking(db: Database) -> AsyncIterator[Tracking]:
    async with Tracking.open(db, TrackingSection(), TrackingMetrics(CollectorRegistry())) as tracking:
        yield tracking


class CountingFiles(TrackingAdapter):
    """Counts the looks; the first one is told that nobody answers."""

    calls = 0

    async def shards(self, filename: str, stage: Stage) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise Transient("DATABASE_DOWN", "for a moment")
        return await super().shards(filename, stage)


async def take(tracking: Tracking, stage: Stage, *shards: int) -> None:
    for shard in shards:
        await tracking.move(stage, "start", "f", shard, actor="test")
        await tracking.move(stage, "done", "f", shard, actor="test")


def waiting(**more: Any) -> FlowStep:
    return make_step("tracking.wait", {"filename": "f", "pollSeconds": 0.2, **more})


async def test_a_step_waits_until_all_shards_are_through(tracking: Tracking) -> None:
    """F14: for a file nobody registered yet, for all its shards, and through a database that is away for a moment."""
    files = CountingFiles(tracking)

    async def looked(task: "asyncio.Task[Json]") -> None:
        """Back when it has looked at what there is now, and still waits."""
        before = files.calls

        async def is_so() -> bool:
            return files.calls >= before + 2

        await becomes(is_so, "it looks again")
        assert not task.done()

    async with under_way(tracking_worker(files), waiting(stage="shard-splitter")) as task:
        await looked(task)
        await tracking.register("f", [0, 1], worker=None, actor="test")
        await tracking.move(INGEST, "done", "f", actor="test")
        await take(tracking, SPLITTER, 0)
        await looked(task)
        await take(tracking, SPLITTER, 1)
        assert await task == {"filename": "f", "stage": "shard-splitter", "shards": 2}
    async with under_way(tracking_worker(files), waiting()) as task:
        await take(tracking, WORKER, 0, 1)
        await take(tracking, SENDER, 0)
        await looked(task)
        await take(tracking, SENDER, 1)
        assert (await task)["stage"] == "mysql-sender"


async def test_a_shard_that_failed_fails_the_step(tracking: Tracking) -> None:
    """F14: TRACKING_FAILED names the shards and why; a failure behind the stage that is asked for does not matter."""
    await tracking.register("f", [0, 1, 2], worker=None, actor="test")
    await tracking.move(INGEST, "done", "f", actor="test")
    await take(tracking, SPLITTER, 0, 1, 2)
    await tracking.move(WORKER, "fail", "f", 1, actor="test", reason="disk full")
    worker = tracking_worker(TrackingAdapter(tracking))
    error = await run_failing_step(worker, waiting())
    assert (error.error.code, error.retryable) == ("TRACKING_FAILED", True)
    assert list(error.error.details["shards"]) == ["1"]
    assert "disk full" in error.error.message
    assert (await run_step(worker, waiting(stage="shard-splitter")))["shards"] == 3


async def test_a_step_that_waits_for_a_file_can_be_stopped(tracking: Tracking) -> None:
    """F9, F14: a file may never come."""
    await is_stopped(tracking_worker(TrackingAdapter(tracking)), waiting())
