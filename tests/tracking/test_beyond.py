"""Beyond the document: claims, reports, leases, history, reasons, live moves, bulk retry and pauses."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import timedelta
from typing import Any

import pytest
from fastapi import FastAPI

from penstock.kernel.clock import ManualClock
from penstock.kernel.journal import BEGINNING, Noted
from penstock.kernel.live import Batch
from penstock.kernel.telemetry import Telemetry
from penstock.tracking.service import Tracking
from tests.support.http import problem
from tests.support.sse import EventStream
from tests.support.types import Json
from tests.tracking.conftest import MAX_ATTEMPTS
from tests.tracking.rig import BASE, FILE, INGEST, SENDER, SPLITTER, WORKER, Api, held, reported

SECOND = timedelta(seconds=1)
LEASE = timedelta(seconds=60)


def names(items: Sequence[Json]) -> list[tuple[str, int]]:
    return [(item["filename"], item["shard"]) for item in items]


async def expire(tracking: Tracking, clock: ManualClock, after: timedelta = LEASE) -> int:
    """Let every lease run out; how many were taken back."""
    clock.advance(after + SECOND)
    return await tracking.reap()


# T12


async def test_a_claim_starts_the_oldest_rows(api: Api, clock: ManualClock) -> None:
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


async def test_without_a_word_one_row_is_claimed_for_a_minute(api: Api) -> None:
    """T12: `limit` and `lease_seconds` may be left out."""
    await api.queue_up(WORKER, FILE, 0, 1)
    items = (await api.post("/queues/shard-worker/claim", worker="w1"))["items"]
    assert names(items) == [(FILE, 0)]
    assert items[0]["lease_until"] == "2026-01-01T00:01:00Z"


async def test_only_what_is_ready_is_handed_out(api: Api) -> None:
    """T8, T12: nothing is claimed before the stage before it is done, and nothing that failed."""
    await api.queue_up(SPLITTER, "too-early")
    await api.queue_up(WORKER, "failed")
    await api.move(WORKER, "fail", "failed")
    assert await api.claim(WORKER) == []
    assert await api.claim(SENDER) == []


async def test_fences_grow_with_every_claim(api: Api) -> None:
    """T12: each time a row is handed out, in whatever stage, its fence is higher."""
    await api.queue_up(SPLITTER, FILE)
    fences = []
    for stage in (SPLITTER, SPLITTER, WORKER, SENDER):
        (item,) = await api.claim(stage)
        fences.append(item["fence"])
        outcome = "release" if len(fences) == 1 else "done"
        assert (await api.report(stage, reported(item, outcome)))[0][0] == "settled"
    assert fences == sorted(set(fences))


async def test_claimers_at_once_share_nothing(api: Api) -> None:
    """T12: eight workers at once get every row, and none of them twice."""
    await api.queue_up(SPLITTER, FILE, *range(40))
    claims = await asyncio.gather(*(api.claim(SPLITTER, f"w{n}", limit=5) for n in range(8)))
    rest = await api.claim(SPLITTER)
    got = [item["shard"] for items in [*claims, rest] for item in items]
    assert sorted(got) == list(range(40))


async def test_a_claim_waits_for_work(api: Api) -> None:
    """T12: a claim that may wait gets the row as soon as it is ready."""
    await api.post("/files/register", filename=FILE, shards=[0])
    waiting = asyncio.create_task(api.claim(SPLITTER, wait_seconds=30))
    async with asyncio.timeout(10):
        await api.move(INGEST, "done", FILE)
        assert names(await waiting) == [(FILE, 0)]


# T13


async def test_reports_are_answered_one_by_one(api: Api) -> None:
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


async def test_a_report_said_twice_is_unchanged(api: Api, clock: ManualClock) -> None:
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


async def test_of_two_reports_in_a_batch_the_first_counts(api: Api) -> None:
    """T13: of two reports on one row in one batch the first is believed; the same again is unchanged."""
    await api.queue_up(WORKER, FILE, 0, 1)
    one, two = await api.claim(WORKER)
    answers = await api.report(
        WORKER, reported(one, "done"), reported(one, "done"), reported(two, "failed"), reported(two, "done")
    )
    assert answers == [("settled", "done"), ("unchanged", "done"), ("settled", "failed"), ("superseded", "failed")]
    assert await api.steps(FILE, WORKER, 0) == [("new", "started"), ("started", "done")]


async def test_an_old_fence_changes_nothing(api: Api, tracking: Tracking, clock: ManualClock) -> None:
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


async def test_a_report_on_a_row_in_another_stage_is_superseded(api: Api) -> None:
    """T13: a fence holds for the stage it was claimed in."""
    await api.queue_up(WORKER, FILE)
    (item,) = await api.claim(WORKER)
    assert (await api.report(SENDER, reported(item, "done")))[0][0] == "superseded"
    assert await api.status(FILE, WORKER) == "started"


async def test_a_retry_waits_and_counts(api: Api, clock: ManualClock) -> None:
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


async def test_a_release_costs_nothing(api: Api, clock: ManualClock) -> None:
    """T13: what was not begun goes back to its place in the queue at once, as if never claimed."""
    await api.queue_up(WORKER, "older")
    clock.advance(SECOND)
    await api.queue_up(WORKER, "younger")
    for _ in range(MAX_ATTEMPTS + 1):
        (item,) = await api.claim(WORKER, limit=1)
        assert (item["filename"], item["attempt"]) == ("older", 1)
        assert await api.report(WORKER, reported(item, "release")) == [("settled", "new")]


# T14


async def test_a_heartbeat_extends_what_it_names(api: Api, tracking: Tracking, clock: ManualClock) -> None:
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
    api: Api, tracking: Tracking, clock: ManualClock
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


async def test_a_heartbeat_tells_what_was_lost(api: Api, tracking: Tracking, clock: ManualClock) -> None:
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


async def test_a_row_lost_and_claimed_again_is_both(api: Api, tracking: Tracking, clock: ManualClock) -> None:
    """T14: under its old fence an item is lost, also for a worker that holds the row again under a new one."""
    await api.queue_up(WORKER, FILE)
    (old,) = await api.claim(WORKER)
    await expire(tracking, clock)
    (new,) = await api.claim(WORKER)
    answer = await api.post("/queues/shard-worker/heartbeat", worker="w1", items=[held(old), held(new)])
    assert (answer["extended"], answer["lost"]) == ([held(new)], [held(old)])


async def test_a_heartbeat_never_shortens_a_lease(api: Api, tracking: Tracking, clock: ManualClock) -> None:
    """T14: a heartbeat for a second leaves a minute's lease a minute."""
    await api.queue_up(WORKER, FILE)
    items = await api.claim(WORKER)
    await api.post("/queues/shard-worker/heartbeat", worker="w1", items=[held(items[0])], lease_seconds=1)
    assert await expire(tracking, clock, 5 * SECOND) == 0


async def test_a_lease_that_ran_out_goes_back_through_failed(api: Api, tracking: Tracking, clock: ManualClock) -> None:
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


async def test_after_max_attempts_it_has_failed_for_good(api: Api, tracking: Tracking, clock: ManualClock) -> None:
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


async def test_a_start_without_a_lease_is_never_taken_back(api: Api, tracking: Tracking, clock: ManualClock) -> None:
    """T8, T14: the document's own `start` knows no lease: its daemon may take as long as it needs."""
    await api.queue_up(WORKER, FILE)
    await api.move(WORKER, "start", FILE, worker="w")
    assert await expire(tracking, clock, timedelta(days=365)) == 0
    assert await api.status(FILE, WORKER) == "started"


# T15


async def test_history_tells_who_when_and_why(api: Api, clock: ManualClock) -> None:
    """T15: every move of every row, oldest first, with its author, its time, its reason and its fence."""
    await api.post("/files/register", filename=FILE, shards=[0], worker="producer")
    clock.advance(SECOND)
    await api.move(INGEST, "done", FILE, worker="producer")
    await api.claim(SPLITTER, "splitter-1")
    clock.advance(SECOND)
    await api.move(SPLITTER, "fail", FILE, error="disk full")
    history = await api.get(f"/files/{FILE}/history")
    row = {"filename": FILE, "shard": 0}
    ingest, split = {**row, "stage": "event-ingest"}, {**row, "stage": "shard-splitter"}
    first, second, third = (f"2026-01-01T00:00:0{n}Z" for n in range(3))
    no = {"reason": None}
    assert history == {
        "filename": FILE,
        "moves": [
            {**ingest, "from": None, "to": "started", "actor": "producer", "at": first, **no, "fence": None},
            {**ingest, "from": "started", "to": "done", "actor": "producer", "at": second, **no, "fence": 0},
            {**split, "from": "new", "to": "started", "actor": "splitter-1", "at": second, **no, "fence": 1},
            {
                **split,
                "from": "started",
                "to": "failed",
                "actor": "operator",
                "at": third,
                "reason": "disk full",
                "fence": 1,
            },
        ],
        "next": None,
    }


async def test_reports_are_noted_under_their_workers_name(api: Api) -> None:
    """T13, T15: the worker that claimed a row is the author of its end; the error it gave is the reason."""
    await api.queue_up(WORKER, FILE)
    (item,) = await api.claim(WORKER, "w7")
    await api.report(WORKER, reported(item, "failed", error="bad line 3"))
    last = (await api.get(f"/files/{FILE}/history"))["moves"][-1]
    assert (last["actor"], last["reason"], last["to"], last["fence"]) == ("w7", "bad line 3", "failed", item["fence"])


async def test_history_comes_in_pages(api: Api) -> None:
    """T15: page by page, no move twice and none left out, also within one batch of moves."""
    await api.queue_up(WORKER, FILE, 0, 1, 2)
    await api.queue_up(WORKER, "other", 0)
    whole = (await api.get(f"/files/{FILE}/history"))["moves"]
    found: list[Json] = []
    cursor = None
    while True:
        page = await api.get(f"/files/{FILE}/history", limit=2, **({"cursor": cursor} if cursor else {}))
        assert len(page["moves"]) <= 2
        found += page["moves"]
        if (cursor := page["next"]) is None:
            break
    assert found == whole
    assert len(whole) == 3 * 4
    assert problem(await api.http.get(f"/files/{FILE}/history", params={"cursor": "W10"}), 422, "BAD_CURSOR")["hint"]


# T16


async def why(api: Api, filename: str = FILE) -> tuple[str | None, str, str, str]:
    told = await api.get(f"/files/{filename}/0/why")
    return told["stage"], told["status"], told["why"], told["hint"] or ""


async def test_why_tells_of_a_file_that_is_not_complete(api: Api, clock: ManualClock) -> None:
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


async def test_why_tells_of_a_row_nobody_takes(api: Api, clock: ManualClock) -> None:
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


async def test_why_tells_who_holds_a_row(api: Api, tracking: Tracking, clock: ManualClock) -> None:
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


async def test_why_tells_of_a_start_without_a_lease(api: Api) -> None:
    """T16: a row started without a lease is waited for without end; what to do if its worker is gone."""
    await api.queue_up(WORKER, FILE)
    await api.move(WORKER, "start", FILE, worker="by hand")
    _, status, words, hint = await why(api)
    assert status == "started"
    assert "by hand" in words
    assert "without a lease" in words
    assert "/stages/shard-worker/fail" in hint


async def test_why_tells_how_it_failed(api: Api, clock: ManualClock) -> None:
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


async def test_why_tells_of_a_later_try(api: Api) -> None:
    """T16: a row that is tried again later says when, and after how many attempts."""
    await api.queue_up(WORKER, FILE)
    (item,) = await api.claim(WORKER)
    await api.report(WORKER, reported(item, "retry", error="busy", retry_after_seconds=90))
    _, status, words, _ = await why(api)
    assert status == "new"
    assert "90 seconds" in words
    assert "attempt 1" in words


async def test_why_tells_of_a_pause(api: Api, clock: ManualClock) -> None:
    """T16, T19: a row of a paused stage names who paused it, when and why, and how to go on."""
    await api.queue_up(WORKER, FILE)
    await api.post("/queues/shard-worker/pause", worker="ann", reason="moving house")
    clock.advance(timedelta(days=2))
    _, status, words, hint = await why(api)
    assert status == "new"
    for part in ("ann", "moving house", "2 days ago"):
        assert part in words
    assert "/queues/shard-worker/resume" in hint


async def test_why_tells_that_all_is_done(api: Api, clock: ManualClock) -> None:
    """T16: a row at the end of its way says so, and since when."""
    await api.queue_up(SENDER, FILE)
    await api.move(SENDER, "start", FILE)
    await api.move(SENDER, "done", FILE)
    clock.advance(timedelta(minutes=4))
    stage, status, words, _ = await why(api)
    assert (stage, status) == (None, "done")
    assert "all stages are done" in words
    assert "4 minutes" in words


# T17


async def next_moves(moves: AsyncIterator[Batch], number: int) -> list[tuple[str, str]]:
    """The next so many moves of a stream: whose, and where to."""
    found: list[Noted] = []
    async with asyncio.timeout(20):
        while len(found) < number:
            found += (await anext(moves))[1]
    return [(noted.entry.subject, noted.entry.target) for noted in found]


async def test_moves_are_told_as_they_are_made(api: Api, tracking: Tracking) -> None:
    """T17: a watcher hears every move made from its beginning on, in order."""
    async with aclosing(tracking.live.moves(await tracking.live.start(None))) as moves:
        await api.queue_up(WORKER, FILE)
        expected = [(f"{FILE}/0", status) for status in ("started", "done", "started", "done")]
        assert await next_moves(moves, 4) == expected


async def test_a_watcher_goes_on_where_it_left_off(api: Api, tracking: Tracking) -> None:
    """T17: from any position on, every move after it is told, once."""
    await api.queue_up(WORKER, FILE, 0, 1)
    async with aclosing(tracking.live.moves((BEGINNING,))) as moves:
        batch: list[Noted] = []
        while len(batch) < 8:
            batch += (await anext(moves))[1]
    whole = [(noted.entry.subject, noted.entry.target) for noted in batch]
    for place in (0, 3, 6):
        async with aclosing(tracking.live.moves((batch[place].position,))) as moves:
            assert await next_moves(moves, 7 - place) == whole[place + 1 :]


class Watcher:
    """`GET /events` of an application: httpx's own transport reads an answer to its end, and this one has none."""

    def __init__(self, app: FastAPI, then: Callable[[], Awaitable[Any]]) -> None:
        self._app, self._then = app, then
        self._bodies: list[str] = []
        self._heard = asyncio.Event()

    async def heard(self) -> str:
        """What came after the first bytes; *then* is done once these are out and before anything else goes on."""
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "query_string": b"",
            "path": f"{BASE}/events",
            "raw_path": f"{BASE}/events".encode(),
            "root_path": "",
            "headers": [(b"host", b"127.0.0.1")],
            "client": None,
            "server": ("127.0.0.1", 80),
        }
        watching = asyncio.create_task(self._app(scope, self._receive, self._send))
        try:
            async with asyncio.timeout(5):
                await self._heard.wait()
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        return "".join(self._bodies[1:])

    async def _receive(self) -> Any:
        await asyncio.Event().wait()  # it asks nothing more, and does not go

    async def _send(self, message: Any) -> None:
        if body := message.get("body"):
            self._bodies.append(body.decode())
            if len(self._bodies) == 1:
                await self._then()
            else:
                self._heard.set()


async def test_a_greeted_watcher_misses_nothing(api: Api, app: FastAPI) -> None:
    """T17: whoever has received the beginning of the stream receives every move made after it."""
    watcher = Watcher(app, lambda: api.post("/files/register", filename=FILE, shards=[0]))
    assert FILE in await watcher.heard()


async def test_events_stream_over_http(live: Api) -> None:
    """T17: `GET /events` tells moves as server-sent events; Last-Event-ID goes on, filters leave out."""
    async with live.http.stream("GET", "/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = EventStream(answer)
        await live.queue_up(SPLITTER, "a")
        first_id, first = await events.next()
        assert (first["filename"], first["shard"], first["stage"]) == ("a", 0, "event-ingest")
        assert (first["from"], first["to"], first["actor"]) == (None, "started", "operator")
        _, second = await events.next()
        assert (second["from"], second["to"]) == ("started", "done")
    await live.queue_up(WORKER, "b")
    go_on = {"last-event-id": first_id}
    async with live.http.stream("GET", "/events", headers=go_on) as answer:
        events = EventStream(answer)
        told = [await events.next() for _ in range(5)]
    assert [(one["filename"], one["to"]) for _, one in told] == [
        ("a", "done"),
        ("b", "started"),
        ("b", "done"),
        ("b", "started"),
        ("b", "done"),
    ]
    params = {"stage": "shard-splitter", "filename": "b"}
    async with live.http.stream("GET", "/events", headers=go_on, params=params) as answer:
        assert (await EventStream(answer).next())[0] == told[3][0]
    for path, headers, code in (("/events", {"last-event-id": "x"}, "BAD_EVENT_ID"), ("/events?stage=x", {}, None)):
        refused = await live.http.get(path, headers=headers)
        assert refused.status_code == 422
        assert code in (None, refused.json()["code"])


def metrics(telemetry: Telemetry) -> dict[str, float]:
    lines = telemetry.exposition().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line.startswith("penstock_tracking"))
    return {name.removeprefix("penstock_tracking_"): float(value) for name, _, value in pairs}


async def test_prometheus_sees_the_pipeline(
    api: Api, tracking: Tracking, clock: ManualClock, telemetry: Telemetry
) -> None:
    """T17: gauges per stage and status, the oldest age per queue, and a counter of leases that ran out."""
    await api.queue_up(WORKER, "old")
    clock.advance(timedelta(seconds=100))
    await api.queue_up(WORKER, "young", 0, 1)
    await api.queue_up(WORKER, "failed")
    await api.move(WORKER, "fail", "failed")
    await tracking.show_metrics()
    shown = metrics(telemetry)
    assert shown['rows{stage="shard-worker",status="new"}'] == 3
    assert shown['rows{stage="shard-worker",status="failed"}'] == 1
    assert shown['rows{stage="event-ingest",status="done"}'] == 4
    assert shown['rows{stage="mysql-sender",status="new"}'] == 4
    assert shown['queue_rows{stage="shard-worker"}'] == 3
    assert shown['queue_rows{stage="mysql-sender"}'] == 0
    assert shown['queue_oldest_seconds{stage="shard-worker"}'] == 100
    assert shown['queue_oldest_seconds{stage="shard-splitter"}'] == 0
    assert shown['lease_expiries_total{stage="shard-worker"}'] == 0
    assert shown['paused{stage="shard-worker"}'] == 0
    await api.claim(WORKER, limit=2)
    await expire(tracking, clock)
    await api.post("/queues/shard-worker/pause")
    await tracking.show_metrics()
    shown = metrics(telemetry)
    assert shown['lease_expiries_total{stage="shard-worker"}'] == 2
    assert shown['paused{stage="shard-worker"}'] == 1


async def test_the_oldest_row_is_the_one_that_came_first(
    api: Api, tracking: Tracking, clock: ManualClock, telemetry: Telemetry
) -> None:
    """T17: the age of a queue is that of its oldest row, also when that one is tried again after younger ones."""
    await api.queue_up(WORKER, "old")
    (item,) = await api.claim(WORKER)
    clock.advance(timedelta(seconds=100))
    await api.queue_up(WORKER, "young")
    await api.report(WORKER, reported(item, "retry", error="busy", retry_after_seconds=10))
    clock.advance(timedelta(seconds=20))
    await tracking.show_metrics()
    assert metrics(telemetry)['queue_oldest_seconds{stage="shard-worker"}'] == 120


# T19


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
    api: Api, clock: ManualClock, chosen: Json, expected: list[tuple[str, int]]
) -> None:
    """T19: all failed rows of a stage, or those of a prefix, of shards, of a time, of an error; and no others."""
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


async def test_a_failure_has_the_time_of_its_own_stage(api: Api, clock: ManualClock) -> None:
    """T16, T19: what another stage of the row does later does not make its failure younger."""
    await api.queue_up(SPLITTER, FILE)
    await api.move(WORKER, "fail", FILE)
    clock.advance(timedelta(minutes=5))
    for step in ("start", "done"):
        await api.move(SPLITTER, step, FILE)
    assert "5 minutes ago" in (await why(api))[2]
    chosen = {"failed_before": "2026-01-01T00:00:01Z"}
    assert (await api.post("/stages/shard-worker/retry-failed", **chosen))["retried"] == 1


async def test_bulk_retry_gives_back_all_attempts_and_says_who(
    api: Api, tracking: Tracking, clock: ManualClock
) -> None:
    """T15, T19: a row set back in bulk begins anew, and its history tells by whom."""
    await api.queue_up(WORKER, FILE)
    for _ in range(MAX_ATTEMPTS):
        await api.claim(WORKER)
        await expire(tracking, clock)
    await api.post("/stages/shard-worker/retry-failed", worker="ann")
    last = (await api.get(f"/files/{FILE}/history"))["moves"][-1]
    assert (last["from"], last["to"], last["actor"]) == ("failed", "new", "ann")
    assert [item["attempt"] for item in await api.claim(WORKER)] == [1]


async def test_bulk_retry_of_files(api: Api) -> None:
    """T2, T19: event-ingest is retried file by file; single shards of it cannot be."""
    for name in ("a", "b"):
        await api.post("/files/register", filename=name, shards=[0, 1])
        await api.move(INGEST, "fail", name, error="timeout")
    await api.refused(422, "WHOLE_FILES_ONLY", "/stages/event-ingest/retry-failed", shards=[0])
    assert (await api.post("/stages/event-ingest/retry-failed", filename_prefix="a"))["retried"] == 1
    assert [await api.status(name, INGEST, 1) for name in ("a", "b")] == ["new", "failed"]


async def test_a_paused_stage_hands_out_nothing(api: Api) -> None:
    """T12, T19: while a stage is paused nothing of it is claimed; other stages go on, and after resume it does too."""
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


async def test_a_paused_stage_starts_nothing_and_ends_what_runs(api: Api) -> None:
    """T8, T19: `start` is refused with the state and who paused it; what is under way may end."""
    await api.queue_up(WORKER, FILE, 0, 1, 2)
    await api.move(WORKER, "start", FILE, 0, worker="w1")
    (claimed,) = await api.claim(WORKER, limit=1)
    await api.post("/queues/shard-worker/pause", worker="ann")
    await api.post("/queues/shard-worker/pause", worker="bob")  # it stays ann's
    refused = await api.refused(409, "STAGE_PAUSED", "/stages/shard-worker/start", filename=FILE, shard=2)
    assert (refused["current"], "ann" in refused["detail"], bool(refused["hint"])) == ("new", True, True)
    assert (await api.move(WORKER, "start", FILE, 0, worker="w1"))["status"] == "started"
    await api.move(WORKER, "done", FILE, 0)
    assert await api.report(WORKER, reported(claimed, "done")) == [("settled", "done")]


async def test_resume_wakes_who_waits(api: Api) -> None:
    """T12, T19: a worker that waits at a paused stage gets its row when the stage is resumed."""
    await api.queue_up(WORKER, FILE)
    await api.post("/queues/shard-worker/pause")
    waiting = asyncio.create_task(api.claim(WORKER, wait_seconds=30))
    async with asyncio.timeout(10):
        await api.post("/queues/shard-worker/resume")
        assert names(await waiting) == [(FILE, 0)]


# T5


async def test_a_cursor_skips_nothing_while_the_queue_moves(api: Api, clock: ManualClock) -> None:
    """T5: rows leave and enter between pages; of those that stayed none is skipped and none comes twice."""
    for n in range(10):
        await api.queue_up(WORKER, f"f{n}")
        clock.advance(SECOND)
    page = await api.get("/queues/shard-worker", limit=4)
    seen = [item["filename"] for item in page["items"]]
    await api.claim(WORKER, limit=3)  # f0, f1 and f2 leave
    await api.move(WORKER, "start", "f5")
    await api.queue_up(WORKER, "f10")
    while page["next"]:
        page = await api.get("/queues/shard-worker", limit=4, cursor=page["next"])
        seen += [item["filename"] for item in page["items"]]
    assert seen == ["f0", "f1", "f2", "f3", "f4", "f6", "f7", "f8", "f9", "f10"]


async def test_a_cursor_tells_apart_rows_of_one_moment(api: Api) -> None:
    """T5: rows that came in one moment are paged one by one."""
    await api.queue_up(SPLITTER, FILE, *range(5))
    shards, cursor = [], None
    while True:
        page = await api.get("/queues/shard-splitter", limit=1, **({"cursor": cursor} if cursor else {}))
        shards += [item["shard"] for item in page["items"]]
        if (cursor := page["next"]) is None:
            break
    assert shards == list(range(5))


async def test_offsets_still_work(api: Api, clock: ManualClock) -> None:
    """T5: `limit` and `offset` as the document has them; past the end there is nothing."""
    await api.queue_up(SPLITTER, FILE, *range(5))
    for offset, expected in ((0, [0, 1]), (2, [2, 3]), (4, [4]), (6, [])):
        page = await api.get("/queues/shard-splitter", limit=2, offset=offset)
        assert [item["shard"] for item in page["items"]] == expected


async def test_a_queue_by_the_time_of_its_rows(api: Api, clock: ManualClock) -> None:
    """T5: `updated_since` is the first moment that counts, `updated_before` the first that does not."""
    for n in range(3):
        await api.queue_up(SPLITTER, f"f{n}")
        clock.advance(SECOND)

    async def found(**params: str) -> list[str]:
        items = (await api.get("/queues/shard-splitter", **params))["items"]
        return [item["filename"] for item in items]

    moment = "2026-01-01T00:00:01Z"
    assert await found(updated_since=moment) == ["f1", "f2"]
    assert await found(updated_before=moment) == ["f0"]
    assert await found(updated_since=moment, updated_before="2026-01-01T00:00:02Z") == ["f1"]
    assert await found(updated_since="2026-01-01T02:00:01+02:00") == ["f1", "f2"]
