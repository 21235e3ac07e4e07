"""What a listener hears, for tests of signals."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.kernel.errors import Transient
from penstock.kernel.signals import Resync, Signal, Signals
from tests.kernel.signals.backends import RedisSignalsBackend
from tests.services.redis import redis_binary
from tests.support.require import require

WITHIN = 20.0
Items = AsyncIterator[Signal | Resync]
AT_ONCE = 2.0


async def assert_down(signals: Signals) -> None:
    for attempt in (signals.announce(["lost"]), signals.check(), signals.lag()):
        with pytest.raises(Transient) as down:
            await attempt
        assert down.value.code == "SIGNALS_DOWN"
        assert down.value.hint


async def resynced(feed: Items, *reasons: str) -> list[Signal | Resync]:
    """Everything up to the next Resync, or the next for one of *reasons*."""
    items: list[Signal | Resync] = []
    async with asyncio.timeout(WITHIN):
        while True:
            items.append(item := await anext(feed))
            if isinstance(item, Resync) and item.reason in (reasons or (item.reason,)):
                return items


def server_binary() -> Path:
    return redis_binary() or require("redis", "there is no redis-server here")


async def heard(feed: Items, *bodies: str, within: float = WITHIN) -> list[Signal | Resync]:
    """Everything up to the moment when each of *bodies* has come."""
    items: list[Signal | Resync] = []
    async with asyncio.timeout(within):
        while not {Signal(body) for body in bodies} <= set(items):
            items.append(await anext(feed))
    return items


async def becomes(claim: Callable[[], bool]) -> None:
    """Ask the server again and again until *claim* is true."""
    async with asyncio.timeout(WITHIN):
        while not await asyncio.to_thread(claim):
            pass


def pings(backend: RedisSignalsBackend) -> int:
    return int(backend.server.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"])


def first_arrivals(items: list[Signal | Resync]) -> list[str]:
    return list(dict.fromkeys(item.body for item in items if isinstance(item, Signal)))


async def begun(backend: RedisSignalsBackend, feed: Items) -> None:
    """Past the first entry of an empty stream, which may cause a needless Resync, and quiet."""
    await resynced(feed)
    backend.add("first")
    await resynced(feed)
    backend.add("second")
    await heard(feed, "second")


def leave_behind(backend: RedisSignalsBackend, *groups: str) -> None:
    for group in groups:
        backend.server.xgroup_create(backend.stream, group, mkstream=True)
        backend.server.xgroup_createconsumer(backend.stream, group, "listener")
