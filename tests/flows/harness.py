"""A harness of flows: the engine and its API on a real PostgreSQL, with short methods for requests."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from penstock.app.apis import PublicApis, make_app
from penstock.app.http_server import bind_listener, format_address, run_server
from penstock.flows.api import runs, steps
from penstock.flows.api.queries import FlowEvents, FlowViews
from penstock.flows.config import FlowsSection
from penstock.flows.definition.catalogue import FlowCatalogue
from penstock.flows.engine.engine import FlowEngine
from penstock.flows.engine.operations import RunOperations
from penstock.flows.maintenance import FlowMaintenance
from penstock.flows.runtime import open_engine
from penstock.kernel.clock import Clock
from penstock.kernel.db.database import Database
from penstock.kernel.http.app import get_services
from penstock.kernel.http.auth import Authenticator, NoAuthenticator
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import Settings
from tests.support.http import answered, problem
from tests.support.types import Json
from tests.support.wait import becomes

BASE = "/api/v1"
LEASE = timedelta(seconds=60)
SECOND = timedelta(seconds=1)


class FlowsHarness:
    """Requests with the expected status; no background task is running."""

    def __init__(self, engine: FlowEngine, catalogue: FlowCatalogue, storage: FolderStorage, app: FastAPI) -> None:
        self.engine = engine
        self.maintenance = FlowMaintenance(engine, catalogue, storage)
        self.storage = storage
        self.app = app
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1{BASE}")

    async def get(self, path: str, **params: Any) -> Json:
        return answered(await self.http.get(path, params=params))

    async def post(self, path: str, expected: int = 200, /, **body: Any) -> Json:
        return answered(await self.http.post(path, json=body), expected)

    async def post_refused(self, expected: int, code: str, path: str, /, **body: Any) -> Json:
        """Send a POST request that must be refused, and return the problem."""
        return problem(await self.http.post(path, json=body), expected, code)

    async def create(self, steps: Mapping[str, Any], run_id: str = "r1", **more: Any) -> Json:
        """F2: create a run of *steps*."""
        return await self.post("/flow_runs", 201, runId=run_id, steps=steps, **more)

    async def run(self, run_id: str = "r1") -> Json:
        return await self.get(f"/flow_runs/{run_id}")

    async def wait_for_end(self, run_id: str = "r1") -> Json:
        """Wait for the end of a run, and return the run."""

        async def has_ended() -> bool:
            return (await self.run(run_id))["status"] not in ("PENDING", "RUNNING")

        await becomes(has_ended, f"run {run_id} ends")
        return await self.run(run_id)

    async def statuses(self, run_id: str = "r1") -> dict[str, str]:
        """Return the status of each step of a run."""
        return {name: step["status"] for name, step in (await self.run(run_id))["steps"].items()}

    async def claim(self, *kinds: str, limit: int = 100, **more: Any) -> list[Json]:
        request = {"worker": "w1", "kinds": kinds or ["work"], "limit": limit, **more}
        items: list[Json] = (await self.post("/flow_steps/claim", **request))["items"]
        return items

    async def report(self, item: Json, status: str = "SUCCEEDED", **more: Any) -> Json:
        """Report the outcome of a claimed step."""
        return await self.post(f"{step_path(item)}/report", **report_body(item, status, **more))

    async def complete(self, *kinds: str, **outputs: Any) -> list[str]:
        """Claim all ready steps, report them as SUCCEEDED, and return their names."""
        items = await self.claim(*kinds)
        for item in items:
            await self.report(item, outputs=outputs)
        return [item["stepId"] for item in items]


@asynccontextmanager
async def flows_harness(
    database_url: str,
    folder: Path,
    /,
    *,
    clock: Clock | None = None,
    authenticator: Authenticator | None = None,
    settings: Settings | None = None,
    **section: Any,
) -> AsyncIterator[FlowsHarness]:
    """Open a harness; a manual *clock* makes time stop; *section* are settings of flows."""
    telemetry, storage = Telemetry(), FolderStorage(folder / "objects")
    flows = FlowsSection.model_validate({"lease": LEASE, **section})
    async with AsyncExitStack() as stack:
        db = await stack.enter_async_context(Database.open(database_url, clock=clock, prefers_indexes=True))
        platform = await stack.enter_async_context(open_engine(db, storage, flows, telemetry))
        web = PublicApis(settings or Settings(), telemetry, authenticator or NoAuthenticator())
        app = make_app("Flows", web, LivenessPulse({}, needs=[]))
        for part in (runs, steps):
            app.include_router(part.routes)
        services = get_services(app)
        services.add(FlowEngine, platform.engine)
        services.add(RunOperations, platform.operations)
        services.add(FlowViews, FlowViews(db, platform.catalogue))
        services.add(FlowEvents, platform.live)
        harness = FlowsHarness(platform.engine, platform.catalogue, storage, app)
        await stack.enter_async_context(harness.http)
        yield harness


@asynccontextmanager
async def on_a_port(harness: FlowsHarness) -> AsyncIterator[str]:
    """Serve the API of the harness on a free port and return its address."""
    with bind_listener("127.0.0.1", 0) as socket:
        async with run_server(harness.app, socket, Settings().server):
            try:
                yield format_address(socket)
            finally:
                harness.engine.notifier.close()  # end waiting claims and event streams


def step_path(item: Json) -> str:
    return f"/flow_runs/{item['runId']}/steps/{item['stepId']}"


def report_body(item: Json, status: str = "SUCCEEDED", **more: Any) -> Json:
    """Return the body of a report on a claimed step, without the names of the run and the step."""
    return {"fence": item["fence"], "status": status, **more}


def claim_name(item: Json) -> Json:
    """Return the run, step and fence of a claimed step."""
    return {name: item[name] for name in ("runId", "stepId", "fence")}


def chain(*names: str, kind: str = "work", **more: Any) -> Json:
    """Return steps of which each depends on the previous one."""
    steps: Json = {}
    for number, name in enumerate(names):
        steps[name] = {"kind": kind, **more, **({"dependsOn": [names[number - 1]]} if number else {})}
    return steps
