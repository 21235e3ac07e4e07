"""The consumer groups of listeners: pending, trimmed and reaped entries, and the lag."""

from datetime import timedelta

import pytest

from penstock.kernel.signals import Resync, Signal
from tests.kernel.signals.backends import RedisSignalsBackend, redis_backend
from tests.kernel.signals.feed_reader import (
    becomes,
    first_arrivals,
    leave_behind,
    read_first,
    read_until,
    read_until_resync,
)
from tests.services.redis import RedisCluster


async def test_a_signal_delivered_to_a_dead_connection_is_redelivered(cluster_backend: RedisSignalsBackend) -> None:
    """R22: a signal that Redis has delivered, but that was not acknowledged, is not lost."""
    lost = """
        redis.call('XADD', KEYS[1], '*', 'body', 'swallowed')
        redis.call('XREADGROUP', 'GROUP', ARGV[1], 'listener', 'STREAMS', KEYS[1], '>')
    """
    async with cluster_backend.signals.listen("pod") as feed:
        await read_first(cluster_backend, feed)
        cluster_backend.server.eval(lost, 1, cluster_backend.stream, f"{cluster_backend.name}:pod")
        await read_until(feed, "swallowed")


async def test_signals_are_acknowledged(cluster_backend: RedisSignalsBackend) -> None:
    """R22: nothing is pending in Redis for a listener that has read everything."""
    async with cluster_backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        await cluster_backend.signals.announce([f"v{n}" for n in range(150)])
        await read_until(feed, *(f"v{n}" for n in range(150)))
        await becomes(
            lambda: (
                not cluster_backend.server.xpending(cluster_backend.stream, f"{cluster_backend.name}:pod")["pending"]
            )
        )


@pytest.mark.parametrize("remaining", [0, 1])
async def test_a_trimmed_stream_causes_a_resync(cluster_backend: RedisSignalsBackend, remaining: int) -> None:
    """R22: entries that were trimmed before they were read become a Resync, whether or not entries remain."""
    add_and_trim = """
        for i = 2, #ARGV do redis.call('XADD', KEYS[1], '*', 'body', ARGV[i]) end
        redis.call('XTRIM', KEYS[1], 'MAXLEN', ARGV[1])
    """
    async with cluster_backend.signals.listen("pod") as feed:
        await read_first(cluster_backend, feed)
        cluster_backend.server.eval(
            add_and_trim, 1, cluster_backend.stream, remaining, "trimmed", "trimmed too", "last"
        )
        items = await read_until_resync(feed)
    assert items == [Signal("last")] * remaining + [Resync("the stream was trimmed before it was read")]


async def test_trimming_of_read_entries_causes_no_resync(cluster_backend: RedisSignalsBackend) -> None:
    """R22: there is no Resync for trimmed entries that were read."""
    async with cluster_backend.signals.listen("pod") as feed:
        await read_first(cluster_backend, feed)
        for n in range(5):
            cluster_backend.server.xadd(cluster_backend.stream, {"body": f"v{n}"}, maxlen=2, approximate=False)
            assert await read_until(feed, f"v{n}") == [Signal(f"v{n}")]


async def test_a_closed_listener_deletes_its_group(cluster_backend: RedisSignalsBackend) -> None:
    """R22: the group of a listener is deleted when it closes."""
    async with cluster_backend.signals.listen("a") as feed, cluster_backend.signals.listen("b") as other:
        await read_until_resync(feed)
        await read_until_resync(other)
        assert cluster_backend.groups == {f"{cluster_backend.name}:a", f"{cluster_backend.name}:b"}
    assert cluster_backend.groups == set()


async def test_groups_of_dead_listeners_are_reaped(cluster: RedisCluster) -> None:
    """R22: groups of inactive listeners are deleted, at the start of a listener and later; other groups are not."""
    quick = {"poll": timedelta(milliseconds=20), "dead_after": timedelta(milliseconds=400)}
    async with redis_backend(cluster, **quick) as backend:
        leave_behind(backend, f"{backend.name}:dead", "another:group")
        async with backend.signals.listen("pod") as feed, backend.signals.listen("other") as other_feed:
            await read_until_resync(feed)
            await read_until_resync(other_feed)
            alive = {f"{backend.name}:pod", f"{backend.name}:other", "another:group"}
            await becomes(lambda: backend.groups == alive)
            leave_behind(backend, f"{backend.name}:died-later")
            await becomes(lambda: backend.groups == alive)


async def test_a_quiet_listener_is_not_considered_dead(cluster: RedisCluster) -> None:
    """R22: a listener is active for Redis also when there are no signals."""
    async with (
        redis_backend(cluster, poll=timedelta(milliseconds=20)) as backend,
        backend.signals.listen("pod") as feed,
    ):
        await read_first(backend, feed)
        idle = [0]

        def is_active_again() -> bool:
            (consumer,) = backend.server.xinfo_consumers(backend.stream, f"{backend.name}:pod")
            idle.append(consumer["idle"])
            return idle[-1] < idle[-2]  # without activity it only grows

        await becomes(is_active_again)


async def test_a_listener_ignores_the_group_of_a_dead_listener(cluster_backend: RedisSignalsBackend) -> None:
    """R22: an existing group with the same name does not deliver old signals."""
    leave_behind(cluster_backend, f"{cluster_backend.name}:pod")
    cluster_backend.add("old")
    async with cluster_backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        cluster_backend.add("new")
        assert first_arrivals(await read_until(feed, "new")) == ["new"]


async def test_the_lag_is_that_of_the_slowest_listener(cluster_backend: RedisSignalsBackend) -> None:
    """R26: the lag is the number of undelivered entries of the slowest group of this channel."""
    assert await cluster_backend.signals.measure_lag() == 0
    leave_behind(cluster_backend, f"{cluster_backend.name}:slow", "another:slower")
    await cluster_backend.signals.announce(["a", "b", "c"])
    assert await cluster_backend.signals.measure_lag() == 3
    cluster_backend.server.xreadgroup(
        f"{cluster_backend.name}:slow", "listener", {cluster_backend.stream: ">"}, count=2
    )
    assert await cluster_backend.signals.measure_lag() == 1
    async with cluster_backend.signals.listen("quick") as feed:
        await read_until_resync(feed)
        assert await cluster_backend.signals.measure_lag() == 1
    cluster_backend.server.xgroup_destroy(cluster_backend.stream, f"{cluster_backend.name}:slow")
    assert await cluster_backend.signals.measure_lag() == 0
