"""F17: the API of flows as workers of any language use it: claim, heartbeat, logs, artifacts, report."""

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from mimetypes import MimeTypes
from typing import Annotated, Any
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from penstock.flows import artifacts
from penstock.flows.api import step_schemas
from penstock.flows.api.runs import Engine, Operator, RunId, StepId, Views
from penstock.flows.contract import ARTIFACT_NAME_LIMIT, ENGINE_KINDS, PREFIX, HeartbeatState, StepReportAnswer
from penstock.flows.model import ClaimedStep, StepError, StepReport
from penstock.kernel.errors import Conflict, Invalid, NotFound

routes = APIRouter(prefix=PREFIX, tags=["flows"])
# In the browser of whoever looks at it, what a step left must not act as this server's own page would.
_HARMLESS = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_BINARY = "application/octet-stream"
_TYPES = MimeTypes()  # its own table: this machine's may say otherwise
_TYPES.add_type("text/markdown", ".md")
_TYPES.add_type("application/x-ndjson", ".ndjson")
_TYPES.add_type("application/vnd.apache.parquet", ".parquet")
_BODY = {"requestBody": {"required": True, "content": {_BINARY: {"schema": {"type": "string", "format": "binary"}}}}}
_ANY: dict[int | str, Any] = {200: {"content": {"*/*": {"schema": {"type": "string", "format": "binary"}}}}}

ArtifactName = Annotated[str, Path(max_length=ARTIFACT_NAME_LIMIT, description="May hold slashes.")]
Fence = Annotated[int, Query(ge=0, le=2**63 - 1, description="Of the claim.")]


@routes.post("/flow_steps/claim", response_model=step_schemas.StepClaimResponse)
async def claim(wanted: step_schemas.StepClaimRequest, request: Request, engine: Engine) -> Response:
    """F4: steps that are now this worker's alone, each under a fence that grows with every claim."""
    if own := sorted(ENGINE_KINDS.intersection(wanted.kinds)):
        hint = "the engine runs these itself"
        raise Invalid("KIND_NOT_CLAIMABLE", f"steps of kind {own[0]} are not handed out", hint=hint)
    held = await engine.claim(
        wanted.worker,
        dict.fromkeys(wanted.kinds, wanted.limit),
        limit=wanted.limit,
        lease_for=_seconds(wanted.lease_seconds),
        wait=wanted.wait_seconds,
        is_gone=request.is_disconnected,
    )
    # As it is: asked for all the time, and checked when it came in.
    told = orjson.dumps({"items": [_claimed(one) for one in held]}, option=orjson.OPT_UTC_Z)
    return Response(told, media_type="application/json")


@routes.post("/flow_steps/heartbeat")
async def heartbeat(beat: step_schemas.StepHeartbeatRequest, engine: Engine) -> step_schemas.StepHeartbeatResponse:
    """F9: hold on to steps for another lease; and hear which are to be stopped."""
    names = [(item.run_id, item.step_id, item.fence) for item in beat.items]
    told = await engine.heartbeat(names, _seconds(beat.lease_seconds))
    by_is_cancelled = {None: HeartbeatState.LOST, True: HeartbeatState.CANCELLED, False: HeartbeatState.EXTENDED}
    return step_schemas.StepHeartbeatResponse(
        items=[
            step_schemas.StepHeartbeatResult(
                run_id=name[0], step_id=name[1], fence=name[2], state=by_is_cancelled[told.get(name)]
            )
            for name in names
        ]
    )


@routes.post("/flow_steps/report")
async def report_many(
    said: step_schemas.StepReportRequest, engine: Engine, views: Views, caller: Operator
) -> step_schemas.StepReportResponse:
    """F5: how steps ended, each with a result of its own. An old fence is superseded and changes nothing."""
    reports = [_report(item.run_id, item.step_id, item) for item in said.items]
    answers = await engine.report(reports, said.worker or caller.subject)
    stands = await views.statuses([(item.run_id, item.step_id) for item in said.items])
    results = [
        step_schemas.StepReportResult(
            run_id=one.run_id,
            step_id=one.step_id,
            fence=one.fence,
            result=answer,
            status=stands.get((one.run_id, one.step_id)),
        )
        for one, answer in zip(said.items, answers, strict=True)
    ]
    return step_schemas.StepReportResponse(items=results)


@routes.post("/flow_runs/{runId}/steps/{stepId}/report")
async def report(
    run_id: RunId, step_id: StepId, said: step_schemas.StepOutcome, engine: Engine, views: Views, caller: Operator
) -> step_schemas.StepReportResult:
    """F5: how a step ended. The same again is a success; anything else of a step that has ended is 409."""
    worker = said.worker or caller.subject
    [answer] = await engine.report([_report(run_id, step_id, said)], worker)
    row = await views.step(run_id, step_id)
    if answer is StepReportAnswer.CONFLICT:
        told = f"step {step_id} of run {run_id} is {row['status']}, and was not reported so under fence {said.fence}"
        raise Conflict("STEP_ENDED", told, hint="what was reported first counts")
    if answer is StepReportAnswer.SUPERSEDED:
        told = f"step {step_id} of run {run_id} is no longer held under fence {said.fence}"
        raise Conflict("SUPERSEDED", told, hint="stop working on it: it is somebody else's, or has ended")
    return step_schemas.StepReportResult(
        run_id=run_id, step_id=step_id, fence=said.fence, result=answer, status=row["status"]
    )


@routes.post("/flow_runs/{runId}/steps/{stepId}/logs")
async def log(
    run_id: RunId, step_id: StepId, told: step_schemas.NewLogLines, engine: Engine, views: Views
) -> step_schemas.AttemptRecord:
    """F18: keep lines with an attempt; 409 when it no longer holds its step."""
    await views.must_hold(run_id, step_id, told.fence)
    await engine.log(run_id, step_id, told.fence, [(line.level, line.message) for line in told.lines])
    return step_schemas.AttemptRecord(lines=len(told.lines))


@routes.put("/flow_runs/{runId}/steps/{stepId}/artifacts/{name:path}", openapi_extra=_BODY)
async def write(
    run_id: RunId, step_id: StepId, name: ArtifactName, fence: Fence, request: Request, engine: Engine, views: Views
) -> step_schemas.WrittenArtifact:
    """F6: write under an attempt; it is published when a report that counts names it. 409 under an old fence."""
    await views.must_hold(run_id, step_id, fence)
    data = await request.body()
    await artifacts.write(engine.publisher.storage, run_id, step_id, fence, name, data)
    return step_schemas.WrittenArtifact(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())


@routes.get("/flow_runs/{runId}/steps/{stepId}/artifacts/{name:path}", response_class=StreamingResponse, responses=_ANY)
async def read(run_id: RunId, step_id: StepId, name: ArtifactName, engine: Engine) -> StreamingResponse:
    """F6: an artifact of a step, as it is."""
    known = await engine.artifact(run_id, step_id, name)
    storage = engine.publisher.storage
    found = await storage.info(known.path)
    if found is None:
        hint = "the step knows of it, but the store does not: was it removed?"
        raise NotFound("ARTIFACT_DELETED", f"{known.uri} is not there any more", hint=hint)
    headers = {
        "content-length": str(found.size),
        "content-disposition": f"inline; filename*=UTF-8''{quote(name.rpartition('/')[2], safe='')}",
        "content-security-policy": _HARMLESS,
    }
    content, encoding = _TYPES.guess_type(name)
    media_type = content if content and encoding is None else _BINARY
    return StreamingResponse(storage.stream(known.path, etag=found.etag), media_type=media_type, headers=headers)


def _claimed(held: ClaimedStep) -> Mapping[str, Any]:
    return {
        "runId": held.run_id,
        "stepId": held.step_id,
        "kind": held.kind,
        "fence": held.fence,
        "attempt": held.attempt,
        "inputs": held.inputs,
        "scope": held.scope,
        "leaseUntil": held.lease_until,
        "timeoutSeconds": held.time_limit.total_seconds() if held.time_limit else None,
        "trace": held.trace,
    }


def _report(run_id: str, step_id: str, said: step_schemas.StepOutcomeBase) -> StepReport:
    error = StepError(said.error.code, said.error.message, said.error.details) if said.error else None
    names = tuple(said.artifacts)
    return StepReport(run_id, step_id, said.fence, said.status, said.outputs, error, names, said.retryable)


def _seconds(number: float | None) -> timedelta | None:
    return None if number is None else timedelta(seconds=number)
