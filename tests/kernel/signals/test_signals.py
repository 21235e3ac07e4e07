"""Signals: every listener receives each signal or a Resync, with every implementation."""

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.kernel.db import listener as notifications
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.kernel.db.listener import MissedNotifications, Notification
from penstock.kernel.errors import Invalid
from penstock.kernel.signals import BODY_LIMIT, Resync, Signal
from penstock.kernel.signals.postgres import PostgresSignals
from penstock.kernel.signals.stream import SignalStream
from tests.kernel.signals.backends import SignalsBackend
from tests.kernel.signals.feed_reader import (
    AT_ONCE,
    WITHIN,
    assert_down,
    becomes,
    first_arrivals,
    read_until,
    read_until_resync,
)
from tests.services.redis import redis_binary
from tests.support.require import require

ROOT = Path(__file__).parents[3]


# Every implementation


async def test_a_listener_first_receives_a_resync(backend: SignalsBackend) -> None:
    """R22: a new listener first reads the source of truth."""
    await backend.signals.announce(["before"])
    async with backend.signals.listen("pod") as feed, asyncio.timeout(WITHIN):
        assert await anext(feed) == Resync("the listener has started")


async def test_a_signal_arrives_at_once(backend: SignalsBackend) -> None:
    """R16: a signal does not wait for a poll."""
    async with backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        await backend.signals.announce(["now"])
        await read_until(feed, "now", within=AT_ONCE)


async def test_every_listener_receives_every_signal(backend: SignalsBackend) -> None:
    """R22: signals are not divided between listeners: each listener receives all of them."""
    bodies = [f"v{n}" for n in range(20)]
    async with contextlib.AsyncExitStack() as stack:
        feeds = [await stack.enter_async_context(backend.signals.listen(f"pod-{n}")) for n in range(4)]
        for feed in feeds:
            await read_until_resync(feed)
        for body in bodies:
            await backend.signals.announce([body])
        for feed in feeds:
            assert first_arrivals(await read_until(feed, *bodies)) == bodies


async def test_signals_of_one_announcer_arrive_in_order(backend: SignalsBackend) -> None:
    """R16: signals arrive in the order in which they were announced, within one call and across calls."""
    bodies = [f"{n:04}" for n in range(500)]
    async with backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        for start in range(0, 500, 250):
            await backend.signals.announce(bodies[start : start + 250])
        assert first_arrivals(await read_until(feed, *bodies)) == bodies


@pytest.mark.parametrize(
    "body",
    ["Größe 🌊 \N{GREEK SMALL LETTER OMEGA}", "x" * BODY_LIMIT, "ü" * (BODY_LIMIT // 2), ' {"a": "\'\\"}\r\n\t\x01 '],
    ids=["unicode", "largest", "largest in bytes", "quotes and controls"],
)
async def test_a_body_arrives_unchanged(backend: SignalsBackend, body: str) -> None:
    """R16: any text up to the limit in bytes arrives unchanged."""
    async with backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        await backend.signals.announce([body])
        await read_until(feed, body)


@pytest.mark.parametrize("body", ["x" * (BODY_LIMIT + 1), "ü" * BODY_LIMIT, "", "a\0b", "\ud800"])
async def test_an_invalid_body_is_refused_with_the_whole_announcement(backend: SignalsBackend, body: str) -> None:
    """R16: one invalid body is an error, and no signal of the announcement is sent."""
    async with backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        with pytest.raises(Invalid, match="bytes of text without NUL") as refused:
            await backend.signals.announce(["valid", body])
        await backend.signals.announce(["after"])
        assert Signal("valid") not in await read_until(feed, "after")
    assert refused.value.code == "SIGNAL_TOO_LARGE"
    assert refused.value.hint


async def test_an_empty_announcement_sends_nothing(backend: SignalsBackend) -> None:
    """R15: an empty announcement is allowed."""
    async with backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        await backend.signals.announce([])
        await backend.signals.announce(["something"])
        assert first_arrivals(await read_until(feed, "something")) == ["something"]


async def test_a_lost_connection_is_marked_and_reopened(backend: SignalsBackend) -> None:
    """R22: after every reconnect there is a Resync, and later signals arrive."""
    async with backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        for n in range(3):
            await backend.cut()
            await backend.signals.announce([f"meanwhile-{n}"])
            await read_until_resync(feed, "the connection was lost", "Pub/Sub was lost")
            await backend.signals.announce([f"later-{n}"])
            await read_until(feed, f"later-{n}")


async def test_a_restarted_listener_receives_new_signals(backend: SignalsBackend) -> None:
    """R22: a listener that restarts with the same name resyncs, and receives new signals only."""
    async with backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
    await backend.signals.announce(["while away"])
    async with backend.signals.listen("pod") as feed:
        assert await read_until_resync(feed) == [Resync("the listener has started")]
        await backend.signals.announce(["back"])
        assert first_arrivals(await read_until(feed, "back")) == ["back"]


async def test_a_cancelled_wait_loses_no_signal(backend: SignalsBackend) -> None:
    """R19: a listener may wait with a timeout; later signals still arrive."""
    async with backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(feed), 0.01)
        await backend.signals.announce(["after all"])
        await read_until(feed, "after all")


async def test_a_slow_listener_receives_a_resync(backend: SignalsBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: the inbox of a slow listener is limited; beyond the limit a Resync replaces the signals."""
    monkeypatch.setattr(notifications, "INBOX_LIMIT", 10)
    marker = MissedNotifications("the listener was too slow")
    async with backend.signals.listen("pod") as feed:
        assert isinstance(feed, SignalStream)
        await read_until_resync(feed)
        waiting: asyncio.Queue[Notification | MissedNotifications] = feed._inbox._queue
        await backend.signals.announce([f"v{n}" for n in range(100)])
        await becomes(lambda: marker in list(waiting._queue))  # type: ignore[attr-defined]
        assert waiting.qsize() <= 10
        await read_until_resync(feed, marker.reason)


@pytest.mark.full
async def test_a_listener_in_another_process_receives_signals(backend: SignalsBackend) -> None:
    """R16: signals reach other processes; the listener there starts with its own Resync."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kernel.signals.listener", *backend.child, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(WITHIN):
            assert await child.stdout.readline() == b"resync\n"
            await backend.signals.announce(["over there"])
            while await child.stdout.readline() != b"over there\n":
                pass
    finally:
        child.kill()
        await child.wait()


async def test_a_cancelled_announcement_ends_as_cancelled(backend: SignalsBackend) -> None:
    """R15: an announcement can be cancelled at any moment, and the channel still works."""
    for steps in range(40):
        announcing = asyncio.create_task(backend.signals.announce(["perhaps"]))
        for _ in range(steps):
            await asyncio.sleep(0)
        if announcing.cancel():
            with pytest.raises(asyncio.CancelledError):
                await announcing
    await backend.signals.announce(["works"])


async def test_a_listener_can_be_closed_at_any_moment(backend: SignalsBackend) -> None:
    """R22: a listener closes promptly, whatever it is doing."""
    for steps in range(40):
        async with asyncio.timeout(WITHIN), backend.signals.listen("pod"):
            for _ in range(steps):
                await asyncio.sleep(0)


async def test_a_channel_that_works_passes_its_check(backend: SignalsBackend) -> None:
    """R23: the health check of a working channel passes."""
    await backend.signals.check()


# Services of the machine


def test_a_missing_service_skips_unless_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """PENSTOCK_REQUIRE turns the skip of a test into a failure."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("PENSTOCK_REQUIRE", "kafka")
    with pytest.raises(pytest.skip.Exception, match="no redis-server"):
        require("redis", "no redis-server")
    monkeypatch.setenv("PENSTOCK_REQUIRE", "kafka, redis")
    with pytest.raises(pytest.fail.Exception, match="no redis-server"):
        require("redis", "no redis-server")
    assert redis_binary() is None


async def test_without_postgres_announcing_is_transient() -> None:
    """R23: while the server is down an announcement is Transient, with a hint."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder:
        async with contextlib.AsyncExitStack() as server, contextlib.AsyncExitStack() as client:
            url = await server.enter_async_context(run_embedded_postgres(Path(folder)))
            db = await client.enter_async_context(Database.open(url))
            signals = PostgresSignals(db, "changes")
            await signals.announce(["works"])
            await server.aclose()
            await assert_down(signals)
