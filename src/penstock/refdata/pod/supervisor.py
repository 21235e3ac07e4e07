"""A query pod: a loader process, and serving processes that read its memory."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.resources import files
from pathlib import Path
from time import monotonic

import orjson
import structlog
from fastapi.openapi.docs import get_swagger_ui_html

from penstock.kernel.db.database import Database
from penstock.kernel.errors import NotFound, Transient
from penstock.kernel.http.health import (
    ALIASES,
    EXPOSITION,
    HEALTH,
    METRICS,
    READINESS,
    Check,
    HealthChecks,
    LivenessPulse,
)
from penstock.kernel.ids import make_worker_name
from penstock.kernel.signals import Signals
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.tasks.wait import cancel_and_wait, wait_event
from penstock.kernel.telemetry.log_level import LOG_LEVEL
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.dictionaries.catalogue import DictionaryCatalogue
from penstock.refdata.pod.config import PodConfig
from penstock.refdata.pod.ipc import DocumentReply, LoaderReply, LoaderRequest, serve_requests
from penstock.refdata.pod.load.auditor import PodAuditor
from penstock.refdata.pod.load.barrier import VersionBarrier
from penstock.refdata.pod.load.dictionary_state import DictionaryState
from penstock.refdata.pod.load.loader import PodLoader
from penstock.refdata.pod.load.metrics import PodMetrics
from penstock.refdata.pod.load.requests import LoaderRequestHandler
from penstock.refdata.pod.memory.folder import make_pod_folder
from penstock.refdata.pod.memory.shared_counters import PodCounter
from penstock.refdata.pod.memory.writer import MemoryWriter
from penstock.refdata.pod.serve.main import LIVENESS, LOG_LEVEL_INTERVAL

_JSON = "application/json"
_LOG_HINT = "check that PostgreSQL is running; look for dictionary_load_failed and primary_lost in the log of the pod"
_HEARTBEAT_INTERVAL, _MISSED_HEARTBEATS = 5.0, 6  # seconds; misses before a process is killed
_STABLE_AFTER = 10.0  # seconds of life after which the back-off of restarts is reset
_ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css", "favicon-32x32.png": "image/png"}


class PodSupervisor:
    """The loader of a pod: its memory, and the handler of requests of its serving processes.

    The serving processes start before the memory is loaded, and answer with NOT_LOADED until then.
    """

    def __init__(self, config: PodConfig, telemetry: Telemetry, folder: Path) -> None:
        self.config = config
        self.folder = folder
        section = config.refdata.query
        self.memory = MemoryWriter(folder, limit=section.memory_limit_mb * 1024 * 1024)
        # Readiness needs the dictionaries to be loaded once: then the pod serves without its dependencies.
        checks: dict[str, Check] = {
            "dictionaries": self.check,
            "primary": self._check_primary,
            "signals": self._check_signals,
        }
        self.pulse = LivenessPulse(checks, needs=["dictionaries"], on_drain=self.memory.counters.set_draining)
        self.request_handler = LoaderRequestHandler(self._make_page)
        self._telemetry = telemetry
        self._metrics = PodMetrics(telemetry.registry)
        self._loader: PodLoader | None = None
        self._primary: tuple[Database, Signals] | None = None
        self._metrics.show(self.memory, self._list_states, section.processes, config.stale_after)

    async def check(self) -> None:
        """Raise Transient NOT_LOADED until every dictionary was loaded once; they stay in memory afterwards."""
        if not self.memory.counters.is_loaded:
            raise Transient("NOT_LOADED", "not every dictionary is loaded yet", hint=_LOG_HINT)

    async def share_log_level(self) -> None:
        """Pass the log level to the serving processes."""
        self.memory.counters.log_level = LOG_LEVEL.number

    @asynccontextmanager
    async def follow_primary(
        self, db: Database, catalogue: DictionaryCatalogue, signals: Signals
    ) -> AsyncIterator[asyncio.Event]:
        """Follow the primary until the end of the context; yield an event that is set when everything is loaded."""
        section, self._primary = self.config.refdata.query, (db, signals)
        loader = self._loader = PodLoader(db, catalogue, self.memory, section, self._metrics, self._telemetry)
        auditor = PodAuditor(loader, self._metrics)
        self.request_handler.open(loader, VersionBarrier(loader, section, self._metrics), auditor)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(loader.start(signals, make_worker_name("query")))
            if section.audit_every is not None:
                await stack.enter_async_context(run_periodically("audit", auditor.audit_all, section.audit_every))
            yield loader.is_loaded

    async def _check_primary(self) -> None:
        await self._require_primary()[0].check()

    async def _check_signals(self) -> None:
        await self._require_primary()[1].check()

    def _require_primary(self) -> tuple[Database, Signals]:
        if self._primary is None:
            raise Transient("DATABASE_DOWN", "PostgreSQL was not reached since the start of the pod", hint=_LOG_HINT)
        return self._primary

    def _list_states(self) -> Sequence[DictionaryState]:
        return self._loader.list_states() if self._loader else ()

    async def _make_page(self, path: str) -> DocumentReply:
        """R17, R27: return a document about the pod: its health, its metrics, or its API."""
        path = ALIASES.get(path, path)
        if path == LIVENESS:
            return _make_health_page(HealthChecks(status="UP"))
        if path == HEALTH:
            return _make_health_page(await self.pulse.check_health())
        if path == READINESS:
            return _make_health_page(await self.pulse.check_readiness())
        if path == METRICS:
            return DocumentReply(200, EXPOSITION, await self.pulse.format_metrics(self._telemetry))
        if path == "/openapi.json":
            return DocumentReply(200, _JSON, files("penstock.refdata.pod").joinpath("openapi.json").read_bytes())
        if path == "/docs":
            return DocumentReply(200, "text/html; charset=utf-8", _make_docs_page())
        name = path.removeprefix("/swagger/")
        if path.startswith("/swagger/") and name in _ASSETS:
            return DocumentReply(200, _ASSETS[name], files("fastapi_swagger").joinpath("resources", name).read_bytes())
        raise NotFound("NOT_FOUND", f"there is no resource at {path[:200]}", hint="/docs lists all paths")


@asynccontextmanager
async def open_pod(config: PodConfig, telemetry: Telemetry) -> AsyncIterator[PodSupervisor]:
    """Yield a pod that does not serve yet."""
    with make_pod_folder(config.refdata.query.memory_dir, config.data_dir, make_worker_name("query")) as folder:
        pod = PodSupervisor(config, telemetry, folder)
        try:
            async with run_periodically("log level", pod.share_log_level, LOG_LEVEL_INTERVAL):
                yield pod
        finally:
            pod.memory.close()


@asynccontextmanager
async def serve_pod(pod: PodSupervisor, sockets: Sequence[socket.socket]) -> AsyncIterator[None]:
    """Serve on *sockets*, one for each process, until the end of the context; then finish open requests."""
    processes = [_PodProcess(pod, number, sock) for number, sock in enumerate(sockets)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            await process.is_up.wait()
        yield
    finally:
        for sock in sockets:  # clients must not queue on a socket that is not accepted any more
            sock.close()
        await asyncio.gather(*(process.stop() for process in processes))


class _PodProcess:
    """A serving process, which is restarted when it dies."""

    def __init__(self, pod: PodSupervisor, number: int, listening: socket.socket) -> None:
        self.is_up = asyncio.Event()
        self._pod = pod
        self._number = number
        self._listening = listening
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_running(), name=f"serving process {self._number}")

    async def stop(self) -> None:
        """Stop the process after its open requests; kill it if it does not stop in time."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    async def _keep_running(self) -> None:
        backoff, log = Backoff(), structlog.get_logger().bind(process=self._number)
        while not self._stopping.is_set():
            start = monotonic()
            code = await self._run()
            if monotonic() - start > _STABLE_AFTER:
                backoff.reset()
            if not self._stopping.is_set():
                log.error("serving_process_died", exit_code=code)
                await wait_event(self._stopping, backoff.compute_next().total_seconds())

    async def _run(self) -> int:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        descriptors = self._listening.fileno(), theirs.fileno()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.refdata.pod.serve.main",
            stdin=asyncio.subprocess.PIPE,
            pass_fds=descriptors,
        )
        theirs.close()
        requests = asyncio.create_task(serve_requests(ours, self._handle), name="loader requests")
        watch = asyncio.create_task(self._watch(process), name="watch")
        stop = asyncio.create_task(self._stop(process), name="stop")
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died already: see its exit code
                await process.communicate(self._encode_startup(*descriptors))
            return await process.wait()
        finally:
            for task in (requests, watch, stop):
                await cancel_and_wait(task)

    def _encode_startup(self, listening: int, loader_socket: int) -> bytes:
        config = self._pod.config.model_dump(mode="json", by_alias=True)
        startup = {"config": config, "folder": str(self._pod.folder), "process": self._number}
        return orjson.dumps({**startup, "listening": listening, "loader_socket": loader_socket})

    async def _handle(self, request: LoaderRequest) -> LoaderReply:
        self.is_up.set()
        return await self._pod.request_handler.handle(request)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process if it sends no heartbeats: a frozen reader prevents freeing of memory."""
        counters, last, misses = self._pod.memory.counters.get_process_counters(self._number), -1, 0
        while misses < _MISSED_HEARTBEATS:  # counted, not timed: this process may have been frozen itself
            await asyncio.sleep(_HEARTBEAT_INTERVAL)
            heartbeats = counters[PodCounter.HEARTBEATS]
            misses = misses + 1 if heartbeats == last and self.is_up.is_set() else 0
            last = heartbeats
        structlog.get_logger().error("serving_process_frozen", process=self._number, pid=process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        await self._stopping.wait()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(self._pod.config.drain_seconds + 5)
            process.kill()


def _make_health_page(health: HealthChecks) -> DocumentReply:
    body = health.model_dump_json(exclude_none=True).encode()
    return DocumentReply(200 if health.status == "UP" else 503, _JSON, body)


def _make_docs_page() -> bytes:
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="Penstock query",
        swagger_js_url="/swagger/swagger-ui-bundle.js",
        swagger_css_url="/swagger/swagger-ui.css",
        swagger_favicon_url="/swagger/favicon-32x32.png",
    )
    return bytes(page.body)
