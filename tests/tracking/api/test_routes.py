"""The founding document: its seven endpoints, their rules and their errors."""

import asyncio
import json
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.tracking.contract import Stage
from penstock.tracking.service import Tracking
from tests.support.http import answered, problem
from tests.support.types import Json
from tests.tracking.harness import FILE, INGEST, SENDER, SPLITTER, WORKER, TrackingHarness

SECOND = timedelta(seconds=1)
TIMEOUT = 20  # seconds; only a request that waits for a lock takes so long
QUEUED = [SPLITTER, WORKER, SENDER]
STATES = ["new", "started", "done", "failed"]
MOVES = ["start", "done", "fail", "retry"]
# T8: the status after each move from each status; None is refused with 409.
TABLE: dict[tuple[str, str], str | None] = {
    ("new", "start"): "started",
    ("new", "done"): None,
    ("new", "fail"): "failed",
    ("new", "retry"): "new",
    ("started", "start"): None,  # a claim: an unnamed worker cannot repeat it
    ("started", "done"): "done",
    ("started", "fail"): "failed",
    ("started", "retry"): None,
    ("done", "start"): None,
    ("done", "done"): "done",
    ("done", "fail"): None,
    ("done", "retry"): None,
    ("failed", "start"): None,
    ("failed", "done"): None,
    ("failed", "fail"): "failed",
    ("failed", "retry"): "new",
}


async def make_file(api: TrackingHarness, stage: Stage, state: str, filename: str) -> None:
    """Create a file of one shard with *state* in *stage* and every previous stage done."""
    if stage is INGEST:
        await api.post("/files/register", filename=filename, shards=[0])
        moves = {"new": ["fail", "retry"], "started": [], "done": ["done"], "failed": ["fail"]}
    else:
        await api.queue_up(stage, filename)
        moves = {"new": [], "started": ["start"], "done": ["start", "done"], "failed": ["fail"]}
    for step in moves[state]:
        await api.move(stage, step, filename)


async def test_requests_of_the_founding_document(api: TrackingHarness) -> None:
    """T1, T2, T3, T4, T5: every request of the founding document gets the answer printed in it."""
    assert await api.post("/files/register", filename=FILE, shards=[0, 1]) == {
        "filename": FILE,
        "shards": [0, 1],
        "created": True,
    }
    assert await api.post("/stages/event-ingest/done", filename=FILE) == {"filename": FILE, "updated_rows": 2}
    for shard in (0, 1):
        await api.post("/stages/shard-splitter/start", filename=FILE, shard=shard)
        await api.post("/stages/shard-splitter/done", filename=FILE, shard=shard)
    assert await api.get("/queues/shard-worker", limit=1) == {
        "stage": "shard-worker",
        "items": [{"filename": FILE, "shard": 0, "created_at": "2026-01-01T00:00:00Z"}],
        "next": (await api.get("/queues/shard-worker", limit=1))["next"],
    }
    for transition, status in (("start", "started"), ("done", "done")):
        assert await api.post(f"/stages/shard-worker/{transition}", filename=FILE, shard=0) == {
            "filename": FILE,
            "shard": 0,
            "stage": "shard-worker",
            "status": status,
        }
    await api.post("/stages/shard-worker/start", filename=FILE, shard=1)
    await api.post("/stages/shard-worker/done", filename=FILE, shard=1)
    await api.post("/stages/mysql-sender/start", filename=FILE, shard=1)
    assert (await api.post("/stages/mysql-sender/fail", filename=FILE, shard=1))["status"] == "failed"
    assert await api.post("/stages/mysql-sender/retry", filename=FILE, shard=1) == {
        "filename": FILE,
        "shard": 1,
        "stage": "mysql-sender",
        "status": "new",
    }


async def test_file_shows_its_shards(api: TrackingHarness, clock: ManualClock) -> None:
    """T6: a file shows all shards in order, with four statuses and the time of the last move, as in the document."""
    await api.queue_up(WORKER, FILE, 1, 0)
    clock.advance(timedelta(minutes=5))
    await api.move(WORKER, "start", FILE, 0)
    known = {"event_ingest_status": "done", "shard_splitter_status": "done", "mysql_sender_status": "new"}
    moved = {"shard": 0, **known, "shard_worker_status": "started", "updated_at": "2026-01-01T00:05:00Z"}
    waiting = {"shard": 1, **known, "shard_worker_status": "new", "updated_at": "2026-01-01T00:00:00Z"}
    assert await api.get(f"/files/{FILE}") == {"filename": FILE, "shards": [moved, waiting]}


async def test_register_starts_event_ingest(api: TrackingHarness) -> None:
    """T1: there is one row per shard, with event-ingest started and the other stages new."""
    await api.post("/files/register", filename=FILE, shards=[2, 0])
    rows = (await api.get(f"/files/{FILE}"))["shards"]
    assert [row["shard"] for row in rows] == [0, 2]
    for row in rows:
        assert [row[f"{stage.field}_status"] for stage in Stage] == ["started", "new", "new", "new"]


async def test_repeated_registration_succeeds(api: TrackingHarness) -> None:
    """T1: `created` is false for the same shards, a part of them, and after event-ingest is done."""
    await api.post("/files/register", filename=FILE, shards=[0, 1])
    before = await api.get(f"/files/{FILE}")
    for shards in ([0, 1], [1]):
        again = await api.post("/files/register", filename=FILE, shards=shards)
        assert again == {"filename": FILE, "shards": shards, "created": False}
    assert await api.get(f"/files/{FILE}") == before
    await api.move(INGEST, "done", FILE)
    assert (await api.post("/files/register", filename=FILE, shards=[0, 1]))["created"] is False


async def test_new_shards_join_until_the_file_is_complete(api: TrackingHarness) -> None:
    """T1: new shards of a file are inserted while its event-ingest is not done; later they are refused with 409."""
    await api.post("/files/register", filename=FILE, shards=[0])
    assert (await api.post("/files/register", filename=FILE, shards=[0, 1]))["created"] is True
    assert (await api.move(INGEST, "done", FILE))["updated_rows"] == 2
    refused = await api.refused(409, "FILE_SEALED", "/files/register", filename=FILE, shards=[0, 2])
    assert (refused["current"], bool(refused["hint"])) == ("done", True)
    assert len((await api.get(f"/files/{FILE}"))["shards"]) == 2


async def test_one_of_concurrent_registrations_creates(api: TrackingHarness) -> None:
    """T1: ten concurrent registrations of one file leave one row per shard; one of them created it."""
    answers = await asyncio.gather(*(api.post("/files/register", filename=FILE, shards=[0, 1]) for _ in range(10)))
    assert sorted(answer["created"] for answer in answers) == [False] * 9 + [True]
    assert (await api.get("/metrics/summary"))["total"] == 2


async def test_event_ingest_moves_the_whole_file(api: TrackingHarness) -> None:
    """T2: done, fail, retry and start move all shards, and a repeated request gets the same answer."""
    await api.post("/files/register", filename=FILE, shards=[0, 1, 2])
    for transition, status in (("fail", "failed"), ("retry", "new"), ("start", "started"), ("done", "done")):
        assert await api.move(INGEST, transition, FILE) == {"filename": FILE, "updated_rows": 3}
        rows = (await api.get(f"/files/{FILE}"))["shards"]
        assert {row["event_ingest_status"] for row in rows} == {status}
        if transition != "start":
            assert await api.move(INGEST, transition, FILE) == {"filename": FILE, "updated_rows": 3}


async def test_file_has_one_producer(api: TrackingHarness) -> None:
    """T2, T8: shards that are added later belong to the producer of the file; only it may repeat or end its start."""
    await api.post("/files/register", filename=FILE, shards=[0], worker="a")
    await api.post("/files/register", filename=FILE, shards=[1], worker="b")
    refused = await api.refused(409, "ALREADY_STARTED", "/stages/event-ingest/start", filename=FILE, worker="b")
    assert (refused["current"], refused["worker"]) == ("started", "a")
    await api.refused(409, "CLAIMED_BY_OTHER", "/stages/event-ingest/done", filename=FILE, worker="b")
    assert (await api.post("/stages/event-ingest/done", filename=FILE, worker="a"))["updated_rows"] == 2


@pytest.mark.parametrize("stage", list(Stage))
async def test_every_move_from_every_state(api: TrackingHarness, clock: ManualClock, stage: Stage) -> None:
    """T3, T4, T8: possible moves succeed, repeated ones change nothing, all others are 409 with the current status."""
    for (state, transition), target in TABLE.items():
        filename = f"{state}-{transition}"
        await make_file(api, stage, state, filename)
        before = await api.row(filename)
        clock.advance(SECOND)
        row = {} if stage is INGEST else {"shard": 0}
        answer = await api.http.post(f"/stages/{stage}/{transition}", json={"filename": filename, **row})
        after = await api.row(filename)
        if target is None:
            code = "ALREADY_STARTED" if (state, transition) == ("started", "start") else "BAD_MOVE"
            assert problem(answer, 409, code)["current"] == state, filename
            assert after == before
        else:
            done = {"updated_rows": 1} if stage is INGEST else {"shard": 0, "stage": stage.value, "status": target}
            assert answered(answer) == {"filename": filename, **done}
            assert after[f"{stage.field}_status"] == target
        assert (after["updated_at"] == before["updated_at"]) is (target in (None, state)), filename


async def test_repeated_move_is_not_recorded(api: TrackingHarness, clock: ManualClock) -> None:
    """T8: a request for the present status of a row adds nothing to the history."""
    await make_file(api, WORKER, "done", FILE)
    before = await api.steps(FILE)
    clock.advance(SECOND)
    await api.move(WORKER, "done", FILE, worker="other")
    assert await api.steps(FILE) == before


async def test_start_is_a_claim(api: TrackingHarness, clock: ManualClock) -> None:
    """T8: a second `start` succeeds for the same worker only; another or an unnamed worker gets 409."""
    await api.queue_up(WORKER, FILE)
    await api.move(WORKER, "start", FILE, worker="a")
    before = await api.row(FILE)
    clock.advance(SECOND)
    assert (await api.move(WORKER, "start", FILE, worker="a"))["status"] == "started"
    for other in ({"worker": "b"}, {}):
        path = "/stages/shard-worker/start"
        refused = await api.refused(409, "ALREADY_STARTED", path, filename=FILE, shard=0, **other)
        assert (refused["current"], refused["worker"]) == ("started", "a")
    assert await api.row(FILE) == before


async def test_unnamed_start_cannot_be_repeated(api: TrackingHarness) -> None:
    """T8: a `start` without a worker name cannot be repeated."""
    await api.queue_up(WORKER, FILE)
    await api.move(WORKER, "start", FILE)
    for again in ({}, {"worker": "a"}):
        await api.refused(409, "ALREADY_STARTED", "/stages/shard-worker/start", filename=FILE, shard=0, **again)


async def test_producer_may_repeat_its_start(api: TrackingHarness) -> None:
    """T1, T8: the registration is the start of event-ingest, and claims it for the named worker."""
    await api.post("/files/register", filename=FILE, shards=[0, 1], worker="a")
    assert (await api.move(INGEST, "start", FILE, worker="a"))["updated_rows"] == 2
    await api.refused(409, "ALREADY_STARTED", "/stages/event-ingest/start", filename=FILE, worker="b")


async def test_one_of_concurrent_starts_succeeds(api: TrackingHarness) -> None:
    """T8: `start` is a claim: of ten concurrent workers one gets the row, the others get 409."""
    await api.queue_up(WORKER, FILE)
    body = {"filename": FILE, "shard": 0}
    starts = [api.http.post("/stages/shard-worker/start", json={**body, "worker": f"w{n}"}) for n in range(10)]
    answers = await asyncio.gather(*starts)
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 9
    assert await api.steps(FILE, WORKER) == [("new", "started")]


async def test_only_its_worker_ends_a_row(api: TrackingHarness) -> None:
    """T8: a named worker cannot end the row of another worker; an unnamed caller, an operator, can."""
    await api.queue_up(WORKER, FILE)
    await api.move(WORKER, "start", FILE, worker="a")
    for transition in ("done", "fail"):
        path = f"/stages/shard-worker/{transition}"
        refused = await api.refused(409, "CLAIMED_BY_OTHER", path, filename=FILE, shard=0, worker="b")
        assert (refused["current"], refused["worker"]) == ("started", "a")
    assert (await api.move(WORKER, "done", FILE))["status"] == "done"


@pytest.mark.parametrize("stage", QUEUED)
async def test_stages_start_in_order(api: TrackingHarness, stage: Stage) -> None:
    """T8: a stage starts only when the previous one is done: 409 while that is new, started or failed."""
    assert stage.before is not None
    for state in ("new", "started", "failed"):
        await make_file(api, stage.before, state, state)
        refused = await api.refused(409, "STAGE_NOT_READY", f"/stages/{stage}/start", filename=state, shard=0)
        assert refused["current"] == "new"
        assert refused["before"] == {"stage": stage.before.value, "status": state}
        assert refused["hint"]
        assert await api.status(state, stage) == "new"
    assert (await api.get(f"/queues/{stage}"))["items"] == []


async def test_failure_of_a_later_stage_keeps_the_lease(
    api: TrackingHarness, clock: ManualClock, tracking: Tracking
) -> None:
    """T8, T14: `new → failed` of a later stage does not change the lease of the started stage, which still expires."""
    await api.queue_up(SPLITTER, FILE)
    await api.claim(SPLITTER, "dies", lease_seconds=10)
    await api.move(SENDER, "fail", FILE)
    await api.move(SENDER, "retry", FILE)
    clock.advance(11 * SECOND)
    await tracking.reap()
    assert await api.status(FILE, SPLITTER) == "new"


async def test_started_file_is_listed_after_a_later_stage_failed(api: TrackingHarness) -> None:
    """T6, T8: the filter `started` finds a started row, whatever happened in its other stages."""
    await api.post("/files/register", filename=FILE, shards=[0])
    await api.move(SENDER, "fail", FILE)
    found = await api.get("/files", stage="event-ingest", status="started")
    assert [file["filename"] for file in found["files"]] == [FILE]


@pytest.mark.parametrize("stage", QUEUED)
async def test_queue_contains_ready_rows_only(api: TrackingHarness, stage: Stage) -> None:
    """T5: a queue contains the rows that are new in its stage and done in the previous one, and no others."""
    for state in STATES:
        await make_file(api, stage, state, state)
    page = await api.get(f"/queues/{stage}")
    assert [item["filename"] for item in page["items"]] == ["new"]
    assert set(page["items"][0]) == {"filename", "shard", "created_at"}
    assert (page["stage"], page["next"]) == (stage, None)


async def test_queues_are_oldest_first_and_limited(api: TrackingHarness, clock: ManualClock) -> None:
    """T5: a queue is ordered oldest first; `limit` defaults to 100 items, and `offset` skips items."""
    await api.queue_up(SPLITTER, "b", *range(101))
    clock.advance(SECOND)
    await api.queue_up(SPLITTER, "a")
    items = (await api.get("/queues/shard-splitter"))["items"]
    assert [item["shard"] for item in items] == list(range(100))
    rest = (await api.get("/queues/shard-splitter", limit=1000, offset=100))["items"]
    assert [(item["filename"], item["shard"]) for item in rest] == [("b", 100), ("a", 0)]


async def test_invalid_query_parameters_are_refused(api: TrackingHarness) -> None:
    """T5, T9: `limit` is 1 to 1000, `offset` is not negative, and times and cursors must be valid."""
    invalid: list[tuple[str, str | int]] = [("limit", 0), ("limit", 1001), ("limit", "x"), ("offset", -1)]
    for name, value in [*invalid, ("updated_since", "yesterday")]:
        refused = problem(await api.http.get("/queues/shard-worker", params={name: value}), 422, "MALFORMED")
        assert refused["errors"][0]["at"] == f"query.{name}"
    assert problem(await api.http.get("/queues/shard-worker", params={"cursor": "x"}), 422, "BAD_CURSOR")["hint"]


async def test_files_are_found_by_filters(api: TrackingHarness, clock: ManualClock) -> None:
    """T6: `GET /files` filters by status in one or any stage, shard, prefix and time, and lists the matching shards."""
    await api.queue_up(WORKER, "2025-a", 0, 1)
    clock.advance(SECOND)
    await api.queue_up(SPLITTER, "2025-b")
    await api.move(WORKER, "fail", "2025-a", 1)
    await api.post("/files/register", filename="2026-c", shards=[7])

    async def found(**params: Any) -> list[tuple[str, int]]:
        files = (await api.get("/files", **params))["files"]
        return [(file["filename"], row["shard"]) for file in files for row in file["shards"]]

    everything = [("2025-a", 0), ("2025-a", 1), ("2025-b", 0), ("2026-c", 7)]
    assert await found() == everything
    assert await found(status="failed") == [("2025-a", 1)]
    assert await found(stage="shard-splitter", status="done") == everything[:2]
    assert await found(stage="shard-worker", status="failed") == [("2025-a", 1)]
    assert await found(stage="mysql-sender", status="failed") == []
    assert await found(status="started") == [("2026-c", 7)]
    assert await found(shard=7) == [("2026-c", 7)]
    assert await found(prefix="2025") == everything[:3]
    assert await found(updated_before="2026-01-01T00:00:01Z") == [("2025-a", 0)]
    assert await found(updated_since="2026-01-01T00:00:01Z") == everything[1:]


async def test_files_are_paged(api: TrackingHarness) -> None:
    """T6: pages are ordered by name and shard, list each row once, and are limited however many shards a file has."""
    for name in ("c", "a", "b"):
        await api.post("/files/register", filename=name, shards=[1, 0])
    found, cursor = [], None
    while True:
        page = await api.get("/files", limit=3, **({"cursor": cursor} if cursor else {}))
        shards = [(file["filename"], shard["shard"]) for file in page["files"] for shard in file["shards"]]
        assert len(shards) <= 3
        found += shards
        if (cursor := page["next"]) is None:
            break
    assert found == [(name, shard) for name in "abc" for shard in (0, 1)]


async def test_summary(api: TrackingHarness, tracking: Tracking) -> None:
    """T7: the summary has the total, all stages by status, and each shard by mysql-sender, before and after folding."""
    await api.queue_up(SENDER, "a", 0, 1)
    await api.queue_up(WORKER, "b", 1)
    await api.move(SENDER, "start", "a", 0)
    await api.move(SENDER, "done", "a", 0)
    await api.move(SENDER, "fail", "a", 1)
    await api.post("/files/register", filename="c", shards=[3])
    summary = {
        "total": 4,
        "by_stage": {
            "event_ingest": {"new": 0, "started": 1, "done": 3, "failed": 0},
            "shard_splitter": {"new": 1, "started": 0, "done": 3, "failed": 0},
            "shard_worker": {"new": 2, "started": 0, "done": 2, "failed": 0},
            "mysql_sender": {"new": 2, "started": 0, "done": 1, "failed": 1},
        },
        "by_shard": [
            {"shard": 0, "total": 1, "done": 1, "failed": 0},
            {"shard": 1, "total": 2, "done": 0, "failed": 1},
            {"shard": 3, "total": 1, "done": 0, "failed": 0},
        ],
    }
    assert await api.get("/metrics/summary") == summary
    assert await tracking.fold_counts() > 0
    assert await api.get("/metrics/summary") == summary


async def test_summary_of_an_empty_pipeline(api: TrackingHarness) -> None:
    """T7: the summary lists all four stages even without rows."""
    summary = await api.get("/metrics/summary")
    assert (summary["total"], summary["by_shard"]) == (0, [])
    assert summary["by_stage"] == {stage.field: dict.fromkeys(STATES, 0) for stage in Stage}


async def test_summary_reads_no_row(api: TrackingHarness, db: Database) -> None:
    """T7: the summary works while the table is locked, so its time does not depend on the number of rows."""
    await api.queue_up(SPLITTER, FILE, 0, 1)
    async with db.transaction() as tx:
        await tx.execute("LOCK TABLE pipeline_tracking IN ACCESS EXCLUSIVE MODE")
        async with asyncio.timeout(TIMEOUT):
            summary = await api.get("/metrics/summary")
    assert (summary["total"], summary["by_stage"]["shard_splitter"]["new"]) == (2, 2)


async def test_moves_do_not_wait_for_counters(api: TrackingHarness, db: Database, tracking: Tracking) -> None:
    """T7: while one move is not committed, others of the same stage and shard are made, counted and folded."""
    await api.queue_up(SPLITTER, "a")
    await api.queue_up(SPLITTER, "b")
    await tracking.fold_counts()
    async with db.transaction() as slow:
        await slow.execute("UPDATE pipeline_tracking SET shard_splitter_status = 'started' WHERE filename = 'a'")
        async with asyncio.timeout(TIMEOUT):
            (claimed,) = await api.claim(SPLITTER)
            await tracking.fold_counts()
            counted = (await api.get("/metrics/summary"))["by_stage"]["shard_splitter"]
    assert claimed["filename"] == "b"
    assert (counted["new"], counted["started"]) == (1, 1)
    counted = (await api.get("/metrics/summary"))["by_stage"]["shard_splitter"]
    assert (counted["new"], counted["started"]) == (0, 2)


AS_JSON = {"content-type": "application/json"}
ROW = {"filename": FILE, "shard": 0}
UNKNOWN: list[tuple[str, str, Json | None, str]] = [
    ("POST", "/stages/no-such/start", ROW, "UNKNOWN_STAGE"),
    ("POST", "/stages/shard_worker/start", ROW, "UNKNOWN_STAGE"),
    ("POST", "/stages/no-such/retry", ROW, "UNKNOWN_STAGE"),
    ("POST", "/stages/no-such/retry-failed", {}, "UNKNOWN_STAGE"),
    ("POST", "/queues/no-such/claim", {"worker": "w"}, "UNKNOWN_STAGE"),
    ("POST", "/queues/no-such/heartbeat", {"worker": "w"}, "UNKNOWN_STAGE"),
    ("POST", "/queues/no-such/pause", {}, "UNKNOWN_STAGE"),
    ("POST", "/queues/no-such/resume", {}, "UNKNOWN_STAGE"),
    ("GET", "/queues/no-such", None, "UNKNOWN_STAGE"),
    ("POST", "/stages/shard-worker/finish", ROW, "UNKNOWN_MOVE"),
    ("POST", "/stages/event-ingest/finish", {"filename": FILE}, "UNKNOWN_MOVE"),
    ("POST", "/stages/shard-worker/start", {"filename": "other", "shard": 0}, "UNKNOWN_ROW"),
    ("POST", "/stages/shard-worker/start", {"filename": FILE, "shard": 9}, "UNKNOWN_ROW"),
    ("POST", "/stages/event-ingest/done", {"filename": "other"}, "UNKNOWN_FILE"),
    ("GET", "/files/other", None, "UNKNOWN_FILE"),
    ("GET", "/files/other/history", None, "UNKNOWN_FILE"),
    ("GET", "/files/other/0/why", None, "UNKNOWN_ROW"),
    ("GET", f"/files/{FILE}/9/why", None, "UNKNOWN_ROW"),
    ("GET", "/nowhere", None, "NOT_FOUND"),
]


async def test_unknown_names_are_404(api: TrackingHarness) -> None:
    """T9: unknown stages, transitions, files and rows are problems with status 404, their own code and a hint."""
    await api.queue_up(WORKER, FILE)
    for method, path, body, code in UNKNOWN:
        answer = await api.http.request(method, path, json=body)
        assert problem(answer, 404, code)["hint"], path


SHARDS: list[Any] = [
    [],
    [-1],
    [0, 0],
    [1.5],
    ["1"],
    [True],
    [None],
    [2**31],
    [2**63],
    [10**400],
    [[0]],
    {"0": 1},
    0,
    "0",
    None,
    list(range(10_001)),
]


async def test_invalid_shards_are_422(api: TrackingHarness) -> None:
    """T1, T9: an empty list, a negative, double, non-integer or huge shard is malformed, and nothing is registered."""
    for shards in SHARDS:
        refused = await api.refused(422, "MALFORMED", "/files/register", filename=FILE, shards=shards)
        assert refused["errors"][0]["at"].startswith("body.shards"), shards
    assert (await api.get("/metrics/summary"))["total"] == 0


NAMES: list[Any] = ["", ".", "..", "a/b", "a\nb", "a\0b", "\ud800", "x" * 256, 7, None, ["a"]]


async def test_invalid_filenames_are_422(api: TrackingHarness) -> None:
    """T9: a filename is text that can be part of a path; anything else is malformed in every request."""
    for name in NAMES:
        for path, more in (("/files/register", {"shards": [0]}), ("/stages/shard-worker/start", {"shard": 0})):
            refused = await api.http.post(path, content=json.dumps({"filename": name, **more}), headers=AS_JSON)
            assert problem(refused, 422, "MALFORMED")["errors"][0]["at"] == "body.filename", name


BODIES: list[tuple[str, Any]] = [
    ("/files/register", {"filename": FILE}),
    ("/files/register", {"shards": [0]}),
    ("/files/register", {"filename": FILE, "shards": [0], "status": "done"}),
    ("/files/register", {"filename": FILE, "shards": [0], "\ud800": 1}),
    ("/files/register", {"filename": FILE, "shards": [0], "worker": ""}),
    ("/files/register", {"filename": FILE, "shards": [0], "worker": "a\0"}),
    ("/files/register", []),
    ("/files/register", "register"),
    ("/files/register", None),
    ("/stages/event-ingest/done", {}),
    ("/stages/event-ingest/done", {"filename": FILE, "shard": 0}),
    ("/stages/shard-worker/start", {"filename": FILE}),
    ("/stages/shard-worker/start", {"shard": 0}),
    ("/stages/shard-worker/start", {"filename": FILE, "shard": "0"}),
    ("/stages/shard-worker/start", {"filename": FILE, "shard": True}),
    ("/stages/shard-worker/start", {"filename": FILE, "shard": 0.5}),
    ("/stages/shard-worker/start", {"filename": FILE, "shard": -1}),
    ("/stages/shard-worker/start", {"filename": FILE, "shard": 2**31}),
    ("/stages/shard-worker/start", {"filename": FILE, "shard": 0, "wroker": "w"}),
    ("/stages/shard-worker/retry", {"filename": FILE, "shard": None}),
    ("/stages/shard-worker/report", {}),
    ("/stages/shard-worker/report", []),
    ("/stages/shard-worker/report", [{**ROW, "fence": 1}]),
    ("/stages/shard-worker/report", [{**ROW, "fence": 1, "outcome": "new"}]),
    ("/stages/shard-worker/report", [{**ROW, "fence": "1", "outcome": "done"}]),
    ("/stages/shard-worker/report", [{**ROW, "outcome": "done"}]),
    ("/stages/shard-worker/report", [{**ROW, "fence": 1, "outcome": "retry", "retry_after_seconds": -1}]),
    ("/queues/shard-worker/claim", {}),
    ("/queues/shard-worker/claim", {"worker": "w", "limit": 0}),
    ("/queues/shard-worker/claim", {"worker": "w", "limit": 1001}),
    ("/queues/shard-worker/claim", {"worker": "w", "lease_seconds": 0}),
    ("/queues/shard-worker/heartbeat", {"worker": "w", "items": [ROW]}),
    ("/stages/shard-worker/retry-failed", {"failed_since": "2026-01-01T00:00:00"}),
]


async def test_malformed_bodies_are_422(api: TrackingHarness) -> None:
    """T9: a missing, wrong or unknown field is a problem with status 422 that names the field, and nothing changes."""
    await api.queue_up(WORKER, FILE)
    before = await api.get(f"/files/{FILE}")
    for path, body in BODIES:
        refused = problem(await api.http.post(path, content=json.dumps(body), headers=AS_JSON), 422, "MALFORMED")
        assert all({"at", "message"} <= set(error) for error in refused["errors"]), (path, body)
    assert await api.get(f"/files/{FILE}") == before


CONTENTS = [
    b"",
    b"{",
    b"invalid",
    b'{"filename": "a", "shards": [0]',
    b'{"filename": "a", "shards": [0]} {}',
    b"\xff\xfe",
    b'{"filename": "\xff", "shards": [0]}',
    b'{"filename": "a", "shards": [' + b"9" * 5000 + b"]}",
    b'{"filename": "a", "shards": [NaN]}',
    b"[" * 100_000,
]


async def test_invalid_json_is_422(http: httpx.AsyncClient) -> None:
    """T9: a body that is not JSON, or that no parser accepts, is malformed."""
    answers = [await http.post("/files/register", content=content, headers=AS_JSON) for content in CONTENTS]
    assert [answer.status_code for answer in answers] == [422] * len(CONTENTS)
    for answer in answers:
        problem(answer, 422, "MALFORMED")


async def test_malformed_requests_get_a_hint(api: TrackingHarness) -> None:
    """T9: every error has a hint, including a malformed body, query or path."""
    assert (await api.refused(422, "MALFORMED", "/files/register"))["hint"]
    assert problem(await api.http.get("/queues/shard-worker", params={"limit": 0}), 422, "MALFORMED")["hint"]
    assert problem(await api.http.get(f"/files/{FILE}/x/why"), 422, "MALFORMED")["hint"]


async def test_event_ingest_cannot_be_claimed(api: TrackingHarness) -> None:
    """T2, T9: event-ingest moves whole files; claims, reports and heartbeats of it are refused with a hint."""
    await api.post("/files/register", filename=FILE, shards=[0])
    report = [{**ROW, "fence": 0, "outcome": "done"}]
    for path, body in (("/queues/event-ingest/claim", {"worker": "w"}), ("/stages/event-ingest/report", report)):
        assert problem(await api.http.post(path, json=body), 409, "STAGE_NOT_CLAIMABLE")["hint"]
    await api.refused(409, "STAGE_NOT_CLAIMABLE", "/queues/event-ingest/heartbeat", worker="w")


async def test_any_accepted_name_works_in_a_path(api: TrackingHarness) -> None:
    """T6: every accepted filename can be requested by its path."""
    for name in ("a b", "a?b=c#d", "100%", "Ёлка", "register", "x" * 255, "a.event-ingest.txt", "-", "a;b"):
        await api.post("/files/register", filename=name, shards=[0])
        path = f"/files/{quote(name, safe='')}"
        assert (await api.get(path))["filename"] == name
        assert (await api.get(f"{path}/0/why"))["filename"] == name
