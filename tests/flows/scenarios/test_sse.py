"""F18: moves as server-sent events."""

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
    """The API over the network: without one a stream has no end."""
    async with on_a_port(harness) as address, httpx.AsyncClient(base_url=address + BASE, timeout=30) as client:
        yield client


async def test_moves_are_told_as_they_are_made(harness: FlowsHarness, http: httpx.AsyncClient) -> None:
    """F18: who watches sees every move of runs and steps; with Last-Event-ID nothing is missed or told twice."""
    async with http.stream("GET", "/flow_runs/events") as answer:
        events = EventStream(answer)
        await harness.create(chain("a"))
        first = [await events.next() for _ in range(2)]
        await harness.complete()
        told = [*first, *[await events.next() for _ in range(3)]]
    moves = [(one["runId"], one["stepId"], one["from"], one["to"]) for _, one in told]
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
    async with http.stream("GET", "/flow_runs/events", headers={"last-event-id": told[1][0]}) as answer:
        events = EventStream(answer)
        assert [await events.next() for _ in range(3)] == told[2:]


async def test_one_run_is_watched_alone(harness: FlowsHarness, http: httpx.AsyncClient) -> None:
    """F18: the stream of a run has its moves and its steps', and no other's; also not of one whose name goes on."""
    await harness.create(chain("a"), "r")
    async with http.stream("GET", "/flow_runs/r/events") as answer:
        events = EventStream(answer)
        await harness.create(chain("a"), "r2")
        await harness.create(chain("a"), "another")
        await harness.post("/flow_runs/r/cancel")
        told: list[Json] = []
        while sum(one["to"] == "CANCELLED" for one in told) < 2:  # what was made just before may be told too
            told.append((await events.next())[1])
    assert {one["runId"] for one in told} == {"r"}
    assert {one["stepId"] for one in told if one["to"] == "CANCELLED"} == {None, "a"}
    problem(await http.get("/flow_runs/none/events"), 404, "RUN_NOT_FOUND")


async def test_streams_are_bounded(
    harness: FlowsHarness, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F18: one watcher too many is told so; an id that is none is refused."""
    bad = await http.get("/flow_runs/events", headers={"last-event-id": "yesterday"})
    problem(bad, 422, "BAD_EVENT_ID")
    monkeypatch.setattr(event_stream, "STREAM_LIMIT", 1)
    async with http.stream("GET", "/flow_runs/events"):
        problem(await http.get("/flow_runs/events"), 503, "TOO_MANY_STREAMS")
