"""R22, R23, R28: what happens to Redis, and what readers of a pod notice of it: nothing, or not for long."""

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

SELDOM, OFTEN = "PT60S", "PT0.2S"  # so seldom that a look cannot help, so often that signals need not
NOWHERE = "127.0.0.1:1"
EVERYTHING = ("on", "nopass", "allkeys", "allchannels", "+@all")


class RedisRecoveryHarness:
    """A database, a channel in Redis, somebody who writes, and pods as they are opened."""

    def __init__(self, url: str, folder: Path, cluster: RedisCluster, writer: RefdataHarness, route: Json) -> None:
        self.url, self.folder, self.cluster, self.writer, self.route = url, folder, cluster, writer, route
        self.stream: str = route["streamKey"]
        self.user = f"pod-{os.urandom(4).hex()}"
        self.allow(*EVERYTHING)

    def allow(self, *rules: str) -> None:
        """Change what pods may do; the writer may do everything."""
        for number in range(len(self.cluster.addresses)):
            self.cluster.node(number).execute_command("ACL", "SETUSER", self.user, *rules)  # type: ignore[no-untyped-call]

    def cut(self) -> int:
        """Close every connection of pods; how many there were."""
        nodes = [self.cluster.node(number) for number in range(len(self.cluster.addresses))]
        return sum(node.execute_command("CLIENT", "KILL", "USER", self.user) for node in nodes)  # type: ignore[no-untyped-call]

    @asynccontextmanager
    async def pod(self, every: str = SELDOM, **sections: Any) -> AsyncIterator[PodHarness]:
        async with running_pod(self.settings(every, **sections), self.folder) as pod:
            if not sections:
                await becomes(lambda: self.listens(1), "the pod listens")
            yield pod

    def settings(self, every: str, **sections: Any) -> Settings:
        query = {"reconcileEvery": every, "auditEvery": None}
        return refdata_settings(
            self.url, **{"redis": {**self.route, "username": self.user}, "query": query, **sections}
        )

    async def put(self, value: Any, *, tells: bool = True, code: str = "LOOSE") -> int:
        """Commit a version, and tell the pods of it."""
        await self.writer.send(code, upsert("a", value))
        await self.writer.apply()
        if tells:
            assert await self.writer.relay() == 1
        return await self.writer.version(code)

    def groups(self) -> list[Json]:
        found: list[Json] = self.cluster.holder(self.stream).xinfo_groups(self.stream)
        return found

    async def have_read_all(self, count: int) -> bool:
        """Whether *count* groups were handed the last entry of the stream and have settled everything.

        By position: Redis 6.2 knows neither `lag` nor `entries-read`.
        """
        last = self.cluster.holder(self.stream).xinfo_stream(self.stream)["last-generated-id"]
        return [(group["last-delivered-id"], group["pending"]) for group in self.groups()] == [(last, 0)] * count

    async def listens(self, count: int) -> bool:
        """Whether so many pods are on both paths."""
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
def looks(monkeypatch: pytest.MonkeyPatch) -> list[PodLoader]:
    """Every look at the primary's versions, as it ends."""
    seen: list[PodLoader] = []
    look = PodLoader.reconcile

    async def counted(loader: PodLoader) -> None:
        await look(loader)
        seen.append(loader)

    monkeypatch.setattr(PodLoader, "reconcile", counted)
    return seen


async def shows(pod: PodHarness, version: int, value: Any) -> None:
    """Back when *pod* answers so from memory, asked without a version."""

    async def is_so() -> bool:
        found = await pod.get("LOOSE/items/a")
        assert found.status in (200, 404)
        return found.status == 200 and (found.version, found.json, found.source) == (version, value, "memory")

    await becomes(is_so, f"version {version}")


async def handle_invalidation(harness: RedisRecoveryHarness, looks: list[PodLoader], *pods: PodHarness) -> None:
    """Back when a version came to *pods* by word alone: those of before may have caused a look that was still due."""
    values = count(100)

    async def hear_one() -> bool:
        seen, value = len(looks), next(values)
        version = await harness.put(value)
        for pod in pods:
            await shows(pod, version, value)
        return len(looks) == seen

    await becomes(hear_one, "a version comes without a look")


async def test_without_pubsub_the_stream_tells(harness: RedisRecoveryHarness, looks: list[PodLoader]) -> None:
    """R22, R28: a pod that loses Pub/Sub for good hears from the stream, and looks at nothing else."""
    async with harness.pod() as pod:
        await shows(pod, await harness.put(1), 1)
        harness.allow("-subscribe")
        assert harness.cluster.client_kill_pubsub() == 1
        await handle_invalidation(harness, looks, pod)
        harness.allow("+subscribe")
        await becomes(lambda: harness.listens(1), "Pub/Sub is back")
        await handle_invalidation(harness, looks, pod)


async def test_a_pod_that_was_away_catches_up(harness: RedisRecoveryHarness) -> None:
    """R22: what was announced while a pod had no connection at all is there once it has one; reads never stop."""
    async with harness.pod() as pod:
        await shows(pod, await harness.put(1), 1)
        harness.allow("off")
        assert harness.cut() >= 2
        version = [await harness.put(value) for value in (2, 3, 4)][-1]
        assert (await pod.get("LOOSE/items/a")).json == 1
        harness.allow("on")
        await shows(pod, version, 4)
        (group,) = harness.groups()
        await becomes(lambda: harness.listens(1), "the pod listens again")
        assert group["name"].startswith(f"{harness.route['consumerGroup']}:")


async def test_a_pod_whose_part_of_the_stream_is_gone_looks_at_everything(harness: RedisRecoveryHarness) -> None:
    """R22: trimmed past the pod's position: every dictionary is compared, told of or not."""
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

        await becomes(has_come, "the dictionary that nobody told of")
        assert (await pod.get("COUNTRY/items/a")).json["name"] == "Norway"


async def test_a_redis_that_lost_everything_is_no_loss(harness: RedisRecoveryHarness, looks: list[PodLoader]) -> None:
    """R22: FLUSHALL, with a version announced before it and not heard: reconciled; later ones are heard again."""
    async with harness.pod() as pod:
        harness.allow("off")
        harness.cut()
        version = await harness.put(1)
        harness.cluster.wipe()
        harness.allow("on")
        await shows(pod, version, 1)
        await becomes(lambda: harness.listens(1), "the pod listens again")
        harness.cluster.wipe()
        await becomes(lambda: harness.listens(1), "the pod has a group again")
        await handle_invalidation(harness, looks, pod)


@pytest.mark.full
async def test_a_failover_is_no_loss(database_url: str, tmp_path: Path) -> None:
    """R22, R23: the master with the stream dies and its replica takes over: reads go on, news arrive over it."""
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


async def test_without_redis_pods_stay_fresh(database_url: str, tmp_path: Path) -> None:
    """R23: Redis wholly gone: reads go on and follow the primary by looking; once back, signals tell again."""
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
            await becomes(lambda: harness.listens(1), "the pod listens again")
            assert await harness.writer.relay() == 2
            await shows(pod, await harness.put(4), 4)

            await becomes(lambda: harness.have_read_all(1), "the stream is read to its end")
    finally:
        await asyncio.to_thread(cluster.stop)


async def test_a_pod_needs_neither_redis_nor_kafka(harness: RedisRecoveryHarness) -> None:
    """R23: with both out of reach a pod starts, is ready, serves, and follows the primary."""
    version = await harness.put(1)
    settings = harness.settings(OFTEN, redis={"nodes": [NOWHERE]}).model_dump(mode="json", by_alias=True)
    settings["bus"]["kafka"] = {"bootstrap": NOWHERE}
    async with running_pod(Settings.model_validate(settings), harness.folder) as pod:
        await shows(pod, version, 1)
        async with pod.session.get(f"{pod.address}/actuator/health/readiness") as response:
            assert response.status == 200
        await shows(pod, await harness.put(2), 2)


async def test_every_pod_hears_everything_in_a_group_of_its_own(
    harness: RedisRecoveryHarness, looks: list[PodLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R22: one group per pod under the configured prefix; each is handed every message; none outlives its pod."""
    numbers = count()
    monkeypatch.setattr(pods, "worker_name", lambda role: f"{role}@{next(numbers)}")  # else known by its process
    async with AsyncExitStack() as stack:
        three = [await stack.enter_async_context(harness.pod()) for _ in range(3)]
        await becomes(lambda: harness.listens(3), "all pods listen")
        await handle_invalidation(harness, looks, *three)
        await becomes(lambda: harness.have_read_all(3), "each group is handed everything")
        assert all(str(group["name"]).startswith(f"{harness.route['consumerGroup']}:") for group in harness.groups())
    assert harness.groups() == []


async def test_the_group_of_a_killed_pod_is_reaped(harness: RedisRecoveryHarness) -> None:
    """R22: a pod that died without a word leaves a group; another pod removes it, and keeps those of the living."""
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

        await becomes(is_reaped, "the dead one's group is gone")
        await signals.announce(["news"])
        for feed in (first, second):
            assert await anext(feed) == Signal("news")
    await signals.close()
