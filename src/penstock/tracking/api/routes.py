"""The pipeline API: /api/v1/pipeline."""

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Header, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from penstock.kernel.db import page
from penstock.kernel.db.page import Cursor, Limit
from penstock.kernel.errors import Invalid
from penstock.kernel.http.app import Caller, service
from penstock.kernel.http.auth import Principal
from penstock.kernel.http.schemas import Moment
from penstock.kernel.states.event_stream import EVENT_STREAM
from penstock.tracking.api import schemas, views
from penstock.tracking.contract import PREFIX, Stage, StageReportAnswer, StageStatus
from penstock.tracking.model import (
    FILE_STAGE,
    MACHINES,
    MOVES,
    FailureSample,
    RowKey,
    RowPosition,
    RowReport,
    queue_named,
    stage_named,
)
from penstock.tracking.service import Tracking
from penstock.tracking.store import BEGINNING

routes = APIRouter(prefix=PREFIX, tags=["pipeline"])

_StageName = Annotated[str, Path(json_schema_extra={"enum": [stage.value for stage in Stage]})]
Transition = Annotated[str, Path(json_schema_extra={"enum": list(MOVES)})]
Filename = Annotated[schemas.Filename, Path()]
When = Annotated[Moment | None, Query()]


# These wait for nothing, and are async all the same: what is not, the framework runs in a thread.
async def _tracking(request: Request, _caller: Caller) -> Tracking:
    """The service; whoever gets hold of it has said who they are."""
    return service(request, Tracking)


async def _stage(stage: _StageName) -> Stage:
    return stage_named(stage)


async def _queue(stage: _StageName) -> Stage:
    return queue_named(stage)


async def _watching(tracking: Annotated[Tracking, Depends(_tracking)]) -> AsyncIterator[Tracking]:
    """The service, with room for one more event stream."""
    async with tracking.live.reserve_slot():
        yield tracking


Service = Annotated[Tracking, Depends(_tracking)]
AnyStage = Annotated[Stage, Depends(_stage)]
HandedOut = Annotated[Stage, Depends(_queue)]


@routes.post("/files/register")
async def register(body: schemas.RegisterRequest, tracking: Service, caller: Caller) -> schemas.RegisterResult:
    """T1: one row per shard, with event-ingest started. Saying it again is a success."""
    actor = _actor(body.worker, caller)
    created = await tracking.register(body.filename, body.shards, worker=body.worker, actor=actor)
    return schemas.RegisterResult(filename=body.filename, shards=body.shards, created=created)


@routes.get("/files")
async def list_files(
    tracking: Service,
    stage: Annotated[Stage | None, Query(description="With `status`: where the rows must stand so.")] = None,
    status: Annotated[StageStatus | None, Query(description="Without `stage`: in any of them.")] = None,
    shard: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    prefix: Annotated[schemas.Prefix, Query(description="How the filename begins.")] = "",
    updated_since: When = None,
    updated_before: When = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> schemas.FilePage:
    """T6: files by name, with the shards the filters leave. `limit` counts shards: a file may go on over pages."""
    if stage is not None and status is None:
        raise Invalid("STATUS_MISSING", "a stage alone filters nothing", hint="give `status` too")
    stands = RowPosition(stage, status, shard, prefix, updated_since, updated_before)
    after = page.start_after(cursor, [str, int], ("", -1))
    found = await tracking.files(stands, after=after, limit=limit)
    files = [
        schemas.FileStatus(filename=filename, shards=[views.shard(row) for row in rows])
        for filename, rows in groupby(found.items, key=lambda row: row.filename)
    ]
    return schemas.FilePage(files=files, next=found.next)


@routes.get("/files/{filename}")
async def show_file(filename: Filename, tracking: Service) -> schemas.FileStatus:
    """T6: all shards of a file with their four statuses."""
    return schemas.FileStatus(filename=filename, shards=[views.shard(row) for row in await tracking.file(filename)])


@routes.get("/files/{filename}/history")
async def show_history(
    filename: Filename, tracking: Service, limit: Limit = 1000, cursor: Cursor = None
) -> schemas.TrackingHistory:
    """T15: every move of every shard of a file, oldest first: who, when, why."""
    after = page.start_after(cursor, [int, int], (0, 0))
    found = await tracking.history(filename, after=after, limit=limit)
    return schemas.TrackingHistory(
        filename=filename, moves=[views.event(noted) for noted in found.items], next=found.next
    )


@routes.get("/files/{filename}/{shard}/why")
async def explain(
    filename: Filename, shard: Annotated[int, Path(ge=0, le=2**31 - 1)], tracking: Service
) -> schemas.RowExplanationView:
    """T16: in words, why a row is where it is, and what would move it."""
    found = await tracking.why(filename, shard)
    status = found.status or StageStatus.DONE
    return schemas.RowExplanationView(
        filename=filename, shard=shard, stage=found.stage, status=status, why=found.why, hint=found.hint
    )


@routes.post("/stages/{stage}/retry-failed")
async def retry_failed(
    body: schemas.RetryFilter, tracking: Service, caller: Caller, stage: AnyStage
) -> schemas.RetriedRows:
    """T19: set back all rows that failed so."""
    failed = FailureSample(
        body.filename_prefix, body.shards, body.failed_since, body.failed_before, body.error_contains
    )
    actor = _actor(body.worker, caller)
    retried = await tracking.retry_failed(stage, failed, limit=body.limit, actor=actor, reason="retried with others")
    return schemas.RetriedRows(stage=stage, retried=retried)


@routes.post("/stages/{stage}/report", response_model=schemas.StageReportResponse)
async def report(body: schemas.Reports, tracking: Service, stage: HandedOut) -> Response:
    """T13: how claimed rows ended, each with a result of its own. An old fence is superseded and changes nothing."""
    results = await tracking.report(stage, [_report(one) for one in body])
    return _answer({"stage": stage, "results": [_result(*result) for result in results]})


@routes.post(f"/stages/{FILE_STAGE}/{{transition}}")
async def move_file(
    transition: Transition, body: schemas.FileMoveRequest, tracking: Service, caller: Caller
) -> schemas.FileMoved:
    """T2: a step of event-ingest, with all shards of a file at once."""
    actor = _actor(body.worker, caller)
    rows = await tracking.move(
        FILE_STAGE, transition, body.filename, worker=body.worker, actor=actor, reason=body.error
    )
    return schemas.FileMoved(filename=body.filename, updated_rows=rows)


@routes.post("/stages/{stage}/{transition}")
async def move_row(
    stage: AnyStage, transition: Transition, body: schemas.RowMoveRequest, tracking: Service, caller: Caller
) -> schemas.RowMoved:
    """T3, T4, T8: a step of one row. Asking for the state it is in changes nothing; `start` is a claim."""
    actor = _actor(body.worker, caller)
    await tracking.move(
        stage, transition, body.filename, body.shard, worker=body.worker, actor=actor, reason=body.error
    )
    status = MACHINES[stage].move(transition).target
    return schemas.RowMoved(filename=body.filename, shard=body.shard, stage=stage, status=status)


@routes.get("/queues")
async def list_queues(tracking: Service) -> schemas.QueueList:
    """How long each queue is, and whether it is paused."""
    counts, pauses = await tracking.counts(), await tracking.pauses()
    return schemas.QueueList(queues=[views.queue(stage, counts, pauses.get(stage)) for stage in Stage])


@routes.get("/queues/{stage}")
async def list_queue(
    stage: AnyStage,
    tracking: Service,
    limit: Limit = 100,
    offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    updated_since: When = None,
    updated_before: When = None,
    cursor: Cursor = None,
) -> schemas.QueuePage:
    """T5: what waits for a stage, oldest first. Page with `cursor`: offsets skip rows while the queue moves."""
    found = await tracking.queue(
        stage,
        after=page.start_after(cursor, [datetime, int], (BEGINNING, 0)),
        updated_since=updated_since,
        updated_before=updated_before,
        limit=limit,
        offset=offset,
    )
    items = [
        schemas.QueueItem(filename=row.filename, shard=row.shard, created_at=row.created_at) for row in found.items
    ]
    return schemas.QueuePage(stage=stage, items=items, next=found.next)


@routes.post("/queues/{stage}/claim", response_model=schemas.StageClaimResponse)
async def claim(body: schemas.StageClaimRequest, request: Request, tracking: Service, stage: HandedOut) -> Response:
    """T12: rows that are now this worker's alone, each under a fence that grows with every claim."""
    held = await tracking.claim(
        stage,
        body.worker,
        limit=body.limit,
        lease_for=_seconds(body.lease_seconds),
        wait=body.wait_seconds,
        is_gone=request.is_disconnected,
    )
    paused = not held and stage in await tracking.pauses()
    items = [one._asdict() for one in held]
    return _answer({"stage": stage, "worker": body.worker, "items": items, "paused": paused})


@routes.post("/queues/{stage}/heartbeat")
async def heartbeat(
    body: schemas.StageHeartbeatRequest, tracking: Service, stage: HandedOut
) -> schemas.StageHeartbeatResult:
    """T14: hold on to claimed rows for another lease."""
    keys = None if body.items is None else [RowKey(item.filename, item.shard, item.fence) for item in body.items]
    until, kept, lost = await tracking.heartbeat(stage, body.worker, keys, _seconds(body.lease_seconds))
    return schemas.StageHeartbeatResult(stage=stage, lease_until=until, extended=_held(kept), lost=_held(lost))


@routes.post("/queues/{stage}/pause")
async def pause(
    stage: AnyStage, tracking: Service, caller: Caller, body: schemas.PauseRequest | None = None
) -> schemas.PauseState:
    """T19: hand out and start nothing of this stage until it is resumed. What is under way may end."""
    said = body or schemas.PauseRequest()
    paused = await tracking.pause(stage, actor=_actor(said.worker, caller), reason=said.reason)
    return schemas.PauseState(stage=stage, paused=True, since=paused.since, by=paused.actor, reason=paused.reason)


@routes.post("/queues/{stage}/resume")
async def resume(stage: AnyStage, tracking: Service) -> schemas.PauseState:
    """T19: let a stage go on."""
    await tracking.resume(stage)
    return schemas.PauseState(stage=stage, paused=False)


@routes.get("/metrics/summary")
async def summarise(tracking: Service) -> schemas.TrackingSummary:
    """T7: how many rows stand where, exactly, whatever their number."""
    return views.summary(await tracking.counts())


@routes.get("/events", response_class=StreamingResponse, responses={200: {"content": {EVENT_STREAM: {}}}})
async def watch(
    tracking: Annotated[Tracking, Depends(_watching)],
    stage: Annotated[Stage | None, Query()] = None,
    filename: Annotated[schemas.Filename | None, Query()] = None,
    last_event_id: Annotated[str | None, Header(description="Go on after this event.")] = None,
) -> StreamingResponse:
    """T17: moves as they are made, as server-sent events named `move`."""
    # Asked before the first word is sent: who has heard it misses nothing from then on.
    start = await tracking.live.start_positions(last_event_id)
    events = tracking.live.stream(start, views.told(stage, filename), "the pipeline")
    return StreamingResponse(events, media_type=EVENT_STREAM)


def _answer(document: Mapping[str, Any]) -> Response:
    """*document* as it is: for the two routes whose answers are long and asked for all the time."""
    return Response(orjson.dumps(document, option=orjson.OPT_UTC_Z), media_type="application/json")


def _result(report: RowReport, answer: StageReportAnswer, status: StageStatus | None) -> dict[str, Any]:
    name = {"filename": report.filename, "shard": report.shard, "fence": report.fence}
    return {**name, "result": answer, "status": status}


def _actor(worker: str | None, caller: Principal) -> str:
    """Who is noted in the history: the worker that named itself, else whoever the token is for."""
    return worker or caller.subject or "unknown"


def _seconds(number: float | None) -> timedelta | None:
    return None if number is None else timedelta(seconds=number)


def _report(one: schemas.StageReportRequest) -> RowReport:
    return RowReport(one.filename, one.shard, one.fence, one.outcome, one.error, _seconds(one.retry_after_seconds))


def _held(keys: Sequence[RowKey]) -> list[schemas.LeasedRowView]:
    return [schemas.LeasedRowView(filename=key.filename, shard=key.shard, fence=key.fence) for key in keys]
