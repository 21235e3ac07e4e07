"""R22, R23, R28: failures of Redis, which readers do not notice for long."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.signals import Resync, Signal
from penstock.kernel.signals.redis import RedisSignals
from penstock.refdata.pod import supervisor as pods
from penstock.refdata.pod.load.loader import PodLoader
from penstock.settings import Settings
from tests.refdata.harness import RefdataHarness, create_schemas, opened, refdata_settings, upsert
from tests.refdata.pod.harness import PodHarness, running_pod
from tests.services.redis import MASTERS, RedisCluster, redis_binary
from tests.support.require import require
from tests.support.types import Json
from tests.support.wait import becomes

SELDOM, OFTEN = "PT60S", "PT0.2S"  # rare enough to exclude reconciliation, frequent enough without notifications
NOWHERE = "127.0.0.1:1"
EVERYTHING = ("on", "nopass", "allkeys", "allchannels", "+@all")


class RedisRecoveryHarness:
    """A database, a channel in Redis, a writer, and the opened pods."""

    def __init__(self, url: str, folder: Path, cluster: RedisCluster, writer: RefdataHarness, route: Json) -> None:
        self.url, self.folder, self.cluster, self.writer, self.route = url, folder, cluster, writer, route
        self.stream: str = route["streamKey"]
        self.user = f"pod-{os.urandom(4).hex()}"
        self.allow(*EVERYTHING)

    def allow(self, *rules: str) -> None:
        """Change the rights of pods in Redis; the writer has all rights."""
        for number in range(len(self.cluster.addresses)):
            self.cluster.node(number).execute_command("ACL", "SETUSER", self.user, *rules)  # type: ignore[no-untyped-call]

    def cut(self) -> int:
        """Close the connections of all pods, and return their number."""
        nodes = [self.cluster.node(number) for number in range(len(self.cluster.addresses))]
        return sum(node.execute_command("CLIENT", "KILL", "USER", self.user) for node in nodes)  # type: ignore[no-untyped-call]

    @asynccontextmanager
    async def pod(self, every: str = SELDOM, **sections: Any) -> AsyncIterator[PodHarness]:
        async with running_pod(self.settings(every, **sections), self.folder) as pod:
            if not sections:
                await becomes(lambda: self.listen(1), "the pod listens")
            yield pod

    def settings(self, every: str, **sections: Any) -> Settings:
        query = {"reconcileEvery": every, "auditEvery": None}
        return refdata_settings(
            self.url, **{"redis": {**self.route, "username": self.user}, "query": query, **sections}
        )

    async def put(self, value: Any, *, tells: bool = True, code: str = "LOOSE") -> int:
        """Commit a version and notify the pods."""
        await self.writer.send(code, upsert("a", value))
        await self.writer.apply()
        if tells:
            assert await self.writer.relay() == 1
        return await self.writer.version(code)

    def groups(self) -> list[Json]:
        found: list[Json] = self.cluster.holder(self.stream).xinfo_groups(self.stream)
        return found

    async def have_read_all(self, count: int) -> bool:
        """Return whether *count* groups have received and acknowledged the last entry of the stream.

        Positions are compared, because Redis 6.2 has neither `lag` nor `entries-read`.
        """
        last = self.cluster.holder(self.stream).xinfo_stream(self.stream)["last-generated-id"]
        return [(group["last-delivered-id"], group["pending"]) for group in self.groups()] == [(last, 0)] * count

    async def listen(self, count: int) -> bool:
        """Return whether *count* pods listen on both paths."""
        holder = self.cluster.holder(self.stream)
        subscribers = dict(holder.pubsub_numsub(self.route["pubChannel"]))
        consumers = sum(group["consumers"] for group in self.groups()) if holder.exists(self.stream) else 0
        return subscribers[self.route["pubChannel"]] >= count and consumers >= count


@pytest.fixture
async def harness(database_url: str, tmp_path: Path, cluster: RedisCluster) -> AsyncIterator[RedisRecoveryHarness]:
    async with recovery_harness(database_url, tmp_path, cluster) as harness:
        yield harness


@asynccontextmanager
async def recovery_harness(url: str, folder: Path, cluster: RedisCluster) -> AsyncIterator[RedisRecoveryHarness]:
    await create_schemas(url)
    name = f"t{os.urandom(4).hex()}"
    names = {"pubChannel": f"{name}:pub", "streamKey": f"{name}:stream", "consumerGroup": f"{name}-pods"}
    route = {"nodes": cluster.addresses, **names}
    async with opened(refdata_settings(url, redis=route)) as writer:
        yield RedisRecoveryHarness(url, folder, cluster, writer, route)


@pytest.fixture
def reconciliations(monkeypatch: pytest.MonkeyPatch) -> list[PodLoader]:
    """Return the list of completed reconciliations."""
    seen: list[PodLoader] = []
    look = PodLoader.reconcile

    async def counted(loader: PodLoader) -> None:
        await look(loader)
        seen.append(loader)

    monkeypatch.setattr(PodLoader, "reconcile", counted)
    return seen


async def shows(pod: PodHarness, version: int, value: Any) -> None:
    """Return when *pod* answers from memory with *version* without a barrier."""

    async def is_so() -> bool:
        found = await pod.get("LOOSE/items/a")
        assert found.status in (200, 404)
        return found.status == 200 and (found.version, found.json, found.source) == (version, value, "memory")

    await becomes(is_so, f"version {version}")


async def wait_for_notification(
    harness: RedisRecoveryHarness, reconciliations: list[PodLoader], *pods: PodHarness
) -> None:
    """Return when a version reached *pods* by a notification, without a reconciliation."""
    values = count(100)

    async def is_notified() -> bool:
        seen, value = len(reconciliations), next(values)
        version = await harness.put(value)
        for pod in pods:
            await shows(pod, version, value)
        return len(reconciliations) == seen

    await becomes(is_notified, "a version by notification")


async def test_the_stream_replaces_pubsub(harness: RedisRecoveryHarness, reconciliations: list[PodLoader]) -> None:
    """R22, R28: a pod without Pub/Sub receives notifications over the stream, without reconciliation."""
    async with harness.pod() as pod:
        await shows(pod, await harness.put(1), 1)
        harness.allow("-subscribe")
        assert harness.cluster.client_kill_pubsub() == 1
        await wait_for_notification(harness, reconciliations, pod)
        harness.allow("+subscribe")
        await becomes(lambda: harness.listen(1), "Pub/Sub is back")
        await wait_for_notification(harness, reconciliations, pod)


async def test_a_disconnected_pod_catches_up(harness: RedisRecoveryHarness) -> None:
    """R22: changes during a disconnection are loaded after the reconnect, and reads continue."""
    async with harness.pod() as pod:
        await shows(pod, await harness.put(1), 1)
        harness.allow("off")
        assert harness.cut() >= 2
        version = [await harness.put(value) for value in (2, 3, 4)][-1]
        assert (await pod.get("LOOSE/items/a")).json == 1
        harness.allow("on")
        await shows(pod, version, 4)
        (group,) = harness.groups()
        await becomes(lambda: harness.listen(1), "the pod listens again")
        assert group["name"].startswith(f"{harness.route['consumerGroup']}:")


async def test_a_trimmed_stream_causes_reconciliation(harness: RedisRecoveryHarness) -> None:
    """R22: if the stream is trimmed past the position of a pod, all dictionaries are compared."""
    async with harness.pod() as pod:
        await shows(pod, await harness.put(1), 1)
        harness.allow("off")
        harness.cut()
        await harness.put({"name": "Norway"}, code="COUNTRY")
        version = await harness.put(2)
        assert harness.cluster.holder(harness.stream).xtrim(harness.stream, maxlen=0, approximate=False) == 3
        harness.allow("on")
        await shows(pod, version, 2)

        async def has_come() -> bool:
            return (await pod.get("COUNTRY/items/a")).status == 200

        await becomes(has_come, "the dictionary without a notification")
        assert (await pod.get("COUNTRY/items/a")).json["name"] == "Norway"


async def test_a_flush_of_redis_loses_no_change(
    harness: RedisRecoveryHarness, reconciliations: list[PodLoader]
) -> None:
    """R22: after FLUSHALL changes are found by reconciliation, and later notifications arrive again."""
    async with harness.pod() as pod:
        harness.allow("off")
        harness.cut()
        version = await harness.put(1)
        harness.cluster.wipe()
        harness.allow("on")
        await shows(pod, version, 1)
        await becomes(lambda: harness.listen(1), "the pod listens again")
        harness.cluster.wipe()
        await becomes(lambda: harness.listen(1), "the pod has a group again")
        await wait_for_notification(harness, reconciliations, pod)


@pytest.mark.full
async def test_a_failover_of_redis_loses_no_change(database_url: str, tmp_path: Path) -> None:
    """R22, R23: during a failover to the replica reads continue, and later notifications arrive."""
    cluster = await asyncio.to_thread(RedisCluster, redis_binary() or require("redis"), replicas=True)
    try:
        async with recovery_harness(database_url, tmp_path, cluster) as harness, harness.pod() as pod:
            await shows(pod, await harness.put(1), 1)
            owner = cluster.owner(harness.stream)
            cluster.kill(owner)
            version = await harness.put(2, tells=False)
            assert (await pod.get("LOOSE/items/a")).json == 1
            await asyncio.to_thread(cluster.wait_until_promoted, owner + MASTERS)
            assert await harness.writer.relay() == 1
            await shows(pod, version, 2)
            await shows(pod, await harness.put(3), 3)
    finally:
        await asyncio.to_thread(cluster.stop)


async def test_pods_without_redis_stay_up_to_date(database_url: str, tmp_path: Path) -> None:
    """R23: without Redis pods follow the primary by reconciliation; afterwards notifications arrive again."""
    cluster = await asyncio.to_thread(RedisCluster, redis_binary() or require("redis"))
    try:
        async with recovery_harness(database_url, tmp_path, cluster) as harness, harness.pod(OFTEN) as pod:
            await shows(pod, await harness.put(1), 1)
            for number in range(MASTERS):
                cluster.kill(number)
            for value in (2, 3):
                await shows(pod, await harness.put(value, tells=False), value)
            answer = await pod.get("LOOSE/items/a")
            assert "X-Data-Age" not in answer.headers
            await asyncio.gather(*(asyncio.to_thread(cluster.start, number) for number in range(MASTERS)))
            harness.allow(*EVERYTHING)
            await becomes(lambda: harness.listen(1), "the pod listens again")
            assert await harness.writer.relay() == 2
            await shows(pod, await harness.put(4), 4)

            await becomes(lambda: harness.have_read_all(1), "the stream is read to its end")
    finally:
        await asyncio.to_thread(cluster.stop)


async def test_a_pod_needs_neither_redis_nor_kafka(harness: RedisRecoveryHarness) -> None:
    """R23: without Redis and Kafka a pod starts, becomes ready, serves and follows the primary."""
    version = await harness.put(1)
    settings = harness.settings(OFTEN, redis={"nodes": [NOWHERE]}).model_dump(mode="json", by_alias=True)
    settings["bus"]["kafka"] = {"bootstrap": NOWHERE}
    async with running_pod(Settings.model_validate(settings), harness.folder) as pod:
        await shows(pod, version, 1)
        async with pod.session.get(f"{pod.address}/actuator/health/readiness") as response:
            assert response.status == 200
        await shows(pod, await harness.put(2), 2)


async def test_every_pod_has_its_own_consumer_group(
    harness: RedisRecoveryHarness, reconciliations: list[PodLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R22: each pod has a group with the configured prefix, gets every message, and removes its group at the end."""
    numbers = count()
    monkeypatch.setattr(
        pods, "make_worker_name", lambda role: f"{role}@{next(numbers)}"
    )  # names are unique per process by default
    async with AsyncExitStack() as stack:
        three = [await stack.enter_async_context(harness.pod()) for _ in range(3)]
        await becomes(lambda: harness.listen(3), "all pods listen")
        await wait_for_notification(harness, reconciliations, *three)
        await becomes(lambda: harness.have_read_all(3), "each group is handed everything")
        assert all(str(group["name"]).startswith(f"{harness.route['consumerGroup']}:") for group in harness.groups())
    assert harness.groups() == []


async def test_the_group_of_a_killed_pod_is_removed(harness: RedisRecoveryHarness) -> None:
    """R22: another pod removes the group of a killed pod, and keeps those of living pods."""
    holder, prefix = harness.cluster.holder(harness.stream), harness.route["consumerGroup"]
    for name in (f"{prefix}:dead", "foreign"):
        holder.xgroup_create(harness.stream, name, mkstream=True)
        holder.xgroup_createconsumer(harness.stream, name, "listener")
    poll = timedelta(milliseconds=50)
    names = {"pub_channel": harness.route["pubChannel"], "stream_key": harness.stream, "group_prefix": prefix}
    signals = RedisSignals(harness.cluster.addresses, **names, poll=poll, dead_after=10 * poll)
    async with signals.listen("one") as first, signals.listen("two") as second:
        for feed in (first, second):
            assert isinstance(await anext(feed), Resync)

        async def is_reaped() -> bool:
            return {group["name"] for group in harness.groups()} == {f"{prefix}:one", f"{prefix}:two", "foreign"}

        await becomes(is_reaped, "the group to be removed")
        await signals.announce(["news"])
        for feed in (first, second):
            assert await anext(feed) == Signal("news")
    await signals.close()
