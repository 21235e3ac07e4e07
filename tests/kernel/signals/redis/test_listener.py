"""Both paths of a listener on Redis: what Pub/Sub loses the stream has, and silence is noticed."""

from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from penstock.kernel.signals import Resync, Signal
from penstock.kernel.signals.redis import listener as redis_listener
from tests.kernel.signals.backends import RedisSignalsBackend, redis_backend
from tests.kernel.signals.feed_reader import AT_ONCE, becomes, heard, pings, resynced, server_binary
from tests.services.redis import RedisCluster, RedisServer


async def test_pubsub_alone_is_instant(cluster_backend: RedisSignalsBackend) -> None:
    """R15: what is published arrives without the stream's help."""
    async with cluster_backend.signals.listen("pod") as feed:
        await resynced(feed)
        cluster_backend.publish("only published")
        await heard(feed, "only published", within=AT_ONCE)


async def test_what_pubsub_lost_is_caught_up_from_the_stream(cluster_backend: RedisSignalsBackend) -> None:
    """R15, R22: a signal that is only in the stream is heard, and heard once."""
    async with cluster_backend.signals.listen("pod") as feed:
        await resynced(feed)
        for n in range(5):
            cluster_backend.add(f"only added {n}")
        items = await heard(feed, "only added 4")
    assert [item.body for item in items if isinstance(item, Signal)] == [f"only added {n}" for n in range(5)]


async def test_while_pubsub_is_cut_again_and_again_the_very_signals_arrive(
    cluster_backend: RedisSignalsBackend,
) -> None:
    """R22: a broken Pub/Sub costs no signal, and it is subscribed to again."""
    bodies = [f"v{n}" for n in range(10)]
    async with cluster_backend.signals.listen("pod") as feed:
        await resynced(feed)
        for body in bodies:
            cluster_backend.redis.client_kill_pubsub()
            await cluster_backend.signals.announce([body])
        items = await heard(feed, *bodies)
        if Resync("Pub/Sub was lost") not in items:
            await resynced(feed, "Pub/Sub was lost")
        cluster_backend.publish("only published")
        await heard(feed, "only published", within=AT_ONCE)


async def test_silence_is_no_loss_so_long_as_the_server_answers(
    single_backend: RedisSignalsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R22: a quiet subscription is asked whether it lives, and goes on."""
    monkeypatch.setattr(redis_listener, "_PING_AFTER", 0.02)
    async with single_backend.signals.listen("pod") as feed:
        await resynced(feed)
        before = pings(single_backend)
        await becomes(lambda: pings(single_backend) > before + 3)
        single_backend.publish("after the silence")
        assert await heard(feed, "after the silence") == [Signal("after the silence")]


async def test_a_server_that_says_nothing_more_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: both paths notice a server that neither answers nor closes; when it is back there is a Resync of each."""
    monkeypatch.setattr(redis_listener, "_PING_AFTER", 0.02)
    monkeypatch.setattr(redis_listener, "ANSWER_WITHIN", 0.5)
    service = RedisServer(server_binary())
    try:
        async with (
            redis_backend(service, poll=timedelta(milliseconds=100)) as backend,
            backend.signals.listen("pod") as feed,
        ):
            await resynced(feed)
            with capture_logs() as logs:
                service.freeze()
                await becomes(lambda: {log.get("path") for log in logs} >= {"pubsub", "stream"})
                service.thaw()
            items = await resynced(feed, "the connection was lost")
            if Resync("Pub/Sub was lost") not in items:
                await resynced(feed, "Pub/Sub was lost")
            await backend.signals.announce(["later"])
            await heard(feed, "later")
    finally:
        service.stop()


async def test_a_wiped_redis_is_told_and_used_again(
    cluster: RedisCluster, cluster_backend: RedisSignalsBackend
) -> None:
    """R22: when Redis lost its data the listener resyncs, and both paths work as before."""
    async with cluster_backend.signals.listen("pod") as feed:
        await resynced(feed)
        cluster.wipe()
        await resynced(feed, "the stream was lost")
        await cluster_backend.signals.announce(["later"])
        await heard(feed, "later")
        cluster_backend.add("only added")
        await heard(feed, "only added")
