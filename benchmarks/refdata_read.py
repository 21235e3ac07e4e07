"""The way out of refdata on one core, beside an nginx that says always the same, Redis GET, and FastAPI.

The serving process alone is on core 0, the load on core 1: wrk with 64 kept connections, redis-benchmark with 64
clients for Redis, whose protocol wrk does not speak. Nobody pipelines. Every server is sent the same request headers.
Where the load is the first to have no more of its core, a rate tells of the load, not of the server: so beside each
rate stands the same by processor time, which is what the server would do with all of its core.
"""

import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import jwt

from benchmarks import peers, wrk
from benchmarks.harness import Bench, Figure, Shared, ratio
from benchmarks.peers.fastapi_reads import DICTIONARY, SECRET, TENANT, VERSION
from benchmarks.peers.nginx import constant_reply
from benchmarks.peers.redis_server import RedisPeer, redis_peer
from benchmarks.pods import Dictionaries, Pod, fill, query_api, settings_for
from benchmarks.servers import SERVER_CORE, Served, need_two_cores, pin, started, tool
from benchmarks.wrk import Load, Target
from penstock.kernel.embedded import embedded_postgres

ITEMS = 1_000_000
KEY = "00123456"
BODY = '{"name": "item 0123456", "rate": 456.25}'
WANTED_TPS = 2_000_000
MOST_P99_MS = 25
LARGE = Dictionaries(TENANT, [DICTIONARY], ITEMS)
MANY = Dictionaries("many", [f"DICT-{number:04}" for number in range(1_000)], 1_000)
NONE = Dictionaries("none", ["EMPTY"], 0)
KEPT_SECRET = "a secret of the benchmarks, of no use to anybody"
OURS, BARE = "1 core: Penstock, JWT and X-Min-Version", "1 core: Penstock, bare"
NGINX, REDIS, FASTAPI = "1 core: nginx, return 200", "1 core: Redis GET", "1 core: FastAPI, the same checks"
OURS_RANDOM, NGINX_RANDOM = "random keys: Penstock, JWT and X-Min-Version", "random keys: nginx, return 200"
ONE, TWO = "both cores: Penstock, 1 process", "both cores: Penstock, 2 processes"
BY_TIME = ", by processor time"
T = TypeVar("T")
Press = Callable[[], Awaitable[Load]]


@asynccontextmanager
async def benches(folder: Path) -> AsyncIterator[list[Bench]]:
    """Reads, memory and starts. What is measured with is started when it is first needed."""
    need_two_cores()
    for name in ("wrk", "nginx", "redis-server", "redis-benchmark"):
        tool(name)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(embedded_postgres(folder))
        print(f"filling {ITEMS:,} items twice", file=sys.stderr)
        await fill(url, LARGE, MANY)
        house = _House(url, folder.parent, stack)
        yield [*house.reads(), *house.scaling(), *house.memory(), *house.starts()]


def conclusions(figures: Sequence[Figure]) -> list[str]:
    """The figures that were asked for: ratios of the same rounds, and cores."""
    asked = [(OURS, REDIS, "≥ 1.0"), (OURS, NGINX, "≥ 0.8"), (OURS, FASTAPI, ""), (OURS, BARE, "")]
    asked += [(OURS_RANDOM, NGINX_RANDOM, ""), (TWO, ONE, "")]
    lines = [line for ours, theirs, wanted in asked for line in _ratio(figures, ours, theirs, wanted)]
    for one in figures:
        if one.bench.name in (OURS, OURS + BY_TIME):
            cores, said = WANTED_TPS / one.median, one.bench.name.removeprefix(OURS)
            lines.append(f"{WANTED_TPS:,} TPS / {one.median:,.0f} requests/s per core{said} = {cores:.1f} cores")
    busy = [(name, ratio(figures, name, name + BY_TIME)) for name in (OURS, BARE, NGINX, REDIS, FASTAPI)]
    told = [f"{name.removeprefix('1 core: ')} {share:.0%}" for name, share in busy if share is not None]
    return [*lines, f"of its core each server had: {'; '.join(told)}"] if told else lines


def _ratio(figures: Sequence[Figure], ours: str, theirs: str, wanted: str) -> list[str]:
    rates, by_time = ratio(figures, ours, theirs), ratio(figures, ours + BY_TIME, theirs + BY_TIME)
    if rates is None or by_time is None:
        return []
    aim = f" (wanted {wanted})" if wanted else ""
    return [f"{rates:.2f}×{BY_TIME} {by_time:.2f}×{aim}: {ours} / {theirs.rpartition(': ')[2]}"]


class _House:
    """Everything that is measured, each begun once."""

    def __init__(self, url: str, folder: Path, stack: AsyncExitStack) -> None:
        self._url = url
        self._folder = folder
        self._stack = stack
        self._begun: dict[str, Any] = {}

    def reads(self) -> list[Bench]:
        """One key and random ones, on one core."""
        ways: dict[str, Press] = {
            OURS: lambda: self._ask_ours(1),
            BARE: self._ask_bare,
            NGINX: lambda: self._ask_nginx(1),
            REDIS: self._ask_redis,
            FASTAPI: self._ask_fastapi,
            OURS_RANDOM: lambda: self._ask_ours(ITEMS),
            NGINX_RANDOM: lambda: self._ask_nginx(ITEMS),
        }
        limits = {OURS: MOST_P99_MS, OURS_RANDOM: MOST_P99_MS}
        return [bench for name, way in ways.items() for bench in _figures(name, way, limits.get(name))]

    def scaling(self) -> list[Bench]:
        """One process and two, on both cores, which the load shares with them."""
        ways: dict[str, Press] = {ONE: lambda: self._ask_processes(1), TWO: lambda: self._ask_processes(2)}
        return [bench for name, way in ways.items() for bench in _figures(name, way)]

    def memory(self) -> list[Bench]:
        """Of an item, with all that goes with it."""
        what = f"of {ITEMS:,} items, each"
        return [
            Bench(f"memory {what}: Penstock", "bytes", self._pod_memory, is_duration=True),
            Bench(f"memory {what}: Redis", "bytes", self._redis_memory, is_duration=True),
            Bench(f"memory {what}: a dict in Python", "bytes", self._dict_memory, is_duration=True),
        ]

    def starts(self) -> list[Bench]:
        """From the command to ready."""
        ways = {"nothing": NONE, f"{ITEMS:,} items": LARGE, "1,000 dictionaries of 1,000 items": MANY}
        return [
            Bench(f"start of a pod with {what}", "s", lambda it=held: self._start(it), is_duration=True)  # type: ignore[misc]
            for what, held in ways.items()
        ]

    async def _ask_ours(self, keys: int) -> Load:
        return await self._press(await self._guarded(), self._headers(), keys)

    async def _ask_bare(self) -> Load:
        return await self._press(await self._once("bare", self._pod("bare")), {}, 1)

    async def _press(self, pod: Pod, headers: dict[str, str], keys: int) -> Load:
        pin(pod.serving_pids, SERVER_CORE)
        return await self._load(pod.url(TENANT, DICTIONARY), headers, pod.serving_pids, keys)

    async def _ask_nginx(self, keys: int) -> Load:
        nginx = await self._once("nginx", constant_reply(self._folder, BODY))
        url = f"{nginx.api}/v1/tenants/{TENANT}/dictionaries/{DICTIONARY}"
        return await self._load(url, self._headers(), [nginx.pid], keys)

    async def _ask_redis(self) -> Load:
        return await (await self._redis()).get(KEY, BODY)

    async def _ask_fastapi(self) -> Load:
        command = ("-m", "benchmarks.peers.fastapi_reads", "--items", str(ITEMS), "--body", BODY)
        peer: Served = await self._once("fastapi", started(*command, env={SECRET: KEPT_SECRET}))
        pin([peer.pid], SERVER_CORE)
        return await self._load(
            f"{peer.api}/v1/tenants/{TENANT}/dictionaries/{DICTIONARY}", self._headers(), [peer.pid], 1
        )

    async def _load(self, url: str, headers: dict[str, str], pids: list[int], keys: int) -> Load:
        one = f"{url}/items/{KEY}"
        _check(one, headers)
        target = Target(one, headers, pids) if keys == 1 else Target(f"{url}/items/", headers, pids, keys)
        return await wrk.press(target, self._folder)

    async def _ask_processes(self, count: int) -> Load:
        pod = await self._once(f"processes {count}", self._pod("jwt", "--processes", str(count)))
        url = f"{pod.url(TENANT, DICTIONARY)}/items/{KEY}"
        return await wrk.press(Target(url, self._headers(), pod.serving_pids), self._folder, core=None)

    async def _pod_memory(self) -> float:
        return (await self._guarded()).memory_bytes / ITEMS

    async def _redis_memory(self) -> float:
        return (await self._redis()).memory_of(ITEMS, BODY)

    async def _dict_memory(self) -> float:
        args = ("--items", str(ITEMS), "--size", str(len(BODY)))
        return float((await peers.ask(Path(sys.executable), peers.HERE / "plain_dict.py", *args))["bytes"])

    async def _start(self, held: Dictionaries) -> float:
        async with query_api(settings_for(self._url, held)) as pod:
            return pod.seconds

    async def _guarded(self) -> Pod:
        return await self._once("jwt", self._pod("jwt"))

    async def _redis(self) -> RedisPeer:
        return await self._once("redis", redis_peer())

    def _pod(self, auth: str, *args: str) -> AbstractAsyncContextManager[Pod]:
        guard = {"auth": {"jwt": {"algorithms": ["HS256"], "secret": f"env:{SECRET}"}}} if auth == "jwt" else {}
        return query_api(settings_for(self._url, LARGE, **guard), *args, env={SECRET: KEPT_SECRET})

    def _headers(self) -> dict[str, str]:
        if "token" not in self._begun:
            claims = {"sub": "bench", "tenant_id": TENANT, "exp": int(time.time()) + 86_400}
            self._begun["token"] = jwt.encode(claims, KEPT_SECRET, algorithm="HS256")
        return {"Authorization": f"Bearer {self._begun['token']}", "X-Min-Version": str(VERSION)}

    async def _once(self, name: str, opening: AbstractAsyncContextManager[T]) -> T:
        if name not in self._begun:
            print(f"  starting {name}", file=sys.stderr)
            self._begun[name] = await self._stack.enter_async_context(opening)
        found: T = self._begun[name]
        return found


def _figures(name: str, way: Press, most_p99: float | None = None) -> list[Bench]:
    """What one run tells."""
    shared = Shared(way)

    async def rate() -> float:
        return (await shared.result("rate")).rate

    async def rate_by_time() -> float:
        return (await shared.result("rate by time")).per_processor_second

    async def p99() -> float:
        return (await shared.result("p99")).p99

    return [
        Bench(name, "requests", rate),
        Bench(name + BY_TIME, "requests", rate_by_time),
        Bench(f"{name}: p99", "ms", p99, most_p99, is_duration=True),
    ]


def _check(url: str, headers: dict[str, str]) -> None:
    """That it is the right answer which is given so quickly."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as response:
        body = response.read().decode()
        assert body == BODY, f"{url} gives {body}"
