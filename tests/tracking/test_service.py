"""T12, T13, T14: claims, reports, heartbeats and leases of workers; and the log of them."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import Transient
from penstock.tracking import store
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
    make_lease,
    make_report,
    names,
)

# T12


async def test_claim_starts_the_oldest_rows(api: TrackingHarness, clock: ManualClock) -> None:
    """T12: a claim returns the oldest rows up to the limit; each is started, with a fence, an attempt and a lease."""
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


async def test_claim_defaults_to_one_row_for_a_minute(api: TrackingHarness) -> None:
    """T12: `limit` and `lease_seconds` are optional."""
    await api.queue_up(WORKER, FILE, 0, 1)
    items = (await api.post("/queues/shard-worker/claim", worker="w1"))["items"]
    assert names(items) == [(FILE, 0)]
    assert items[0]["lease_until"] == "2026-01-01T00:01:00Z"


async def test_claim_returns_ready_rows_only(api: TrackingHarness) -> None:
    """T8, T12: a row is not claimed before its previous stage is done, nor after it failed."""
    await api.queue_up(SPLITTER, "too-early")
    await api.queue_up(WORKER, "failed")
    await api.move(WORKER, "fail", "failed")
    assert await api.claim(WORKER) == []
    assert await api.claim(SENDER) == []


async def test_fences_grow_with_every_claim(api: TrackingHarness) -> None:
    """T12: every claim of a row, in any stage, increments its fence."""
    await api.queue_up(SPLITTER, FILE)
    fences = []
    for stage in (SPLITTER, SPLITTER, WORKER, SENDER):
        (item,) = await api.claim(stage)
        fences.append(item["fence"])
        outcome = "release" if len(fences) == 1 else "done"
        assert (await api.report(stage, make_report(item, outcome)))[0][0] == "settled"
    assert fences == sorted(set(fences))


async def test_concurrent_claims_share_no_row(api: TrackingHarness) -> None:
    """T12: eight concurrent workers claim every row, and no row twice."""
    await api.queue_up(SPLITTER, FILE, *range(40))
    claims = await asyncio.gather(*(api.claim(SPLITTER, f"w{n}", limit=5) for n in range(8)))
    rest = await api.claim(SPLITTER)
    got = [item["shard"] for items in [*claims, rest] for item in items]
    assert sorted(got) == list(range(40))


async def test_claim_waits_for_work(api: TrackingHarness) -> None:
    """T12: a waiting claim returns the row as soon as it is ready."""
    await api.post("/files/register", filename=FILE, shards=[0])
    waiting = asyncio.create_task(api.claim(SPLITTER, wait_seconds=30))
    async with asyncio.timeout(10):
        await api.move(INGEST, "done", FILE)
        assert names(await waiting) == [(FILE, 0)]


# T13


async def test_each_report_gets_a_result(api: TrackingHarness) -> None:
    """T13: settled, unchanged, superseded, unknown: each report gets its result and the status of its row, in order."""
    await api.queue_up(WORKER, FILE, 0, 1, 2)
    done, failed, again = await api.claim(WORKER)
    answer = await api.http.post(
        "/stages/shard-worker/report",
        json=[
            make_report(done, "done"),
            make_report(failed, "failed", error="broken"),
            make_report(again, "retry", error="later", retry_after_seconds=0),
            {**make_report(done, "done"), "fence": done["fence"] - 1},
            {"filename": FILE, "shard": 9, "fence": 1, "outcome": "done"},
            {"filename": "other", "shard": 0, "fence": 1, "outcome": "done"},
        ],
    )
    results = [(result["shard"], result["result"], result["status"]) for result in answer.json()["results"]]
    assert results == [
        (0, "settled", "done"),
        (1, "settled", "failed"),
        (2, "settled", "new"),
        (0, "superseded", "done"),
        (9, "unknown", None),
        (0, "unknown", None),
    ]
    assert [await api.status(FILE, WORKER, shard) for shard in (0, 1, 2)] == ["done", "failed", "new"]


async def test_repeated_report_is_unchanged(api: TrackingHarness, clock: ManualClock) -> None:
    """T13: a report that is repeated after a lost answer changes nothing, for every outcome."""
    for outcome in ("done", "failed", "retry", "release"):
        await api.queue_up(WORKER, outcome)
        (item,) = await api.claim(WORKER)
        (first,) = await api.report(WORKER, make_report(item, outcome, error="why"))
        before = await api.row(outcome), await api.steps(outcome)
        clock.advance(SECOND)
        assert await api.report(WORKER, make_report(item, outcome, error="why")) == [("unchanged", first[1])]
        assert (await api.row(outcome), await api.steps(outcome)) == before
        await api.http.post("/stages/shard-worker/fail", json={"filename": outcome, "shard": 0})


async def test_first_of_two_reports_in_a_batch_counts(api: TrackingHarness) -> None:
    """T13: of two reports on one row in one batch the first is accepted; an equal second one is unchanged."""
    await api.queue_up(WORKER, FILE, 0, 1)
    first, second = await api.claim(WORKER)
    answers = await api.report(
        WORKER,
        make_report(first, "done"),
        make_report(first, "done"),
        make_report(second, "failed"),
        make_report(second, "done"),
    )
    assert answers == [("settled", "done"), ("unchanged", "done"), ("settled", "failed"), ("superseded", "failed")]
    assert await api.steps(FILE, WORKER, 0) == [("new", "started"), ("started", "done")]


async def test_old_fence_changes_nothing(api: TrackingHarness, tracking: Tracking, clock: ManualClock) -> None:
    """T13: every report under an expired lease is superseded; the row belongs to the worker that claimed it later."""
    await api.queue_up(WORKER, FILE)
    (lost,) = await api.claim(WORKER, "slow")
    await expire(tracking, clock)
    (mine,) = await api.claim(WORKER, "next")
    assert mine["fence"] > lost["fence"]
    for outcome in ("done", "failed", "retry", "release"):
        assert await api.report(WORKER, make_report(lost, outcome)) == [("superseded", "started")]
    assert await api.report(WORKER, make_report(mine, "done")) == [("settled", "done")]
    assert await api.report(WORKER, make_report(lost, "failed")) == [("superseded", "done")]


async def test_report_in_another_stage_is_superseded(api: TrackingHarness) -> None:
    """T13: a fence is valid only in the stage of its claim."""
    await api.queue_up(WORKER, FILE)
    (item,) = await api.claim(WORKER)
    assert (await api.report(SENDER, make_report(item, "done")))[0][0] == "superseded"
    assert await api.status(FILE, WORKER) == "started"


async def test_retry_waits_and_counts_as_an_attempt(api: TrackingHarness, clock: ManualClock) -> None:
    """T13: a retried row can be claimed again when it is due, as the next attempt; the last attempt fails for good."""
    await api.queue_up(WORKER, FILE)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        (item,) = await api.claim(WORKER)
        assert item["attempt"] == attempt
        last = await api.report(WORKER, make_report(item, "retry", error="busy", retry_after_seconds=10))
        clock.advance(9 * SECOND)
        assert await api.claim(WORKER) == []
        clock.advance(SECOND)
    assert last == [("settled", "failed")]
    assert await api.claim(WORKER) == []


async def test_release_costs_no_attempt(api: TrackingHarness, clock: ManualClock) -> None:
    """T13: a released row returns to its position in the queue at once, as if never claimed."""
    await api.queue_up(WORKER, "older")
    clock.advance(SECOND)
    await api.queue_up(WORKER, "younger")
    for _ in range(MAX_ATTEMPTS + 1):
        (item,) = await api.claim(WORKER, limit=1)
        assert (item["filename"], item["attempt"]) == ("older", 1)
        assert await api.report(WORKER, make_report(item, "release")) == [("settled", "new")]


# T14


async def test_heartbeat_extends_named_items(api: TrackingHarness, tracking: Tracking, clock: ManualClock) -> None:
    """T14: a heartbeat extends the leases of the named items; the other leases expire."""
    await api.queue_up(WORKER, FILE, 0, 1)
    named, _ = await api.claim(WORKER, lease_seconds=10)
    clock.advance(9 * SECOND)
    answer = await api.post("/queues/shard-worker/heartbeat", worker="w1", items=[make_lease(named)], lease_seconds=30)
    assert answer == {
        "stage": "shard-worker",
        "lease_until": "2026-01-01T00:00:39Z",
        "extended": [make_lease(named)],
        "lost": [],
    }
    assert await expire(tracking, clock, 2 * SECOND) == 1
    assert [await api.status(FILE, WORKER, shard) for shard in (0, 1)] == ["started", "new"]
    assert await expire(tracking, clock, 30 * SECOND) == 1


async def test_heartbeat_without_items_extends_all_claims_of_a_worker(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock
) -> None:
    """T14: a heartbeat without items extends all claims of the worker in the stage, and no others."""
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


async def test_heartbeat_returns_lost_items(api: TrackingHarness, tracking: Tracking, clock: ManualClock) -> None:
    """T14: reaped, settled and unknown items are lost; a heartbeat does not restore them."""
    await api.queue_up(WORKER, FILE, 0, 1)
    late, ended = await api.claim(WORKER)
    await api.report(WORKER, make_report(ended, "done"))
    await expire(tracking, clock)
    unknown = {"filename": "other", "shard": 0, "fence": 1}
    items = [make_lease(late), make_lease(ended), unknown]
    answer = await api.post("/queues/shard-worker/heartbeat", worker="w1", items=items)
    assert (answer["extended"], answer["lost"]) == ([], items)
    assert await api.status(FILE, WORKER) == "new"


async def test_old_and_new_fence_of_a_row_differ(api: TrackingHarness, tracking: Tracking, clock: ManualClock) -> None:
    """T14: an item is lost under its old fence, even if its worker has claimed the row again under a new one."""
    await api.queue_up(WORKER, FILE)
    (old,) = await api.claim(WORKER)
    await expire(tracking, clock)
    (new,) = await api.claim(WORKER)
    answer = await api.post("/queues/shard-worker/heartbeat", worker="w1", items=[make_lease(old), make_lease(new)])
    assert (answer["extended"], answer["lost"]) == ([make_lease(new)], [make_lease(old)])


async def test_heartbeat_never_shortens_a_lease(api: TrackingHarness, tracking: Tracking, clock: ManualClock) -> None:
    """T14: a heartbeat for one second does not shorten a lease of a minute."""
    await api.queue_up(WORKER, FILE)
    items = await api.claim(WORKER)
    await api.post("/queues/shard-worker/heartbeat", worker="w1", items=[make_lease(items[0])], lease_seconds=1)
    assert await expire(tracking, clock, 5 * SECOND) == 0


async def test_expired_lease_returns_through_failed(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock
) -> None:
    """T14: the reaper returns the row to new through failed; both moves are in the history with the reason."""
    await api.queue_up(WORKER, FILE)
    await api.claim(WORKER, "gone")
    assert await expire(tracking, clock) == 1
    assert await api.status(FILE, WORKER) == "new"
    moves = (await api.get(f"/files/{FILE}/history"))["moves"][-2:]
    assert [(move["from"], move["to"]) for move in moves] == [("started", "failed"), ("failed", "new")]
    for move in moves:
        assert (move["actor"], move["at"]) == ("reaper", "2026-01-01T00:01:01Z")
        assert "gone" in move["reason"]


async def test_row_fails_for_good_after_max_attempts(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock
) -> None:
    """T14: a lease that expires on the last attempt leaves the row failed, until an operator retries it."""
    await api.queue_up(WORKER, FILE)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert [item["attempt"] for item in await api.claim(WORKER)] == [attempt]
        assert await expire(tracking, clock) == 1
    assert await api.status(FILE, WORKER) == "failed"
    assert (await api.steps(FILE, WORKER))[-1] == ("started", "failed")
    assert (await api.claim(WORKER), await expire(tracking, clock)) == ([], 0)
    await api.move(WORKER, "retry", FILE)
    assert [item["attempt"] for item in await api.claim(WORKER)] == [1]


async def test_start_without_a_lease_never_expires(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock
) -> None:
    """T8, T14: the founding document's `start` has no lease: its daemon may take any time."""
    await api.queue_up(WORKER, FILE)
    await api.move(WORKER, "start", FILE, worker="w")
    assert await expire(tracking, clock, timedelta(days=365)) == 0
    assert await api.status(FILE, WORKER) == "started"


# Log


def select(logs: list[Any], *events: str) -> list[dict[str, Any]]:
    """Return the log entries of *events*, without the names of the events."""
    return [{k: v for k, v in entry.items() if k != "event"} for entry in logs if entry["event"] in events]


async def test_log_shows_a_completed_file_once(api: TrackingHarness) -> None:
    """Log: a file is logged at INFO when its last shard is done, by report or by move; claims only at DEBUG."""
    await api.queue_up(SENDER, FILE, 0, 1)
    await api.queue_up(SENDER, "other")
    with capture_logs() as logs:
        first, second, *_ = await api.claim(SENDER, limit=2)
        await api.report(SENDER, make_report(first, "done"))
        assert select(logs, "file_completed") == []
        await api.report(SENDER, make_report(second, "done"))
        await api.report(SENDER, make_report(second, "done"))  # a repeated report
        await api.move(SENDER, "start", "other")
        await api.move(SENDER, "done", "other")
        await api.move(SENDER, "done", "other")
    assert select(logs, "file_completed") == [
        {"log_level": "info", "filename": FILE, "shards": 2},
        {"log_level": "info", "filename": "other", "shards": 1},
    ]
    assert {entry["log_level"] for entry in select(logs, "rows_claimed", "rows_settled", "row_moved")} == {"debug"}


async def test_log_does_not_decide_the_response(api: TrackingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log: a committed report is settled, even if the database fails before the completed file is logged."""

    async def fail(*_: object) -> dict[str, int]:
        raise Transient("DATABASE_DOWN", "the database is down")

    await api.queue_up(SENDER, FILE)
    (row,) = await api.claim(SENDER, limit=1)
    monkeypatch.setattr(store, "find_complete", fail)
    with capture_logs() as logs:
        assert await api.report(SENDER, make_report(row, "done")) == [("settled", "done")]
    assert select(logs, "file_completed") == []


async def test_log_finds_a_file_that_is_completed_out_of_order(api: TrackingHarness) -> None:
    """Log: a file is not complete when its last shard is done before the others."""
    await api.queue_up(SENDER, FILE, 0, 1)
    with capture_logs() as logs:
        first, second = await api.claim(SENDER, limit=2)
        await api.report(SENDER, make_report(second, "done"))
        assert select(logs, "file_completed") == []
        await api.report(SENDER, make_report(first, "done"))
    assert select(logs, "file_completed") == [{"log_level": "info", "filename": FILE, "shards": 2}]


async def test_log_shows_rows_that_failed_for_good(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock
) -> None:
    """Log: a row that fails for good is logged at WARNING with its error; a row that is retried is not."""
    await api.queue_up(WORKER, FILE)
    await api.queue_up(WORKER, "second")
    with capture_logs() as logs:
        for _ in range(MAX_ATTEMPTS):
            assert select(logs, "row_failed") == []
            await api.claim(WORKER, limit=1)
            await expire(tracking, clock)
            await api.claim(WORKER, limit=1)  # the other row
            await expire(tracking, clock)
        await api.queue_up(WORKER, "third", 0, 1)
        item, _ = await api.claim(WORKER)
        await api.report(WORKER, make_report(item, "failed", error="bad line 3"))
        await api.move(WORKER, "fail", "third", 1, error="stopped by hand")
    failed = [(entry["log_level"], entry["filename"], entry["error"]) for entry in select(logs, "row_failed")]
    assert sorted(failed) == [
        ("warning", FILE, "the lease expired on the last attempt"),
        ("warning", "second", "the lease expired on the last attempt"),
        ("warning", "third", "bad line 3"),
        ("warning", "third", "stopped by hand"),
    ]
