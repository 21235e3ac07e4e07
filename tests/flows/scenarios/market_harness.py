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
TIMEOUT = 30.0  # seconds; only a failing test takes so long
_FINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


class MarketHarness:
    """Create and read runs of the example and of similar flows."""

    def __init__(self, engine: FlowEngine, views: FlowViews, storage: FolderStorage, folder: Path) -> None:
        self.engine, self.views, self.storage, self.folder = engine, views, storage, folder
        self.operations = RunOperations(engine, storage)

    async def create(self, run_id: str = "r1", **request: Any) -> bool:
        """Create a run, by default of the example; return whether it is new."""
        body = RunRequest.model_validate({"runId": run_id, **(request or {"flow": FLOW})})
        return (await self.engine.create(body, "tester"))[1]

    async def wait_for_end(self, run_id: str = "r1") -> Json:
        """Wait for the end of a run, and return the run."""
        async with asyncio.timeout(TIMEOUT):
            while True:
                notified = self.engine.notifier.get_next_event(RUNS)
                run = await self.views.read_run(run_id)
                if run["status"] in _FINAL:
                    return run
                await notified.wait()

    async def run_to_end(self, run_id: str = "r1", **request: Any) -> Json:
        """Create a run, wait for its end, and return it."""
        await self.create(run_id, **request)
        return await self.wait_for_end(run_id)

    async def read_artifact(self, step_id: str, name: str, run_id: str = "r1") -> bytes:
        return await self.engine.read_artifact(run_id, step_id, name)

    async def read_manifest(self, run_id: str = "r1") -> tuple[list[str], dict[str, str]]:
        """Return the items of the published manifest, and the error codes of the missing charts."""
        manifest = orjson.loads(await self.read_artifact("charts", MANIFEST, run_id))
        assert [request["id"] for request in manifest["requested"]] == ["days", "four-hours", "hours"]
        failures = {failure["id"]: failure["code"] for failure in manifest["failures"]}
        return [item["id"] for item in manifest["items"]], failures

    def list_published(self) -> dict[str, tuple[bytes, int]]:
        """Return the contents and write times of all published artifacts by path."""
        return self.list_objects("runs", "charts")

    def list_objects(self, *folders: str) -> dict[str, tuple[bytes, int]]:
        """Return the contents and write times of all objects in *folders* of the storage by path."""
        files = [path for folder in folders for path in (self.folder / folder).rglob("*") if path.is_file()]
        return {
            path.relative_to(self.folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) for path in files
        }

    async def has_written(self, data: bytes) -> bool:
        """Return whether an attempt of the charts has written *data* that is not published yet."""
        paths = [info.path async for info in self.storage.list("attempts/r1/charts")]
        return data in [(await self.storage.get(path)).data for path in paths]

    async def read_all(self, run_id: str = "r1") -> bytes:
        """Return everything that a user can read about a run: its state, logs, history and artifacts."""
        run = await self.views.read_run(run_id)
        logs = [await self.views.read_logs(run_id, step_id, None, 0, 1_000) for step_id in run["steps"]]
        history = await self.views.read_history(run_id, (0, 0), 1_000)
        answers = orjson.dumps([run, *(page.model_dump() for page in [history, *logs])])
        return answers + b"".join(data for data, _ in self.list_published().values())

    @asynccontextmanager
    async def run_worker(self, workers: Workers, name: str = "w1", concurrency: int = 8) -> AsyncIterator[None]:
        """Run a worker; at the end it completes and reports its running steps."""
        source = LocalWorkSource(self.engine, self.storage)
        worker = StepWorker(source, workers, Telemetry(), name=name, concurrency=concurrency, lease_for=LEASE)
        async with worker.run(timedelta(seconds=5)):
            yield


@asynccontextmanager
async def open_market(
    url: str, folder: Path, *, clock: Clock | None = None, **section: Any
) -> AsyncIterator[MarketHarness]:
    """Open the flows of the example without a worker."""
    flows = make_settings(**section)
    async with AsyncExitStack() as stack:
        db = await stack.enter_async_context(Database.open(url, clock=clock, prefers_indexes=True))
        storage, catalogue = FolderStorage(folder / "objects"), open_catalogue(flows)
        checks = (catalogue.input_checks, catalogue.report_checks)
        opening = FlowEngine.open(db, storage, catalogue, checks[0], flows, checks[1])
        engine = await stack.enter_async_context(opening)
        yield MarketHarness(engine, FlowViews(db, catalogue), storage, folder / "objects")


@asynccontextmanager
async def run_market(
    url: str,
    folder: Path,
    server: ScriptedMarketServer | None = None,
    handlers: Mapping[str, Handler] | None = None,
    **section: Any,
) -> AsyncIterator[MarketHarness]:
    """Run the flows of the example with the built-in workers; *handlers* replace the workers of their kinds."""
    async with (
        open_market(url, folder, **section) as harness,
        harness.run_worker(make_workers(server, handlers, **section)),
    ):
        yield harness


def make_workers(
    server: ScriptedMarketServer | None = None, handlers: Mapping[str, Handler] | None = None, **section: Any
) -> Workers:
    """Return the built-in workers; the *server* records their pauses, so that a test does not wait for them."""
    pause = server.pause if server else asyncio.sleep
    flows, built_in = make_settings(**section), Workers()
    for make_worker in open_catalogue(flows).make_workers(KindContext(flows, pause=pause)):
        built_in.add(make_worker)
    built_in.handlers |= handlers or {}
    return built_in


def make_settings(**section: Any) -> FlowsSection:
    apis = {name: {**section[name], "token": TOKEN_REF} for name in ("images", "llm") if name in section}
    return FlowsSection.model_validate(
        {"folder": EXAMPLE / "flows", "files": EXAMPLE, "lease": LEASE, **section, **apis}
    )


def make_request(**changes: Mapping[str, Any]) -> Json:
    """Return the scope and steps of the example with one attempt per step; *changes* update steps and their inputs."""
    flow = YAML(typ="safe").load(EXAMPLE / "flows" / f"{FLOW}.yaml")
    steps: Json = {}
    for name, step in flow["steps"].items():
        change = dict(changes.get(name, {}))
        inputs = {**step["inputs"], **change.pop("inputs", {})}
        steps[name] = {**step, "retry": None, **change, "inputs": inputs}
    return {"scope": flow["scope"], "steps": steps}
