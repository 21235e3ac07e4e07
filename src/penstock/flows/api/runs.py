"""The API of flows: /api/v1/flow_runs and /api/v1/flows; what workers ask for is in steps."""

from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from penstock.flows.api import schemas
from penstock.flows.api.queries import LAST, FlowEvents, FlowViews, move
from penstock.flows.contract import NAME, PREFIX, FlowRunStatus, StepStatus
from penstock.flows.definition.json_values import reject_duplicate_names
from penstock.flows.definition.spec import RunRequest
from penstock.flows.engine.engine import FlowEngine
from penstock.flows.engine.operations import RunOperations
from penstock.kernel.db import page
from penstock.kernel.db.page import Cursor, Limit
from penstock.kernel.errors import Invalid
from penstock.kernel.http.app import require_operator, service
from penstock.kernel.http.auth import Principal
from penstock.kernel.http.schemas import UtcTime
from penstock.kernel.states.event_stream import EVENT_STREAM, LiveEvents
from penstock.kernel.states.journal import StoredEntry
from penstock.kernel.telemetry.telemetry import current_traceparent

EVENTS = "events"  # where a run of that name would be
_STREAM: dict[int | str, Any] = {200: {"content": {EVENT_STREAM: {}}}}

Operator = Annotated[Principal, Depends(require_operator("flows"))]
FlowName = Annotated[str, Path(alias="flow", pattern=NAME)]
RunId = Annotated[str, Path(alias="runId", pattern=schemas.RUN_ID)]
StepId = Annotated[str, Path(alias="stepId", pattern=schemas.STEP_ID)]
LastEvent = Annotated[str | None, Header(alias="Last-Event-ID", description="Go on after this event.")]


# These wait for nothing, and are async all the same: what is not, the framework runs in a thread.
async def _engine(request: Request, _caller: Operator) -> FlowEngine:
    return service(request, FlowEngine)


async def _operations(request: Request, _caller: Operator) -> RunOperations:
    return service(request, RunOperations)


async def _views(request: Request, _caller: Operator) -> FlowViews:
    return service(request, FlowViews)


Engine = Annotated[FlowEngine, Depends(_engine)]
Operations = Annotated[RunOperations, Depends(_operations)]
Views = Annotated[FlowViews, Depends(_views)]


routes = APIRouter(prefix=PREFIX, tags=["flows"])


async def _named_once(request: Request, _caller: Operator) -> None:
    """Looked at before the body is read as a whole: by then what came twice is gone."""
    reject_duplicate_names(await request.body())


async def _watching(request: Request, _caller: Operator) -> AsyncIterator[LiveEvents]:
    """The journal's tail, with room for one more event stream."""
    live = service(request, FlowEvents)
    async with live.reserve_slot():
        yield live


Watching = Annotated[LiveEvents, Depends(_watching)]


@routes.post(
    "/flow_runs",
    status_code=201,
    dependencies=[Depends(_named_once)],
    responses={200: {"model": schemas.RunCreated, "description": "The same was asked for before"}},
)
async def create(
    wanted: RunRequest, engine: Engine, views: Views, caller: Operator, response: Response
) -> schemas.RunCreated:
    """F2: a run of a named flow, or of steps given inline. With a `runId` asking again makes no second one."""
    _refuse_reserved(wanted.run_id)
    run_id, is_new = await engine.create(wanted, caller.subject, trace=current_traceparent())
    response.status_code = 201 if is_new else 200
    return _created(run_id, await views.status(run_id), is_new=is_new)


@routes.get("/flow_runs")
async def runs(
    views: Views,
    flow: Annotated[str | None, Query(pattern=NAME)] = None,
    status: Annotated[FlowRunStatus | None, Query()] = None,
    since: Annotated[UtcTime | None, Query(description="Made then or later.")] = None,
    limit: Limit = 20,
    cursor: Cursor = None,
) -> schemas.FlowRunList:
    """The runs there were, the latest first."""
    (before,) = page.start_after(cursor, [int], [LAST])
    found = await views.runs(flow, status, since, before, limit)
    return schemas.FlowRunList(runs=list(found.items), next=found.next)


@routes.get(f"/flow_runs/{EVENTS}", response_class=StreamingResponse, responses=_STREAM)
async def watch(live: Watching, last_event_id: LastEvent = None) -> StreamingResponse:
    """F18: moves of all runs and steps as they are made, as server-sent events named `move`."""
    return await _streamed(live, last_event_id, move)


@routes.get("/flow_runs/{runId}", response_model=schemas.FlowRun)
async def run(
    run_id: RunId,
    views: Views,
    steps: Annotated[bool, Query(description="False: only how many of them stand how.")] = True,
) -> Response:
    """F1: a run as it stands, with all its steps."""
    told = await views.run(run_id, with_steps=steps)
    return Response(orjson.dumps(told, option=orjson.OPT_UTC_Z), media_type="application/json")


@routes.get(f"/flow_runs/{{runId}}/{EVENTS}", response_class=StreamingResponse, responses=_STREAM)
async def watch_run(run_id: RunId, views: Views, live: Watching, last_event_id: LastEvent = None) -> StreamingResponse:
    """F18: moves of one run and its steps."""
    await views.status(run_id)
    return await _streamed(
        live, last_event_id, lambda noted: move(noted) if noted.entry.subject.partition("/")[0] == run_id else None
    )


@routes.get("/flow_runs/{runId}/logs")
async def run_logs(run_id: RunId, views: Views, limit: Limit = 200, cursor: Cursor = None) -> schemas.RunLogPage:
    """F18: return the log lines of all steps of a run, oldest first."""
    at, line = page.start_after(cursor, [datetime, int], (None, 0))
    return await views.run_logs(run_id, (at, line), limit)


@routes.get("/flow_runs/{runId}/history")
async def history(run_id: RunId, views: Views, limit: Limit = 1000, cursor: Cursor = None) -> schemas.FlowHistory:
    """F18: every move of a run and its steps, oldest first: who, when, why."""
    entry, place = page.start_after(cursor, [int, int], (0, 0))
    return await views.history(run_id, (entry, place), limit)


@routes.post("/flow_runs/{runId}/cancel")
async def cancel(
    run_id: RunId, operations: Operations, caller: Operator, because: schemas.FlowActionRequest | None = None
) -> schemas.RunCancelled:
    """F9: what waits does not begin; what is under way is told at its next heartbeat. The first end wins."""
    reason = (because and because.reason) or f"cancelled by {caller.subject}"
    status = await operations.cancel(run_id, caller.subject, reason)
    return schemas.RunCancelled(run_id=run_id, status=status)


@routes.post("/flow_runs/{runId}/retry")
async def retry(run_id: RunId, operations: Operations, caller: Operator) -> schemas.RetriedSteps:
    """F10: try all that failed again, with what was cancelled because of it; the run goes on."""
    return schemas.RetriedSteps(run_id=run_id, steps=await operations.retry(run_id, caller.subject))


@routes.post("/flow_runs/{runId}/resume", status_code=201)
async def resume(
    run_id: RunId, where: schemas.ResumeRequest, operations: Operations, views: Views, caller: Operator
) -> schemas.RunCreated:
    """F19: a new run that begins at a step, with what the old one did before it, as far as it still holds."""
    _refuse_reserved(where.run_id)
    name = await operations.resume(run_id, where.from_, caller.subject, where.run_id)
    return _created(name, await views.status(name), is_new=True)


@routes.post("/flow_runs/{runId}/steps/{stepId}/retry")
async def retry_step(run_id: RunId, step_id: StepId, operations: Operations, caller: Operator) -> schemas.RetriedSteps:
    """F10: try one step again, with what was cancelled because of it; the run goes on."""
    return schemas.RetriedSteps(run_id=run_id, steps=await operations.retry(run_id, caller.subject, step_id))


@routes.post("/flow_runs/{runId}/steps/{stepId}/skip")
async def skip(
    run_id: RunId,
    step_id: StepId,
    operations: Operations,
    caller: Operator,
    because: schemas.FlowActionRequest | None = None,
) -> schemas.StepState:
    """F10: do without a step; what comes after it has its turn. A step under way cannot be skipped."""
    await operations.skip(run_id, step_id, caller.subject, (because and because.reason) or "skipped by hand")
    return schemas.StepState(run_id=run_id, step_id=step_id, status=StepStatus.SKIPPED)


@routes.get("/flow_runs/{runId}/steps/{stepId}/why")
async def why(run_id: RunId, step_id: StepId, views: Views, engine: Engine) -> schemas.StepExplanationView:
    """F18: in words, why a step is where it is, and what would move it."""
    return await views.why(run_id, step_id, engine.section.limits)


@routes.get("/flow_runs/{runId}/steps/{stepId}/logs")
async def logs(
    run_id: RunId,
    step_id: StepId,
    views: Views,
    attempt: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Only of this one.")] = None,
    limit: Limit = 200,
    cursor: Cursor = None,
) -> schemas.LogPage:
    """F18: what a step told while it ran, oldest first."""
    (after,) = page.start_after(cursor, [int], [0])
    return await views.logs(run_id, step_id, attempt, after, limit)


@routes.get("/flows")
async def flows(views: Views) -> schemas.FlowList:
    """F15: the flows there are by name, and files that cannot be used."""
    return await views.flows()


@routes.get("/flows/{flow}")
async def flow(name: FlowName, views: Views) -> schemas.FlowView:
    """F15: a flow as it is written, and as a Mermaid chart; and when it runs by itself."""
    return await views.flow(name)


@routes.post("/flows/{flow}/schedule/pause")
async def pause(name: FlowName, operations: Operations, views: Views) -> schemas.FlowView:
    """F16: do not start the flow by itself for the time being."""
    await operations.pause_schedule(name, is_paused=True)
    return await views.flow(name)


@routes.post("/flows/{flow}/schedule/resume")
async def resume_schedule(name: FlowName, operations: Operations, views: Views) -> schemas.FlowView:
    """F16: start the flow by itself again; what passed meanwhile is not caught up."""
    await operations.pause_schedule(name, is_paused=False)
    return await views.flow(name)


async def _streamed(
    live: LiveEvents, last_event_id: str | None, told: Callable[[StoredEntry], schemas.FlowMove | None]
) -> StreamingResponse:
    # Asked before the first word is sent: who has heard it misses nothing from then on.
    start = await live.start_positions(last_event_id)
    return StreamingResponse(live.stream(start, told, "flows"), media_type=EVENT_STREAM)


def _created(run_id: str, status: FlowRunStatus, *, is_new: bool) -> schemas.RunCreated:
    return schemas.RunCreated(run_id=run_id, status=status, created=is_new, url=f"{PREFIX}/flow_runs/{run_id}")


def _refuse_reserved(run_id: str | None) -> None:
    if run_id == EVENTS:
        raise Invalid("RESERVED_RUN_ID", f"no run can be called {EVENTS!r}", hint="choose another runId")
