"""A row that is to be tried later, and one that is tried again and again."""

from datetime import timedelta

from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.states.journal import MOVES_LIMIT
from penstock.tracking.service import Tracking
from tests.tracking.harness import FILE, SENDER, SPLITTER, WORKER, TrackingHarness, reported

HOUR = 3600


async def put_off(api: TrackingHarness) -> None:
    """A row of the splitter that is to be tried again in an hour."""
    await api.queue_up(SPLITTER, FILE)
    (item,) = await api.claim(SPLITTER)
    await api.report(SPLITTER, reported(item, "retry", error="busy", retry_after_seconds=HOUR))
    assert await api.claim(SPLITTER) == []


async def test_whoever_starts_it_by_hand_does_not_put_off_the_next_stage(api: TrackingHarness) -> None:
    """T5, T12: done before its time, a row is due for the next stage at once."""
    await put_off(api)
    await api.move(SPLITTER, "start", FILE)
    await api.move(SPLITTER, "done", FILE)
    assert len(await api.claim(WORKER)) == 1


async def test_a_retry_by_hand_does_not_wait(api: TrackingHarness) -> None:
    """T4: failed and set back by a person, a row is handed out at once."""
    await put_off(api)
    await api.move(SPLITTER, "fail", FILE)
    await api.move(SPLITTER, "retry", FILE)
    assert len(await api.claim(SPLITTER)) == 1


async def test_neither_does_a_bulk_retry(api: TrackingHarness) -> None:
    """T19: the same for all that failed."""
    await put_off(api)
    await api.move(SPLITTER, "fail", FILE)
    assert (await api.post(f"/stages/{SPLITTER}/retry-failed"))["retried"] == 1
    assert len(await api.claim(SPLITTER)) == 1


async def test_nor_what_failed_on_its_last_attempt(api: TrackingHarness, db: Database) -> None:
    """T4, T14: a last `retry` that becomes `failed` leaves nothing to wait for."""
    await api.queue_up(SENDER, FILE)
    await db.execute("UPDATE pipeline_tracking SET mysql_sender_attempts = 99")
    (item,) = await api.claim(SENDER)
    last = await api.report(SENDER, reported(item, "retry", error="busy", retry_after_seconds=HOUR))
    assert last == [("settled", "failed")]
    await api.move(SENDER, "retry", FILE)
    assert len(await api.claim(SENDER)) == 1


async def test_why_tells_what_became_of_the_try_before(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock
) -> None:
    """T16: a row that waits again says that it was tried, and how that ended."""
    await api.queue_up(WORKER, FILE)
    assert "attempt" not in (await api.get(f"/files/{FILE}/0/why"))["why"]
    await api.claim(WORKER, "sleepy", lease_seconds=1)
    clock.advance(timedelta(seconds=2))
    await tracking.reap()
    why = (await api.get(f"/files/{FILE}/0/why"))["why"]
    assert "attempt 1 did not succeed: the lease of sleepy ran out" in why


async def test_a_row_without_end_does_not_grow_without_end(api: TrackingHarness, db: Database) -> None:
    """T15: a row keeps the numbers of its last moves; the newest are always among them."""
    await api.queue_up(WORKER, FILE)
    await db.execute(
        "UPDATE pipeline_tracking SET moves = array_cat(ARRAY(SELECT -n FROM generate_series(1, $1::int) AS n), moves)",
        MOVES_LIMIT,
    )
    (item,) = await api.claim(WORKER)
    await api.report(WORKER, reported(item, "release"))
    await api.move(WORKER, "start", FILE, worker="by hand")
    kept = await db.fetchval("SELECT moves FROM pipeline_tracking")
    assert len(kept) == MOVES_LIMIT
    assert (await api.steps(FILE, WORKER))[-1] == ("new", "started")


async def test_a_file_somebody_else_retried_does_not_stop_the_others(api: TrackingHarness, tracking: Tracking) -> None:
    """T19: of the files of a bulk retry, one that has moved meanwhile is left alone, the rest go on."""
    for name in ("a", "b", "c"):
        await api.post("/files/register", filename=name, shards=[0])
        await api.move("event-ingest", "fail", name)
    quicker = tracking.move

    async def overtaken(stage, name, filename, *args, **more):  # type: ignore[no-untyped-def]
        if filename == "b":
            await quicker(stage, "retry", "b", actor="other")
            await quicker(stage, "start", "b", actor="other")
        return await quicker(stage, name, filename, *args, **more)

    tracking.move = overtaken  # type: ignore[method-assign]
    assert (await api.post("/stages/event-ingest/retry-failed"))["retried"] == 2
    assert [await api.status(name, "event-ingest") for name in "abc"] == ["new", "started", "new"]
