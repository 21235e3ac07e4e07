"""H17: faults and background changes of the simulator."""

import asyncio
from typing import Any

import aiohttp
import pytest

from penstock.harvest.simulator.faults import FaultInjector, Faults, Rates
from penstock.harvest.simulator.server import LocalSource
from tests.harvest.simulator.client import COUNT, PAGE, LocalSourceClient, in_order
from tests.support.wait import becomes


@pytest.mark.parametrize(("asked", "told"), [(0, "0"), (0.2, "1"), (7, "7")])
async def test_throttled(client: LocalSourceClient, source: LocalSource, asked: float, told: str) -> None:
    """H17: 429 with Retry-After in whole seconds, to REST and GraphQL alike."""
    source.set_faults(Faults(rate_429=1, retry_after=asked))
    async with client.session.get("/records") as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, told)
    async with client.session.post("/graphql", json={"query": COUNT}) as answer:
        assert answer.status == 429
    assert source.stats()["faults"] == {"429": 2}


async def test_errors_and_garbage(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: 500; or 200 with JSON that ends too early."""
    source.set_faults(Faults(rate_500=1))
    assert (await client.get("/records/count", status=500))["error"]["code"] == "INTERNAL"
    source.set_faults(Faults(rate_garbage=1))
    with pytest.raises(ValueError):
        await client.get("/records")


async def test_a_cut_connection(
    client: LocalSourceClient, source: LocalSource, caplog: pytest.LogCaptureFixture
) -> None:
    """H17: the connection ends in the middle of an answer, without a log entry of the server."""
    source.set_faults(Faults(rate_cut=1))
    with pytest.raises(aiohttp.ClientPayloadError):
        await client.get("/records")
    source.set_faults()
    assert (await client.get("/records"))["total"] == 400
    assert caplog.records == []


async def test_a_timeout_ends_when_the_client_hangs_up(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: a request that is never answered; others are."""
    source.set_faults(Faults(rate_timeout=1))
    asked = asyncio.create_task(client.get("/records"))
    await becomes(lambda: _has_given(source, "timeout"), "the request is held")
    source.set_faults()
    assert (await client.get("/records"))["total"] == 400
    assert not asked.done()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


async def test_a_timeout_may_end_by_itself(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: after timeout_for seconds the answer comes all the same; so it does after a latency."""
    loop = asyncio.get_running_loop()
    for faults in (Faults(rate_timeout=1, timeout_for=0.05), Faults(latency_ms=50)):
        source.set_faults(faults)
        began = loop.time()
        assert (await client.get("/records"))["total"] == 400
        assert loop.time() - began >= 0.04


async def test_short_pages_lose_nothing(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: a short page lacks rows at its end, tells that more follow, and is gone on with behind its last row."""
    source.set_faults(Faults(rate_short=1))
    found, cursors, lengths = list[Any](), list[Any](), set[int]()
    cursor: Any = {}
    while len(found) < 400:
        page = await client.get("/records", offset=len(found), limit=30)
        found += page["items"]
        lengths.add(len(page["items"]))
        assert page["hasMore"] is (len(found) < 400)
    while cursor is not None:
        page = await client.get("/records", limit=30, **cursor)
        cursors += page["items"]
        cursor = page["nextCursor"] and {"cursor": page["nextCursor"]}
    assert found == cursors == in_order(source.truth())
    assert max(lengths) < 30
    assert min(lengths) >= 1
    assert len(lengths) > 3  # they are short by more than a row, and not all alike


async def test_short_pages_by_graphql(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: GraphQL has short pages too; its total stays."""
    token = await client.token()
    source.set_faults(Faults(rate_short=1))
    page = (await client.graphql(PAGE, token=token, limit=50))["data"]["as"]["diamonds_by_query"]
    assert 1 <= len(page["items"]) < 50
    assert page["total_count"] == 400


def test_faults_repeat_by_seed() -> None:
    """H17: the same seed deals the same faults to the same requests, at about the rates asked for."""
    faults = Faults(rate_429=0.1, rate_500=0.2, rate_short=0.3)
    injector, same, other = FaultInjector(faults, 7), FaultInjector(faults, 7), FaultInjector(faults, 8)
    dealt = [injector.deal() for _ in range(2_000)]
    assert dealt == [same.deal() for _ in range(2_000)]
    assert dealt != [other.deal() for _ in range(2_000)]
    injector.set(faults)
    assert dealt[:50] == [injector.deal() for _ in range(50)]
    kinds = [fault.kind.value for fault in dealt if fault is not None]
    assert 150 < kinds.count("429") < 250
    assert 300 < kinds.count("500") < 420


async def test_churn_goes_on_until_it_is_stopped(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: records change in the background, so many a second; 0 stops it."""
    await client.post("/admin/changes", {"churn": {"updates": 1_000, "inserts": 10}})
    await becomes(lambda: _has_moved(source), "records change by themselves")
    await client.post("/admin/changes", {"churn": {"updates": 0}})
    assert source._routes.churn._timer is None
    source.set_churn(Rates(deletes=100_000))
    await becomes(lambda: _is_empty(source), "all are deleted")


async def _has_given(source: LocalSource, fault: str) -> bool:
    return fault in source.stats()["faults"]


async def _has_moved(source: LocalSource) -> bool:
    stats = source.stats()
    return bool(stats["generation"] > 2 and stats["total"] > 400)


async def _is_empty(source: LocalSource) -> bool:
    return bool(source.stats()["total"] == 0)
