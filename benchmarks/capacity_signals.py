"""What commits take on their way to the pods: of Redis, of PostgreSQL, and of the pods' loaders."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio

from benchmarks.capacity_commits import LOOK, WAITING, delta, work
from benchmarks.capacity_place import PER_THOUSAND, TENANT, Measurements, Place, code_of, figures
from benchmarks.freshness import _noted
from benchmarks.harness import Bench
from benchmarks.peers.redis_server import redis_peer
from benchmarks.pods import Dictionaries, Pod, query_api, settings_for, written
from benchmarks.servers import processor_seconds, started
from benchmarks.simulated_pods import HELD
from penstock.app.parts import open_refdata
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.commands.messages import build_command_message
from penstock.refdata.model import DictionaryKey
from penstock.refdata.runtime import RefdataPlatform
from penstock.settings import Settings

RATE, PAYLOAD = 100, 50
_COMMIT, _POD_COMMIT, _POD_REST = "a commit", "a commit, for each pod", "a pod at rest"
_UNITS = {
    f"redis: {_COMMIT}: memory of the stream": "bytes",
    f"redis: {_COMMIT}: commands": "commands",
    f"redis: {_COMMIT}: processor time": "ms for 1,000",
    f"redis: {_POD_COMMIT}: commands": "commands",
    f"redis: {_POD_COMMIT}: sent": "bytes",
    f"redis: {_POD_COMMIT}: processor time": "ms for 1,000",
    f"redis: {_POD_REST}: commands": "commands for 100 s",
    f"redis: {_POD_REST}: connections": "connections",
    "pods: at rest: loader": "ms a second",
    "pods: at rest: a serving process": "ms a second",
    "pods: at rest: PostgreSQL": "ms a second",
    f"pods: {RATE} deltas/s: loader": "ms a second",
    f"pods: {RATE} deltas/s: PostgreSQL": "ms a second",
}
# Of a short rest, and of the difference between two measurements, nothing may be left.
_MAY_BE_ZERO = (
    f"redis: {_POD_COMMIT}: commands",
    f"redis: {_POD_COMMIT}: processor time",
    f"redis: {_POD_REST}: commands",
    "pods: at rest: loader",
    "pods: at rest: a serving process",
    "pods: at rest: PostgreSQL",
    f"pods: {RATE} deltas/s: PostgreSQL",
)


@dataclass(frozen=True)
class _Stand:
    """What Redis has done and has, and what PostgreSQL has spent."""

    commands: float
    sent: float
    processor: float
    clients: float
    primary: float

    def since(self, before: "_Stand") -> "_Stand":
        return _Stand(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


def benches(place: Place) -> list[Bench]:
    """Return a hundred commits a second without pods, with the loaders of a few, and with one whole pod."""
    program = place.session.find_tool("redis-server")
    return figures(partial(_measure, place, program), _UNITS, may_be_zero=_MAY_BE_ZERO) if program else []


async def _measure(place: Place, program: str) -> Measurements:
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(_rig(place, program))
        await rig.publish(rig.small)  # a warm-up; the keys of later changes are known then
        before = await rig.stand()
        await rig.publish(rig.small)
        alone, entry = (await rig.stand()).since(before), await rig.entry()
        async with rig.loaders() as file:
            clients, before = before.clients, await rig.stand()
            await asyncio.sleep(place.sizes.seconds)
            rest = (await rig.stand()).since(before)
            connections, before = before.clients - clients, await rig.stand()
            await rig.held(file, await rig.publish(rig.small))
            busy = (await rig.stand()).since(before)
        return {
            **rig.redis_figures(alone, rest, busy.since(alone)),
            f"redis: {_COMMIT}: memory of the stream": entry,
            f"redis: {_POD_REST}: connections": connections / place.sizes.loaders,
            **await rig.pod(),
        }


@asynccontextmanager
async def _rig(place: Place, program: str) -> "AsyncIterator[_Rig]":
    url, counts = await place.dictionaries(PAYLOAD), place.sizes.items[PAYLOAD]
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(redis_peer(program, core=None))
        client = await stack.enter_async_context(redis.asyncio.Redis(port=peer.port))
        route = {"redis": {"mode": "single", "nodes": [peer.address]}}
        codes = [code_of(count) for count in dict.fromkeys((counts[0], counts[-1]))]
        settings = settings_for(url, Dictionaries(TENANT, codes, 0), refdata=route)
        platform = await stack.enter_async_context(open_refdata(Settings.model_validate(settings), Telemetry()))
        file = written(settings, place.folder)
        for role in ("apply", "relay"):
            await stack.enter_async_context(work(role, file))
        yield _Rig(place, url, platform, client, route)


@dataclass(frozen=True)
class _Rig:
    """Everything between the bus and the pods, and a publisher at a steady pace."""

    place: Place
    url: str
    platform: RefdataPlatform
    redis: redis.asyncio.Redis
    route: dict[str, Any]

    @property
    def count(self) -> int:
        return int(RATE * self.place.sizes.seconds)

    @property
    def small(self) -> int:
        return self.place.sizes.items[PAYLOAD][0]

    @property
    def large(self) -> int:
        return self.place.sizes.items[PAYLOAD][-1]

    def redis_figures(self, alone: _Stand, rest: _Stand, more: _Stand) -> Measurements:
        """Return figures by the commits, and by what there was *more* with the loaders."""
        count, loaders, seconds = self.count, self.place.sizes.loaders, self.place.sizes.seconds
        heard = loaders * count
        return {
            f"redis: {_COMMIT}: commands": alone.commands / count,
            f"redis: {_COMMIT}: processor time": alone.processor * PER_THOUSAND / count,
            f"redis: {_POD_COMMIT}: commands": more.commands / heard,
            f"redis: {_POD_COMMIT}: sent": more.sent / heard,
            f"redis: {_POD_COMMIT}: processor time": more.processor * PER_THOUSAND / heard,
            f"redis: {_POD_REST}: commands": 100 * rest.commands / seconds / loaders,
            "pods: at rest: PostgreSQL": 1000 * rest.primary / seconds / loaders,
            f"pods: {RATE} deltas/s: PostgreSQL": 1000 * more.primary / seconds / loaders,
        }

    async def stand(self) -> _Stand:
        info = await self.redis.info()
        commands, sent, clients = (
            float(info[name]) for name in ("total_commands_processed", "total_net_output_bytes", "connected_clients")
        )
        return _Stand(commands, sent, info["used_cpu_user"] + info["used_cpu_sys"], clients, self.place.seconds())

    async def entry(self) -> float:
        """Bytes of an entry of the stream, before anybody reads it."""
        key = self.platform.section.redis.stream_key
        return float(await self.redis.memory_usage(key, samples=0) or 0) / await self.redis.xlen(key)

    async def publish(self, items: int) -> int:
        """Commits of one dictionary, a hundred a second, until they are announced; its last version."""
        target, began = DictionaryKey(TENANT, code_of(items)), time.perf_counter()
        topic, wanted = self.platform.section.kafka.commands_topic, await self._version(target) + self.count
        for number in range(self.count):
            await asyncio.sleep(began + number / RATE - time.perf_counter())
            await self.platform.bus.publish([build_command_message(topic, delta(target, items))])
        while await self._version(target) < wanted or await self.platform.db.fetchval(WAITING):  # noqa: ASYNC110 - other processes do it
            await asyncio.sleep(LOOK)
        return wanted

    @asynccontextmanager
    async def loaders(self) -> AsyncIterator[Path]:
        """Start the loaders of a few pods in one program, and yield the file in which they note what they have."""
        file = self.place.folder / "loaders"
        args = (
            "--config",
            self._config(self.small),
            "--name",
            "sim",
            "--count",
            self.place.sizes.loaders,
            "--file",
            file,
        )
        async with started("-m", "benchmarks.simulated_pods", *map(str, args)):
            yield file

    async def held(self, file: Path, version: int) -> None:
        """Back when all loaders hold that version."""
        while sum(feed.when(version) is not None for feed in _noted([file])[HELD]) < self.place.sizes.loaders:  # noqa: ASYNC110 - other processes do it
            await asyncio.sleep(LOOK)

    async def pod(self) -> Measurements:
        """Measure what the processes of a pod on the largest dictionary take, at rest and then with commits."""
        seconds = self.place.sizes.seconds
        async with query_api(self._settings(self.large)) as pod:
            loader, serving = [pod.served.pid], pod.serving_pids
            before = processor_seconds(loader), processor_seconds(serving)
            await asyncio.sleep(seconds)
            rest = processor_seconds(loader) - before[0], processor_seconds(serving) - before[1]
            began, used = time.perf_counter(), processor_seconds(loader)
            await _answers(pod, code_of(self.large), await self.publish(self.large))
            busy = (processor_seconds(loader) - used) / (time.perf_counter() - began)
        return {
            "pods: at rest: loader": 1000 * rest[0] / seconds,
            "pods: at rest: a serving process": 1000 * rest[1] / seconds,
            f"pods: {RATE} deltas/s: loader": 1000 * busy,
        }

    async def _version(self, target: DictionaryKey) -> int:
        query = "SELECT version FROM dictionary_meta WHERE (tenant_id, dict_code) = ($1, $2)"
        return int(await self.platform.db.fetchval(query, *target))

    def _settings(self, items: int) -> dict[str, Any]:
        return settings_for(self.url, Dictionaries(TENANT, [code_of(items)], items), refdata=self.route)

    def _config(self, items: int) -> Path:
        return written(self._settings(items), self.place.folder)


async def _answers(pod: Pod, code: str, version: int) -> None:
    async with httpx.AsyncClient() as client:
        while (await client.get(f"{pod.url(TENANT, code)}/version")).json()["version"] < version:  # noqa: ASYNC110 - other processes do it
            await asyncio.sleep(LOOK)
