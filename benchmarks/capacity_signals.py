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
from benchmarks.capacity_place import PER_THOUSAND, TENANT, Place, Told, code_of, figures
from benchmarks.capacity_pods import SIZES
from benchmarks.freshness import _noted
from benchmarks.harness import Bench
from benchmarks.peers.redis_server import redis_peer
from benchmarks.pods import Dictionaries, Pod, query_api, settings_for, written
from benchmarks.servers import processor_seconds, started
from benchmarks.simulated_pods import HELD
from benchmarks.wrk import SECONDS
from penstock.app import RefdataPlatform, open_refdata
from penstock.kernel.telemetry import Telemetry
from penstock.refdata.model import Dict
from penstock.refdata.reading import command_message
from penstock.settings import Settings

RATE, LOADERS = 100, 10
PAYLOAD = 50
SMALL, _, LARGE = SIZES[PAYLOAD]
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
    """A hundred commits a second without pods, with the loaders of ten, and with one whole pod."""
    return figures(partial(_measure, place), _UNITS)


async def _measure(place: Place) -> Told:
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(_rig(place))
        await rig.publish(SMALL)  # so that everybody is warm, and what comes next is known by its keys
        before = await rig.stand()
        await rig.publish(SMALL)
        alone, entry = (await rig.stand()).since(before), await rig.entry()
        async with rig.loaders() as file:
            clients, before = before.clients, await rig.stand()
            await asyncio.sleep(SECONDS)
            rest = (await rig.stand()).since(before)
            connections, before = before.clients - clients, await rig.stand()
            await rig.held(file, await rig.publish(SMALL))
            busy = (await rig.stand()).since(before)
        return {
            **_of_redis(alone, rest, busy.since(alone), rig.count),
            f"redis: {_COMMIT}: memory of the stream": entry,
            f"redis: {_POD_REST}: connections": connections / LOADERS,
            **await rig.pod(),
        }


def _of_redis(alone: _Stand, rest: _Stand, more: _Stand, count: int) -> Told:
    """By the commits, and by what there was *more* with the loaders."""
    heard = LOADERS * count
    return {
        f"redis: {_COMMIT}: commands": alone.commands / count,
        f"redis: {_COMMIT}: processor time": alone.processor * PER_THOUSAND / count,
        f"redis: {_POD_COMMIT}: commands": more.commands / heard,
        f"redis: {_POD_COMMIT}: sent": more.sent / heard,
        f"redis: {_POD_COMMIT}: processor time": more.processor * PER_THOUSAND / heard,
        f"redis: {_POD_REST}: commands": 100 * rest.commands / SECONDS / LOADERS,
        "pods: at rest: PostgreSQL": 1000 * rest.primary / SECONDS / LOADERS,
        f"pods: {RATE} deltas/s: PostgreSQL": 1000 * more.primary / SECONDS / LOADERS,
    }


@asynccontextmanager
async def _rig(place: Place) -> "AsyncIterator[_Rig]":
    url = await place.dictionaries(PAYLOAD, SIZES[PAYLOAD])
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(redis_peer(core=None))
        client = await stack.enter_async_context(redis.asyncio.Redis(port=peer.port))
        route = {"redis": {"mode": "single", "nodes": [peer.address]}}
        settings = settings_for(url, Dictionaries(TENANT, [code_of(SMALL), code_of(LARGE)], 0), refdata=route)
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
        return int(RATE * SECONDS)

    async def stand(self) -> _Stand:
        info = await self.redis.info()
        commands, sent, clients = (
            float(info[name]) for name in ("total_commands_processed", "total_net_output_bytes", "connected_clients")
        )
        return _Stand(commands, sent, info["used_cpu_user"] + info["used_cpu_sys"], clients, self.place.seconds())

    async def entry(self) -> float:
        """Bytes of an entry of the stream, before anybody reads it."""
        key = self.platform.settings.refdata.redis.stream_key
        return float(await self.redis.memory_usage(key, samples=0) or 0) / await self.redis.xlen(key)

    async def publish(self, items: int) -> int:
        """Commits of one dictionary, a hundred a second, until they are announced; its last version."""
        target, began = Dict(TENANT, code_of(items)), time.perf_counter()
        topic, wanted = self.platform.settings.refdata.kafka.commands_topic, await self._version(target) + self.count
        for number in range(self.count):
            await asyncio.sleep(began + number / RATE - time.perf_counter())
            await self.platform.bus.publish([command_message(topic, delta(target, items))])
        while await self._version(target) < wanted or await self.platform.db.fetchval(WAITING):  # noqa: ASYNC110 - other processes do it
            await asyncio.sleep(LOOK)
        return wanted

    @asynccontextmanager
    async def loaders(self) -> AsyncIterator[Path]:
        """The loaders of ten pods in one program, and the file in which they tell what they have."""
        file = self.place.folder / "loaders"
        args = ("--config", self._config(SMALL), "--name", "sim", "--count", LOADERS, "--file", file)
        async with started("-m", "benchmarks.simulated_pods", *map(str, args)):
            yield file

    async def held(self, file: Path, version: int) -> None:
        """Back when all loaders hold that version."""
        while sum(one.when(version) is not None for one in _noted([file])[HELD]) < LOADERS:  # noqa: ASYNC110 - other processes do it
            await asyncio.sleep(LOOK)

    async def pod(self) -> Told:
        """What the processes of a pod on a million items take, at rest and then with commits."""
        async with query_api(self._settings(LARGE)) as pod:
            loader, serving = [pod.served.pid], pod.serving_pids
            before = processor_seconds(loader), processor_seconds(serving)
            await asyncio.sleep(SECONDS)
            rest = processor_seconds(loader) - before[0], processor_seconds(serving) - before[1]
            began, used = time.perf_counter(), processor_seconds(loader)
            await _answers(pod, code_of(LARGE), await self.publish(LARGE))
            busy = (processor_seconds(loader) - used) / (time.perf_counter() - began)
        return {
            "pods: at rest: loader": 1000 * rest[0] / SECONDS,
            "pods: at rest: a serving process": 1000 * rest[1] / SECONDS,
            f"pods: {RATE} deltas/s: loader": 1000 * busy,
        }

    async def _version(self, target: Dict) -> int:
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
