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
from penstock.kernel.http.app import Caller, get_service
from penstock.kernel.http.auth import Principal
from penstock.kernel.http.schemas import UtcTime
from penstock.kernel.states.event_stream import EVENT_STREAM
from penstock.tracking.api import schemas, views
from penstock.tracking.contract import PREFIX, Stage, StageReportAnswer, StageStatus
from penstock.tracking.model import (
    FILE_STAGE,
    MACHINES,
    MOVES,
    FailureFilter,
    RowFilter,
    RowKey,
    RowReport,
    parse_queue,
    parse_stage,
)
from penstock.tracking.service import Tracking
from penstock.tracking.store import BEGINNING

routes = APIRouter(prefix=PREFIX, tags=["pipeline"])

_StageName = Annotated[str, Path(json_schema_extra={"enum": [stage.value for stage in Stage]})]
Transition = Annotated[str, Path(json_schema_extra={"enum": list(MOVES)})]
Filename = Annotated[schemas.Filename, Path()]
When = Annotated[UtcTime | None, Query()]


# These functions are async although they do not wait: the framework would run a plain function in a thread.
async def _get_tracking(request: Request, _caller: Caller) -> Tracking:
    """Return the service, for an authenticated caller."""
    return get_service(request, Tracking)


async def _parse_stage(stage: _StageName) -> Stage:
    return parse_stage(stage)


async def _parse_queue(stage: _StageName) -> Stage:
    return parse_queue(stage)


async def _open_stream(tracking: Annotated[Tracking, Depends(_get_tracking)]) -> AsyncIterator[Tracking]:
    """Yield the service, and count one more event stream while it is open."""
    async with tracking.live.reserve_slot():
        yield tracking


Service = Annotated[Tracking, Depends(_get_tracking)]
StageParam = Annotated[Stage, Depends(_parse_stage)]
QueueParam = Annotated[Stage, Depends(_parse_queue)]


@routes.post("/files/register")
async def register(body: schemas.RegisterRequest, tracking: Service, caller: Caller) -> schemas.RegisterResult:
    """T1: register the shards of a file, with event-ingest started. A repeated registration succeeds."""
    actor = _choose_actor(body.worker, caller)
    created = await tracking.register(body.filename, body.shards, worker=body.worker, actor=actor)
    return schemas.RegisterResult(filename=body.filename, shards=body.shards, created=created)


@routes.get("/files")
async def list_files(
    tracking: Service,
    stage: Annotated[Stage | None, Query(description="Stage that must have `status`; needs `status`.")] = None,
    status: Annotated[
        StageStatus | None, Query(description="Status of the shards in `stage`; without `stage`, in any stage.")
    ] = None,
    shard: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    prefix: Annotated[schemas.Prefix, Query(description="Prefix of the filename.")] = "",
    updated_since: When = None,
    updated_before: When = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> schemas.FilePage:
    """T6: list files by name, with the shards that match the filters. `limit` counts shards; a file may span pages."""
    if stage is not None and status is None:
        raise Invalid(
            "STATUS_MISSING",
            "the filter `stage` needs the filter `status`",
            hint=f"add a status, e.g. ?stage={stage}&status=failed",
        )
    wanted = RowFilter(stage, status, shard, prefix, updated_since, updated_before)
    after = page.decode_start(cursor, [str, int], ("", -1))
    rows = await tracking.list_rows(wanted, after=after, limit=limit)
    files = [
        schemas.FileStatus(filename=filename, shards=[views.view_shard(row) for row in shards])
        for filename, shards in groupby(rows.items, key=lambda row: row.filename)
    ]
    return schemas.FilePage(files=files, next=rows.next)


@routes.get("/files/{filename}")
async def show_file(filename: Filename, tracking: Service) -> schemas.FileStatus:
    """T6: show all shards of a file with their four statuses."""
    rows = await tracking.find_file(filename)
    return schemas.FileStatus(filename=filename, shards=[views.view_shard(row) for row in rows])


@routes.get("/files/{filename}/history")
async def show_history(
    filename: Filename, tracking: Service, limit: Limit = 1000, cursor: Cursor = None
) -> schemas.TrackingHistory:
    """T15: list the moves of all shards of a file, oldest first, with actor, time and reason."""
    after = page.decode_start(cursor, [int, int], (0, 0))
    entries = await tracking.list_moves(filename, after=after, limit=limit)
    moves = [views.view_event(entry) for entry in entries.items]
    return schemas.TrackingHistory(filename=filename, moves=moves, next=entries.next)


@routes.get("/files/{filename}/{shard}/why")
async def explain(
    filename: Filename, shard: Annotated[int, Path(ge=0, le=2**31 - 1)], tracking: Service
) -> schemas.RowExplanationView:
    """T16: explain in words why a shard has its present status, and how to move it."""
    explanation = await tracking.explain(filename, shard)
    status = explanation.status or StageStatus.DONE
    return schemas.RowExplanationView(
        filename=filename,
        shard=shard,
        stage=explanation.stage,
        status=status,
        why=explanation.why,
        hint=explanation.hint,
    )


@routes.post("/stages/{stage}/retry-failed")
async def retry_failed(
    body: schemas.RetryFilter, tracking: Service, caller: Caller, stage: StageParam
) -> schemas.RetriedRows:
    """T19: reset the failed rows that match the filters to new."""
    failed = FailureFilter(
        body.filename_prefix, body.shards, body.failed_since, body.failed_before, body.error_contains
    )
    actor = _choose_actor(body.worker, caller)
    retried = await tracking.retry_failed(stage, failed, limit=body.limit, actor=actor, reason="bulk retry")
    return schemas.RetriedRows(stage=stage, retried=retried)


@routes.post("/stages/{stage}/report", response_model=schemas.StageReportResponse)
async def report(body: schemas.Reports, tracking: Service, stage: QueueParam) -> Response:
    """T13: report the outcome of claimed rows; one result each. A report under an old fence changes nothing."""
    results = await tracking.report(stage, [_make_report(row) for row in body])
    return _make_response({"stage": stage, "results": [_make_result(*result) for result in results]})


@routes.post(f"/stages/{FILE_STAGE}/{{transition}}")
async def move_file(
    transition: Transition, body: schemas.FileMoveRequest, tracking: Service, caller: Caller
) -> schemas.FileMoved:
    """T2: move all shards of a file in event-ingest."""
    actor = _choose_actor(body.worker, caller)
    rows = await tracking.move(
        FILE_STAGE, transition, body.filename, worker=body.worker, actor=actor, reason=body.error
    )
    return schemas.FileMoved(filename=body.filename, updated_rows=rows)


@routes.post("/stages/{stage}/{transition}")
async def move_row(
    stage: StageParam, transition: Transition, body: schemas.RowMoveRequest, tracking: Service, caller: Caller
) -> schemas.RowMoved:
    """T3, T4, T8: move one row. A repeated request changes nothing; only its worker may repeat `start`."""
    actor = _choose_actor(body.worker, caller)
    await tracking.move(
        stage, transition, body.filename, body.shard, worker=body.worker, actor=actor, reason=body.error
    )
    status = MACHINES[stage].move(transition).target
    return schemas.RowMoved(filename=body.filename, shard=body.shard, stage=stage, status=status)


@routes.get("/queues")
async def list_queues(tracking: Service) -> schemas.QueueList:
    """List all queues with their length and their pause."""
    counts, pauses = await tracking.count_rows(), await tracking.list_pauses()
    return schemas.QueueList(queues=[views.view_queue(stage, counts, pauses.get(stage)) for stage in Stage])


@routes.get("/queues/{stage}")
async def list_queue(
    stage: StageParam,
    tracking: Service,
    limit: Limit = 100,
    offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    updated_since: When = None,
    updated_before: When = None,
    cursor: Cursor = None,
) -> schemas.QueuePage:
    """T5: list the rows that wait for a stage, oldest first. Use `cursor`: `offset` skips rows of a busy queue."""
    rows = await tracking.list_queue(
        stage,
        after=page.decode_start(cursor, [datetime, int], (BEGINNING, 0)),
        updated_since=updated_since,
        updated_before=updated_before,
        limit=limit,
        offset=offset,
    )
    items = [schemas.QueueItem(filename=row.filename, shard=row.shard, created_at=row.created_at) for row in rows.items]
    return schemas.QueuePage(stage=stage, items=items, next=rows.next)


@routes.post("/queues/{stage}/claim", response_model=schemas.StageClaimResponse)
async def claim(body: schemas.StageClaimRequest, request: Request, tracking: Service, stage: QueueParam) -> Response:
    """T12: claim rows for one worker, each with a lease and a fence that grows with every claim."""
    rows = await tracking.claim(
        stage,
        body.worker,
        limit=body.limit,
        lease_for=_make_duration(body.lease_seconds),
        wait=body.wait_seconds,
        is_gone=request.is_disconnected,
    )
    paused = not rows and stage in await tracking.list_pauses()
    items = [row._asdict() for row in rows]
    return _make_response({"stage": stage, "worker": body.worker, "items": items, "paused": paused})


@routes.post("/queues/{stage}/heartbeat")
async def heartbeat(
    body: schemas.StageHeartbeatRequest, tracking: Service, stage: QueueParam
) -> schemas.StageHeartbeatResult:
    """T14: extend the leases of claimed rows."""
    keys = None if body.items is None else [RowKey(item.filename, item.shard, item.fence) for item in body.items]
    until, extended, lost = await tracking.heartbeat(stage, body.worker, keys, _make_duration(body.lease_seconds))
    return schemas.StageHeartbeatResult(
        stage=stage, lease_until=until, extended=_view_keys(extended), lost=_view_keys(lost)
    )


@routes.post("/queues/{stage}/pause")
async def pause_stage(
    stage: StageParam, tracking: Service, caller: Caller, body: schemas.PauseRequest | None = None
) -> schemas.PauseState:
    """T19: stop claims and starts of a stage until it is resumed. Started rows may end."""
    request = body or schemas.PauseRequest()
    pause = await tracking.pause(stage, actor=_choose_actor(request.worker, caller), reason=request.reason)
    return schemas.PauseState(stage=stage, paused=True, since=pause.since, by=pause.actor, reason=pause.reason)


@routes.post("/queues/{stage}/resume")
async def resume_stage(stage: StageParam, tracking: Service) -> schemas.PauseState:
    """T19: end the pause of a stage."""
    await tracking.resume(stage)
    return schemas.PauseState(stage=stage, paused=False)


@routes.get("/metrics/summary")
async def summarise(tracking: Service) -> schemas.TrackingSummary:
    """T7: count the rows by stage and by shard, exactly."""
    return views.view_summary(await tracking.count_rows())


@routes.get("/events", response_class=StreamingResponse, responses={200: {"content": {EVENT_STREAM: {}}}})
async def watch(
    tracking: Annotated[Tracking, Depends(_open_stream)],
    stage: Annotated[Stage | None, Query()] = None,
    filename: Annotated[schemas.Filename | None, Query()] = None,
    last_event_id: Annotated[
        str | None, Header(description="Id of the last received event; the stream continues after it.")
    ] = None,
) -> StreamingResponse:
    """T17: stream moves as server-sent events named `move`."""
    # Read before the response starts: a client that has the headers misses no later event.
    start = await tracking.live.find_start_positions(last_event_id)
    events = tracking.live.stream(start, views.make_event_filter(stage, filename), "the pipeline")
    return StreamingResponse(events, media_type=EVENT_STREAM)


def _make_response(document: Mapping[str, Any]) -> Response:
    """Return *document* without validation, for the two frequent routes with long responses."""
    return Response(orjson.dumps(document, option=orjson.OPT_UTC_Z), media_type="application/json")


def _make_result(report: RowReport, answer: StageReportAnswer, status: StageStatus | None) -> dict[str, Any]:
    name = {"filename": report.filename, "shard": report.shard, "fence": report.fence}
    return {**name, "result": answer, "status": status}


def _choose_actor(worker: str | None, caller: Principal) -> str:
    """Return the name for the history: the worker of the request, else the subject of the token."""
    return worker or caller.subject or "unknown"


def _make_duration(number: float | None) -> timedelta | None:
    return None if number is None else timedelta(seconds=number)


def _make_report(row: schemas.StageReportRequest) -> RowReport:
    return RowReport(
        row.filename, row.shard, row.fence, row.outcome, row.error, _make_duration(row.retry_after_seconds)
    )


def _view_keys(keys: Sequence[RowKey]) -> list[schemas.LeasedRowView]:
    return [schemas.LeasedRowView(filename=key.filename, shard=key.shard, fence=key.fence) for key in keys]
