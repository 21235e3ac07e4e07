"""From a commit to the moment every pod answers with it.

`work apply`, `work relay` and three pods, each a process of its own, on one PostgreSQL with durable commits and one
Redis. The commit's time is PostgreSQL's own (`track_commit_timestamp`), taken just before it is made durable. A pod's
is when its answer to `/version` arrives: each is asked every 2 ms, so a figure is up to that much too high. For 100
pods there are their loaders, without serving processes, in 4 programs, with a small dictionary each.
"""

import asyncio
import bisect
import itertools
import random
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import msgspec

from benchmarks.harness import Bench, Figure, Group, Shared
from benchmarks.peers.redis_server import redis_peer
from benchmarks.pods import PROGRAM, Dictionaries, Pod, fill, query_api, settings_for, written
from benchmarks.servers import started
from benchmarks.session import Session
from benchmarks.simulated_pods import HEARD, HELD
from benchmarks.wrk import SECONDS
from penstock.app.parts import open_refdata
from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.kernel.tasks.wait import cancel_and_wait
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.commands.messages import build_command_message
from penstock.refdata.contract import Command, CommandItem, CommandSource, EventType
from penstock.refdata.model import CommandEvent, DictionaryKey
from penstock.refdata.runtime import RefdataPlatform
from penstock.settings import Settings

RESOLUTION = 0.002
TENANT, LARGE, SMALL = "bench", "RATES", "SMALL"
POSTGRES = {"track_commit_timestamp": "on", "max_connections": "400"}
# processed_event is written once, by the commit that is asked about; outbox_event again, by the relay's.
_COMMITS = """
SELECT o.version, extract(epoch FROM pg_xact_commit_timestamp(p.xmin))::float8 AS committed,
       extract(epoch FROM pg_xact_commit_timestamp(o.xmin))::float8 AS announced
FROM outbox_event o JOIN processed_event p USING (tenant_id, event_id)
WHERE o.tenant_id = $1 AND o.dict_code = $2 AND o.version > $3 ORDER BY o.version"""
QUANTILES = (50, 95, 99)
_numbers = itertools.count()


@dataclass(frozen=True)
class Watched:
    """Pods that are watched, the items of their dictionary, and the deltas a second it gets."""

    pods: int
    items: int
    rate: int


@dataclass(frozen=True)
class Sizes:
    """Whole pods, simulated ones and the programs they are in, and the seconds of deltas in a round."""

    whole: Watched
    simulated: Watched
    programs: int
    seconds: float

    @property
    def large(self) -> Dictionaries:
        return Dictionaries(TENANT, [LARGE], self.whole.items)

    @property
    def small(self) -> Dictionaries:
        return Dictionaries(TENANT, [SMALL], self.simulated.items)


@dataclass
class Seen:
    """Return the time at which each version was first seen, in order."""

    versions: list[int]
    times: list[float]

    def note(self, at: float, version: int) -> None:
        if not self.versions or version > self.versions[-1]:
            self.versions.append(version)
            self.times.append(at)

    def when(self, version: int) -> float | None:
        """When that version or a later one was there."""
        place = bisect.bisect_left(self.versions, version)
        return self.times[place] if place < len(self.times) else None


@asynccontextmanager
async def benches(session: Session, sizes: Sizes) -> AsyncIterator[list[Bench]]:
    """Open a few whole pods at many deltas a second, and the loaders of many at fewer."""
    program = session.require_tool("redis-server")
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(run_embedded_postgres(session.postgres, settings=POSTGRES))
        print(f"filling {sizes.whole.items:,} items", file=sys.stderr)
        await fill(url, sizes.large, sizes.small)
        redis = await stack.enter_async_context(redis_peer(program, core=None))
        route = {"redis": {"mode": "single", "nodes": [redis.address]}}
        settings = settings_for(url, Dictionaries(TENANT, [LARGE, SMALL], 0), refdata=route)
        file = written(settings, session.folder)
        for role in ("apply", "relay"):
            await stack.enter_async_context(started(*PROGRAM, "work", role, "--json", "--config", str(file)))
        opened = open_refdata(Settings.model_validate(settings), Telemetry())
        house = _House(await stack.enter_async_context(opened), sizes, stack, session.folder)
        yield [*house.whole(), *house.simulated()]


def conclusions(_figures: Sequence[Figure], sizes: Sizes) -> list[str]:
    """Return the conditions under which the figures were measured."""
    whole, simulated = sizes.whole, sizes.simulated
    return [
        f"{whole.pods} pods: {whole.rate} deltas/s of one item each, {whole.items:,} items;"
        f" resolution {RESOLUTION * 1000:g} ms",
        f"{simulated.pods} pods: {simulated.rate} deltas/s, {simulated.items:,} items, {sizes.programs} programs;"
        f" every delta is {simulated.pods} small loads at once on one PostgreSQL, all on this machine",
        f"samples in a round: {int(whole.rate * sizes.seconds):,} and {int(simulated.rate * sizes.seconds):,}",
    ]


GROUP = Group(
    benches,
    full=Sizes(
        whole=Watched(pods=3, items=1_000_000, rate=100),
        simulated=Watched(pods=100, items=1_000, rate=2),
        programs=4,
        seconds=4 * SECONDS,
    ),
    smoke=Sizes(
        whole=Watched(pods=1, items=100, rate=100),
        simulated=Watched(pods=2, items=100, rate=20),
        programs=1,
        seconds=0.2,
    ),
    conclude=conclusions,
)


class _House:
    def __init__(self, platform: RefdataPlatform, sizes: Sizes, stack: AsyncExitStack, folder: Path) -> None:
        self._platform = platform
        self._sizes = sizes
        self._stack = stack
        self._folder = folder
        self._pods: list[Pod] = []

    def whole(self) -> list[Bench]:
        shared = Shared(self._measure_whole)
        targets = {95: 50, 99: 150}
        name = f"commit to answered by all of {self._sizes.whole.pods} pods"
        return [_quantile(name, shared, "answered", quantile, targets.get(quantile)) for quantile in QUANTILES]

    def simulated(self) -> list[Bench]:
        shared, pods = Shared(self._measure_simulated), self._sizes.simulated.pods
        names = {HEARD: f"commit to heard by all of {pods} pods", HELD: f"commit to held by all of {pods}"}
        return [_quantile(name, shared, what, quantile) for what, name in names.items() for quantile in QUANTILES]

    async def _measure_whole(self) -> Mapping[str, list[float]]:
        await self._start_pods()
        target = DictionaryKey(TENANT, LARGE)
        before = await self._version(target)
        seen = [Seen([], []) for _ in self._pods]
        watching = [asyncio.create_task(_watch(pod, target, feed)) for pod, feed in zip(self._pods, seen, strict=True)]
        try:
            count = await self._publish(target, self._sizes.whole)
            await self._all_have(await self._settled(target, before + count), seen)
        finally:
            for task in watching:
                await cancel_and_wait(task)
        return {"answered": await self._delays(target, before, seen)}

    async def _measure_simulated(self) -> Mapping[str, list[float]]:
        """Start and end the simulated pods: a hundred that listen would slow what is measured beside them."""
        target = DictionaryKey(TENANT, SMALL)
        await self._begin(target)
        async with self._simulated() as files:
            before = await self._version(target)
            count = await self._publish(target, self._sizes.simulated)
            last = await self._settled(target, before + count)
            found = _noted(files)
            while any(feed.when(last) is None for feed in found[HELD]) or len(found[HELD]) < self._sizes.simulated.pods:
                await asyncio.sleep(0.1)
                found = _noted(files)
        return {what: await self._delays(target, before, found[what]) for what in (HEARD, HELD)}

    async def _start_pods(self) -> None:
        if not self._pods:
            await self._begin(DictionaryKey(TENANT, LARGE))
            for _ in range(self._sizes.whole.pods):
                opening = query_api(self._settings(self._sizes.large))
                self._pods.append(await self._stack.enter_async_context(opening))

    @asynccontextmanager
    async def _simulated(self) -> AsyncIterator[list[Path]]:
        """Start the loaders of so many pods, and yield the files in which they note what they have."""
        config, files = written(self._settings(self._sizes.small), self._folder), []
        count = self._sizes.simulated.pods // self._sizes.programs
        async with AsyncExitStack() as stack:
            for number in range(self._sizes.programs):
                file = self._folder / f"simulated-{number}"
                args = ("--config", config, "--name", f"sim{number}", "--count", count, "--file", file)
                command = ("-m", "benchmarks.simulated_pods", *map(str, args))
                await stack.enter_async_context(started(*command))
                files.append(file)
            yield files

    def _settings(self, held: Dictionaries) -> dict[str, Any]:
        route = {"mode": "single", "nodes": self._platform.section.redis.nodes}
        return settings_for(self._platform.db.dsn, held, refdata={"redis": route})

    async def _begin(self, target: DictionaryKey) -> None:
        """Have a first commit: without one that is remembered, pods would load everything at the next."""
        before = await self._version(target)
        await self._send(target, 1)
        await self._settled(target, before + 1)

    async def _publish(self, target: DictionaryKey, watched: Watched) -> int:
        """Send deltas at a steady pace; return how many."""
        count, began = int(watched.rate * self._sizes.seconds), time.perf_counter()
        for number in range(count):
            await asyncio.sleep(began + number / watched.rate - time.perf_counter())
            await self._send(target, watched.items)
        return count

    async def _send(self, target: DictionaryKey, items: int) -> None:
        payload = msgspec.Raw(b'{"name": "item %d", "rate": 1.25}' % next(_numbers))
        item = CommandItem(f"{random.randrange(items):08}", payload=payload)
        command = Command(dict_code=target.dict_code, event_type=EventType.DELTA, items=[item])
        command.event_id, command.tenant_id, command.source = uuid.uuid4(), target.tenant_id, CommandSource.KAFKA
        topic = self._platform.section.kafka.commands_topic
        event = CommandEvent(target, command.event_id, CommandSource.KAFKA, command)
        await self._platform.bus.publish([build_command_message(topic, event)])

    async def _version(self, target: DictionaryKey) -> int:
        query = "SELECT version FROM dictionary_meta WHERE tenant_id = $1 AND dict_code = $2"
        return int(await self._platform.db.fetchval(query, *target))

    async def _settled(self, target: DictionaryKey, version: int) -> int:
        while await self._version(target) < version:  # noqa: ASYNC110 - other processes do it
            await asyncio.sleep(0.05)
        return version

    async def _all_have(self, version: int, seen: Sequence[Seen]) -> None:
        while any(feed.when(version) is None for feed in seen):  # noqa: ASYNC110 - other processes do it
            await asyncio.sleep(0.05)

    async def _delays(self, target: DictionaryKey, before: int, seen: Sequence[Seen]) -> list[float]:
        """For each commit, how long the slowest took, in ms."""
        commits = await self._platform.db.fetch(_COMMITS, *target, before)
        _tell_pace(commits)
        return [
            1000 * (max(at for feed in seen if (at := feed.when(commit["version"])) is not None) - commit["committed"])
            for commit in commits
        ]


def _noted(files: Sequence[Path]) -> dict[str, list[Seen]]:
    found: dict[str, dict[str, Seen]] = {HEARD: {}, HELD: {}}
    for file in files:
        for line in file.read_text().splitlines():
            who, what, at, version = line.split(" ")
            found[what].setdefault(who, Seen([], [])).note(float(at), int(version))
    return {what: list(by_pod.values()) for what, by_pod in found.items()}


def _tell_pace(commits: Sequence[asyncpg.Record]) -> None:
    """How far it was to the relay's own commit, which comes after it has announced."""
    times = [commit["committed"] for commit in commits]
    relayed = statistics.quantiles([1000 * (commit["announced"] - commit["committed"]) for commit in commits], n=100)
    rate = (len(times) - 1) / (times[-1] - times[0])
    text = f"  {rate:.1f} commits/s; to the relay's own commit p50 {relayed[49]:.1f} ms, p95 {relayed[94]:.1f} ms"
    print(text, file=sys.stderr)


async def _watch(pod: Pod, target: DictionaryKey, seen: Seen) -> None:
    """Ask for the version again and again over one connection."""
    parts = urlsplit(pod.url(*target) + "/version")
    request = f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        while True:
            writer.write(request)
            headers = dict(line.split(b": ", 1) for line in (await reader.readuntil(b"\r\n\r\n")).splitlines()[1:-1])
            await reader.readexactly(int(headers[b"Content-Length"]))
            seen.note(time.time(), int(headers[b"X-Dict-Version"]))
            await asyncio.sleep(RESOLUTION)
    finally:
        writer.close()


def _quantile(
    name: str, shared: Shared[Mapping[str, list[float]]], what: str, quantile: int, target: float | None = None
) -> Bench:
    async def measure() -> float:
        delays = (await shared.result(f"{what} {quantile}"))[what]
        return statistics.quantiles(delays, n=100, method="inclusive")[quantile - 1]

    return Bench(f"{name}: p{quantile}", "ms", measure, target, is_duration=True)
