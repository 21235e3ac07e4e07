"""Rows that are retried later, and rows that are retried many times."""

from datetime import timedelta

from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.states.journal import MOVES_LIMIT
from penstock.tracking.service import Tracking
from tests.tracking.harness import FILE, SENDER, SPLITTER, WORKER, TrackingHarness, make_report

HOUR = 3600


async def delay_row(api: TrackingHarness) -> None:
    """Create a row of the splitter that is retried in an hour."""
    await api.queue_up(SPLITTER, FILE)
    (item,) = await api.claim(SPLITTER)
    await api.report(SPLITTER, make_report(item, "retry", error="busy", retry_after_seconds=HOUR))
    assert await api.claim(SPLITTER) == []


async def test_manual_start_does_not_delay_the_next_stage(api: TrackingHarness) -> None:
    """T5, T12: a row that is done before it was due is due for the next stage at once."""
    await delay_row(api)
    await api.move(SPLITTER, "start", FILE)
    await api.move(SPLITTER, "done", FILE)
    assert len(await api.claim(WORKER)) == 1


async def test_manual_retry_does_not_wait(api: TrackingHarness) -> None:
    """T4: a row that an operator failed and retried can be claimed at once."""
    await delay_row(api)
    await api.move(SPLITTER, "fail", FILE)
    await api.move(SPLITTER, "retry", FILE)
    assert len(await api.claim(SPLITTER)) == 1


async def test_bulk_retry_does_not_wait(api: TrackingHarness) -> None:
    """T19: a row that is retried in bulk can be claimed at once."""
    await delay_row(api)
    await api.move(SPLITTER, "fail", FILE)
    assert (await api.post(f"/stages/{SPLITTER}/retry-failed"))["retried"] == 1
    assert len(await api.claim(SPLITTER)) == 1


async def test_failure_on_the_last_attempt_leaves_no_delay(api: TrackingHarness, db: Database) -> None:
    """T4, T14: a last `retry` that becomes `failed` leaves no delay for a manual retry."""
    await api.queue_up(SENDER, FILE)
    await db.execute("UPDATE pipeline_tracking SET mysql_sender_attempts = 99")
    (item,) = await api.claim(SENDER)
    last = await api.report(SENDER, make_report(item, "retry", error="busy", retry_after_seconds=HOUR))
    assert last == [("settled", "failed")]
    await api.move(SENDER, "retry", FILE)
    assert len(await api.claim(SENDER)) == 1


async def test_why_shows_the_previous_attempt(api: TrackingHarness, tracking: Tracking, clock: ManualClock) -> None:
    """T16: a row that waits again shows its previous attempt and the error of it."""
    await api.queue_up(WORKER, FILE)
    assert "attempt" not in (await api.get(f"/files/{FILE}/0/why"))["why"]
    await api.claim(WORKER, "sleepy", lease_seconds=1)
    clock.advance(timedelta(seconds=2))
    await tracking.reap()
    why = (await api.get(f"/files/{FILE}/0/why"))["why"]
    assert "attempt 1 did not succeed: the lease of sleepy expired" in why


async def test_row_keeps_a_limited_number_of_moves(api: TrackingHarness, db: Database) -> None:
    """T15: a row keeps the numbers of its last moves only; the newest are always among them."""
    await api.queue_up(WORKER, FILE)
    await db.execute(
        "UPDATE pipeline_tracking SET moves = array_cat(ARRAY(SELECT -n FROM generate_series(1, $1::int) AS n), moves)",
        MOVES_LIMIT,
    )
    (item,) = await api.claim(WORKER)
    await api.report(WORKER, make_report(item, "release"))
    await api.move(WORKER, "start", FILE, worker="by hand")
    stored = await db.fetchval("SELECT moves FROM pipeline_tracking")
    assert len(stored) == MOVES_LIMIT
    assert (await api.steps(FILE, WORKER))[-1] == ("new", "started")


async def test_file_moved_concurrently_does_not_stop_a_bulk_retry(api: TrackingHarness, tracking: Tracking) -> None:
    """T19: a bulk retry skips a file that was moved meanwhile, and retries the others."""
    for name in ("a", "b", "c"):
        await api.post("/files/register", filename=name, shards=[0])
        await api.move("event-ingest", "fail", name)
    move = tracking.move

    async def move_concurrently(stage, name, filename, *args, **more):  # type: ignore[no-untyped-def]
        if filename == "b":
            await move(stage, "retry", "b", actor="other")
            await move(stage, "start", "b", actor="other")
        return await move(stage, name, filename, *args, **more)

    tracking.move = move_concurrently  # type: ignore[method-assign]
    assert (await api.post("/stages/event-ingest/retry-failed"))["retried"] == 2
    assert [await api.status(name, "event-ingest") for name in "abc"] == ["new", "started", "new"]
