"""T12, T13, T14: claims, reports, heartbeats and leases of workers."""

import asyncio
from datetime import timedelta

from penstock.kernel.clock import ManualClock
from penstock.tracking.service import Tracking
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
    held,
    names,
    reported,
)

# T12


async def test_a_claim_starts_the_oldest_rows(api: TrackingHarness, clock: ManualClock) -> None:
    """T12: rows come oldest first, up to the limit, each started, with a fence, an attempt and a lease."""
    await api.queue_up(WORKER, "second", 1, 0)
    clock.advance(SECOND)
    await api.queue_up(WORKER, "first-by-name")
    answer = await api.post("/queues/shard-worker/claim", worker="w1", limit=2, lease_seconds=10)
    first = {"filename": "second", "fence": 2, "attempt": 1, "created_at": "2026-01-01T00:00:00Z"}
    until = "2026-01-01T00:00:11Z"
    assert answer == {
        "stage": "shard-worker",
        "worker": "w1",
        "items": [{**first, "shard": shard, "lease_until": until} for shard in (0, 1)],
        "paused": False,
    }
    assert await api.status("second", WORKER) == "started"
    assert names(await api.claim(WORKER, "w2")) == [("first-by-name", 0)]
    assert await api.claim(WORKER, "w3") == []


async def test_without_a_word_one_row_is_claimed_for_a_minute(api: TrackingHarness) -> None:
    """T12: `limit` and `lease_seconds` may be left out."""
    await api.queue_up(WORKER, FILE, 0, 1)
    items = (await api.post("/queues/shard-worker/claim", worker="w1"))["items"]
    assert names(items) == [(FILE, 0)]
    assert items[0]["lease_until"] == "2026-01-01T00:01:00Z"


async def test_only_what_is_ready_is_handed_out(api: TrackingHarness) -> None:
    """T8, T12: nothing is claimed before the stage before it is done, and nothing that failed."""
    await api.queue_up(SPLITTER, "too-early")
    await api.queue_up(WORKER, "failed")
    await api.move(WORKER, "fail", "failed")
    assert await api.claim(WORKER) == []
    assert await api.claim(SENDER) == []


async def test_fences_grow_with_every_claim(api: TrackingHarness) -> None:
    """T12: each time a row is handed out, in whatever stage, its fence is higher."""
    await api.queue_up(SPLITTER, FILE)
    fences = []
    for stage in (SPLITTER, SPLITTER, WORKER, SENDER):
        (item,) = await api.claim(stage)
        fences.append(item["fence"])
        outcome = "release" if len(fences) == 1 else "done"
        assert (await api.report(stage, reported(item, outcome)))[0][0] == "settled"
    assert fences == sorted(set(fences))


async def test_claimers_at_once_share_nothing(api: TrackingHarness) -> None:
    """T12: eight workers at once get every row, and none of them twice."""
    await api.queue_up(SPLITTER, FILE, *range(40))
    claims = await asyncio.gather(*(api.claim(SPLITTER, f"w{n}", limit=5) for n in range(8)))
    rest = await api.claim(SPLITTER)
    got = [item["shard"] for items in [*claims, rest] for item in items]
    assert sorted(got) == list(range(40))


async def test_a_claim_waits_for_work(api: TrackingHarness) -> None:
    """T12: a claim that may wait gets the row as soon as it is ready."""
    await api.post("/files/register", filename=FILE, shards=[0])
    waiting = asyncio.create_task(api.claim(SPLITTER, wait_seconds=30))
    async with asyncio.timeout(10):
        await api.move(INGEST, "done", FILE)
        assert names(await waiting) == [(FILE, 0)]


# T13


async def test_reports_are_answered_one_by_one(api: TrackingHarness) -> None:
    """T13: settled, unchanged, superseded, unknown: each report gets its own result, in order, and where its row is."""
    await api.queue_up(WORKER, FILE, 0, 1, 2)
    done, failed, again = await api.claim(WORKER)
    answer = await api.http.post(
        "/stages/shard-worker/report",
        json=[
            reported(done, "done"),
            reported(failed, "failed", error="broken"),
            reported(again, "retry", error="later", retry_after_seconds=0),
            {**reported(done, "done"), "fence": done["fence"] - 1},
            {"filename": FILE, "shard": 9, "fence": 1, "outcome": "done"},
            {"filename": "other", "shard": 0, "fence": 1, "outcome": "done"},
        ],
    )
    told = [(one["shard"], one["result"], one["status"]) for one in answer.json()["results"]]
    assert told == [
        (0, "settled", "done"),
        (1, "settled", "failed"),
        (2, "settled", "new"),
        (0, "superseded", "done"),
        (9, "unknown", None),
        (0, "unknown", None),
    ]
    assert [await api.status(FILE, WORKER, shard) for shard in (0, 1, 2)] == ["done", "failed", "new"]


async def test_a_report_said_twice_is_unchanged(api: TrackingHarness, clock: ManualClock) -> None:
    """T13: a worker that did not hear the answer may say it again: nothing changes, for every outcome."""
    for outcome in ("done", "failed", "retry", "release"):
        await api.queue_up(WORKER, outcome)
        (item,) = await api.claim(WORKER)
        (first,) = await api.report(WORKER, reported(item, outcome, error="why"))
        before = await api.row(outcome), await api.steps(outcome)
        clock.advance(SECOND)
        assert await api.report(WORKER, reported(item, outcome, error="why")) == [("unchanged", first[1])]
        assert (await api.row(outcome), await api.steps(outcome)) == before
        await api.http.post("/stages/shard-worker/fail", json={"filename": outcome, "shard": 0})


async def test_of_two_reports_in_a_batch_the_first_counts(api: TrackingHarness) -> None:
    """T13: of two reports on one row in one batch the first is believed; the same again is unchanged."""
    await api.queue_up(WORKER, FILE, 0, 1)
    one, two = await api.claim(WORKER)
    answers = await api.report(
        WORKER, reported(one, "done"), reported(one, "done"), reported(two, "failed"), reported(two, "done")
    )
    assert answers == [("settled", "done"), ("unchanged", "done"), ("settled", "failed"), ("superseded", "failed")]
    assert await api.steps(FILE, WORKER, 0) == [("new", "started"), ("started", "done")]


async def test_an_old_fence_changes_nothing(api: TrackingHarness, tracking: Tracking, clock: ManualClock) -> None:
    """T13: whose lease ran out is told so, whatever it says; the row belongs to the one who claimed it after."""
    await api.queue_up(WORKER, FILE)
    (lost,) = await api.claim(WORKER, "slow")
    await expire(tracking, clock)
    (mine,) = await api.claim(WORKER, "next")
    assert mine["fence"] > lost["fence"]
    for outcome in ("done", "failed", "retry", "release"):
        assert await api.report(WORKER, reported(lost, outcome)) == [("superseded", "started")]
    assert await api.report(WORKER, reported(mine, "done")) == [("settled", "done")]
    assert await api.report(WORKER, reported(lost, "failed")) == [("superseded", "done")]


async def test_a_report_on_a_row_in_another_stage_is_superseded(api: TrackingHarness) -> None:
    """T13: a fence holds for the stage it was claimed in."""
    await api.queue_up(WORKER, FILE)
    (item,) = await api.claim(WORKER)
    assert (await api.report(SENDER, reported(item, "done")))[0][0] == "superseded"
    assert await api.status(FILE, WORKER) == "started"


async def test_a_retry_waits_and_counts(api: TrackingHarness, clock: ManualClock) -> None:
    """T13: `retry` hands the row out again when its time has come, as the next attempt; at last it fails for good."""
    await api.queue_up(WORKER, FILE)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        (item,) = await api.claim(WORKER)
        assert item["attempt"] == attempt
        last = await api.report(WORKER, reported(item, "retry", error="busy", retry_after_seconds=10))
        clock.advance(9 * SECOND)
        assert await api.claim(WORKER) == []
        clock.advance(SECOND)
    assert last == [("settled", "failed")]
    assert await api.claim(WORKER) == []


async def test_a_release_costs_nothing(api: TrackingHarness, clock: ManualClock) -> None:
    """T13: what was not begun goes back to its place in the queue at once, as if never claimed."""
    await api.queue_up(WORKER, "older")
    clock.advance(SECOND)
    await api.queue_up(WORKER, "younger")
    for _ in range(MAX_ATTEMPTS + 1):
        (item,) = await api.claim(WORKER, limit=1)
        assert (item["filename"], item["attempt"]) == ("older", 1)
        assert await api.report(WORKER, reported(item, "release")) == [("settled", "new")]


# T14


async def test_a_heartbeat_extends_what_it_names(api: TrackingHarness, tracking: Tracking, clock: ManualClock) -> None:
    """T14: leases of the named items are extended; what nobody named runs out."""
    await api.queue_up(WORKER, FILE, 0, 1)
    kept, _ = await api.claim(WORKER, lease_seconds=10)
    clock.advance(9 * SECOND)
    answer = await api.post("/queues/shard-worker/heartbeat", worker="w1", items=[held(kept)], lease_seconds=30)
    assert answer == {
        "stage": "shard-worker",
        "lease_until": "2026-01-01T00:00:39Z",
        "extended": [held(kept)],
        "lost": [],
    }
    assert await expire(tracking, clock, 2 * SECOND) == 1
    assert [await api.status(FILE, WORKER, shard) for shard in (0, 1)] == ["started", "new"]
    assert await expire(tracking, clock, 30 * SECOND) == 1


async def test_a_heartbeat_without_items_extends_all_a_worker_holds(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock
) -> None:
    """T14: a worker that names no items keeps all it holds of the stage, and nothing of others."""
    await api.queue_up(WORKER, FILE, 0, 1, 2)
    await api.queue_up(SPLITTER, "other-stage")
    mine = await api.claim(WORKER, "w1", limit=2)
    await api.claim(WORKER, "w2")
    await api.claim(SPLITTER, "w1")
    clock.advance(50 * SECOND)
    answer = await api.post("/queues/shard-worker/heartbeat", worker="w1")
    assert sorted(names(answer["extended"])) == names(mine)
    assert answer["lost"] == []
    assert await expire(tracking, clock, 20 * SECOND) == 2
    assert [await api.status(FILE, WORKER, shard) for shard in (0, 1, 2)] == ["started", "started", "new"]


async def test_a_heartbeat_tells_what_was_lost(api: TrackingHarness, tracking: Tracking, clock: ManualClock) -> None:
    """T14: items taken back, ended or unknown are lost; a heartbeat does not bring them back."""
    await api.queue_up(WORKER, FILE, 0, 1)
    late, ended = await api.claim(WORKER)
    await api.report(WORKER, reported(ended, "done"))
    await expire(tracking, clock)
    unknown = {"filename": "other", "shard": 0, "fence": 1}
    items = [held(late), held(ended), unknown]
    answer = await api.post("/queues/shard-worker/heartbeat", worker="w1", items=items)
    assert (answer["extended"], answer["lost"]) == ([], items)
    assert await api.status(FILE, WORKER) == "new"


async def test_a_row_lost_and_claimed_again_is_both(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock
) -> None:
    """T14: under its old fence an item is lost, also for a worker that holds the row again under a new one."""
    await api.queue_up(WORKER, FILE)
    (old,) = await api.claim(WORKER)
    await expire(tracking, clock)
    (new,) = await api.claim(WORKER)
    answer = await api.post("/queues/shard-worker/heartbeat", worker="w1", items=[held(old), held(new)])
    assert (answer["extended"], answer["lost"]) == ([held(new)], [held(old)])


async def test_a_heartbeat_never_shortens_a_lease(api: TrackingHarness, tracking: Tracking, clock: ManualClock) -> None:
    """T14: a heartbeat for a second leaves a minute's lease a minute."""
    await api.queue_up(WORKER, FILE)
    items = await api.claim(WORKER)
    await api.post("/queues/shard-worker/heartbeat", worker="w1", items=[held(items[0])], lease_seconds=1)
    assert await expire(tracking, clock, 5 * SECOND) == 0


async def test_a_lease_that_ran_out_goes_back_through_failed(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock
) -> None:
    """T14: the reaper puts the row back to new, by way of failed, and both moves are in the history with the reason."""
    await api.queue_up(WORKER, FILE)
    await api.claim(WORKER, "gone")
    assert await expire(tracking, clock) == 1
    assert await api.status(FILE, WORKER) == "new"
    moves = (await api.get(f"/files/{FILE}/history"))["moves"][-2:]
    assert [(move["from"], move["to"]) for move in moves] == [("started", "failed"), ("failed", "new")]
    for move in moves:
        assert (move["actor"], move["at"]) == ("reaper", "2026-01-01T00:01:01Z")
        assert "gone" in move["reason"]


async def test_after_max_attempts_it_has_failed_for_good(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock
) -> None:
    """T14: the lease that runs out on the last attempt leaves the row failed, until somebody retries it."""
    await api.queue_up(WORKER, FILE)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert [item["attempt"] for item in await api.claim(WORKER)] == [attempt]
        assert await expire(tracking, clock) == 1
    assert await api.status(FILE, WORKER) == "failed"
    assert (await api.steps(FILE, WORKER))[-1] == ("started", "failed")
    assert (await api.claim(WORKER), await expire(tracking, clock)) == ([], 0)
    await api.move(WORKER, "retry", FILE)
    assert [item["attempt"] for item in await api.claim(WORKER)] == [1]


async def test_a_start_without_a_lease_is_never_taken_back(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock
) -> None:
    """T8, T14: the document's own `start` knows no lease: its daemon may take as long as it needs."""
    await api.queue_up(WORKER, FILE)
    await api.move(WORKER, "start", FILE, worker="w")
    assert await expire(tracking, clock, timedelta(days=365)) == 0
    assert await api.status(FILE, WORKER) == "started"
