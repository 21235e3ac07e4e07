"""H17: faults and background changes of the simulator."""

import asyncio
from typing import Any

import aiohttp
import pytest

from penstock.harvest.simulator.faults import FaultInjector, Faults, Rates
from penstock.harvest.simulator.server import LocalSource
from tests.harvest.simulator.client import COUNT, PAGE, LocalSourceClient, sort_by_price
from tests.support.wait import becomes


@pytest.mark.parametrize(("seconds", "header"), [(0, "0"), (0.2, "1"), (7, "7")])
async def test_throttled(client: LocalSourceClient, source: LocalSource, seconds: float, header: str) -> None:
    """H17: 429 with Retry-After in whole seconds, for REST and GraphQL."""
    source.set_faults(Faults(rate_429=1, retry_after=seconds))
    async with client.session.get("/records") as response:
        assert (response.status, response.headers["Retry-After"]) == (429, header)
    async with client.session.post("/graphql", json={"query": COUNT}) as response:
        assert response.status == 429
    assert source.read_stats()["faults"] == {"429": 2}


async def test_errors_and_garbage(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: a response 500, or 200 with truncated JSON."""
    source.set_faults(Faults(rate_500=1))
    assert (await client.get("/records/count", status=500))["error"]["code"] == "INTERNAL"
    source.set_faults(Faults(rate_garbage=1))
    with pytest.raises(ValueError):
        await client.get("/records")


async def test_aborted_connection(
    client: LocalSourceClient, source: LocalSource, caplog: pytest.LogCaptureFixture
) -> None:
    """H17: the connection ends in the middle of a response, without a log entry of the server."""
    source.set_faults(Faults(rate_cut=1))
    with pytest.raises(aiohttp.ClientPayloadError):
        await client.get("/records")
    source.set_faults()
    assert (await client.get("/records"))["total"] == 400
    assert caplog.records == []


async def test_timeout_ends_with_the_connection(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: a request without a response does not affect other requests."""
    source.set_faults(Faults(rate_timeout=1))
    request = asyncio.create_task(client.get("/records"))
    await becomes(lambda: _has_injected(source, "timeout"), "the request waits")
    source.set_faults()
    assert (await client.get("/records"))["total"] == 400
    assert not request.done()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_timeout_with_an_end(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: the response is sent after `timeout_for` seconds, or after the latency."""
    loop = asyncio.get_running_loop()
    for faults in (Faults(rate_timeout=1, timeout_for=0.05), Faults(latency_ms=50)):
        source.set_faults(faults)
        started = loop.time()
        assert (await client.get("/records"))["total"] == 400
        assert loop.time() - started >= 0.04


async def test_short_pages_lose_nothing(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: a short page lacks rows at its end and has a cursor after its last row, so a client misses none."""
    source.set_faults(Faults(rate_short=1))
    by_offset, by_cursor, lengths = list[Any](), list[Any](), set[int]()
    cursor: Any = {}
    while len(by_offset) < 400:
        page = await client.get("/records", offset=len(by_offset), limit=30)
        by_offset += page["items"]
        lengths.add(len(page["items"]))
        assert page["hasMore"] is (len(by_offset) < 400)
    while cursor is not None:
        page = await client.get("/records", limit=30, **cursor)
        by_cursor += page["items"]
        cursor = page["nextCursor"] and {"cursor": page["nextCursor"]}
    assert by_offset == by_cursor == sort_by_price(source.read_truth())
    assert max(lengths) < 30
    assert min(lengths) >= 1
    assert len(lengths) > 3  # of different lengths


async def test_short_pages_by_graphql(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: short pages of GraphQL keep the total."""
    token = await client.token()
    source.set_faults(Faults(rate_short=1))
    page = (await client.graphql(PAGE, token=token, limit=50))["data"]["as"]["diamonds_by_query"]
    assert 1 <= len(page["items"]) < 50
    assert page["total_count"] == 400


def test_faults_repeat_by_seed() -> None:
    """H17: the same seed injects the same faults into the same requests, at about the configured rates."""
    faults = Faults(rate_429=0.1, rate_500=0.2, rate_short=0.3)
    injector, same, other = FaultInjector(faults, 7), FaultInjector(faults, 7), FaultInjector(faults, 8)
    faults_of_requests = [injector.inject() for _ in range(2_000)]
    assert faults_of_requests == [same.inject() for _ in range(2_000)]
    assert faults_of_requests != [other.inject() for _ in range(2_000)]
    injector.set(faults)
    assert faults_of_requests[:50] == [injector.inject() for _ in range(50)]
    kinds = [fault.kind.value for fault in faults_of_requests if fault is not None]
    assert 150 < kinds.count("429") < 250
    assert 300 < kinds.count("500") < 420


async def test_churn_continues_until_it_is_stopped(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: records change in the background at the rates per second; 0 stops it."""
    await client.post("/admin/changes", {"churn": {"updates": 1_000, "inserts": 10}})
    await becomes(lambda: _has_moved(source), "records change in the background")
    await client.post("/admin/changes", {"churn": {"updates": 0}})
    assert source._routes.churn._timer is None
    source.set_churn(Rates(deletes=100_000))
    await becomes(lambda: _is_empty(source), "all are deleted")


async def _has_injected(source: LocalSource, fault: str) -> bool:
    return fault in source.read_stats()["faults"]


async def _has_moved(source: LocalSource) -> bool:
    stats = source.read_stats()
    return bool(stats["generation"] > 2 and stats["total"] > 400)


async def _is_empty(source: LocalSource) -> bool:
    return bool(source.read_stats()["total"] == 0)
