"""The connection to Redis: addresses, users, and nodes that fail, return and take over."""

import asyncio

import pytest

from penstock.kernel.errors import BadConfig, Transient
from penstock.kernel.signals.redis import RedisSignals
from tests.kernel.signals.backends import RedisSignalsBackend, redis_backend
from tests.kernel.signals.feed_reader import assert_down, read_until, read_until_resync, server_binary
from tests.services.redis import RedisCluster, RedisServer


async def test_a_node_that_lost_its_data_causes_a_resync(private_cluster: RedisCluster) -> None:
    """R22, R23: the node of the stream dies and returns without data: Transient, then Resync, then signals."""
    async with redis_backend(private_cluster) as backend, backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        owner = private_cluster.owner(backend.stream)
        private_cluster.kill(owner)
        with pytest.raises(Transient):
            await backend.signals.announce(["unreachable"])
        await asyncio.to_thread(private_cluster.start, owner)
        await read_until_resync(feed, "the stream was lost")
        await backend.signals.announce(["later"])
        await read_until(feed, "later")


async def test_a_failover_causes_a_resync() -> None:
    """R22, R23: a replica takes over the stream from a frozen master: Resync, then signals from the new one."""
    service = await asyncio.to_thread(RedisCluster, server_binary(), replicas=True)
    try:
        async with redis_backend(service) as backend, backend.signals.listen("pod") as feed:
            await read_until_resync(feed)
            owner = service.owner(backend.stream)
            service.freeze(owner)
            await asyncio.to_thread(service.wait_until_promoted, owner + 3)
            await read_until_resync(feed, "the connection was lost", "the stream was lost")
            await backend.signals.announce(["to the new master"])
            await read_until(feed, "to the new master")
            service.thaw(owner)
            await backend.signals.announce(["after the thaw"])
            await read_until(feed, "after the thaw")
    finally:
        await asyncio.to_thread(service.stop)


async def test_a_stream_that_moves_to_another_node_is_followed(
    cluster: RedisCluster, cluster_backend: RedisSignalsBackend
) -> None:
    """R16, R22: while a slot is moved, for however long, and after it: Resync, and signals on both paths."""
    async with cluster_backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        await cluster_backend.signals.announce(["before"])
        cluster.open_slot(cluster_backend.stream)
        await read_until_resync(feed, "the connection was lost")
        await cluster_backend.signals.announce(["meanwhile"])
        await read_until(feed, "meanwhile")
        cluster.close_slot(cluster_backend.stream)
        await cluster_backend.signals.announce(["after"])
        await read_until(feed, "after")


async def test_a_wrong_password_is_transient(single: RedisServer) -> None:
    """R16: Redis may require a password; a wrong one is Transient with a hint, because Redis may be reconfigured."""
    user = {"username": "pod", "password": "secret"}
    single.ask("ACL SETUSER", "pod", "on", ">secret", "~*", "&*", "+@all")
    async with redis_backend(single, **user) as backend, backend.signals.listen("pod") as feed:
        await read_until_resync(feed)
        await backend.signals.announce(["known"])
        await read_until(feed, "known")
    async with redis_backend(single, **user | {"password": "wrong"}) as backend:
        await assert_down(backend.signals)


@pytest.mark.parametrize("nodes", [[], ["no-port"], [":6379"], ["a:x"]])
def test_invalid_addresses_are_refused(nodes: list[str]) -> None:
    """R16: invalid addresses are BadConfig."""
    with pytest.raises(BadConfig):
        RedisSignals(nodes, pub_channel="p", stream_key="s", group_prefix="g")


def test_a_single_redis_has_one_address() -> None:
    """R16: several addresses without a cluster are BadConfig."""
    with pytest.raises(BadConfig):
        RedisSignals(["a:1", "b:2"], mode="single", pub_channel="p", stream_key="s", group_prefix="g")
