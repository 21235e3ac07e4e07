"""The API of flows for operators: /api/v1/flow_runs and /api/v1/flows. The routes of workers are in `steps`."""

from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from penstock.flows.api import schemas
from penstock.flows.api.queries import LAST, FlowEvents, FlowViews, view_move
from penstock.flows.contract import NAME, PREFIX, FlowRunStatus, StepStatus
from penstock.flows.definition.json_values import reject_duplicate_names
from penstock.flows.definition.spec import RunRequest
from penstock.flows.engine.engine import FlowEngine
from penstock.flows.engine.operations import RunOperations
from penstock.kernel.db import page
from penstock.kernel.db.page import Cursor, Limit
from penstock.kernel.errors import Invalid
from penstock.kernel.http.app import get_service, require_operator
from penstock.kernel.http.auth import Principal
from penstock.kernel.http.schemas import UtcTime
from penstock.kernel.states.event_stream import EVENT_STREAM, LiveEvents
from penstock.kernel.states.journal import StoredEntry
from penstock.kernel.telemetry.telemetry import format_traceparent

EVENTS = "events"  # a path segment, so that no run can have this id
_STREAM: dict[int | str, Any] = {200: {"content": {EVENT_STREAM: {}}}}

Operator = Annotated[Principal, Depends(require_operator("flows"))]
FlowName = Annotated[str, Path(alias="flow", pattern=NAME)]
RunId = Annotated[str, Path(alias="runId", pattern=schemas.RUN_ID)]
StepId = Annotated[str, Path(alias="stepId", pattern=schemas.STEP_ID)]
LastEvent = Annotated[str | None, Header(alias="Last-Event-ID", description="Continue after this event.")]


# These functions are async although they do not wait: the framework would run a plain function in a thread.
async def _get_engine(request: Request, _caller: Operator) -> FlowEngine:
    return get_service(request, FlowEngine)


async def _get_operations(request: Request, _caller: Operator) -> RunOperations:
    return get_service(request, RunOperations)


async def _get_views(request: Request, _caller: Operator) -> FlowViews:
    return get_service(request, FlowViews)


Engine = Annotated[FlowEngine, Depends(_get_engine)]
Operations = Annotated[RunOperations, Depends(_get_operations)]
Views = Annotated[FlowViews, Depends(_get_views)]


routes = APIRouter(prefix=PREFIX, tags=["flows"])


async def _check_names(request: Request, _caller: Operator) -> None:
    """Reject duplicate names in the body; the JSON parser of the framework would keep only the last."""
    reject_duplicate_names(await request.body())


async def _reserve_stream(request: Request, _caller: Operator) -> AsyncIterator[LiveEvents]:
    """Yield the source of events, and count one more event stream while it is open."""
    live = get_service(request, FlowEvents)
    async with live.reserve_slot():
        yield live


EventSource = Annotated[LiveEvents, Depends(_reserve_stream)]


@routes.post(
    "/flow_runs",
    status_code=201,
    dependencies=[Depends(_check_names)],
    responses={200: {"model": schemas.RunCreated, "description": "The run exists already"}},
)
async def create(
    body: RunRequest, engine: Engine, views: Views, caller: Operator, response: Response
) -> schemas.RunCreated:
    """F2: create a run of a named flow or of inline steps. The same request with the same `runId` is repeatable."""
    _reject_reserved(body.run_id)
    run_id, is_new = await engine.create(body, caller.subject, trace=format_traceparent())
    response.status_code = 201 if is_new else 200
    return _view_created(run_id, await views.read_run_status(run_id), is_new=is_new)


@routes.get("/flow_runs")
async def list_runs(
    views: Views,
    flow: Annotated[str | None, Query(pattern=NAME, description="Only runs of this flow.")] = None,
    status: Annotated[FlowRunStatus | None, Query(description="Only runs with this status.")] = None,
    since: Annotated[UtcTime | None, Query(description="Only runs created at this time or later.")] = None,
    limit: Limit = 20,
    cursor: Cursor = None,
) -> schemas.FlowRunList:
    """List runs, the latest first."""
    (before,) = page.decode_start(cursor, [int], [LAST])
    found = await views.list_runs(flow, status, since, before, limit)
    return schemas.FlowRunList(runs=list(found.items), next=found.next)


@routes.get(f"/flow_runs/{EVENTS}", response_class=StreamingResponse, responses=_STREAM)
async def stream_events(live: EventSource, last_event_id: LastEvent = None) -> StreamingResponse:
    """F18: stream the moves of all runs and steps as server-sent events named `move`."""
    return await _open_stream(live, last_event_id, view_move)


@routes.get("/flow_runs/{runId}", response_model=schemas.FlowRun)
async def show_run(
    run_id: RunId,
    views: Views,
    steps: Annotated[bool, Query(description="False omits the steps; `counts` has their number by status.")] = True,
) -> Response:
    """F1: show a run with all its steps."""
    document = await views.read_run(run_id, with_steps=steps)
    return Response(orjson.dumps(document, option=orjson.OPT_UTC_Z), media_type="application/json")


@routes.get(f"/flow_runs/{{runId}}/{EVENTS}", response_class=StreamingResponse, responses=_STREAM)
async def stream_run_events(
    run_id: RunId, views: Views, live: EventSource, last_event_id: LastEvent = None
) -> StreamingResponse:
    """F18: stream the moves of a run and its steps as server-sent events."""
    await views.read_run_status(run_id)
    return await _open_stream(
        live,
        last_event_id,
        lambda stored: view_move(stored) if stored.entry.subject.partition("/")[0] == run_id else None,
    )


@routes.get("/flow_runs/{runId}/logs")
async def list_run_logs(run_id: RunId, views: Views, limit: Limit = 200, cursor: Cursor = None) -> schemas.RunLogPage:
    """F18: list the log lines of all steps of a run, the oldest first."""
    at, line = page.decode_start(cursor, [datetime, int], (None, 0))
    return await views.read_run_logs(run_id, (at, line), limit)


@routes.get("/flow_runs/{runId}/history")
async def show_history(run_id: RunId, views: Views, limit: Limit = 1000, cursor: Cursor = None) -> schemas.FlowHistory:
    """F18: list the moves of a run and its steps, the oldest first, with actor, time and reason."""
    entry, index = page.decode_start(cursor, [int, int], (0, 0))
    return await views.read_history(run_id, (entry, index), limit)


@routes.post("/flow_runs/{runId}/cancel")
async def cancel(
    run_id: RunId, operations: Operations, caller: Operator, body: schemas.FlowActionRequest | None = None
) -> schemas.RunCancelled:
    """F9: cancel a run. Waiting steps do not start; the workers of running steps learn it with their next heartbeat."""
    reason = (body and body.reason) or f"cancelled by {caller.subject}"
    status = await operations.cancel(run_id, caller.subject, reason)
    return schemas.RunCancelled(run_id=run_id, status=status)


@routes.post("/flow_runs/{runId}/retry")
async def retry(run_id: RunId, operations: Operations, caller: Operator) -> schemas.RetriedSteps:
    """F10: retry all failed steps of a run, with the steps that were cancelled because of them."""
    return schemas.RetriedSteps(run_id=run_id, steps=await operations.retry(run_id, caller.subject))


@routes.post("/flow_runs/{runId}/resume", status_code=201)
async def resume(
    run_id: RunId, body: schemas.ResumeRequest, operations: Operations, views: Views, caller: Operator
) -> schemas.RunCreated:
    """F19: create a run that starts at a step, and reuses the outputs and intact artifacts of the steps before it."""
    _reject_reserved(body.run_id)
    new_run_id = await operations.resume(run_id, body.from_, caller.subject, body.run_id)
    return _view_created(new_run_id, await views.read_run_status(new_run_id), is_new=True)


@routes.post("/flow_runs/{runId}/steps/{stepId}/retry")
async def retry_step(run_id: RunId, step_id: StepId, operations: Operations, caller: Operator) -> schemas.RetriedSteps:
    """F10: retry a step, with the steps that were cancelled because of it."""
    return schemas.RetriedSteps(run_id=run_id, steps=await operations.retry(run_id, caller.subject, step_id))


@routes.post("/flow_runs/{runId}/steps/{stepId}/skip")
async def skip_step(
    run_id: RunId,
    step_id: StepId,
    operations: Operations,
    caller: Operator,
    body: schemas.FlowActionRequest | None = None,
) -> schemas.StepState:
    """F10: skip a step; the steps that depend on it continue. A running step cannot be skipped."""
    await operations.skip(run_id, step_id, caller.subject, (body and body.reason) or "skipped by an operator")
    return schemas.StepState(run_id=run_id, step_id=step_id, status=StepStatus.SKIPPED)


@routes.get("/flow_runs/{runId}/steps/{stepId}/why")
async def explain_step(run_id: RunId, step_id: StepId, views: Views, engine: Engine) -> schemas.StepExplanationView:
    """F18: explain in words why a step has its status, and how to change it."""
    return await views.explain(run_id, step_id, engine.section.limits)


@routes.get("/flow_runs/{runId}/steps/{stepId}/logs")
async def list_step_logs(
    run_id: RunId,
    step_id: StepId,
    views: Views,
    attempt: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Only lines of this attempt.")] = None,
    limit: Limit = 200,
    cursor: Cursor = None,
) -> schemas.LogPage:
    """F18: list the log lines of a step, the oldest first."""
    (after,) = page.decode_start(cursor, [int], [0])
    return await views.read_logs(run_id, step_id, attempt, after, limit)


@routes.get("/flows")
async def list_flows(views: Views) -> schemas.FlowList:
    """F15: list all flows by name, and the errors of flow files."""
    return await views.list_flows()


@routes.get("/flows/{flow}")
async def show_flow(name: FlowName, views: Views) -> schemas.FlowView:
    """F15: show a flow with its definition, a Mermaid chart, and its schedule."""
    return await views.read_flow(name)


@routes.post("/flows/{flow}/schedule/pause")
async def pause_schedule(name: FlowName, operations: Operations, views: Views) -> schemas.FlowView:
    """F16: pause the schedule of a flow."""
    await operations.pause_schedule(name, is_paused=True)
    return await views.read_flow(name)


@routes.post("/flows/{flow}/schedule/resume")
async def resume_schedule(name: FlowName, operations: Operations, views: Views) -> schemas.FlowView:
    """F16: resume the schedule of a flow. Times that passed during the pause get no run."""
    await operations.pause_schedule(name, is_paused=False)
    return await views.read_flow(name)


async def _open_stream(
    live: LiveEvents, last_event_id: str | None, view: Callable[[StoredEntry], schemas.FlowMove | None]
) -> StreamingResponse:
    # Read the start before the response begins: after the first byte, the client misses nothing.
    start = await live.find_start_positions(last_event_id)
    return StreamingResponse(live.stream(start, view, "flows"), media_type=EVENT_STREAM)


def _view_created(run_id: str, status: FlowRunStatus, *, is_new: bool) -> schemas.RunCreated:
    return schemas.RunCreated(run_id=run_id, status=status, created=is_new, url=f"{PREFIX}/flow_runs/{run_id}")


def _reject_reserved(run_id: str | None) -> None:
    if run_id == EVENTS:
        raise Invalid("RESERVED_RUN_ID", f"the run id {EVENTS!r} is reserved", hint="choose another runId")
