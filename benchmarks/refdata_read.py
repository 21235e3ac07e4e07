"""The way out of refdata on one core, beside an nginx that says always the same, Redis GET, and FastAPI.

The serving process alone is on core 0, the load on core 1: wrk with 64 kept connections, redis-benchmark with 64
clients for Redis, whose protocol wrk does not speak. No client pipelines. All servers get the same request headers.
Where the load is the first to have no more of its core, a rate tells of the load, not of the server: so beside each
rate is also given by processor time: the rate of the server with a whole core.
"""

import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jwt

from benchmarks import peers
from benchmarks.harness import Bench, Figure, Group, Shared, ratio
from benchmarks.load import Load, Target
from benchmarks.peers.fastapi_reads import DICTIONARY, SECRET, TENANT, VERSION
from benchmarks.peers.nginx import constant_reply
from benchmarks.peers.redis_server import RedisPeer, redis_peer
from benchmarks.pods import Dictionaries, Pod, fill, query_api, settings_for
from benchmarks.servers import SERVER_CORE, Served, pin, started
from benchmarks.session import Session
from benchmarks.wrk import SECONDS, make_generator
from penstock.kernel.db.embedded import run_embedded_postgres

WANTED_TPS = 2_000_000
MOST_P99_MS = 25
NOTHING, ITEMS, MANY = "nothing", "items", "many dictionaries"
TOOLS = ("nginx", "redis-server", "redis-benchmark")
NONE = Dictionaries("none", ["EMPTY"], 0)
KEPT_SECRET = "a secret of the benchmarks, of no use to anybody"
OURS, BARE = "1 core: Penstock, JWT and X-Min-Version", "1 core: Penstock, bare"
NGINX, REDIS, FASTAPI = "1 core: nginx, return 200", "1 core: Redis GET", "1 core: FastAPI, the same checks"
OURS_RANDOM, NGINX_RANDOM = "random keys: Penstock, JWT and X-Min-Version", "random keys: nginx, return 200"
PROCESSES = {1: "both cores: Penstock, 1 process", 2: "both cores: Penstock, 2 processes"}
BY_TIME = ", by processor time"
T = TypeVar("T")
Press = Callable[[], Awaitable[Load]]


@dataclass(frozen=True)
class Sizes:
    """Items of a dictionary, the one that is read, many dictionaries, and the pods and seconds they are read in."""

    items: int
    read: int
    many: int  # dictionaries, and items of each
    processes: Sequence[int]  # of pods on both cores
    starts: Sequence[str]  # pods whose start is timed, by what they hold
    seconds: float

    @property
    def large(self) -> Dictionaries:
        return Dictionaries(TENANT, [DICTIONARY], self.items)

    @property
    def small(self) -> Dictionaries:
        return Dictionaries("many", [f"DICT-{number:04}" for number in range(self.many)], self.many)

    @property
    def key(self) -> str:
        return f"{self.read:08}"

    @property
    def body(self) -> str:
        return f'{{"name": "item {self.read:07}", "rate": {self.read % 1_000}.25}}'


@asynccontextmanager
async def benches(session: Session, sizes: Sizes) -> AsyncIterator[list[Bench]]:
    """Open reads, memory and starts; a server is started when it is first needed."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(run_embedded_postgres(session.postgres))
        print(f"filling {sizes.items:,} items and {sizes.many**2:,}", file=sys.stderr)
        await fill(url, sizes.large, sizes.small)
        house = _House(url, session, sizes, stack)
        yield [*house.reads(), *house.scaling(), *house.memory(), *house.starts()]


def conclusions(figures: Sequence[Figure], _sizes: Sizes) -> list[str]:
    """Return the figures that were asked for: ratios of the same rounds, and cores."""
    asked = [(OURS, REDIS, "≥ 1.0"), (OURS, NGINX, "≥ 0.8"), (OURS, FASTAPI, ""), (OURS, BARE, "")]
    asked += [(OURS_RANDOM, NGINX_RANDOM, ""), (PROCESSES[2], PROCESSES[1], "")]
    lines = [line for ours, theirs, wanted in asked for line in _ratio(figures, ours, theirs, wanted)]
    for figure in figures:
        if figure.bench.name in (OURS, OURS + BY_TIME):
            cores, suffix = WANTED_TPS / figure.median, figure.bench.name.removeprefix(OURS)
            lines.append(f"{WANTED_TPS:,} TPS / {figure.median:,.0f} requests/s per core{suffix} = {cores:.1f} cores")
    busy = [(name, ratio(figures, name, name + BY_TIME)) for name in (OURS, BARE, NGINX, REDIS, FASTAPI)]
    shares = [f"{name.removeprefix('1 core: ')} {share:.0%}" for name, share in busy if share is not None]
    return [*lines, f"of its core each server had: {'; '.join(shares)}"] if shares else lines


GROUP = Group(
    benches,
    full=Sizes(
        items=1_000_000, read=123_456, many=1_000, processes=(1, 2), starts=(NOTHING, ITEMS, MANY), seconds=SECONDS
    ),
    smoke=Sizes(items=10_000, read=456, many=10, processes=(1,), starts=(), seconds=0.05),
    conclude=conclusions,
    needs_two_cores=True,
)


def _ratio(figures: Sequence[Figure], ours: str, theirs: str, wanted: str) -> list[str]:
    rates, by_time = ratio(figures, ours, theirs), ratio(figures, ours + BY_TIME, theirs + BY_TIME)
    if rates is None or by_time is None:
        return []
    aim = f" (target: {wanted})" if wanted else ""
    return [f"{rates:.2f}×{BY_TIME} {by_time:.2f}×{aim}: {ours} / {theirs.rpartition(': ')[2]}"]


class _House:
    """All servers that are measured, each started once."""

    def __init__(self, url: str, session: Session, sizes: Sizes, stack: AsyncExitStack) -> None:
        self._url = url
        self._session = session
        self._sizes = sizes
        self._stack = stack
        self._generator = make_generator(session, sizes.seconds)
        self._nginx, self._redis_server, self._redis_benchmark = map(session.find_tool, TOOLS)
        self._begun: dict[str, Any] = {}

    def reads(self) -> list[Bench]:
        """Return reads of one key and of random ones, on one core."""
        nginx, server, client = self._nginx, self._redis_server, self._redis_benchmark
        ways: dict[str, Press | None] = {
            OURS: partial(self._ask_ours, 1),
            BARE: self._ask_bare,
            NGINX: partial(self._ask_nginx, nginx, 1) if nginx else None,
            REDIS: partial(self._ask_redis, server, client) if server and client else None,
            FASTAPI: self._ask_fastapi,
            OURS_RANDOM: partial(self._ask_ours, self._sizes.items),
            NGINX_RANDOM: partial(self._ask_nginx, nginx, self._sizes.items) if nginx else None,
        }
        limits = {OURS: MOST_P99_MS, OURS_RANDOM: MOST_P99_MS}
        return [bench for name, way in ways.items() if way for bench in _figures(name, way, limits.get(name))]

    def scaling(self) -> list[Bench]:
        """Return reads of pods with one process and with two, on both cores, which the load shares with them."""
        return [
            bench
            for count in self._sizes.processes
            for bench in _figures(PROCESSES[count], partial(self._ask_processes, count))
        ]

    def memory(self) -> list[Bench]:
        """Return the memory of an item, with all that goes with it."""
        server = self._redis_server
        ways = {
            "Penstock": self._pod_memory,
            "Redis": partial(self._redis_memory, server) if server else None,
            "a dict in Python": self._dict_memory,
        }
        return [
            Bench(f"memory of {self._sizes.items:,} items, each: {name}", "bytes", way, is_duration=True)
            for name, way in ways.items()
            if way
        ]

    def starts(self) -> list[Bench]:
        """Return the time from the command to ready."""
        held = {NOTHING: NONE, ITEMS: self._sizes.large, MANY: self._sizes.small}
        names = {NOTHING: NOTHING, ITEMS: f"{self._sizes.items:,} items"}
        names[MANY] = f"{self._sizes.many:,} dictionaries of {self._sizes.many:,} items"
        return [
            Bench(f"start of a pod with {names[what]}", "s", partial(self._start, held[what]), is_duration=True)
            for what in self._sizes.starts
        ]

    async def _ask_ours(self, keys: int) -> Load:
        return await self._press(await self._guarded(), self._headers(), keys)

    async def _ask_bare(self) -> Load:
        return await self._press(await self._once("bare", self._pod("bare")), {}, 1)

    async def _press(self, pod: Pod, headers: dict[str, str], keys: int) -> Load:
        pin(pod.serving_pids, SERVER_CORE)
        return await self._load(pod.url(TENANT, DICTIONARY), headers, pod.serving_pids, keys)

    async def _ask_nginx(self, program: str, keys: int) -> Load:
        nginx = await self._once("nginx", constant_reply(program, self._session.folder, self._sizes.body))
        url = f"{nginx.api}/v1/tenants/{TENANT}/dictionaries/{DICTIONARY}"
        return await self._load(url, self._headers(), [nginx.pid], keys)

    async def _ask_redis(self, server: str, client: str) -> Load:
        redis = await self._redis(server)
        return await redis.get(client, self._sizes.key, self._sizes.body, self._sizes.seconds)

    async def _ask_fastapi(self) -> Load:
        args = ("--items", str(self._sizes.items), "--body", self._sizes.body)
        program = started("-m", "benchmarks.peers.fastapi_reads", *args, env={SECRET: KEPT_SECRET})
        peer: Served = await self._once("fastapi", program)
        pin([peer.pid], SERVER_CORE)
        return await self._load(
            f"{peer.api}/v1/tenants/{TENANT}/dictionaries/{DICTIONARY}", self._headers(), [peer.pid], 1
        )

    async def _load(self, url: str, headers: dict[str, str], pids: list[int], keys: int) -> Load:
        item_url = f"{url}/items/{self._sizes.key}"
        _check(item_url, headers, self._sizes.body)
        target = Target(item_url, headers, pids) if keys == 1 else Target(f"{url}/items/", headers, pids, keys)
        return await self._generator.press(target)

    async def _ask_processes(self, count: int) -> Load:
        pod = await self._once(f"processes {count}", self._pod("jwt", "--processes", str(count)))
        url = f"{pod.url(TENANT, DICTIONARY)}/items/{self._sizes.key}"
        return await self._generator.press(Target(url, self._headers(), pod.serving_pids), core=None)

    async def _pod_memory(self) -> float:
        return (await self._guarded()).memory_bytes / self._sizes.items

    async def _redis_memory(self, server: str) -> float:
        return (await self._redis(server)).memory_of(self._sizes.items, self._sizes.body)

    async def _dict_memory(self) -> float:
        args = ("--items", str(self._sizes.items), "--size", str(len(self._sizes.body)))
        return float((await peers.ask(Path(sys.executable), peers.HERE / "plain_dict.py", *args))["bytes"])

    async def _start(self, held: Dictionaries) -> float:
        async with query_api(settings_for(self._url, held)) as pod:
            return pod.seconds

    async def _guarded(self) -> Pod:
        return await self._once("jwt", self._pod("jwt"))

    async def _redis(self, server: str) -> RedisPeer:
        return await self._once("redis", redis_peer(server))

    def _pod(self, auth: str, *args: str) -> AbstractAsyncContextManager[Pod]:
        guard = {"auth": {"jwt": {"algorithms": ["HS256"], "secret": f"env:{SECRET}"}}} if auth == "jwt" else {}
        return query_api(settings_for(self._url, self._sizes.large, **guard), *args, env={SECRET: KEPT_SECRET})

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


def _check(url: str, headers: dict[str, str], expected: str) -> None:
    """Verify that it is the right answer which is given so quickly."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as response:
        body = response.read().decode()
        assert body == expected, f"{url} gives {body}"
