"""R21, R28: three pods with concurrent writers and readers, recorded in one history."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import quote
from uuid import UUID

import aiohttp
import asyncpg
from ruamel.yaml import YAML
from yarl import URL

from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.kernel.errors import Transient
from penstock.kernel.tasks.wait import wait_event
from penstock.refdata.contract import UpdateState, decode_command
from penstock.refdata.model import DictionaryKey
from penstock.refdata.runtime import ROLES
from penstock.settings import Settings
from tests.refdata.harness import RefdataHarness, command, delete, opened, upsert
from tests.refdata.pod.scenarios.history import History, Hold, Read, Write
from tests.services.redis import RedisCluster
from tests.support.processes import QueryApi
from tests.support.types import Json

# An acknowledged commit must survive a killed server, so unlike in other tests commits are synchronous.
SERVER = {"fsync": "off", "full_page_writes": "off", "max_connections": "300"}
TARGETS = [DictionaryKey(tenant, code) for tenant in ("acme", "globex") for code in ("LOOSE", "TABLED", "WHOLE")]
PROCESSES, WAITS = (1, 2, 1), (100, 0, 20)  # per pod: serving processes, and the barrier wait in ms
WRITERS, READERS = 4, 24
KEYS = [*(f"k{number}" for number in range(10)), "a/b, ü?"]
TABLE = "CREATE TABLE campaign_item (code text, tenant_id text, key text, v jsonb, PRIMARY KEY (code, tenant_id, key))"
_TIMEOUT = aiohttp.ClientTimeout(total=20)
_PLAIN = ("Accept", "Accept-Encoding", "User-Agent")  # left out, so that the fast path is used, too


def tabled(code: str, reload: str) -> Json:
    """Return a dictionary in a table of the user."""
    mine = f"code = '{code}' and tenant_id = :tenantId"
    put = "on conflict (code, tenant_id, key) do update set v = excluded.v"
    new = "select item ->> 'key' as key, item -> 'payload' as v from jsonb_array_elements(:snapshotJson) item"
    return {
        "code": code,
        "loadSql": f"select key as k, v from campaign_item where {mine}",
        "reloadOnEvent": reload,
        "apply": {
            "mode": "SQL_TEMPLATE",
            "upsertSql": f"insert into campaign_item values ('{code}', :tenantId, :key, :payload) {put}",
            "deleteSql": f"delete from campaign_item where {mine} and key = :key",
            "snapshotReplaceSql": f"with new as ({new}), gone as (delete from campaign_item where {mine}"
            " and key not in (select key from new))"
            f" insert into campaign_item select '{code}', :tenantId, key, v from new {put}",
        },
    }


def document(url: str, redis: RedisCluster) -> Json:
    name = os.urandom(4).hex()
    refdata = {
        "kafka": {"commandsTopic": f"refdata.test.{name}"},
        "redis": {"nodes": redis.addresses, "streamKey": f"{name}:stream", "pubChannel": f"{name}:pub"},
        "tenants": sorted({target.tenant_id for target in TARGETS}),
        "apply": {"workers": 1, "lease": "PT1S", "maxAttempts": 100},
        "query": {"reconcileEvery": "PT0.5S", "auditEvery": None, "memoryLimitMb": 64, "memoryDir": "memory"},
        "dictionaries": [{"code": "LOOSE"}, tabled("TABLED", "DELTA"), tabled("WHOLE", "FULL")],
    }
    return {"database": {"url": url}, "server": {"drain_timeout": "PT2S"}, "refdata": refdata}


class CampaignPod:
    """`penstock serve query-api` with a constant port."""

    def __init__(self, number: int, folder: Path, document: Json) -> None:
        self.number = number
        self.processes = PROCESSES[number]
        self._folder = folder / f"pod-{number}"
        self._folder.mkdir()
        query = {**document["refdata"]["query"], "barrierWaitMs": WAITS[number]}
        own = {**document, "refdata": {**document["refdata"], "query": query}}
        YAML(typ="safe").dump(own, self._folder / "penstock.yaml")
        self._port = 0
        self._server: QueryApi | None = None

    async def start(self) -> None:
        """Start the pod and return when it is ready."""
        self._server = QueryApi(self._folder, "--processes", str(self.processes), port=self._port)
        await asyncio.to_thread(self.server.__enter__)
        self._port = self.server.port

    @property
    def server(self) -> QueryApi:
        assert self._server is not None
        return self._server

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        if self._server is not None:
            self._server.__exit__(None, None, None)


class ReadRequest(NamedTuple):
    """The next request of a reader."""

    pod: CampaignPod
    target: DictionaryKey
    min_version: int | None


@dataclass
class BarrierCampaign:
    """The servers, pods and history of a campaign."""

    random: Random
    harness: RefdataHarness
    redis: RedisCluster
    postgres: Path
    pods: list[CampaignPod]
    history: History = field(default_factory=History)
    barriers: int = 0  # responses to reads with a barrier
    known: dict[DictionaryKey, int] = field(default_factory=lambda: dict.fromkeys(TARGETS, 0))
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    acts: "Counter[str]" = field(default_factory=Counter)
    relay: AsyncExitStack = field(default_factory=AsyncExitStack)
    walks: "count[int]" = field(default_factory=lambda: count(1))
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _latest: DictionaryKey = TARGETS[0]
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    @contextmanager
    def hold(self, pod: CampaignPod) -> Iterator[None]:
        """Record a time in which *pod* may fail to answer."""
        hold = Hold(pod.number, time.monotonic())
        self.history.holds.append(hold)
        yield  # not in a finally: after an error the pod stays as it is
        hold.until = time.monotonic()

    async def relay_again(self) -> None:
        await self.relay.enter_async_context(ROLES["relay"](self.harness.platform))

    async def write(self) -> None:
        """Send commands one after the other, each until its version is known."""
        while not self.ending.is_set():
            write = self._command()
            self.history.writes.append(write)
            items = [*(upsert(key, value) for key, value in write.puts.items()), *map(delete, write.deletes)]
            kind = "SNAPSHOT" if write.is_snapshot else "DELTA"
            event_id = UUID(int=self.random.getrandbits(128), version=4)
            body = decode_command(command(write.target.dict_code, *items, event_type=kind, eventId=str(event_id)))
            write.sent_at = time.monotonic()
            while not write.version:
                try:
                    update = await self.harness.refdata.submit(write.target.tenant_id, body, timedelta(seconds=1))
                except Transient:
                    await _a_moment()  # also at the end: a busy loop would delay the restart of the primary
                    continue
                assert update.status is not UpdateState.FAILED, update
                write.version = update.committed_version or 0
            self._learn(write)
            await wait_event(self.ending, self.random.uniform(0, 0.15))

    def _command(self) -> Write:
        chance, target = self.random.random(), self.random.choice(TARGETS)
        puts = {key: {"n": next(self._numbers)} for key in self.random.sample(KEYS, self.random.randint(0, 4))}
        if chance < 0.1:
            return Write(target, puts, is_snapshot=True)
        rest = [key for key in KEYS if key not in puts]
        deletes = self.random.sample(rest, self.random.randint(0 if puts else 1, 2))
        return Write(target, puts, deletes)

    def _learn(self, write: Write) -> None:
        write.known_at = time.monotonic()
        self.known[write.target] = max(self.known[write.target], write.version)
        self._latest = write.target
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def read(self) -> None:
        """Read after every commit, and also in between."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT, skip_auto_headers=_PLAIN) as session:
            reader, ways = (
                CampaignReader(self, session),
                ("item",) * 4 + ("items",) * 3 + ("version", "page", "all", "again"),
            )
            while not self.ending.is_set():
                await wait_event(self._news, self.random.uniform(0, 0.2))
                await getattr(reader, self.random.choice(ways))(self._question())

    def _question(self) -> ReadRequest:
        pod = self.random.choice(self.pods)
        target = self._latest if self.random.random() < 0.5 else self.random.choice(TARGETS)
        known, chance = self.known[target], self.random.random()
        if chance < 0.15:
            return ReadRequest(pod, target, None)
        if chance < 0.25:
            return ReadRequest(pod, target, self.random.randint(0, known))
        if chance < 0.35:
            return ReadRequest(pod, target, known + self.random.choice((1, 1, 1, 1_000_000_000)))
        return ReadRequest(pod, target, known)


class CampaignReader:
    """A reader that records its requests and responses."""

    def __init__(self, campaign: BarrierCampaign, session: aiohttp.ClientSession) -> None:
        self._campaign = campaign
        self._random = campaign.random
        self._session = session
        self._walk = 0

    async def item(self, asked: ReadRequest) -> None:
        key = self._random.choice(KEYS)
        await self._get(asked, "item", f"items/{quote(key, safe='')}", (key,))

    async def again(self, asked: ReadRequest) -> None:
        """R31: read an item, then send its entity tag."""
        key = self._random.choice(KEYS)
        path = f"items/{quote(key, safe='')}"
        first, headers = await self._get(asked, "item", path, (key,))
        if first.status == 200:
            await self._get(asked, "item", path, (key,), first.body, {"If-None-Match": headers["ETag"]})

    async def items(self, asked: ReadRequest) -> None:
        keys = tuple(self._random.sample(KEYS, self._random.randint(1, 6)))
        await self._get(asked, "items", "items?" + "&".join(f"key={quote(key, safe='')}" for key in keys), keys)

    async def version(self, asked: ReadRequest) -> None:
        await self._get(asked, "version", "version")

    async def all(self, asked: ReadRequest) -> None:
        await self._get(asked, "all", "all", headers={"Accept": "application/x-ndjson"})

    async def page(self, asked: ReadRequest) -> None:
        """Read all pages, each possibly from another pod and with a later version."""
        self._walk = next(self._campaign.walks)
        page = f"all?limit={self._random.randint(1, 5)}"
        read, _ = await self._get(asked, "page", page)
        while read.status == 200 and read.body["next"] is not None:
            if self._random.random() < 0.2:
                pod, min_version = self._random.choice(self._campaign.pods), self._campaign.known[asked.target]
                asked = asked._replace(pod=pod, min_version=self._random.choice((asked.min_version, min_version)))
            read, _ = await self._get(asked, "page", f"{page}&cursor={quote(read.body['next'])}")

    async def _get(
        self,
        asked: ReadRequest,
        what: str,
        path: str,
        keys: tuple[str, ...] = (),
        holds: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[Read, Mapping[str, str]]:
        min_version = {} if asked.min_version is None else {"X-Min-Version": str(asked.min_version)}
        url = f"{asked.pod.address}/v1/tenants/{asked.target.tenant_id}/dictionaries/{asked.target.dict_code}/{path}"
        now = time.monotonic()
        read = Read(
            asked.pod.number,
            asked.target,
            what,
            asked.min_version,
            now,
            now,
            keys,
            holds=holds,
            walk=self._walk,
            has_cursor="cursor=" in path,
        )
        headers_received: Mapping[str, str] = {}
        try:
            async with self._session.get(
                URL(url, encoded=True), headers={**min_version, **(headers or {})}
            ) as response:
                raw, headers_received = await response.read(), response.headers
        except (aiohttp.ClientError, TimeoutError, OSError):
            read = replace(read, ended=time.monotonic())
        else:
            read = read.answered(time.monotonic(), response.status, headers_received, raw)
        self._campaign.history.reads.append(read)
        if read.status is None:
            await wait_event(self._campaign.ending, 0.2)  # like a client whose server is unreachable
        elif asked.min_version is not None:
            self._campaign.barriers += 1
        return read, headers_received


async def _a_moment() -> None:
    await wait_event(asyncio.Event(), 0.05)


@asynccontextmanager
async def staged(folder: Path, redis: RedisCluster, random: Random) -> AsyncIterator[BarrierCampaign]:
    """Yield a campaign with running servers and no writes."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(run_embedded_postgres(folder / "postgres", settings=SERVER))
        connection = await asyncpg.connect(url)
        await connection.execute(TABLE)
        await connection.close()
        settings = document(url, redis)
        harness = await stack.enter_async_context(opened(Settings.model_validate(settings)))
        await stack.enter_async_context(ROLES["apply"](harness.platform))
        pods = [CampaignPod(number, folder, settings) for number in range(len(PROCESSES))]
        for pod in pods:
            stack.callback(pod.close)
        await asyncio.gather(*(pod.start() for pod in pods))
        campaign = BarrierCampaign(random, harness, redis, folder / "postgres", pods)
        async with campaign.relay:
            await campaign.relay_again()
            yield campaign
