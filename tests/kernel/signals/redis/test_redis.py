"""Properties of signals on Redis only. The guarantees of every implementation are in test_signals."""

from datetime import timedelta

import pytest

from penstock.kernel.errors import BadConfig
from penstock.kernel.signals.redis import RedisSignals
from tests.kernel.signals.backends import RedisSignalsBackend, redis_backend
from tests.kernel.signals.feed_reader import WITHIN, assert_down
from tests.services.redis import RedisCluster


async def test_without_redis_announcing_is_transient(private_cluster: RedisCluster) -> None:
    """R23: while the cluster is down an announcement is Transient, with a hint."""
    async with redis_backend(private_cluster) as backend:
        await backend.signals.announce(["works"])
        for number in range(len(private_cluster.addresses)):
            private_cluster.kill(number)
        await assert_down(backend.signals)


async def test_an_announcement_is_both_added_and_published(
    cluster: RedisCluster, cluster_backend: RedisSignalsBackend
) -> None:
    """R15: a signal is in the field `body` of the stream, and is published on every node of the cluster."""
    other_node = cluster.node((cluster.owner(cluster_backend.stream) + 1) % 3).pubsub()  # type: ignore[no-untyped-call]
    other_node.subscribe(f"{cluster_backend.name}:pub")
    assert other_node.get_message(timeout=WITHIN)["type"] == "subscribe"
    await cluster_backend.signals.announce(["both"])
    assert other_node.get_message(timeout=WITHIN)["data"] == "both"
    other_node.close()
    assert [fields for _, fields in cluster_backend.server.xrange(cluster_backend.stream)] == [{"body": "both"}]


async def test_the_stream_is_trimmed(cluster: RedisCluster) -> None:
    """R15: the length of the stream is limited approximately, however much is announced."""
    async with redis_backend(cluster, stream_length=100) as backend:
        await backend.signals.announce([str(n) for n in range(1_000)])
        assert 100 <= backend.server.xlen(backend.stream) < 300


def test_too_short_a_limit_for_dead_listeners_is_refused() -> None:
    """R22: a limit with which running listeners would be reaped is BadConfig."""
    with pytest.raises(BadConfig):
        RedisSignals(["a:1"], pub_channel="p", stream_key="s", group_prefix="g", dead_after=timedelta(seconds=5))
