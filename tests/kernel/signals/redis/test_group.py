"""The groups of listeners on the stream: what is pending, trimmed, reaped and behind."""

from datetime import timedelta

import pytest

from penstock.kernel.signals import Resync, Signal
from tests.kernel.signals.backends import RedisSignalsBackend, redis_backend
from tests.kernel.signals.feed_reader import becomes, begun, first_arrivals, heard, leave_behind, resynced
from tests.services.redis import RedisCluster


async def test_a_signal_handed_to_a_dead_connection_is_handed_again(cluster_backend: RedisSignalsBackend) -> None:
    """R22: what Redis counts as delivered and nobody acknowledged is not lost."""
    lost = """
        redis.call('XADD', KEYS[1], '*', 'body', 'swallowed')
        redis.call('XREADGROUP', 'GROUP', ARGV[1], 'listener', 'STREAMS', KEYS[1], '>')
    """
    async with cluster_backend.signals.listen("pod") as feed:
        await begun(cluster_backend, feed)
        cluster_backend.server.eval(lost, 1, cluster_backend.stream, f"{cluster_backend.name}:pod")
        await heard(feed, "swallowed")


async def test_signals_are_acknowledged(cluster_backend: RedisSignalsBackend) -> None:
    """R22: Redis keeps nothing pending for a listener that has read all."""
    async with cluster_backend.signals.listen("pod") as feed:
        await resynced(feed)
        await cluster_backend.signals.announce([f"v{n}" for n in range(150)])
        await heard(feed, *(f"v{n}" for n in range(150)))
        await becomes(
            lambda: (
                not cluster_backend.server.xpending(cluster_backend.stream, f"{cluster_backend.name}:pod")["pending"]
            )
        )


@pytest.mark.parametrize("kept", [0, 1])
async def test_a_stream_trimmed_past_the_listener_is_told(cluster_backend: RedisSignalsBackend, kept: int) -> None:
    """R22: entries that were trimmed before they were read become a Resync, whether or not any is left."""
    add_and_trim = """
        for i = 2, #ARGV do redis.call('XADD', KEYS[1], '*', 'body', ARGV[i]) end
        redis.call('XTRIM', KEYS[1], 'MAXLEN', ARGV[1])
    """
    async with cluster_backend.signals.listen("pod") as feed:
        await begun(cluster_backend, feed)
        cluster_backend.server.eval(add_and_trim, 1, cluster_backend.stream, kept, "trimmed", "trimmed too", "last")
        items = await resynced(feed)
    assert items == [Signal("last")] * kept + [Resync("the stream was trimmed before it was read")]


async def test_a_listener_that_keeps_up_is_not_told_of_trimming(cluster_backend: RedisSignalsBackend) -> None:
    """R22: trimming what was read is no loss: no Resync without need."""
    async with cluster_backend.signals.listen("pod") as feed:
        await begun(cluster_backend, feed)
        for n in range(5):
            cluster_backend.server.xadd(cluster_backend.stream, {"body": f"v{n}"}, maxlen=2, approximate=False)
            assert await heard(feed, f"v{n}") == [Signal(f"v{n}")]


async def test_a_listener_that_closes_leaves_nothing_behind(cluster_backend: RedisSignalsBackend) -> None:
    """R22: a listener's group is its own, and gone when it closes."""
    async with cluster_backend.signals.listen("a") as one, cluster_backend.signals.listen("b") as other:
        await resynced(one)
        await resynced(other)
        assert cluster_backend.groups == {f"{cluster_backend.name}:a", f"{cluster_backend.name}:b"}
    assert cluster_backend.groups == set()


async def test_leftovers_of_dead_listeners_are_reaped(cluster: RedisCluster) -> None:
    """R22: groups of listeners long silent go, at the start of a listener and later; other groups stay."""
    quick = {"poll": timedelta(milliseconds=20), "leftover_after": timedelta(milliseconds=400)}
    async with redis_backend(cluster, **quick) as backend:
        leave_behind(backend, f"{backend.name}:dead", "another:group")
        async with backend.signals.listen("pod") as feed, backend.signals.listen("other") as other_feed:
            await resynced(feed)
            await resynced(other_feed)
            alive = {f"{backend.name}:pod", f"{backend.name}:other", "another:group"}
            await becomes(lambda: backend.groups == alive)
            leave_behind(backend, f"{backend.name}:died-later")
            await becomes(lambda: backend.groups == alive)


async def test_a_quiet_listener_is_not_taken_for_dead(cluster: RedisCluster) -> None:
    """R22: a listener shows Redis that it lives also when there is nothing to hear."""
    async with (
        redis_backend(cluster, poll=timedelta(milliseconds=20)) as backend,
        backend.signals.listen("pod") as feed,
    ):
        await begun(backend, feed)
        idle = [0]

        def has_shown_itself() -> bool:
            (consumer,) = backend.server.xinfo_consumers(backend.stream, f"{backend.name}:pod")
            idle.append(consumer["idle"])
            return idle[-1] < idle[-2]  # without a sign of life it only grows

        await becomes(has_shown_itself)


async def test_a_listener_begins_afresh_where_its_namesake_died(cluster_backend: RedisSignalsBackend) -> None:
    """R22: the leftover group of the same name does not bring the signals of another life."""
    leave_behind(cluster_backend, f"{cluster_backend.name}:pod")
    cluster_backend.add("of another life")
    async with cluster_backend.signals.listen("pod") as feed:
        await resynced(feed)
        cluster_backend.add("of this life")
        assert first_arrivals(await heard(feed, "of this life")) == ["of this life"]


async def test_the_lag_is_that_of_the_slowest_listener(cluster_backend: RedisSignalsBackend) -> None:
    """R26: entries nobody was handed count for the group that is furthest behind, of this channel's groups."""
    assert await cluster_backend.signals.lag() == 0
    leave_behind(cluster_backend, f"{cluster_backend.name}:slow", "another:slower")
    await cluster_backend.signals.announce(["a", "b", "c"])
    assert await cluster_backend.signals.lag() == 3
    cluster_backend.server.xreadgroup(
        f"{cluster_backend.name}:slow", "listener", {cluster_backend.stream: ">"}, count=2
    )
    assert await cluster_backend.signals.lag() == 1
    async with cluster_backend.signals.listen("quick") as feed:
        await resynced(feed)
        assert await cluster_backend.signals.lag() == 1
    cluster_backend.server.xgroup_destroy(cluster_backend.stream, f"{cluster_backend.name}:slow")
    assert await cluster_backend.signals.lag() == 0
