"""Signals: every listener hears each one, or is told to look for itself; the same promises for every implementation."""

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.kernel.db import listener as notifications
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import embedded_postgres
from penstock.kernel.db.listener import MissedNotifications, Notification
from penstock.kernel.errors import Invalid
from penstock.kernel.signals import BODY_LIMIT, Resync, Signal
from penstock.kernel.signals.feed import SignalStream
from penstock.kernel.signals.postgres import PostgresSignals
from tests.kernel.signals.backends import SignalsBackend
from tests.kernel.signals.feed_reader import (
    AT_ONCE,
    WITHIN,
    assert_down,
    becomes,
    first_arrivals,
    heard,
    resynced,
)
from tests.services.redis import redis_binary
from tests.support.require import require

ROOT = Path(__file__).parents[3]


# Every implementation


async def test_the_first_thing_a_listener_receives_is_resync(backend: SignalsBackend) -> None:
    """R22: whatever happened before, a listener first looks at the source of truth."""
    await backend.signals.announce(["before"])
    async with backend.signals.listen("pod") as feed, asyncio.timeout(WITHIN):
        assert await anext(feed) == Resync("the listener began")


async def test_a_signal_arrives_at_once(backend: SignalsBackend) -> None:
    """R16: from announcement to listener there is no waiting for a poll."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        await backend.signals.announce(["now"])
        await heard(feed, "now", within=AT_ONCE)


async def test_every_listener_hears_every_signal(backend: SignalsBackend) -> None:
    """R22: listeners do not share signals among them; each gets all."""
    bodies = [f"v{n}" for n in range(20)]
    async with contextlib.AsyncExitStack() as stack:
        feeds = [await stack.enter_async_context(backend.signals.listen(f"pod-{n}")) for n in range(4)]
        for feed in feeds:
            await resynced(feed)
        for body in bodies:
            await backend.signals.announce([body])
        for feed in feeds:
            assert first_arrivals(await heard(feed, *bodies)) == bodies


async def test_signals_of_one_announcer_arrive_in_order(backend: SignalsBackend) -> None:
    """R16: what was announced first is heard first, within an announcement and among several."""
    bodies = [f"{n:04}" for n in range(500)]
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        for start in range(0, 500, 250):
            await backend.signals.announce(bodies[start : start + 250])
        assert first_arrivals(await heard(feed, *bodies)) == bodies


@pytest.mark.parametrize(
    "body",
    ["Größe 🌊 \N{GREEK SMALL LETTER OMEGA}", "x" * BODY_LIMIT, "ü" * (BODY_LIMIT // 2), ' {"a": "\'\\"}\r\n\t\x01 '],
    ids=["unicode", "largest", "largest in bytes", "quotes and controls"],
)
async def test_a_body_arrives_as_it_was_written(backend: SignalsBackend, body: str) -> None:
    """R16: any text of up to the limit in bytes comes through unchanged."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        await backend.signals.announce([body])
        await heard(feed, body)


@pytest.mark.parametrize("body", ["x" * (BODY_LIMIT + 1), "ü" * BODY_LIMIT, "", "a\0b", "\ud800"])
async def test_a_body_nobody_could_carry_is_refused_with_all_its_company(backend: SignalsBackend, body: str) -> None:
    """R16: one bad body is Invalid, and none of the announcement goes out."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        with pytest.raises(Invalid, match="bytes of text without NUL") as refused:
            await backend.signals.announce(["in bad company", body])
        await backend.signals.announce(["after"])
        assert Signal("in bad company") not in await heard(feed, "after")
    assert refused.value.code == "SIGNAL_TOO_LARGE"
    assert refused.value.hint


async def test_announcing_nothing_is_no_signal(backend: SignalsBackend) -> None:
    """R15: an empty announcement is not an error."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        await backend.signals.announce([])
        await backend.signals.announce(["something"])
        assert first_arrivals(await heard(feed, "something")) == ["something"]


async def test_a_lost_connection_is_told_and_mended(backend: SignalsBackend) -> None:
    """R22: every reconnect is a Resync, after which what was announced meanwhile is known; later signals arrive."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        for n in range(3):
            await backend.cut()
            await backend.signals.announce([f"meanwhile-{n}"])
            await resynced(feed, "the connection was lost", "Pub/Sub was lost")
            await backend.signals.announce([f"later-{n}"])
            await heard(feed, f"later-{n}")


async def test_a_listener_that_comes_back_hears_again(backend: SignalsBackend) -> None:
    """R22: after a restart under the same name a listener resyncs, and hears what comes, not what came."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
    await backend.signals.announce(["while away"])
    async with backend.signals.listen("pod") as feed:
        assert await resynced(feed) == [Resync("the listener began")]
        await backend.signals.announce(["back"])
        assert first_arrivals(await heard(feed, "back")) == ["back"]


async def test_whoever_stops_waiting_loses_nothing(backend: SignalsBackend) -> None:
    """R19: a listener may wait with a limit; what comes afterwards is still handed out."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(feed), 0.01)
        await backend.signals.announce(["after all"])
        await heard(feed, "after all")


async def test_a_listener_that_is_too_slow_is_told_so(backend: SignalsBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: what waits for a slow listener is bounded; beyond it there is a Resync in place of the signals."""
    monkeypatch.setattr(notifications, "INBOX_LIMIT", 10)
    told = MissedNotifications("the listener was too slow")
    async with backend.signals.listen("pod") as feed:
        assert isinstance(feed, SignalStream)
        await resynced(feed)
        waiting: asyncio.Queue[Notification | MissedNotifications] = feed._inbox._queue
        await backend.signals.announce([f"v{n}" for n in range(100)])
        await becomes(lambda: told in list(waiting._queue))  # type: ignore[attr-defined]
        assert waiting.qsize() <= 10
        await resynced(feed, told.reason)


@pytest.mark.full
async def test_a_listener_in_another_process_hears(backend: SignalsBackend) -> None:
    """R16: signals cross processes; the listener there begins with its own Resync."""
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
    """R15: whoever announces can be stopped at any moment, and the channel still works."""
    for steps in range(40):
        announcing = asyncio.create_task(backend.signals.announce(["perhaps"]))
        for _ in range(steps):
            await asyncio.sleep(0)
        if announcing.cancel():
            with pytest.raises(asyncio.CancelledError):
                await announcing
    await backend.signals.announce(["works"])


async def test_a_listener_can_be_closed_at_any_moment(backend: SignalsBackend) -> None:
    """R22: closing is prompt whatever the listener is just doing."""
    for steps in range(40):
        async with asyncio.timeout(WITHIN), backend.signals.listen("pod"):
            for _ in range(steps):
                await asyncio.sleep(0)


async def test_a_channel_that_works_passes_its_check(backend: SignalsBackend) -> None:
    """R23: health tells the truth in good times."""
    await backend.signals.check()


# What the machine has


def test_a_missing_service_skips_unless_the_run_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    """PENSTOCK_REQUIRE turns a skip into a failure, and wants the machine's own redis-server."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("PENSTOCK_REQUIRE", "kafka")
    with pytest.raises(pytest.skip.Exception, match="no redis-server"):
        require("redis", "no redis-server")
    monkeypatch.setenv("PENSTOCK_REQUIRE", "kafka, redis")
    with pytest.raises(pytest.fail.Exception, match="no redis-server"):
        require("redis", "no redis-server")
    assert redis_binary() is None


async def test_without_postgres_announcing_is_transient() -> None:
    """R23: with the server down an announcement says so, with what to do, and may be tried again."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder:
        async with contextlib.AsyncExitStack() as server, contextlib.AsyncExitStack() as client:
            url = await server.enter_async_context(embedded_postgres(Path(folder)))
            db = await client.enter_async_context(Database.open(url))
            signals = PostgresSignals(db, "changes")
            await signals.announce(["works"])
            await server.aclose()
            await assert_down(signals)
