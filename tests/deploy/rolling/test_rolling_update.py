"""R27: clients do not notice that all processes behind an nginx are replaced one by one."""

import asyncio
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
import pytest_asyncio
import uvicorn
from fastapi import FastAPI

from penstock.app.http_server import bind_listener, run_server
from penstock.kernel.http import health
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.http.middleware import DrainMiddleware
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import ServerSection, Settings
from tests.deploy.rolling.nginx import Nginx
from tests.deploy.rolling.rolling_clients import ClientAnswer, Load, Request, connected, loaded
from tests.deploy.rolling.rolling_fleet import Endpoints, Fleet, in_front
from tests.refdata.harness import RefdataHarness, command, opened, upsert
from tests.refdata.pod.harness import PodHarness, running_pod
from tests.services.postgres import SERVER_URL, fresh_database
from tests.support.processes import CommandApi, QueryApi
from tests.support.soak import Campaign, examples
from tests.support.types import Json
from tests.support.wait import becomes

MANY = 20_000
BIG = {
    "code": "BIG",
    "loadSql": "select i::text as k, jsonb_build_object('n', i, 'text', repeat('x', 100)) as v "
    f"from generate_series(1, {MANY}) i where :tenantId = 'acme'",
}
LITTLE = {"code": "LITTLE"}
LIVENESS = "/actuator/health/liveness"
DICTIONARIES = "/v1/tenants/acme/dictionaries"
# What a plain nginx needs that does not know who is ready: one that was just started says so with 503.
KEEPS_TRYING = "error timeout http_503"
NEVER = "off"
DELAY = 1.5
ALL_KINDS = ("newest", "one", "some", "all", "feed", "change")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    async with fresh_database(os.environ[SERVER_URL]) as url:
        yield url


def document(url: str, *, delay: float, processes: int = 1, level: str = "INFO") -> Json:
    query = {"reconcileEvery": "PT0.2S", "auditEvery": None, "processes": processes}
    refdata = {"dictionaries": [BIG, LITTLE], "tenants": ["acme"], "query": query}
    server = {"drain_delay": delay}
    return {"database": {"url": url}, "server": server, "telemetry": {"log_level": level}, "refdata": refdata}


class Readers:
    """Clients of the query pods, and one who writes what they read."""

    def __init__(self, harness: RefdataHarness) -> None:
        self._harness = harness
        self._values = itertools.count(1)
        self.newest = (0, 0)  # a version, and the value it has or a later one

    async def write(self) -> None:
        """A version more."""
        value = next(self._values)
        await self._harness.send("LITTLE", upsert("a", value))
        await self._harness.apply()
        self.newest = await self._harness.version("LITTLE"), value

    async def written(self) -> set[str]:
        """The keys that were committed, each of them in one version."""
        await becomes(self._is_settled, "nothing pends")
        rows = await self._harness.db.fetch("SELECT status, event_id, committed_version FROM update_request")
        assert {row["status"] for row in rows} == {"COMMITTED"}
        assert len({row["committed_version"] for row in rows}) == len(rows)
        return {str(row["event_id"]) for row in rows}

    async def _is_settled(self) -> bool:
        await self._harness.apply()
        return not await self._harness.db.fetchval(
            "SELECT EXISTS (SELECT FROM update_request WHERE status = 'PENDING')"
        )

    def begin(self, load: Load, group: asyncio.TaskGroup) -> None:
        requests = itertools.cycle([self._newest, self._one, self._some, self._one])
        for _ in range(6):
            group.create_task(load.staying(lambda: next(requests)()))
        for _ in range(3):
            group.create_task(load.coming(lambda: next(requests)()))
        group.create_task(load.coming(self._all))
        load.endless = [group.create_task(load.following(f"{DICTIONARIES}/LITTLE/changes")) for _ in range(2)]
        group.create_task(self._keep_writing(load))

    async def _keep_writing(self, load: Load) -> None:
        # Not cancelled: an update whose lease was taken and never returned would be pending until the lease expires.
        while not load.is_over:
            await self.write()
            await asyncio.sleep(0.1)

    def _newest(self) -> Request:
        least, value = self.newest

        def wrong(answer: ClientAnswer) -> str:
            found = int(answer.headers["x-dict-version"]), json.loads(answer.body)
            return "" if found[0] >= least and found[1] >= value else f"{found} is older than {least, value}"

        return Request("newest", (f"{DICTIONARIES}/LITTLE/items/a", f"X-Min-Version: {least}"), wrong)

    def _one(self) -> Request:
        return Request("one", (f"{DICTIONARIES}/BIG/items/{MANY}",), lambda answer: wrong_length(answer, 100))

    def _some(self) -> Request:
        return Request("some", (f"{DICTIONARIES}/BIG/items?keys=1,2,3",), lambda answer: wrong_length(answer, 300))

    def _all(self) -> Request:
        def wrong(answer: ClientAnswer) -> str:
            lines = answer.body.count(b"\n")
            return "" if lines == MANY else f"{lines} lines"

        return Request("all", (f"{DICTIONARIES}/BIG/all", "Accept: application/x-ndjson"), wrong)


def wrong_length(answer: ClientAnswer, least: int) -> str:
    return "" if len(answer.body) > least else f"{len(answer.body)} bytes"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pods(url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("pods"), lambda folder, port: QueryApi(folder, port=port), 3)
    yield fleet
    fleet.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def readers(url: str) -> AsyncIterator[Readers]:
    async with opened(Settings.model_validate(document(url, delay=0))) as harness:
        readers = Readers(harness)
        await readers.write()
        yield readers


def nothing_failed(load: Load, nginx: Nginx, *kinds: str) -> None:
    assert load.failures == [], nginx.errors()
    assert all(load.answered[kind] for kind in kinds), load.answered


async def everyone_answers(nginx: Nginx, fleet: Fleet) -> None:
    """Back when each process has answered some more."""
    since = nginx.reloads

    async def is_so() -> bool:
        counts = nginx.answered(since)
        return all(counts[port] >= 10 for port in fleet.ports)

    await becomes(is_so, "some requests go to each")


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_nginx_tries_another(pods: Fleet, readers: Readers, url: str, tmp_path: Path, campaign: Campaign) -> None:
    """R27: without a delay: nginx finds out by itself who is gone, and asks another; clients see nothing of it."""
    await pods.start(document(url, delay=0))
    async with in_front(tmp_path / "nginx", pods.ports, next=KEEPS_TRYING) as nginx:
        for number in range(examples(1, soak=20)):
            async with loaded(nginx.port, readers.begin) as load:
                await everyone_answers(nginx, pods)
                delay = 0 if examples(0, soak=1) else DELAY
                changed = document(url, delay=delay, processes=2 - number % 2, level="WARNING")
                await pods.roll(changed, lambda _port: True)
                await everyone_answers(nginx, pods)
            nothing_failed(load, nginx, *ALL_KINDS)
            assert load.sent_again == 0
            campaign.end_round(faults=len(pods.ports))


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_nginx_never_tries_twice(
    pods: Fleet, readers: Readers, url: str, tmp_path: Path, campaign: Campaign
) -> None:
    """R27: with a delay: who is not ready is taken out as Kubernetes does it, and no request has to be sent twice."""
    if not pods.running or pods.config["server"]["drain_delay"] != DELAY:
        await pods.start(document(url, delay=DELAY, processes=2))
    nginx = Nginx(tmp_path / "nginx", next=NEVER)
    endpoints = Endpoints(nginx, pods.ports)
    async with endpoints.watched():
        for number in range(examples(1, soak=20)):
            async with loaded(nginx.port, readers.begin) as load:
                await everyone_answers(nginx, pods)
                changed = document(url, delay=DELAY, processes=1 + number % 2, level="DEBUG")
                await pods.roll(changed, lambda port: port in endpoints.ready)
                await everyone_answers(nginx, pods)
            nothing_failed(load, nginx, *ALL_KINDS)
            campaign.end_round(faults=len(pods.ports))


class Writers:
    """Clients of the command API, who send each update once."""

    def __init__(self) -> None:
        self.acknowledged: list[str] = []

    def begin(self, load: Load, group: asyncio.TaskGroup) -> None:
        for _ in range(6):
            group.create_task(load.coming(self._update))

    def _update(self) -> Request:
        event_id = str(uuid4())

        def wrong(answer: ClientAnswer) -> str:
            self.acknowledged.append(event_id)
            return "" if json.loads(answer.body)["eventId"] == event_id else answer.body.decode()

        body = command("LITTLE", upsert(event_id, 1), eventId=event_id)
        return Request("update", ("/v1/tenants/acme/updates",), wrong, "POST", body)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def command_apis(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("command-apis")
    fleet = Fleet(folder, lambda place, port: CommandApi(place, "--port", str(port)), 2)
    yield fleet
    fleet.close()


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_no_update_is_lost_or_doubled(
    command_apis: Fleet, readers: Readers, url: str, tmp_path: Path, campaign: Campaign
) -> None:
    """R6, R27: a POST is never sent twice: each is answered once, and each acknowledged one commits once."""
    campaign.counts_items = True
    await command_apis.start(document(url, delay=DELAY))
    nginx = Nginx(tmp_path / "nginx", next=NEVER)
    endpoints = Endpoints(nginx, command_apis.ports)
    writers, before = Writers(), await readers.written()
    async with endpoints.watched():
        for number in range(examples(1, soak=20)):
            async with loaded(nginx.port, writers.begin) as load:
                await everyone_answers(nginx, command_apis)
                changed = document(url, delay=DELAY, level="DEBUG" if number % 2 == 0 else "INFO")
                await command_apis.roll(changed, lambda port: port in endpoints.ready)
                await everyone_answers(nginx, command_apis)
            nothing_failed(load, nginx, "update")
            campaign.end_round(faults=len(command_apis.ports))
    assert sorted(await readers.written() - before) == sorted(writers.acknowledged)
    assert len(set(writers.acknowledged)) == len(writers.acknowledged)


async def test_a_kept_connection_has_its_last_answer() -> None:
    """R27: when connections are refused, a request that was already sent is answered as the last one."""
    app, pulse = FastAPI(), LivenessPulse({}, needs=[])
    app.add_middleware(DrainMiddleware, pulse=pulse)
    app.include_router(health.make_router(pulse, Telemetry()))
    section = ServerSection()
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bind_listener("127.0.0.1", 0))
        port = sock.getsockname()[1]
        served = await stack.enter_async_context(AsyncExitStack())
        await served.enter_async_context(run_server(app, sock, section))
        wire = await stack.enter_async_context(connected(port))
        assert not (await wire.ask(LIVENESS)).is_last
        pulse.drain()
        stopping = asyncio.create_task(served.aclose())
        await becomes(partial(has_no_listener, port), "connections are refused")
        last = await wire.ask(LIVENESS)
        assert (last.status, last.is_last) == (200, True)
        await stopping


async def test_accepted_connections_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: a server that ends accepts the connections that the kernel has already accepted."""
    app, waiting = FastAPI(), []
    app.include_router(health.make_router(LivenessPulse({}, needs=[]), Telemetry()))
    served = uvicorn.Server.main_loop

    async def until_the_end(server: uvicorn.Server) -> None:
        await served(server)
        # No turn of the loop comes between this and the end: they are in the kernel's queue when it closes.
        for _ in range(20):
            waiting.append(connection := socket.create_connection(sock.getsockname()))
            connection.sendall(f"GET {LIVENESS} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    monkeypatch.setattr(uvicorn.Server, "main_loop", until_the_end)
    with bind_listener("127.0.0.1", 0) as sock:
        async with run_server(app, sock, ServerSection()), connected(sock.getsockname()[1]) as first:
            await first.ask(LIVENESS)
    assert [connection.recv(100).split(b" ")[1] for connection in waiting] == [b"200"] * 20
    for connection in waiting:
        connection.close()


async def has_no_listener(port: int) -> bool:
    try:
        async with connected(port):
            return False
    except ConnectionError:
        return True


async def test_a_pod_closes_no_connection_in_use(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: as long as requests are taken, an idle connection of a draining pod is kept: its next answer is the last."""
    monkeypatch.setattr("penstock.refdata.pod.serve.server._SWEEP_INTERVAL", 0.0)
    monkeypatch.setattr("penstock.refdata.pod.serve.connection.DRAIN_IDLE_TIMEOUT", 0.0)
    path = f"{DICTIONARIES}/LITTLE/version"
    async with running_pod(Settings.model_validate(document(url, delay=0)), tmp_path) as pod:
        port = int(pod.address.rpartition(":")[2])
        async with connected(port) as idle, connected(port) as other:
            assert not (await idle.ask(LIVENESS)).is_last
            pod.pod.pulse.drain()
            while not (await other.ask(path)).is_last:
                pass
            swept = pod.server.now
            await becomes(partial(has_ticked, pod, swept), "it was looked after")
            assert (await idle.ask(LIVENESS)).is_last


async def has_ticked(pod: PodHarness, since: float) -> bool:
    return pod.server.now > since + 0.1
