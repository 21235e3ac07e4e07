"""A pod for tests: its loader and one server in this process, over real sockets, with refdata that writes to it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from penstock.app.http_server import bind_listener
from penstock.app.programs import make_pod_config
from penstock.kernel.http.auth import Authenticator, NoAuthenticator
from penstock.kernel.http.headers import LOCAL_NAMES
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.model import DictionaryKey
from penstock.refdata.pod.ipc import LoaderConnection, serve_requests
from penstock.refdata.pod.memory.folder import make_pod_folder
from penstock.refdata.pod.memory.shared_counters import PodCounters
from penstock.refdata.pod.serve.router import Router
from penstock.refdata.pod.serve.server import PodServer
from penstock.refdata.pod.supervisor import PodSupervisor
from penstock.settings import Settings
from tests.refdata.harness import RefdataHarness, opened, upsert
from tests.support.types import Json
from tests.support.wait import becomes


class PodHarness:
    """A pod and the refdata that writes its dictionaries, with short methods for tests."""

    def __init__(
        self,
        harness: RefdataHarness,
        pod: PodSupervisor,
        server: PodServer,
        address: str,
        session: aiohttp.ClientSession,
    ) -> None:
        self.harness = harness
        self.pod = pod
        self.server = server
        self.address = address
        self.session = session

    async def put(self, code: str, items: Mapping[str, Any], tenant: str = "acme") -> int:
        """Commit a DELTA, and return its version. Pods are not notified until `relay`."""
        await self.harness.send(code, *(upsert(key, payload) for key, payload in items.items()), tenant=tenant)
        await self.harness.apply()
        return await self.harness.version(code, tenant)

    async def put_and_load(self, code: str, items: Mapping[str, Any], tenant: str = "acme") -> int:
        """Commit a DELTA, wait until it is loaded, and return its version."""
        version = await self.put(code, items, tenant)
        await self.load(code, version, tenant)
        return version

    async def load(self, code: str, version: int, tenant: str = "acme") -> None:
        """Load *version*, and return when it is in memory."""
        assert self.pod._loader is not None
        state = self.pod._loader.ensure_state(DictionaryKey(tenant, code))
        state.request_version(version, immediately=True)
        await state.wait_for_version(version)

    async def get(
        self,
        path: str,
        *,
        tenant: str = "acme",
        min_version: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> "PodResponse":
        """GET `…/dictionaries/{path}` of *tenant* with *min_version*."""
        given = {**({} if min_version is None else {"X-Min-Version": str(min_version)}), **(headers or {})}
        url = f"{self.address}/v1/tenants/{tenant}/dictionaries/{path}"
        async with self.session.get(url, headers=given) as response:
            return PodResponse(response.status, response.headers, await response.read())

    async def wait_for_readers(self, count: int) -> None:
        """Return when *count* readers wait for versions."""
        assert self.pod.request_handler._services is not None
        behind = self.pod.request_handler._services[1]

        async def are_there() -> bool:
            return behind._waiting == count

        await becomes(are_there, f"{count} readers to wait")


class PodResponse:
    """A response of the pod."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def version(self) -> int:
        return int(self.headers["X-Dict-Version"])

    @property
    def source(self) -> str:
        return self.headers["X-Data-Source"]


@asynccontextmanager
async def running_pod(
    settings: Settings, folder: Path, authenticator: Authenticator | None = None, *, follows: bool = True
) -> AsyncIterator[PodHarness]:
    """Yield a pod on the database of *settings*; without *follows* it never reaches its primary."""
    telemetry = Telemetry()
    async with opened(settings) as harness, aiohttp.ClientSession() as session:
        with make_pod_folder(folder, folder, "test") as place, bind_listener("127.0.0.1", 0) as sock:
            pod = PodSupervisor(make_pod_config(settings), telemetry, place)
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            theirs.setblocking(False)
            request_handler = asyncio.create_task(serve_requests(ours, pod.request_handler.handle))
            link = await LoaderConnection.open(theirs)
            answers = asyncio.create_task(link.receive_replies())
            tenants = settings.refdata.security.tenant
            names = None if authenticator else LOCAL_NAMES
            router = Router(pod.memory.open_view(), PodCounters(place), tenants, names, stale_after=2.0)
            server = PodServer(router, link, authenticator or NoAuthenticator(), 0, 10.0)
            stopping = asyncio.Event()
            address = f"http://127.0.0.1:{sock.getsockname()[1]}"
            serving = asyncio.create_task(server.serve(sock.dup(), stopping, 2.0))
            try:
                async with _following(pod, harness, follows=follows):
                    pod.pulse.is_serving = True
                    yield PodHarness(harness, pod, server, address, session)
            finally:
                await session.close()
                stopping.set()
                await serving
                for task in (answers, request_handler):
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
                await link.close()
                router.view.txn.abort()
                pod.memory.close()


@asynccontextmanager
async def _following(pod: PodSupervisor, harness: RefdataHarness, *, follows: bool) -> AsyncIterator[None]:
    if not follows:
        yield
        return
    async with pod.follow_primary(harness.db, harness.refdata.catalogue, harness.platform.signals) as is_loaded:
        await is_loaded.wait()
        yield


def dictionary(code: str, **more: Any) -> Json:
    return {"code": code, **more}
