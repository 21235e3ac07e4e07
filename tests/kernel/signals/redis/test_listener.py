"""The two paths of a listener on Redis: the stream has what Pub/Sub loses, and a silent server is detected."""

from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from penstock.kernel.signals import Resync, Signal
from penstock.kernel.signals.redis import listener as redis_listener
from tests.kernel.signals.backends import RedisSignalsBackend, redis_backend
from tests.kernel.signals.feed_reader import AT_ONCE, becomes, pings, read_until, read_until_resync, server_binary
from tests.services.redis import RedisCluster, RedisServer


async def test_pubsub_alone_is_instant(cluster_backend: RedisSignalsBackend) -> None:
    """R15: a published signal arrives without the stream."""
    async with cluster_backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        cluster_backend.publish("only published")
        await read_until(feed, "only published", within=AT_ONCE)


async def test_a_signal_that_pubsub_lost_is_read_from_the_stream(cluster_backend: RedisSignalsBackend) -> None:
    """R15, R22: a signal that is only in the stream arrives once."""
    async with cluster_backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        for n in range(5):
            cluster_backend.add(f"only added {n}")
        items = await read_until(feed, "only added 4")
    assert [item.body for item in items if isinstance(item, Signal)] == [f"only added {n}" for n in range(5)]


async def test_all_signals_arrive_while_pubsub_is_interrupted(
    cluster_backend: RedisSignalsBackend,
) -> None:
    """R22: no signal is lost while Pub/Sub is interrupted, and the subscription is renewed."""
    bodies = [f"v{n}" for n in range(10)]
    async with cluster_backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        for body in bodies:
            cluster_backend.redis.client_kill_pubsub()
            await cluster_backend.signals.announce([body])
        items = await read_until(feed, *bodies)
        if Resync("Pub/Sub was lost") not in items:
            await read_until_resync(feed, "Pub/Sub was lost")
        cluster_backend.publish("only published")
        await read_until(feed, "only published", within=AT_ONCE)


async def test_a_quiet_subscription_is_pinged(
    single_backend: RedisSignalsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R22: a quiet subscription continues as long as the server answers pings."""
    monkeypatch.setattr(redis_listener, "_PING_AFTER", 0.02)
    async with single_backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        before = pings(single_backend)
        await becomes(lambda: pings(single_backend) > before + 3)
        single_backend.publish("after the silence")
        assert await read_until(feed, "after the silence") == [Signal("after the silence")]


async def test_a_frozen_server_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: both paths detect a server that neither answers nor closes; when it is back each causes a Resync."""
    monkeypatch.setattr(redis_listener, "_PING_AFTER", 0.02)
    monkeypatch.setattr(redis_listener, "ANSWER_WITHIN", 0.5)
    service = RedisServer(server_binary())
    try:
        async with (
            redis_backend(service, poll=timedelta(milliseconds=100)) as backend,
            backend.signals.listen("pod") as feed,
        ):
            await read_until_resync(feed)
            with capture_logs() as logs:
                service.freeze()
                await becomes(lambda: {log.get("path") for log in logs} >= {"pubsub", "stream"})
                service.thaw()
            items = await read_until_resync(feed, "the connection was lost")
            if Resync("Pub/Sub was lost") not in items:
                await read_until_resync(feed, "Pub/Sub was lost")
            await backend.signals.announce(["later"])
            await read_until(feed, "later")
    finally:
        service.stop()


async def test_a_redis_without_its_data_causes_a_resync(
    cluster: RedisCluster, cluster_backend: RedisSignalsBackend
) -> None:
    """R22: after Redis has lost its data the listener resyncs, and both paths work."""
    async with cluster_backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        cluster.wipe()
        await read_until_resync(feed, "the stream was lost")
        await cluster_backend.signals.announce(["later"])
        await read_until(feed, "later")
        cluster_backend.add("only added")
        await read_until(feed, "only added")
