"""R21, R28: no read is older than its barrier during failures."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from random import Random
from urllib.parse import quote

import aiohttp
import asyncpg
import psutil
import pytest
import structlog

from penstock.kernel.tasks.wait import wait_event
from tests.refdata.pod.harness import PodHarness
from tests.refdata.pod.scenarios.campaign import (
    READERS,
    TARGETS,
    WRITERS,
    BarrierCampaign,
    CampaignPod,
    CampaignReader,
    ReadRequest,
    staged,
)
from tests.refdata.pod.scenarios.history import DATA
from tests.services.redis import MASTERS, RedisCluster, redis_binary
from tests.support.require import require
from tests.support.soak import Campaign, examples
from tests.support.wait import becomes, until

SEED = "PENSTOCK_SEED"
Act = Callable[[], Awaitable[None]]
LEVEL_WITHIN = 10.0  # seconds after the last repair


class FaultInjector:
    """Injects faults, each kind in a lane of its own, and repairs them."""

    def __init__(self, campaign: BarrierCampaign) -> None:
        self._campaign = campaign
        self._random = campaign.random
        self._redis = campaign.redis

    def lanes(self) -> Sequence[tuple[Sequence[Act], float]]:
        """Return the lanes with their faults and the pause between them."""
        redis = (self.cut_pubsub, self.freeze_redis, self.restart_redis, self.fail_over, self.wipe_redis)
        primary = (self.restart_fast, self.restart_immediately, self.freeze_primary, self.lock_table)
        common = [(redis, 0.5), (primary, 1.0), ((self.stop_relay,), 2.0)]
        return [*common, *((self._acts_on(pod), 1.5) for pod in self._campaign.pods)]

    def _acts_on(self, pod: CampaignPod) -> Sequence[Act]:
        frozen = (self.freeze_loader, self.freeze_serving, self.freeze_pod)
        return [_bound(act, pod) for act in (*frozen, self.kill_serving, self.kill_pod, self.kill_loader)]

    async def inject_faults(self, acts: Sequence[Act], pause: float) -> None:
        """Inject faults one after the other until the end."""
        deck: list[Act] = []
        while not await wait_event(self._campaign.ending, self._random.uniform(0, 2 * pause)):
            deck = deck or self._random.sample(acts, len(acts))
            act = deck.pop()
            await act()
            self._campaign.acts[act.__name__] += 1

    async def cut_pubsub(self) -> None:
        """R22: close Pub/Sub connections; notifications must arrive over the stream or by reconciliation."""
        await asyncio.to_thread(self._redis.client_kill_pubsub)

    async def freeze_redis(self) -> None:
        master = self._random.choice(await asyncio.to_thread(self._masters))
        self._redis.freeze(master)
        await self._while(0.2, 2.5)
        self._redis.thaw(master)
        await asyncio.to_thread(self._redis.wait_until_ok)

    async def restart_redis(self) -> None:
        """Restart a master of Redis; its data is lost unless its replica takes over."""
        master = self._random.choice(await asyncio.to_thread(self._masters))
        self._redis.kill(master)
        await self._while(0, 0.3)
        await asyncio.to_thread(self._redis.start, master)

    async def fail_over(self) -> None:
        master = self._random.choice(await asyncio.to_thread(self._masters))
        self._redis.kill(master)
        await wait_event(self._campaign.ending, 5.0)
        await asyncio.to_thread(self._redis.start, master)

    async def wipe_redis(self) -> None:
        for master in await asyncio.to_thread(self._masters):
            await asyncio.to_thread(self._redis.node(master).flushall)

    async def restart_fast(self) -> None:
        await self._restart_primary(signal.SIGINT)

    async def restart_immediately(self) -> None:
        await self._restart_primary(signal.SIGQUIT)

    async def freeze_primary(self) -> None:
        with _frozen(self._postmaster()):
            await self._while(0.5, 2.5)

    async def lock_table(self) -> None:
        """Lock a table: loads, fallbacks and writes wait."""
        connection = await asyncpg.connect(self._campaign.harness.db.dsn)
        try:
            async with connection.transaction():
                await connection.execute("LOCK TABLE campaign_item IN ACCESS EXCLUSIVE MODE")
                await self._while(0.3, 3.0)
        finally:
            await connection.close()

    async def freeze_loader(self, pod: CampaignPod) -> None:
        """Freeze a loader; its serving processes must still answer."""
        with _frozen(psutil.Process(pod.server.pid), with_children=False):
            await self._while(0.2, 2.0)

    async def freeze_serving(self, pod: CampaignPod) -> None:
        with self._campaign.hold(pod), _frozen(psutil.Process(self._random.choice(pod.server.serving_pids))):
            await self._while(0.2, 2.0)

    async def freeze_pod(self, pod: CampaignPod) -> None:
        with self._campaign.hold(pod), _frozen(psutil.Process(pod.server.pid)):
            await self._while(0.2, 2.0)

    async def kill_serving(self, pod: CampaignPod) -> None:
        """Kill a serving process; the pod must start another one."""
        with self._campaign.hold(pod):
            victim = self._random.choice(pod.server.serving_pids)
            os.kill(victim, signal.SIGKILL)
            await asyncio.to_thread(until, lambda: self._is_replaced(pod, victim), "no other", 15)
            await _is_served(pod)

    async def kill_pod(self, pod: CampaignPod) -> None:
        await self._restart_pod(pod, with_children=True)

    async def kill_loader(self, pod: CampaignPod) -> None:
        """Kill a loader; its serving processes must end soon, and return correct data until then."""
        await self._restart_pod(pod, with_children=False)

    async def stop_relay(self) -> None:
        """R15: stop the relay, so that no notifications are sent."""
        await self._campaign.relay.aclose()
        await self._while(0.2, 2.0)
        await self._campaign.relay_again()

    async def _while(self, shortest: float, longest: float) -> None:
        """Wait for the duration of a fault."""
        await wait_event(asyncio.Event(), self._random.uniform(shortest, longest))

    def _masters(self) -> list[int]:
        found = []
        for number in range(2 * MASTERS):
            role = self._redis.node(number).execute_command("ROLE")  # type: ignore[no-untyped-call]
            found += [number] if role[0] == "master" else []
        return found

    def _postmaster(self) -> psutil.Process:
        return psutil.Process(int((self._campaign.postgres / "data" / "postmaster.pid").read_text().split()[0]))

    async def _restart_primary(self, how: signal.Signals) -> None:
        """Kill the primary; its owner restarts it."""
        before = self._postmaster()
        before.send_signal(how)
        await becomes(lambda: self._answers(before.pid), "the primary does not come back")

    async def _answers(self, before: int) -> bool:
        try:
            connection = await asyncpg.connect(self._campaign.harness.db.dsn, timeout=5)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError):
            return False
        await connection.close()
        return self._postmaster().pid != before

    def _is_replaced(self, pod: CampaignPod, victim: int) -> bool:
        with suppress(psutil.NoSuchProcess):  # the process has ended
            serving = pod.server.serving_pids
            return victim not in serving and len(serving) == pod.processes
        return False

    async def _restart_pod(self, pod: CampaignPod, *, with_children: bool) -> None:
        with self._campaign.hold(pod):
            children = psutil.Process(pod.server.pid).children()
            for process in children if with_children else ():
                process.kill()
            pod.close()
            _, left = await asyncio.to_thread(psutil.wait_procs, children, timeout=30)
            assert not left, f"they outlive their loader: {left}"
            await pod.start()


async def _is_served(pod: CampaignPod) -> None:
    """Return when the processes of *pod* answer, each very probably at least once."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        for _ in range(1 if pod.processes == 1 else 8):
            async with session.get(f"{pod.address}/actuator/health/liveness") as response:
                assert response.status == 200


def _bound(act: Callable[[CampaignPod], Awaitable[None]], pod: CampaignPod) -> Act:
    @wraps(act)
    async def bound() -> None:
        await act(pod)

    return bound


@contextmanager
def _frozen(process: psutil.Process, *, with_children: bool = True) -> Iterator[None]:
    """Send SIGSTOP, first to the parent process, and SIGCONT at the end."""
    process.suspend()
    others = process.children(recursive=True) if with_children else []
    for other in others:
        with suppress(psutil.NoSuchProcess):
            other.suspend()
    try:
        yield
    finally:
        for member in (process, *others):
            with suppress(psutil.NoSuchProcess):
                member.resume()


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    running = RedisCluster(redis_binary() or require("redis"), replicas=True)
    try:
        yield running
    finally:
        running.stop()


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_reads_respect_the_barrier_during_failures(
    cluster: RedisCluster, tmp_path: Path, campaign: Campaign
) -> None:
    """R18–R24, R28: no read is below its barrier, mixed, mislabelled or wrongly refused; all pods converge."""
    seed = int(os.environ.get(SEED) or Random().getrandbits(32))
    log = structlog.get_logger().bind(**{SEED: seed})
    log.info("campaign_begins")
    reads = examples(300, soak=10_000)
    async with staged(tmp_path, cluster, Random(seed)) as stage:
        await _play(stage, reads)
        await _converge(stage)
        history = stage.history
        campaign.rounds, campaign.faults = len(history.reads), stage.acts.total()
        log.info("campaign_ended", **history.figures(), acts=stage.acts)
        violations = history.violations()
        assert not violations, "\n".join(
            [f"{SEED}={seed}: {len(violations)} violations", *violations[:10], *[await _log(pod) for pod in stage.pods]]
        )
        answered = [read for read in history.reads if read.min_version is not None and read.status in DATA]
        assert len(answered) > reads // 3, f"few reads with a barrier were answered: {history.figures()}"
        for pod in stage.pods:
            assert await asyncio.to_thread(pod.server.stop) == 0, await _log(pod)


async def test_a_cursor_respects_the_barrier(pod: PodHarness) -> None:
    """R17, R21: pages have the version of their first page, and are refused for a higher barrier."""
    held = await pod.put_and_load("LOOSE", {"a": 1, "b": 1})
    first = await pod.get("LOOSE/all?limit=1", min_version=held)
    version = await pod.put("LOOSE", {"b": 2})
    more = await pod.get(f"LOOSE/all?limit=1&cursor={quote(first.json['next'])}", min_version=version)
    assert more.status != 200 or more.version >= version


async def _play(campaign: BarrierCampaign, reads: int) -> None:
    """Run writers, readers and faults until enough reads with a barrier were sent and enough faults were injected."""

    async def end() -> None:
        async def is_enough() -> bool:
            return campaign.barriers >= reads and campaign.acts.total() >= reads // 50

        await becomes(is_enough, "too few reads, or acts", within=3_000)
        campaign.ending.set()

    faults = FaultInjector(campaign)
    async with asyncio.TaskGroup() as group:
        for _ in range(WRITERS):
            group.create_task(campaign.write())
        for _ in range(READERS):
            group.create_task(campaign.read())
        for acts, pause in faults.lanes():
            group.create_task(faults.inject_faults(acts, pause))
        group.create_task(end())


async def _converge(campaign: BarrierCampaign) -> None:
    """R22: check that every process of every pod reaches the last version in time."""
    async with asyncio.TaskGroup() as group:
        for pod in campaign.pods:
            group.create_task(becomes(partial(_is_level, campaign, pod), "behind", LEVEL_WITHIN, partial(_log, pod)))


async def _is_level(campaign: BarrierCampaign, pod: CampaignPod) -> bool:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        reader, first = CampaignReader(campaign, session), len(campaign.history.reads)
        for target in TARGETS * pod.processes:  # on separate connections, so that every process gets requests
            await reader.all(ReadRequest(pod, target, None))
    found = [read for read in campaign.history.reads[first:] if read.pod == pod.number]
    return all(read.version == campaign.known[read.target] for read in found)


async def _log(pod: CampaignPod) -> str:
    return pod.server.log_file.read_text()[-3000:]
