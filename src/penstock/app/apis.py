"""The HTTP applications: which parts' routes each of them has."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.responses import RedirectResponse
from pydantic import Field

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
from penstock.kernel.http.app import Caller, create_app, get_services
from penstock.kernel.http.auth import Authenticator
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.http.middleware import DrainMiddleware, HttpMetrics
from penstock.kernel.http.schemas import Camel
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.overview import api as overview_api
from penstock.overview.contract import Part
from penstock.overview.dead_letters import BusTopic, report_dead_letters
from penstock.overview.disks import report_disks
from penstock.overview.events import EventHistory
from penstock.overview.status import BUS, DISKS, StatusBoard, StatusCheck
from penstock.refdata import status as refdata_status
from penstock.refdata.api import routes as refdata_api
from penstock.refdata.commands.service import Refdata
from penstock.settings import Settings
from penstock.tracking import status as tracking_status
from penstock.tracking.api import routes as tracking_api
from penstock.tracking.service import Tracking


@dataclass(frozen=True)
class PublicApis:
    """The objects that all HTTP applications of a process share."""

    settings: Settings
    telemetry: Telemetry
    authenticator: Authenticator

    @cached_property
    def metrics(self) -> HttpMetrics:
        """Return the metrics of requests; a process without an HTTP application does not export them."""
        return HttpMetrics(self.telemetry)


class Whoami(Camel):
    """The identity of the caller."""

    subject: str = Field(description="The claim `sub` of the token; `operator` without authentication.")
    tenant: str | None = Field(description="The tenant that the token acts for, if any.")
    is_operator: bool = Field(description="Whether the caller may use the routes of operators.")


@dataclass(frozen=True)
class Parts:
    """The services behind the API of all parts."""

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
    topics: Sequence[BusTopic]
    folders: Sequence[Path]  # local folders whose free space is reported


def make_api(web: PublicApis, pulse: LivenessPulse, parts: Parts) -> FastAPI:
    """Return the API of all parts."""
    app = make_pipeline_api(web, pulse, parts.tracking, title="Penstock")
    services = get_services(app)
    services.add(Refdata, parts.refdata)
    services.add(IngestViews, parts.ingest)
    services.add(Harvest, parts.harvest)
    services.add(HarvestViews, parts.feeds)
    services.add(FlowEngine, parts.flows)
    services.add(RunOperations, parts.flow_management)
    services.add(FlowViews, parts.flow_views)
    services.add(FlowEvents, parts.flow_events)
    services.add(EventHistory, parts.all_events)
    services.add(StatusBoard, _make_status_board(pulse, parts))
    for part in (refdata_api, ingest_api, harvest_api, flow_runs_api, flow_steps_api, overview_api):
        app.include_router(part.routes)
    app.include_router(_access)
    return app


def _make_status_board(pulse: LivenessPulse, parts: Parts) -> StatusBoard:
    checks: dict[str, StatusCheck] = {
        BUS: lambda: report_dead_letters(parts.topics, parts.feeds.read_clock()),
        DISKS: partial(report_disks, parts.folders),
        Part.TRACKING: partial(tracking_status.report_status, parts.tracking),
        Part.REFDATA: partial(refdata_status.report_status, parts.refdata),
        Part.INGEST: partial(ingest_status.report_status, parts.ingest),
        Part.HARVEST: partial(harvest_status.report_status, parts.feeds),
        Part.FLOWS: partial(flows_status.report_status, parts.flow_views),
    }
    return StatusBoard(pulse, checks, lambda: parts.feeds.read_clock())


def make_pipeline_api(
    web: PublicApis, pulse: LivenessPulse, tracking: Tracking, *, title: str = "Penstock pipeline"
) -> FastAPI:
    """Return the API of tracking."""
    app = make_app(title, web, pulse)
    get_services(app).add(Tracking, tracking)
    app.include_router(tracking_api.routes)

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/docs")

    return app


def make_command_api(web: PublicApis, pulse: LivenessPulse, refdata: Refdata) -> FastAPI:
    """Return the API for commands and updates of refdata."""
    app = make_app("Penstock commands", web, pulse)
    get_services(app).add(Refdata, refdata)
    app.include_router(refdata_api.routes)
    return app


def make_app(title: str, web: PublicApis, pulse: LivenessPulse) -> FastAPI:
    """Return an application with health and metrics, to which routes of parts can be added."""
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
    """Return the identity of the caller; useful when a token is not accepted."""
    return Whoami(subject=caller.subject, tenant=caller.tenant, is_operator=caller.is_operator)
