"""Market reports on the real engine: PostgreSQL, a folder as the store, and the built-in workers."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
from ruamel.yaml import YAML

from penstock.flows.api.queries import FlowViews
from penstock.flows.config import FlowsSection
from penstock.flows.definition.spec import RunRequest
from penstock.flows.engine.engine import RUNS, FlowEngine
from penstock.flows.engine.operations import RunOperations
from penstock.flows.kinds.market.manifest import MANIFEST
from penstock.flows.kinds.registry import open_catalogue
from penstock.flows.step import Handler, KindContext, Workers
from penstock.flows.worker.local import LocalWorkSource
from penstock.flows.worker.loop import StepWorker
from penstock.kernel.clock import Clock
from penstock.kernel.db.database import Database
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.telemetry.telemetry import Telemetry
from tests.flows.market_servers import TOKEN_REF, ScriptedMarketServer
from tests.support.types import Json

EXAMPLE = Path(__file__).parents[3] / "examples" / "market-report"
FLOW = "market-report"
LEASE = timedelta(seconds=60)
WITHIN = 30.0  # seconds; only a broken promise takes so long
_ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")


class MarketHarness:
    """Runs of the example and of flows like it."""

    def __init__(self, engine: FlowEngine, views: FlowViews, storage: FolderStorage, folder: Path) -> None:
        self.engine, self.views, self.storage, self.folder = engine, views, storage, folder
        self.operations = RunOperations(engine, storage)

    async def create(self, run_id: str = "r1", **asked: Any) -> bool:
        """Ask for a run; whether it is new."""
        request = RunRequest.model_validate({"runId": run_id, **(asked or {"flow": FLOW})})
        return (await self.engine.create(request, "tester"))[1]

    async def ended(self, run_id: str = "r1") -> Json:
        """The run, once it has ended."""
        async with asyncio.timeout(WITHIN):
            while True:
                notified = self.engine.notifier.next_event(RUNS)
                run = await self.views.read_run(run_id)
                if run["status"] in _ENDED:
                    return run
                await notified.wait()

    async def done(self, run_id: str = "r1", **asked: Any) -> Json:
        """A run from its beginning to its end."""
        await self.create(run_id, **asked)
        return await self.ended(run_id)

    async def artifact(self, step_id: str, name: str, run_id: str = "r1") -> bytes:
        return await self.engine.read_artifact(run_id, step_id, name)

    async def manifest(self, run_id: str = "r1") -> tuple[list[str], dict[str, str]]:
        """Of the published manifest: the pictures that came, and the codes of those that did not."""
        told = orjson.loads(await self.artifact("charts", MANIFEST, run_id))
        assert [each["id"] for each in told["requested"]] == ["days", "four-hours", "hours"]
        return [each["id"] for each in told["items"]], {each["id"]: each["code"] for each in told["failures"]}

    def published(self) -> dict[str, tuple[bytes, int]]:
        """All artifacts there are: their contents, and when they were written."""
        return self.stored("runs", "charts")

    def stored(self, *folders: str) -> dict[str, tuple[bytes, int]]:
        """The objects in some *folders* of the store, e.g. attempts: their contents, and when they were written."""
        files = [path for folder in folders for path in (self.folder / folder).rglob("*") if path.is_file()]
        return {
            path.relative_to(self.folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) for path in files
        }

    async def has_written(self, data: bytes) -> bool:
        """Whether an attempt at the charts has written *data*, which nobody has published yet."""
        paths = [info.path async for info in self.storage.list("attempts/r1/charts")]
        return data in [(await self.storage.get(path)).data for path in paths]

    async def all_told(self, run_id: str = "r1") -> bytes:
        """Everything that anybody can read of a run: itself, its logs, its history and its artifacts."""
        run = await self.views.read_run(run_id)
        logs = [await self.views.read_logs(run_id, step_id, None, 0, 1_000) for step_id in run["steps"]]
        history = await self.views.read_history(run_id, (0, 0), 1_000)
        told = orjson.dumps([run, *(one.model_dump() for one in [history, *logs])])
        return told + b"".join(data for data, _ in self.published().values())

    @asynccontextmanager
    async def worked_by(self, workers: Workers, name: str = "w1", at_once: int = 8) -> AsyncIterator[None]:
        """Somebody who does steps; at the end what is under way is waited for, and reported."""
        source = LocalWorkSource(self.engine, self.storage)
        worker = StepWorker(source, workers, Telemetry(), name=name, concurrency=at_once, lease_for=LEASE)
        async with worker.run(timedelta(seconds=5)):
            yield


@asynccontextmanager
async def opened(url: str, folder: Path, *, clock: Clock | None = None, **section: Any) -> AsyncIterator[MarketHarness]:
    """Flows of the example's folder, and nobody who does their steps."""
    flows = settings(**section)
    async with AsyncExitStack() as stack:
        db = await stack.enter_async_context(Database.open(url, clock=clock, prefers_indexes=True))
        storage, catalogue = FolderStorage(folder / "objects"), open_catalogue(flows)
        checks = (catalogue.input_checks, catalogue.report_checks)
        opening = FlowEngine.open(db, storage, catalogue, checks[0], flows, checks[1])
        engine = await stack.enter_async_context(opening)
        yield MarketHarness(engine, FlowViews(db, catalogue), storage, folder / "objects")


@asynccontextmanager
async def market(
    url: str,
    folder: Path,
    server: ScriptedMarketServer | None = None,
    handlers: Mapping[str, Handler] | None = None,
    **section: Any,
) -> AsyncIterator[MarketHarness]:
    """The same with the built-in workers, but for kinds that have *handlers* of the test's own."""
    async with opened(url, folder, **section) as found, found.worked_by(workers(server, handlers, **section)):
        yield found


def workers(
    server: ScriptedMarketServer | None = None, handlers: Mapping[str, Handler] | None = None, **section: Any
) -> Workers:
    """The built-in workers, whose pauses are kept by the *server* they ask instead of waited for."""
    pause = server.pause if server else asyncio.sleep
    flows, built_in = settings(**section), Workers()
    for make_worker in open_catalogue(flows).make_workers(KindContext(flows, pause=pause)):
        built_in.add(make_worker)
    built_in.handlers |= handlers or {}
    return built_in


def settings(**section: Any) -> FlowsSection:
    apis = {name: {**section[name], "token": TOKEN_REF} for name in ("images", "llm") if name in section}
    return FlowsSection.model_validate(
        {"folder": EXAMPLE / "flows", "files": EXAMPLE, "lease": LEASE, **section, **apis}
    )


def example(**changed: Mapping[str, Any]) -> Json:
    """The example's steps, tried once, with some of it written otherwise: what a step says, and its inputs."""
    written = YAML(typ="safe").load(EXAMPLE / "flows" / f"{FLOW}.yaml")
    steps: Json = {}
    for name, step in written["steps"].items():
        change = dict(changed.get(name, {}))
        inputs = {**step["inputs"], **change.pop("inputs", {})}
        steps[name] = {**step, "retry": None, **change, "inputs": inputs}
    return {"scope": written["scope"], "steps": steps}
