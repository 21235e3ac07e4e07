"""T16: `why` explains the status of a row, and how to move it."""

from datetime import timedelta

from penstock.kernel.clock import ManualClock
from penstock.tracking.service import Tracking
from tests.tracking.harness import FILE, INGEST, SECOND, SENDER, WORKER, TrackingHarness, expire, explain, make_report


async def test_why_explains_an_incomplete_file(api: TrackingHarness, clock: ManualClock) -> None:
    """T16: a row waits for its producer, which has not completed the file, or has not started again after a retry."""
    await api.post("/files/register", filename=FILE, shards=[0], worker="producer-1")
    clock.advance(5 * SECOND)
    stage, status, words, hint = await explain(api)
    assert (stage, status) == ("event-ingest", "started")
    assert "producer-1" in words
    assert "5 seconds ago" in words
    assert "done" in hint
    await api.move(INGEST, "fail", FILE)
    await api.move(INGEST, "retry", FILE)
    stage, status, words, hint = await explain(api)
    assert (stage, status) == ("event-ingest", "new")
    assert "POST /stages/event-ingest/start" in hint


async def test_why_explains_a_waiting_row(api: TrackingHarness, clock: ManualClock) -> None:
    """T16: a waiting row shows its waiting time, the rows ahead of it, and that no worker processes its stage."""
    await api.queue_up(WORKER, "before", 0, 1)
    await api.queue_up(WORKER, FILE)
    clock.advance(timedelta(hours=3))
    stage, status, words, hint = await explain(api)
    assert (stage, status) == ("shard-worker", "new")
    assert "3 hours" in words
    assert "2 rows are ahead of it" in words
    assert "no rows are being processed" in words
    assert "daemon" in hint
    await api.claim(WORKER, limit=1)
    assert "1 row is ahead of it" in (await explain(api))[2]
    assert (await explain(api))[3] == ""


async def test_why_names_the_worker_of_a_row(api: TrackingHarness, tracking: Tracking, clock: ManualClock) -> None:
    """T16: a started row shows its worker, start, attempt and end of lease; or that the lease expired."""
    await api.queue_up(WORKER, FILE)
    await api.claim(WORKER, "w7")
    await expire(tracking, clock)
    await api.claim(WORKER, "w8")
    clock.advance(20 * SECOND)
    stage, status, words, _ = await explain(api)
    assert (stage, status) == ("shard-worker", "started")
    for part in ("w8", "20 seconds ago", "attempt 2", "expires in 40 seconds"):
        assert part in words
    clock.advance(45 * SECOND)
    assert "expired 5 seconds ago" in (await explain(api))[2]


async def test_why_explains_a_start_without_a_lease(api: TrackingHarness) -> None:
    """T16: a row started without a lease never expires; the hint explains the case of a dead worker."""
    await api.queue_up(WORKER, FILE)
    await api.move(WORKER, "start", FILE, worker="by hand")
    _, status, words, hint = await explain(api)
    assert status == "started"
    assert "by hand" in words
    assert "without a lease" in words
    assert "POST /stages/shard-worker/fail" in hint
    assert f"`penstock track retry shard-worker {FILE} 0`" in hint


async def test_why_shows_the_last_error(api: TrackingHarness, clock: ManualClock) -> None:
    """T16: a failed row shows its last error and when it failed; the hint gives command and route of a retry."""
    await api.queue_up(SENDER, FILE)
    await api.move(SENDER, "fail", FILE, error="an old one")
    await api.move(SENDER, "retry", FILE)
    await api.move(SENDER, "fail", FILE, error="access denied for user")
    clock.advance(timedelta(minutes=3))
    stage, status, words, hint = await explain(api)
    assert (stage, status) == ("mysql-sender", "failed")
    assert "access denied for user" in words
    assert "3 minutes ago" in words
    assert f"run `penstock track retry mysql-sender {FILE} 0` (POST /stages/mysql-sender/retry)" in hint


async def test_why_shows_the_next_attempt(api: TrackingHarness) -> None:
    """T16: a row with a delayed retry shows the time of the next attempt, and the attempts so far."""
    await api.queue_up(WORKER, FILE)
    (item,) = await api.claim(WORKER)
    await api.report(WORKER, make_report(item, "retry", error="busy", retry_after_seconds=90))
    _, status, words, _ = await explain(api)
    assert status == "new"
    assert "90 seconds" in words
    assert "attempt 1" in words


async def test_why_explains_a_pause(api: TrackingHarness, clock: ManualClock) -> None:
    """T16, T19: a row of a paused stage shows actor, time and reason of the pause, and the command that ends it."""
    await api.queue_up(WORKER, FILE)
    await api.post("/queues/shard-worker/pause", worker="ann", reason="database migration")
    clock.advance(timedelta(days=2))
    _, status, words, hint = await explain(api)
    assert status == "new"
    for part in ("ann", "database migration", "2 days ago"):
        assert part in words
    assert "run `penstock track resume shard-worker` (POST /queues/shard-worker/resume)" in hint


async def test_why_reports_a_finished_row(api: TrackingHarness, clock: ManualClock) -> None:
    """T16: a row whose stages are all done reports it, and since when."""
    await api.queue_up(SENDER, FILE)
    await api.move(SENDER, "start", FILE)
    await api.move(SENDER, "done", FILE)
    clock.advance(timedelta(minutes=4))
    stage, status, words, _ = await explain(api)
    assert (stage, status) == (None, "done")
    assert "all stages are done" in words
    assert "4 minutes" in words
