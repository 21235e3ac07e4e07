"""F17: the API of flows for workers in any language: claim, heartbeat, logs, artifacts and reports."""

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
from penstock.flows.model import ClaimedStep, StepError, StepReport, make_superseded_error
from penstock.kernel.errors import Conflict, Invalid, NotFound

routes = APIRouter(prefix=PREFIX, tags=["flows"])
# A browser must not run an artifact as a page of this server.
_CONTENT_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_BINARY = "application/octet-stream"
_TYPES = MimeTypes()  # a separate table, independent of the host
_TYPES.add_type("text/markdown", ".md")
_TYPES.add_type("application/x-ndjson", ".ndjson")
_TYPES.add_type("application/vnd.apache.parquet", ".parquet")
_BODY = {"requestBody": {"required": True, "content": {_BINARY: {"schema": {"type": "string", "format": "binary"}}}}}
_ANY: dict[int | str, Any] = {200: {"content": {"*/*": {"schema": {"type": "string", "format": "binary"}}}}}

ArtifactName = Annotated[
    str, Path(max_length=ARTIFACT_NAME_LIMIT, description="Name of the artifact; may contain slashes.")
]
Fence = Annotated[int, Query(ge=0, le=2**63 - 1, description="Fence of the claim.")]


@routes.post("/flow_steps/claim", response_model=step_schemas.StepClaimResponse)
async def claim_steps(body: step_schemas.StepClaimRequest, request: Request, engine: Engine) -> Response:
    """F4: claim steps for one worker. The fence of a step grows with every claim."""
    if reserved := sorted(ENGINE_KINDS.intersection(body.kinds)):
        hint = "remove it from `kinds`: the engine executes these steps"
        raise Invalid("KIND_NOT_CLAIMABLE", f"steps of kind {reserved[0]} cannot be claimed", hint=hint)
    claimed = await engine.claim(
        body.worker,
        dict.fromkeys(body.kinds, body.limit),
        limit=body.limit,
        lease_for=_make_duration(body.lease_seconds),
        wait=body.wait_seconds,
        is_gone=request.is_disconnected,
    )
    # Without a model, for speed: claims are frequent, and the data was validated before.
    document = orjson.dumps({"items": [_view_claim(step) for step in claimed]}, option=orjson.OPT_UTC_Z)
    return Response(document, media_type="application/json")


@routes.post("/flow_steps/heartbeat")
async def heartbeat(body: step_schemas.StepHeartbeatRequest, engine: Engine) -> step_schemas.StepHeartbeatResponse:
    """F9: extend the leases of steps. The result names the steps that are cancelled or lost."""
    names = [(item.run_id, item.step_id, item.fence) for item in body.items]
    cancellations = await engine.heartbeat(names, _make_duration(body.lease_seconds))
    states = {None: HeartbeatState.LOST, True: HeartbeatState.CANCELLED, False: HeartbeatState.EXTENDED}
    return step_schemas.StepHeartbeatResponse(
        items=[
            step_schemas.StepHeartbeatResult(
                run_id=name[0], step_id=name[1], fence=name[2], state=states[cancellations.get(name)]
            )
            for name in names
        ]
    )


@routes.post("/flow_steps/report")
async def report_steps(
    body: step_schemas.StepReportRequest, engine: Engine, views: Views, caller: Operator
) -> step_schemas.StepReportResponse:
    """F5: report the outcomes of steps, and return one result each. A report under an old fence changes nothing."""
    reports = [_build_report(item.run_id, item.step_id, item) for item in body.items]
    answers = await engine.report(reports, body.worker or caller.subject)
    statuses = await views.list_step_statuses([(item.run_id, item.step_id) for item in body.items])
    results = [
        step_schemas.StepReportResult(
            run_id=item.run_id,
            step_id=item.step_id,
            fence=item.fence,
            result=answer,
            status=statuses.get((item.run_id, item.step_id)),
        )
        for item, answer in zip(body.items, answers, strict=True)
    ]
    return step_schemas.StepReportResponse(items=results)


@routes.post("/flow_runs/{runId}/steps/{stepId}/report")
async def report_step(
    run_id: RunId, step_id: StepId, body: step_schemas.StepOutcome, engine: Engine, views: Views, caller: Operator
) -> step_schemas.StepReportResult:
    """F5: report the outcome of a step. A repeated report succeeds; a different report on an ended step is a 409."""
    worker = body.worker or caller.subject
    [answer] = await engine.report([_build_report(run_id, step_id, body)], worker)
    row = await views.read_step(run_id, step_id)
    if answer is StepReportAnswer.CONFLICT:
        message = (
            f"step {step_id} of run {run_id} is {row['status']}; another report under fence {body.fence} was accepted"
        )
        raise Conflict("STEP_ENDED", message, hint="the first report is final; do not send another one")
    if answer is StepReportAnswer.SUPERSEDED:
        raise make_superseded_error(run_id, step_id, body.fence)
    return step_schemas.StepReportResult(
        run_id=run_id, step_id=step_id, fence=body.fence, result=answer, status=row["status"]
    )


@routes.post("/flow_runs/{runId}/steps/{stepId}/logs")
async def write_logs(
    run_id: RunId, step_id: StepId, body: step_schemas.NewLogLines, engine: Engine, views: Views
) -> step_schemas.AttemptRecord:
    """F18: store log lines of an attempt. Under an old fence the answer is a 409."""
    await views.check_claim(run_id, step_id, body.fence)
    await engine.log(run_id, step_id, body.fence, [(line.level, line.message) for line in body.lines])
    return step_schemas.AttemptRecord(lines=len(body.lines))


@routes.put("/flow_runs/{runId}/steps/{stepId}/artifacts/{name:path}", openapi_extra=_BODY)
async def write_artifact(
    run_id: RunId, step_id: StepId, name: ArtifactName, fence: Fence, request: Request, engine: Engine, views: Views
) -> step_schemas.WrittenArtifact:
    """F6: write an artifact of an attempt; an accepted report publishes it. Under an old fence the answer is a 409."""
    await views.check_claim(run_id, step_id, fence)
    data = await request.body()
    await artifacts.write(engine.publisher.storage, run_id, step_id, fence, name, data)
    return step_schemas.WrittenArtifact(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())


@routes.get("/flow_runs/{runId}/steps/{stepId}/artifacts/{name:path}", response_class=StreamingResponse, responses=_ANY)
async def read_artifact(run_id: RunId, step_id: StepId, name: ArtifactName, engine: Engine) -> StreamingResponse:
    """F6: read an artifact of a step."""
    artifact = await engine.find_artifact(run_id, step_id, name)
    storage = engine.publisher.storage
    stored = await storage.read_info(artifact.path)
    if stored is None:
        hint = f"write it again: `penstock flow run --resume {run_id} --from {step_id}`"
        raise NotFound("ARTIFACT_DELETED", f"{artifact.uri} was deleted from the object store", hint=hint)
    headers = {
        "content-length": str(stored.size),
        "content-disposition": f"inline; filename*=UTF-8''{quote(name.rpartition('/')[2], safe='')}",
        "content-security-policy": _CONTENT_POLICY,
    }
    content, encoding = _TYPES.guess_type(name)
    media_type = content if content and encoding is None else _BINARY
    return StreamingResponse(storage.stream(artifact.path, etag=stored.etag), media_type=media_type, headers=headers)


def _view_claim(step: ClaimedStep) -> Mapping[str, Any]:
    return {
        "runId": step.run_id,
        "stepId": step.step_id,
        "kind": step.kind,
        "fence": step.fence,
        "attempt": step.attempt,
        "inputs": step.inputs,
        "scope": step.scope,
        "leaseUntil": step.lease_until,
        "timeoutSeconds": step.time_limit.total_seconds() if step.time_limit else None,
        "trace": step.trace,
    }


def _build_report(run_id: str, step_id: str, body: step_schemas.StepOutcomeBase) -> StepReport:
    error = StepError(body.error.code, body.error.message, body.error.details) if body.error else None
    names = tuple(body.artifacts)
    return StepReport(run_id, step_id, body.fence, body.status, body.outputs, error, names, body.retryable)


def _make_duration(number: float | None) -> timedelta | None:
    return None if number is None else timedelta(seconds=number)
