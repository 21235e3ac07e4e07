"""T15: the history of a file: actor, time and reason of each move."""

from penstock.kernel.clock import ManualClock
from tests.support.http import problem
from tests.support.types import Json
from tests.tracking.harness import FILE, INGEST, SECOND, SPLITTER, WORKER, TrackingHarness, make_report


async def test_history_has_actor_time_and_reason(api: TrackingHarness, clock: ManualClock) -> None:
    """T15: the history has every move of every row, oldest first, with actor, time, reason and fence."""
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


async def test_history_names_the_worker_of_a_report(api: TrackingHarness) -> None:
    """T13, T15: the worker that claimed a row is the actor of its end; the reported error is the reason."""
    await api.queue_up(WORKER, FILE)
    (item,) = await api.claim(WORKER, "w7")
    await api.report(WORKER, make_report(item, "failed", error="bad line 3"))
    last = (await api.get(f"/files/{FILE}/history"))["moves"][-1]
    assert (last["actor"], last["reason"], last["to"], last["fence"]) == ("w7", "bad line 3", "failed", item["fence"])


async def test_history_is_paged(api: TrackingHarness) -> None:
    """T15: the pages contain each move exactly once, also within one batch of moves."""
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
