"""T16: `why` explains where a row is and what to do about it."""

from datetime import timedelta

from penstock.kernel.clock import ManualClock
from penstock.tracking.service import Tracking
from tests.tracking.harness import FILE, INGEST, SECOND, SENDER, WORKER, TrackingHarness, expire, reported, why


async def test_why_tells_of_a_file_that_is_not_complete(api: TrackingHarness, clock: ManualClock) -> None:
    """T16: a row waits for its producer, who has not said that the file is complete, or has not begun again."""
    await api.post("/files/register", filename=FILE, shards=[0], worker="producer-1")
    clock.advance(5 * SECOND)
    stage, status, words, hint = await why(api)
    assert (stage, status) == ("event-ingest", "started")
    assert "producer-1" in words
    assert "5 seconds ago" in words
    assert "done" in hint
    await api.move(INGEST, "fail", FILE)
    await api.move(INGEST, "retry", FILE)
    stage, status, words, hint = await why(api)
    assert (stage, status) == ("event-ingest", "new")
    assert "/stages/event-ingest/start" in hint


async def test_why_tells_of_a_row_nobody_takes(api: TrackingHarness, clock: ManualClock) -> None:
    """T16: how long a row has waited, what is before it, and that nobody works on its stage."""
    await api.queue_up(WORKER, "before", 0, 1)
    await api.queue_up(WORKER, FILE)
    clock.advance(timedelta(hours=3))
    stage, status, words, hint = await why(api)
    assert (stage, status) == ("shard-worker", "new")
    assert "3 hours" in words
    assert "2 rows are before it" in words
    assert "no rows are under way" in words
    assert "daemon" in hint
    await api.claim(WORKER, limit=1)
    assert "1 row is before it" in (await why(api))[2]
    assert (await why(api))[3] == ""


async def test_why_tells_who_holds_a_row(api: TrackingHarness, tracking: Tracking, clock: ManualClock) -> None:
    """T16: who works on it, since when, in which attempt and for how long; or that its lease ran out."""
    await api.queue_up(WORKER, FILE)
    await api.claim(WORKER, "w7")
    await expire(tracking, clock)
    await api.claim(WORKER, "w8")
    clock.advance(20 * SECOND)
    stage, status, words, _ = await why(api)
    assert (stage, status) == ("shard-worker", "started")
    for part in ("w8", "20 seconds ago", "attempt 2", "another 40 seconds"):
        assert part in words
    clock.advance(45 * SECOND)
    assert "ran out 5 seconds ago" in (await why(api))[2]


async def test_why_tells_of_a_start_without_a_lease(api: TrackingHarness) -> None:
    """T16: a row started without a lease is waited for without end; what to do if its worker is gone."""
    await api.queue_up(WORKER, FILE)
    await api.move(WORKER, "start", FILE, worker="by hand")
    _, status, words, hint = await why(api)
    assert status == "started"
    assert "by hand" in words
    assert "without a lease" in words
    assert "/stages/shard-worker/fail" in hint


async def test_why_tells_how_it_failed(api: TrackingHarness, clock: ManualClock) -> None:
    """T16: the last error, when it was, and that a retry is needed."""
    await api.queue_up(SENDER, FILE)
    await api.move(SENDER, "fail", FILE, error="an old one")
    await api.move(SENDER, "retry", FILE)
    await api.move(SENDER, "fail", FILE, error="access denied for user")
    clock.advance(timedelta(minutes=3))
    stage, status, words, hint = await why(api)
    assert (stage, status) == ("mysql-sender", "failed")
    assert "access denied for user" in words
    assert "3 minutes ago" in words
    assert "/stages/mysql-sender/retry" in hint


async def test_why_tells_of_a_later_try(api: TrackingHarness) -> None:
    """T16: a row that is tried again later says when, and after how many attempts."""
    await api.queue_up(WORKER, FILE)
    (item,) = await api.claim(WORKER)
    await api.report(WORKER, reported(item, "retry", error="busy", retry_after_seconds=90))
    _, status, words, _ = await why(api)
    assert status == "new"
    assert "90 seconds" in words
    assert "attempt 1" in words


async def test_why_tells_of_a_pause(api: TrackingHarness, clock: ManualClock) -> None:
    """T16, T19: a row of a paused stage names who paused it, when and why, and how to go on."""
    await api.queue_up(WORKER, FILE)
    await api.post("/queues/shard-worker/pause", worker="ann", reason="moving house")
    clock.advance(timedelta(days=2))
    _, status, words, hint = await why(api)
    assert status == "new"
    for part in ("ann", "moving house", "2 days ago"):
        assert part in words
    assert "/queues/shard-worker/resume" in hint


async def test_why_tells_that_all_is_done(api: TrackingHarness, clock: ManualClock) -> None:
    """T16: a row at the end of its way says so, and since when."""
    await api.queue_up(SENDER, FILE)
    await api.move(SENDER, "start", FILE)
    await api.move(SENDER, "done", FILE)
    clock.advance(timedelta(minutes=4))
    stage, status, words, _ = await why(api)
    assert (stage, status) == (None, "done")
    assert "all stages are done" in words
    assert "4 minutes" in words
