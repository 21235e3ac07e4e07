"""Signals: every listener hears each one, or is told to look for itself; the same promises for every implementation."""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from penstock.kernel import listener as notifications
from penstock.kernel.db import Database
from penstock.kernel.embedded import embedded_postgres
from penstock.kernel.errors import BadConfig, Invalid, Transient
from penstock.kernel.listener import Inbox
from penstock.kernel.signals import BODY_LIMIT, Resync, Signal
from penstock.kernel.signals.feed import Feed
from penstock.kernel.signals.postgres import PostgresSignals
from penstock.kernel.signals.redis import RedisSignals
from tests.kernel.signals_rigs import PostgresRig, RedisRig, Rig, redis_rig
from tests.services.redis import RedisCluster, RedisServer, redis_binary
from tests.services.require import require

WITHIN = 20.0
AT_ONCE = 2.0
ROOT = Path(__file__).parents[2]

Items = AsyncIterator[Signal | Resync]


def server_binary() -> Path:
    return redis_binary() or require("redis", "there is no redis-server here")


@pytest.fixture(scope="session")
def cluster() -> Iterator[RedisCluster]:
    """Three masters for the whole test process; nobody kills them."""
    service = RedisCluster(server_binary())
    yield service
    service.stop()


@pytest.fixture(scope="session")
def single() -> Iterator[RedisServer]:
    service = RedisServer(server_binary())
    yield service
    service.stop()


@pytest.fixture
async def postgres_rig(db: Database) -> PostgresRig:
    return PostgresRig(db)


@pytest.fixture
async def cluster_rig(cluster: RedisCluster) -> AsyncIterator[RedisRig]:
    async with redis_rig(cluster) as rig:
        yield rig


@pytest.fixture
async def single_rig(single: RedisServer) -> AsyncIterator[RedisRig]:
    async with redis_rig(single) as rig:
        yield rig


@pytest.fixture(params=["postgres", "cluster", "single"])
def rig(request: pytest.FixtureRequest) -> Rig:
    """Every implementation in turn."""
    found: Rig = request.getfixturevalue(f"{request.param}_rig")
    return found


async def heard(feed: Items, *bodies: str, within: float = WITHIN) -> list[Signal | Resync]:
    """Everything up to the moment when each of *bodies* has come."""
    items: list[Signal | Resync] = []
    async with asyncio.timeout(within):
        while not {Signal(body) for body in bodies} <= set(items):
            items.append(await anext(feed))
    return items


async def resynced(feed: Items, *reasons: str) -> list[Signal | Resync]:
    """Everything up to the next Resync, or the next for one of *reasons*."""
    items: list[Signal | Resync] = []
    async with asyncio.timeout(WITHIN):
        while True:
            items.append(item := await anext(feed))
            if isinstance(item, Resync) and item.reason in (reasons or (item.reason,)):
                return items


def first_arrivals(items: list[Signal | Resync]) -> list[str]:
    return list(dict.fromkeys(item.body for item in items if isinstance(item, Signal)))


# Every implementation


async def test_the_first_thing_a_listener_receives_is_resync(rig: Rig) -> None:
    """R22: whatever happened before, a listener first looks at the source of truth."""
    await rig.signals.announce(["before"])
    async with rig.signals.listen("pod") as feed, asyncio.timeout(WITHIN):
        assert await anext(feed) == Resync("the listener began")


async def test_a_signal_arrives_at_once(rig: Rig) -> None:
    """R16: from announcement to listener there is no waiting for a poll."""
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
        await rig.signals.announce(["now"])
        await heard(feed, "now", within=AT_ONCE)


async def test_every_listener_hears_every_signal(rig: Rig) -> None:
    """R22: listeners do not share signals among them; each gets all."""
    bodies = [f"v{n}" for n in range(20)]
    async with contextlib.AsyncExitStack() as stack:
        feeds = [await stack.enter_async_context(rig.signals.listen(f"pod-{n}")) for n in range(4)]
        for feed in feeds:
            await resynced(feed)
        for body in bodies:
            await rig.signals.announce([body])
        for feed in feeds:
            assert first_arrivals(await heard(feed, *bodies)) == bodies


async def test_signals_of_one_announcer_arrive_in_order(rig: Rig) -> None:
    """R16: what was announced first is heard first, within an announcement and among several."""
    bodies = [f"{n:04}" for n in range(500)]
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
        for start in range(0, 500, 250):
            await rig.signals.announce(bodies[start : start + 250])
        assert first_arrivals(await heard(feed, *bodies)) == bodies


@pytest.mark.parametrize(
    "body",
    ["Größe 🌊 \N{GREEK SMALL LETTER OMEGA}", "x" * BODY_LIMIT, "ü" * (BODY_LIMIT // 2), ' {"a": "\'\\"}\r\n\t\x01 '],
    ids=["unicode", "largest", "largest in bytes", "quotes and controls"],
)
async def test_a_body_arrives_as_it_was_written(rig: Rig, body: str) -> None:
    """R16: any text of up to the limit in bytes comes through unchanged."""
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
        await rig.signals.announce([body])
        await heard(feed, body)


@pytest.mark.parametrize("body", ["x" * (BODY_LIMIT + 1), "ü" * BODY_LIMIT, "", "a\0b"])
async def test_a_body_nobody_could_carry_is_refused_with_all_its_company(rig: Rig, body: str) -> None:
    """R16: one bad body is Invalid, and none of the announcement goes out."""
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
        with pytest.raises(Invalid, match="bytes without NUL") as refused:
            await rig.signals.announce(["in bad company", body])
        await rig.signals.announce(["after"])
        assert Signal("in bad company") not in await heard(feed, "after")
    assert refused.value.code == "SIGNAL_TOO_LARGE"
    assert refused.value.hint


async def test_announcing_nothing_is_no_signal(rig: Rig) -> None:
    """R15: an empty announcement is not an error."""
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
        await rig.signals.announce([])
        await rig.signals.announce(["something"])
        assert first_arrivals(await heard(feed, "something")) == ["something"]


async def test_a_lost_connection_loses_no_signal_untold(rig: Rig) -> None:
    """R22: what was announced while the connection was broken arrives, or Resync does; later signals arrive."""
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
        for n in range(3):
            await rig.cut()
            await rig.signals.announce([f"meanwhile-{n}"])
            async with asyncio.timeout(WITHIN):
                while (item := await anext(feed)) != Signal(f"meanwhile-{n}") and not isinstance(item, Resync):
                    pass
            await resynced(feed, *(["Pub/Sub was lost"] if isinstance(rig, RedisRig) else [item.reason]))
