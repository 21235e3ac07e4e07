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

from benchmarks.harness import Bench, Figure, Shared
from benchmarks.peers.redis_server import redis_peer
from benchmarks.pods import PROGRAM, Dictionaries, Pod, fill, query_api, settings_for, written
from benchmarks.servers import started, tool
from benchmarks.simulated_pods import HEARD, HELD
from benchmarks.wrk import SECONDS
from penstock.app import RefdataPlatform, open_refdata
from penstock.kernel.embedded import embedded_postgres
from penstock.kernel.telemetry import Telemetry
from penstock.kernel.waiting import ended
from penstock.refdata.contract import Command, EventType, Item, Source
from penstock.refdata.model import Dict, Event
from penstock.refdata.reading import command_message
from penstock.settings import Settings

PODS = 3
RATE = 100
RUN_SECONDS = 4 * SECONDS
RESOLUTION = 0.002
SIMULATED, PROGRAMS, SIMULATED_RATE = 100, 4, 2
LARGE = Dictionaries("bench", ["RATES"], 1_000_000)
SMALL = Dictionaries("bench", ["SMALL"], 1_000)
BOTH = Dictionaries("bench", [*LARGE.codes, *SMALL.codes], 0)
POSTGRES = {"track_commit_timestamp": "on", "max_connections": "400"}
# processed_event is written once, by the commit that is asked about; outbox_event again, by the relay's.
_COMMITS = """
SELECT o.version, extract(epoch FROM pg_xact_commit_timestamp(p.xmin))::float8 AS committed,
       extract(epoch FROM pg_xact_commit_timestamp(o.xmin))::float8 AS announced
FROM outbox_event o JOIN processed_event p USING (tenant_id, event_id)
WHERE o.tenant_id = $1 AND o.dict_code = $2 AND o.version > $3 ORDER BY o.version"""
QUANTILES = (50, 95, 99)
_numbers = itertools.count()


@dataclass
class Seen:
    """When somebody first had which version, in order."""

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
async def benches(folder: Path) -> AsyncIterator[list[Bench]]:
    """Three whole pods at 100 deltas a second, and the loaders of 100 at fewer."""
    tool("redis-server")
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(embedded_postgres(folder, settings=POSTGRES))
        print("filling 1,000,000 items", file=sys.stderr)
        await fill(url, LARGE, SMALL)
        redis = await stack.enter_async_context(redis_peer(core=None))
        route = {"redis": {"mode": "single", "nodes": [redis.address]}}
        settings = settings_for(url, BOTH, refdata=route)
        file = written(settings, folder.parent)
        for role in ("apply", "relay"):
            await stack.enter_async_context(started(*PROGRAM, "work", role, "--json", "--config", str(file)))
        opened = open_refdata(Settings.model_validate(settings), Telemetry())
        house = _House(await stack.enter_async_context(opened), stack, folder.parent)
        yield [*house.three(), *house.hundred()]


def conclusions(_figures: Sequence[Figure]) -> list[str]:
    """Under what the figures were measured."""
    return [
        f"{PODS} pods: {RATE} deltas/s of one item each, {LARGE.items:,} items; resolution {RESOLUTION * 1000:g} ms",
        f"{SIMULATED} pods: {SIMULATED_RATE} deltas/s, {SMALL.items:,} items, {PROGRAMS} programs; every delta is"
        f" {SIMULATED} small loads at once on one PostgreSQL, all on this machine",
        f"samples in a round: {int(RATE * RUN_SECONDS):,} and {int(SIMULATED_RATE * RUN_SECONDS):,}",
    ]


class _House:
    def __init__(self, platform: RefdataPlatform, stack: AsyncExitStack, folder: Path) -> None:
        self._platform = platform
        self._stack = stack
        self._folder = folder
        self._pods: list[Pod] = []

    def three(self) -> list[Bench]:
        shared = Shared(self._measure_three)
        targets = {95: 50, 99: 150}
        name = f"commit to answered by all of {PODS} pods"
        return [_quantile(name, shared, "answered", quantile, targets.get(quantile)) for quantile in QUANTILES]

    def hundred(self) -> list[Bench]:
        shared = Shared(self._measure_hundred)
        names = {HEARD: f"commit to heard by all of {SIMULATED} pods", HELD: f"commit to held by all of {SIMULATED}"}
        return [_quantile(name, shared, what, quantile) for what, name in names.items() for quantile in QUANTILES]

    async def _measure_three(self) -> Mapping[str, list[float]]:
        await self._start_pods()
        target = Dict(LARGE.tenant, LARGE.codes[0])
        before = await self._version(target)
        seen = [Seen([], []) for _ in self._pods]
        watching = [asyncio.create_task(_watch(pod, target, one)) for pod, one in zip(self._pods, seen, strict=True)]
        try:
            await self._publish(target, LARGE.items, RATE)
            await self._all_have(await self._settled(target, before + int(RATE * RUN_SECONDS)), seen)
        finally:
            for task in watching:
                await ended(task)
        return {"answered": await self._delays(target, before, seen)}

    async def _measure_hundred(self) -> Mapping[str, list[float]]:
        """They end with it: 100 that listen would be in the way of what is measured beside them."""
        target = Dict(SMALL.tenant, SMALL.codes[0])
        await self._begin(target)
        async with self._simulated() as files:
            before = await self._version(target)
            await self._publish(target, SMALL.items, SIMULATED_RATE)
            last = await self._settled(target, before + int(SIMULATED_RATE * RUN_SECONDS))
            found = _noted(files)
            while any(one.when(last) is None for one in found[HELD]) or len(found[HELD]) < SIMULATED:
                await asyncio.sleep(0.1)
                found = _noted(files)
        return {what: await self._delays(target, before, found[what]) for what in (HEARD, HELD)}

    async def _start_pods(self) -> None:
        if not self._pods:
            await self._begin(Dict(LARGE.tenant, LARGE.codes[0]))
            for _ in range(PODS):
                opening = query_api(self._settings(LARGE))
                self._pods.append(await self._stack.enter_async_context(opening))

    @asynccontextmanager
    async def _simulated(self) -> AsyncIterator[list[Path]]:
        """Loaders of so many pods, and the files in which they tell what they have."""
        config, files = written(self._settings(SMALL), self._folder), []
        async with AsyncExitStack() as stack:
            for number in range(PROGRAMS):
                file = self._folder / f"simulated-{number}"
                args = ("--config", config, "--name", f"sim{number}", "--count", SIMULATED // PROGRAMS, "--file", file)
                command = ("-m", "benchmarks.simulated_pods", *map(str, args))
                await stack.enter_async_context(started(*command))
                files.append(file)
            yield files

    def _settings(self, held: Dictionaries) -> dict[str, Any]:
        ours = self._platform.settings
        route = {"mode": "single", "nodes": ours.refdata.redis.nodes}
        return settings_for(ours.database.url, held, refdata={"redis": route})

    async def _begin(self, target: Dict) -> None:
        """Have a first commit: without one that is remembered, pods would load everything at the next."""
        before = await self._version(target)
        await self._send(target, 1)
        await self._settled(target, before + 1)

    async def _publish(self, target: Dict, items: int, rate: int) -> None:
        began = time.perf_counter()
        for number in range(int(rate * RUN_SECONDS)):
            await asyncio.sleep(began + number / rate - time.perf_counter())
            await self._send(target, items)

    async def _send(self, target: Dict, items: int) -> None:
        payload = msgspec.Raw(b'{"name": "item %d", "rate": 1.25}' % next(_numbers))
        item = Item(f"{random.randrange(items):08}", payload=payload)
        command = Command(dict_code=target.dict_code, event_type=EventType.DELTA, items=[item])
        command.event_id, command.tenant_id, command.source = uuid.uuid4(), target.tenant_id, Source.KAFKA
        topic = self._platform.settings.refdata.kafka.commands_topic
        event = Event(target, command.event_id, Source.KAFKA, command)
        await self._platform.bus.publish([command_message(topic, event)])

    async def _version(self, target: Dict) -> int:
        query = "SELECT version FROM dictionary_meta WHERE tenant_id = $1 AND dict_code = $2"
        return int(await self._platform.db.fetchval(query, *target))

    async def _settled(self, target: Dict, version: int) -> int:
        while await self._version(target) < version:  # noqa: ASYNC110 - other processes do it
            await asyncio.sleep(0.05)
        return version

    async def _all_have(self, version: int, seen: Sequence[Seen]) -> None:
        while any(one.when(version) is None for one in seen):  # noqa: ASYNC110 - other processes do it
            await asyncio.sleep(0.05)

    async def _delays(self, target: Dict, before: int, seen: Sequence[Seen]) -> list[float]:
        """For each commit, how long the slowest took, in ms."""
        commits = await self._platform.db.fetch(_COMMITS, *target, before)
        _tell_pace(commits)
        return [
            1000 * (max(at for one in seen if (at := one.when(commit["version"])) is not None) - commit["committed"])
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
    said = f"  {rate:.1f} commits/s; to the relay's own commit p50 {relayed[49]:.1f} ms, p95 {relayed[94]:.1f} ms"
    print(said, file=sys.stderr)


async def _watch(pod: Pod, target: Dict, seen: Seen) -> None:
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
