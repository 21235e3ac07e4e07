"""Signals on Redis: what only Redis has. The promises of every implementation are in test_signals."""

from datetime import timedelta

import pytest

from penstock.kernel.errors import BadConfig
from penstock.kernel.signals.redis import RedisSignals
from tests.kernel.signals.backends import RedisSignalsBackend, redis_backend
from tests.kernel.signals.feed_reader import WITHIN, assert_down
from tests.services.redis import RedisCluster


async def test_without_redis_announcing_is_transient(private_cluster: RedisCluster) -> None:
    """R23: with the cluster down an announcement says so, with what to do, and may be tried again."""
    async with redis_backend(private_cluster) as backend:
        await backend.signals.announce(["works"])
        for number in range(len(private_cluster.addresses)):
            private_cluster.kill(number)
        await assert_down(backend.signals)


async def test_an_announcement_is_both_added_and_published(
    cluster: RedisCluster, cluster_backend: RedisSignalsBackend
) -> None:
    """R15: the stream has it in its field `body`, and whoever subscribes at any node of the cluster gets it."""
    elsewhere = cluster.node((cluster.owner(cluster_backend.stream) + 1) % 3).pubsub()  # type: ignore[no-untyped-call]
    elsewhere.subscribe(f"{cluster_backend.name}:pub")
    assert elsewhere.get_message(timeout=WITHIN)["type"] == "subscribe"
    await cluster_backend.signals.announce(["both"])
    assert elsewhere.get_message(timeout=WITHIN)["data"] == "both"
    elsewhere.close()
    assert [fields for _, fields in cluster_backend.server.xrange(cluster_backend.stream)] == [{"body": "both"}]


async def test_the_stream_is_trimmed(cluster: RedisCluster) -> None:
    """R15: however much is announced, the stream keeps about as many entries as it is told to."""
    async with redis_backend(cluster, stream_length=100) as backend:
        await backend.signals.announce([str(n) for n in range(1_000)])
        assert 100 <= backend.server.xlen(backend.stream) < 300


def test_a_listener_must_have_time_to_show_that_it_lives() -> None:
    """R22: a limit at which the living would be reaped is bad configuration."""
    with pytest.raises(BadConfig):
        RedisSignals(["a:1"], pub_channel="p", stream_key="s", group_prefix="g", leftover_after=timedelta(seconds=5))
