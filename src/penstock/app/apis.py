"""The HTTP applications: which parts' routes each of them has."""

from dataclasses import dataclass
from functools import cached_property, partial

from fastapi import APIRouter, FastAPI
from fastapi.responses import RedirectResponse
from pydantic import BaseModel

from penstock.flows import status as flows_status
from penstock.flows.api import runs as flow_runs_api
from penstock.flows.api import steps as flow_steps_api
from penstock.flows.api.queries import FlowEvents, FlowViews
from penstock.flows.engine.engine import FlowEngine
from penstock.flows.engine.operations import RunOperations
from penstock.harvest import status as harvest_status
from penstock.harvest.api import routes as harvest_api
from penstock.harvest.api.queries import HarvestViews
from penstock.harvest.service import Harvest
from penstock.ingest import status as ingest_status
from penstock.ingest.api import routes as ingest_api
from penstock.ingest.api.queries import IngestViews
from penstock.kernel.http import health
from penstock.kernel.http.app import Caller, create_app, services_of
from penstock.kernel.http.auth import Authenticator
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.http.middleware import DrainMiddleware, HttpMetrics
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.overview import api as overview_api
from penstock.overview.contract import Part
from penstock.overview.events import EventHistory
from penstock.overview.status import Look, StatusBoard
from penstock.refdata import status as refdata_status
from penstock.refdata.api import routes as refdata_api
from penstock.refdata.commands.service import Refdata
from penstock.settings import Settings
from penstock.tracking import status as tracking_status
from penstock.tracking.api import routes as tracking_api
from penstock.tracking.service import Tracking


@dataclass(frozen=True)
class PublicApis:
    """What every HTTP application of a process shares."""

    settings: Settings
    telemetry: Telemetry
    authenticator: Authenticator

    @cached_property
    def metrics(self) -> HttpMetrics:
        """Return the metrics of requests; a process without an application does not show them."""
        return HttpMetrics(self.telemetry)


class Whoami(BaseModel):
    """How the server sees the caller."""

    subject: str
    tenant: str | None
    is_operator: bool


@dataclass(frozen=True)
class Parts:
    """What the API of all parts asks."""

    tracking: Tracking
    refdata: Refdata
    ingest: IngestViews
    harvest: Harvest
    feeds: HarvestViews
    flows: FlowEngine
    flow_management: RunOperations
    flow_views: FlowViews
    flow_events: FlowEvents
    all_events: EventHistory


def make_api(web: PublicApis, pulse: LivenessPulse, parts: Parts) -> FastAPI:
    """The API of all parts."""
    app = make_pipeline_api(web, pulse, parts.tracking, title="Penstock")
    services = services_of(app)
    services.add(Refdata, parts.refdata)
    services.add(IngestViews, parts.ingest)
    services.add(Harvest, parts.harvest)
    services.add(HarvestViews, parts.feeds)
    services.add(FlowEngine, parts.flows)
    services.add(RunOperations, parts.flow_management)
    services.add(FlowViews, parts.flow_views)
    services.add(FlowEvents, parts.flow_events)
    services.add(EventHistory, parts.all_events)
    services.add(StatusBoard, _status_board(pulse, parts))
    for part in (refdata_api, ingest_api, harvest_api, flow_runs_api, flow_steps_api, overview_api):
        app.include_router(part.routes)
    app.include_router(_access)
    return app


def _status_board(pulse: LivenessPulse, parts: Parts) -> StatusBoard:
    looks: dict[str, Look] = {
        Part.TRACKING: partial(tracking_status.report_status, parts.tracking),
        Part.REFDATA: partial(refdata_status.report_status, parts.refdata),
        Part.INGEST: partial(ingest_status.report_status, parts.ingest),
        Part.HARVEST: partial(harvest_status.report_status, parts.feeds),
        Part.FLOWS: partial(flows_status.report_status, parts.flow_views),
    }
    return StatusBoard(pulse, looks, lambda: parts.feeds.now())


def make_pipeline_api(
    web: PublicApis, pulse: LivenessPulse, tracking: Tracking, *, title: str = "Penstock pipeline"
) -> FastAPI:
    """The API of tracking."""
    app = make_app(title, web, pulse)
    services_of(app).add(Tracking, tracking)
    app.include_router(tracking_api.routes)

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/docs")

    return app


def make_command_api(web: PublicApis, pulse: LivenessPulse, refdata: Refdata) -> FastAPI:
    """The API that takes commands in."""
    app = make_app("Penstock commands", web, pulse)
    services_of(app).add(Refdata, refdata)
    app.include_router(refdata_api.routes)
    return app


def make_app(title: str, web: PublicApis, pulse: LivenessPulse) -> FastAPI:
    """One without routes of a part, but with health and metrics."""
    server = web.settings.server
    local_name = server.host if web.settings.auth.jwt is None else None
    app = create_app(
        title, web.telemetry, web.metrics, web.authenticator, body_limit=server.body_limit, local_name=local_name
    )
    app.add_middleware(DrainMiddleware, pulse=pulse)
    app.include_router(health.make_router(pulse, web.telemetry))
    return app


_access = APIRouter(prefix="/api/v1", tags=["access"])


@_access.get("/whoami")
async def whoami(caller: Caller) -> Whoami:
    """Who the server takes you for: the first thing to ask when a token does not work."""
    return Whoami(subject=caller.subject, tenant=caller.tenant, is_operator=caller.is_operator)
