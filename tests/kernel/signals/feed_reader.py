"""Reading from the feed of a listener, for tests of signals."""

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
    for attempt in (signals.announce(["lost"]), signals.check(), signals.measure_lag()):
        with pytest.raises(Transient) as down:
            await attempt
        assert down.value.code == "SIGNALS_DOWN"
        assert down.value.hint


async def read_until_resync(feed: Items, *reasons: str) -> list[Signal | Resync]:
    """Return the items up to the next Resync, or up to the next Resync with one of *reasons*."""
    items: list[Signal | Resync] = []
    async with asyncio.timeout(WITHIN):
        while True:
            items.append(item := await anext(feed))
            if isinstance(item, Resync) and item.reason in (reasons or (item.reason,)):
                return items


def server_binary() -> Path:
    return redis_binary() or require("redis", "there is no redis-server on this machine")


async def read_until(feed: Items, *bodies: str, within: float = WITHIN) -> list[Signal | Resync]:
    """Return the items up to the one with which all *bodies* have arrived."""
    items: list[Signal | Resync] = []
    async with asyncio.timeout(within):
        while not {Signal(body) for body in bodies} <= set(items):
            items.append(await anext(feed))
    return items


async def becomes(holds: Callable[[], bool]) -> None:
    """Poll until *holds* is true."""
    async with asyncio.timeout(WITHIN):
        while not await asyncio.to_thread(holds):
            pass


def pings(backend: RedisSignalsBackend) -> int:
    return int(backend.server.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"])


def first_arrivals(items: list[Signal | Resync]) -> list[str]:
    return list(dict.fromkeys(item.body for item in items if isinstance(item, Signal)))


async def read_first(backend: RedisSignalsBackend, feed: Items) -> None:
    """Read past the first entry of an empty stream, which may cause an unnecessary Resync."""
    await read_until_resync(feed)
    backend.add("first")
    await read_until_resync(feed)
    backend.add("second")
    await read_until(feed, "second")


def leave_behind(backend: RedisSignalsBackend, *groups: str) -> None:
    for group in groups:
        backend.server.xgroup_create(backend.stream, group, mkstream=True)
        backend.server.xgroup_createconsumer(backend.stream, group, "listener")
