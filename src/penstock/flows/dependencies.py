"""What the routes of flows ask for: who is calling, and the parts that answer."""

from typing import Annotated

from fastapi import Depends, Path, Request

from penstock.flows.api import schemas
from penstock.flows.api.queries import FlowViews
from penstock.flows.contract import NAME
from penstock.flows.engine.operations import Management
from penstock.flows.service import FlowEngine
from penstock.kernel.http.app import of_the_house
from penstock.kernel.http.auth import Principal

Operator = Annotated[Principal, Depends(of_the_house("flows"))]


# These wait for nothing, and are async all the same: what is not, the framework runs in a thread.
async def _engine(request: Request, _caller: Operator) -> FlowEngine:
    engine: FlowEngine = request.app.state.flows
    return engine


async def _management(request: Request, _caller: Operator) -> Management:
    management: Management = request.app.state.flow_management
    return management


async def _views(request: Request, _caller: Operator) -> FlowViews:
    views: FlowViews = request.app.state.flow_views
    return views


Engine = Annotated[FlowEngine, Depends(_engine)]
Decisions = Annotated[Management, Depends(_management)]
Views = Annotated[FlowViews, Depends(_views)]
FlowName = Annotated[str, Path(alias="flow", pattern=NAME)]
RunId = Annotated[str, Path(alias="runId", pattern=schemas.RUN_ID)]
StepId = Annotated[str, Path(alias="stepId", pattern=schemas.STEP_ID)]
