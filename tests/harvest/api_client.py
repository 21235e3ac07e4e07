"""A client of the harvest API for tests."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from penstock.app.apis import PublicApis, make_app
from penstock.harvest import contract
from penstock.harvest.api import routes as harvest_api
from penstock.harvest.api.queries import HarvestViews
from penstock.harvest.service import Harvest
from penstock.harvest.simulator.faults import Faults
from penstock.kernel.http.app import get_services
from penstock.kernel.http.auth import make_authenticator
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import Settings
from tests.harvest.stepper import HarvestStepper
from tests.support.http import answered
from tests.support.types import Json

DOWN = Faults(rate_500=1.0)


class HarvestApiClient:
    """A client of the API over a stepper."""

    def __init__(self, stepper: HarvestStepper, http: httpx.AsyncClient) -> None:
        self.stepper = stepper
        self.http = http

    async def get(self, path: str, **params: Any) -> Json:
        return answered(await self.http.get(path, params=params))

    async def post(self, path: str, body: Any = None) -> Json:
        return answered(await self.http.post(path, json=body), 202)

    async def problem(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Return the status and the code of a refused request."""
        response = await self.http.request(method, path, json=body)
        assert response.headers["content-type"] == "application/problem+json", response.text
        problem = response.json()
        assert problem["status"] == response.status_code
        assert problem["title"]
        assert problem["detail"]
        return response.status_code, problem["code"]

    async def refused(self, path: str, body: Any = None) -> tuple[int, str]:
        return await self.problem("POST", path, body)

    async def fail_run(self) -> str:
        """Run a harvest whose partitions all fail, and return its id."""
        run_id = await self.stepper.plan_run()
        self.stepper.source.set_faults(DOWN)
        await self.stepper.drain(contract.WORK_ITEMS)
        self.stepper.source.set_faults()
        return str(run_id)

    async def complete_run(self) -> str:
        run_id = await self.stepper.plan_run()
        await self.stepper.finish()
        return str(run_id)


@asynccontextmanager
async def open_client(
    stepper: HarvestStepper, auth: Mapping[str, Any] | None = None
) -> AsyncIterator[HarvestApiClient]:
    settings = Settings.model_validate({"auth": {"jwt": auth} if auth else {}})
    telemetry = Telemetry()
    app = make_app(
        "test", PublicApis(settings, telemetry, make_authenticator(settings.auth)), LivenessPulse({}, needs=[])
    )
    app.include_router(harvest_api.routes)
    services = get_services(app)
    services.add(Harvest, stepper.harvest)
    services.add(HarvestViews, HarvestViews(stepper.db, stepper.storage, stepper.section))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    base = f"http://127.0.0.1{contract.PREFIX}"
    async with httpx.AsyncClient(transport=transport, base_url=base) as http:
        yield HarvestApiClient(stepper, http)
