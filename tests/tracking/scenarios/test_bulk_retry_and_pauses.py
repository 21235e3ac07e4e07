"""T19: bulk retry, and paused stages."""

import asyncio
from datetime import timedelta

import pytest

from penstock.kernel.clock import ManualClock
from penstock.tracking.service import Tracking
from tests.support.types import Json
from tests.tracking.conftest import MAX_ATTEMPTS
from tests.tracking.harness import (
    FILE,
    INGEST,
    SECOND,
    SENDER,
    SPLITTER,
    WORKER,
    TrackingHarness,
    expire,
    explain,
    make_report,
    names,
)

CHOICES: list[tuple[Json, list[tuple[str, int]]]] = [
    ({"filename_prefix": "b"}, [("b", 0), ("b", 1)]),
    ({"shards": [1, 7]}, [("a", 1), ("b", 1)]),
    ({"failed_since": "2026-01-01T00:00:01Z"}, [("b", 0), ("b", 1)]),
    ({"failed_before": "2026-01-01T00:00:01Z"}, [("a", 0), ("a", 1)]),
    ({"error_contains": "timeout"}, [("a", 0), ("b", 0)]),
    ({"error_contains": "timeout", "filename_prefix": "a"}, [("a", 0)]),
    ({"error_contains": "100%"}, []),
    ({"limit": 3}, [("a", 0), ("a", 1), ("b", 0)]),
    ({}, [("a", 0), ("a", 1), ("b", 0), ("b", 1)]),
]


@pytest.mark.parametrize(("chosen", "expected"), CHOICES, ids=lambda value: str(value)[:40])
async def test_bulk_retry_by_filter(
    api: TrackingHarness, clock: ManualClock, chosen: Json, expected: list[tuple[str, int]]
) -> None:
    """T19: a bulk retry resets the failed rows of a stage that match prefix, shards, time and error, and no others."""
    for name in ("a", "b"):
        await api.queue_up(WORKER, name, 0, 1)
        await api.move(WORKER, "fail", name, 0, error="a timeout of 3 s")
        await api.move(WORKER, "fail", name, 1, error="bad line")
        clock.advance(SECOND)
    await api.queue_up(SENDER, "c")
    await api.move(SENDER, "fail", "c", error="timeout")
    answer = await api.post("/stages/shard-worker/retry-failed", **chosen)
    assert answer == {"stage": "shard-worker", "retried": len(expected)}
    assert sorted(names((await api.get("/queues/shard-worker"))["items"])) == expected
    assert await api.status("c", SENDER) == "failed"


async def test_failure_time_is_that_of_its_stage(api: TrackingHarness, clock: ManualClock) -> None:
    """T16, T19: a later move in another stage does not change the time of a failure."""
    await api.queue_up(SPLITTER, FILE)
    await api.move(WORKER, "fail", FILE)
    clock.advance(timedelta(minutes=5))
    for step in ("start", "done"):
        await api.move(SPLITTER, step, FILE)
    assert "5 minutes ago" in (await explain(api))[2]
    chosen = {"failed_before": "2026-01-01T00:00:01Z"}
    assert (await api.post("/stages/shard-worker/retry-failed", **chosen))["retried"] == 1


async def test_bulk_retry_resets_attempts_and_records_the_actor(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock
) -> None:
    """T15, T19: a row that is reset in bulk starts with all attempts, and its history names the actor."""
    await api.queue_up(WORKER, FILE)
    for _ in range(MAX_ATTEMPTS):
        await api.claim(WORKER)
        await expire(tracking, clock)
    await api.post("/stages/shard-worker/retry-failed", worker="ann")
    last = (await api.get(f"/files/{FILE}/history"))["moves"][-1]
    assert (last["from"], last["to"], last["actor"]) == ("failed", "new", "ann")
    assert [item["attempt"] for item in await api.claim(WORKER)] == [1]


async def test_bulk_retry_of_files(api: TrackingHarness) -> None:
    """T2, T19: event-ingest is retried by file; a filter on shards is refused."""
    for name in ("a", "b"):
        await api.post("/files/register", filename=name, shards=[0, 1])
        await api.move(INGEST, "fail", name, error="timeout")
    await api.refused(422, "WHOLE_FILES_ONLY", "/stages/event-ingest/retry-failed", shards=[0])
    assert (await api.post("/stages/event-ingest/retry-failed", filename_prefix="a"))["retried"] == 1
    assert [await api.status(name, INGEST, 1) for name in ("a", "b")] == ["new", "failed"]


async def test_paused_stage_cannot_be_claimed(api: TrackingHarness) -> None:
    """T12, T19: rows of a paused stage cannot be claimed; other stages continue, and so does this one after resume."""
    await api.queue_up(WORKER, FILE)
    await api.queue_up(SPLITTER, "other")
    assert await api.post("/queues/shard-worker/pause", worker="ann", reason="why not") == {
        "stage": "shard-worker",
        "paused": True,
        "since": "2026-01-01T00:00:00Z",
        "by": "ann",
        "reason": "why not",
    }
    claim = await api.post("/queues/shard-worker/claim", worker="w1")
    assert (claim["items"], claim["paused"]) == ([], True)
    assert names(await api.claim(SPLITTER)) == [("other", 0)]
    queues = {queue["stage"]: queue for queue in (await api.get("/queues"))["queues"]}
    assert (queues["shard-worker"]["paused"], queues["shard-worker"]["ready"]) == (True, 1)
    assert (queues["shard-splitter"]["paused"], queues["shard-splitter"]["started"]) == (False, 1)
    assert (await api.post("/queues/shard-worker/resume"))["paused"] is False
    assert names(await api.claim(WORKER)) == [(FILE, 0)]


async def test_paused_stage_refuses_starts_and_lets_rows_end(api: TrackingHarness) -> None:
    """T8, T19: `start` is refused with the status and the actor of the pause; started rows may end."""
    await api.queue_up(WORKER, FILE, 0, 1, 2)
    await api.move(WORKER, "start", FILE, 0, worker="w1")
    (claimed,) = await api.claim(WORKER, limit=1)
    await api.post("/queues/shard-worker/pause", worker="ann")
    await api.post("/queues/shard-worker/pause", worker="bob")  # the pause of ann is unchanged
    refused = await api.refused(409, "STAGE_PAUSED", "/stages/shard-worker/start", filename=FILE, shard=2)
    assert (refused["current"], "ann" in refused["detail"], bool(refused["hint"])) == ("new", True, True)
    assert (await api.move(WORKER, "start", FILE, 0, worker="w1"))["status"] == "started"
    await api.move(WORKER, "done", FILE, 0)
    assert await api.report(WORKER, make_report(claimed, "done")) == [("settled", "done")]


async def test_resume_wakes_waiting_claims(api: TrackingHarness) -> None:
    """T12, T19: a claim that waits at a paused stage gets its row when the stage is resumed."""
    await api.queue_up(WORKER, FILE)
    await api.post("/queues/shard-worker/pause")
    waiting = asyncio.create_task(api.claim(WORKER, wait_seconds=30))
    async with asyncio.timeout(10):
        await api.post("/queues/shard-worker/resume")
        assert names(await waiting) == [(FILE, 0)]
