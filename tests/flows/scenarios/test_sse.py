"""F18: the stream of moves as server-sent events."""

from collections.abc import AsyncIterator

import httpx
import pytest

from penstock.kernel.states import event_stream
from tests.flows.harness import BASE, FlowsHarness, chain, on_a_port
from tests.support.http import problem
from tests.support.sse import EventStream
from tests.support.types import Json


@pytest.fixture
async def http(harness: FlowsHarness) -> AsyncIterator[httpx.AsyncClient]:
    """The API over the network; without a network a stream could not be closed."""
    async with on_a_port(harness) as address, httpx.AsyncClient(base_url=address + BASE, timeout=30) as client:
        yield client


async def test_moves_are_streamed_live(harness: FlowsHarness, http: httpx.AsyncClient) -> None:
    """F18: the stream has every move of runs and steps; with Last-Event-ID it misses and repeats nothing."""
    async with http.stream("GET", "/flow_runs/events") as response:
        events = EventStream(response)
        await harness.create(chain("a"))
        first = [await events.next() for _ in range(2)]
        await harness.complete()
        received = [*first, *[await events.next() for _ in range(3)]]
    moves = [(move["runId"], move["stepId"], move["from"], move["to"]) for _, move in received]
    assert sorted(moves, key=str) == sorted(
        [
            ("r1", None, "PENDING", "RUNNING"),
            ("r1", "a", "PENDING", "READY"),
            ("r1", "a", "READY", "RUNNING"),
            ("r1", "a", "RUNNING", "SUCCEEDED"),
            ("r1", None, "RUNNING", "SUCCEEDED"),
        ],
        key=str,
    )
    async with http.stream("GET", "/flow_runs/events", headers={"last-event-id": received[1][0]}) as response:
        events = EventStream(response)
        assert [await events.next() for _ in range(3)] == received[2:]


async def test_the_stream_of_a_run_has_only_its_moves(harness: FlowsHarness, http: httpx.AsyncClient) -> None:
    """F18: the stream of a run has its moves and those of its steps, and no move of a run with a longer name."""
    await harness.create(chain("a"), "r")
    async with http.stream("GET", "/flow_runs/r/events") as response:
        events = EventStream(response)
        await harness.create(chain("a"), "r2")
        await harness.create(chain("a"), "another")
        await harness.post("/flow_runs/r/cancel")
        moves: list[Json] = []
        while sum(move["to"] == "CANCELLED" for move in moves) < 2:  # earlier moves can be in the stream, too
            moves.append((await events.next())[1])
    assert {move["runId"] for move in moves} == {"r"}
    assert {move["stepId"] for move in moves if move["to"] == "CANCELLED"} == {None, "a"}
    problem(await http.get("/flow_runs/none/events"), 404, "RUN_NOT_FOUND")


async def test_the_number_of_streams_is_limited(
    harness: FlowsHarness, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F18: a stream over the limit is refused with 503, and an invalid Last-Event-ID with 422."""
    bad = await http.get("/flow_runs/events", headers={"last-event-id": "yesterday"})
    problem(bad, 422, "BAD_EVENT_ID")
    monkeypatch.setattr(event_stream, "STREAM_LIMIT", 1)
    async with http.stream("GET", "/flow_runs/events"):
        problem(await http.get("/flow_runs/events"), 503, "TOO_MANY_STREAMS")
