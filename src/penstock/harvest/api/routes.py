"""H13: routes of the harvest API, below /api/v1/harvest."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Request

from penstock.harvest.api import schemas
from penstock.harvest.api.queries import START, HarvestViews
from penstock.harvest.contract import NAME, PREFIX
from penstock.harvest.service import Harvest
from penstock.kernel.db import page
from penstock.kernel.db.page import Cursor, Limit
from penstock.kernel.http.app import get_service, require_operator
from penstock.kernel.http.auth import Principal
from penstock.kernel.http.schemas import Text

routes = APIRouter(prefix=PREFIX, tags=["harvest"])


Operator = Annotated[Principal, Depends(require_operator("feeds"))]
FeedName = Annotated[str, Path(pattern=NAME)]
RunId = Annotated[UUID, Path(alias="runId")]
PartitionId = Annotated[Text, Path(alias="partitionId", max_length=100)]


async def _get_harvest(request: Request) -> Harvest:
    return get_service(request, Harvest)


async def _get_views(request: Request, _caller: Operator) -> HarvestViews:
    return get_service(request, HarvestViews)


Service = Annotated[Harvest, Depends(_get_harvest)]
Views = Annotated[HarvestViews, Depends(_get_views)]


@routes.get("/feeds")
async def feeds(views: Views) -> schemas.FeedList:
    """List all feeds with their watermark and their last run."""
    return await views.list_feeds()


@routes.get("/feeds/{feed}")
async def feed(feed: FeedName, views: Views) -> schemas.FeedView:
    """Return one feed with its watermark and its last run."""
    return await views.read_feed(feed)


@routes.post("/feeds/{feed}/runs", status_code=202)
async def start(
    feed: FeedName, harvest: Service, caller: Operator, request: schemas.RunRequestBody | None = None
) -> schemas.RunStarted:
    """H2: start a run: full if requested or without a watermark, otherwise incremental. 409 if a run is active."""
    run_id = await harvest.start(feed, caller.subject, full=request is not None and request.full)
    return schemas.RunStarted(run_id=run_id, status_url=f"{PREFIX}/runs/{run_id}")


@routes.get("/feeds/{feed}/watermarks")
async def watermarks(feed: FeedName, views: Views, limit: Limit = 20) -> schemas.WatermarkList:
    """H13: return the watermark, its copy on object storage, and its history."""
    return await views.list_watermarks(feed, limit)


@routes.get("/feeds/{feed}/pricing")
async def pricing(feed: FeedName, views: Views, limit: Limit = 20) -> schemas.PricingResult:
    """H7: list the versions of the pricing rules, newest first."""
    return await views.list_pricing(feed, limit)


@routes.get("/feeds/{feed}/alerts")
async def alerts(feed: FeedName, views: Views, limit: Limit = 20) -> schemas.HarvestAlertList:
    """H12: list the alerts of a feed, newest first."""
    return await views.list_alerts(feed, limit)


@routes.get("/feeds/{feed}/record")
async def record(
    feed: FeedName, views: Views, key: Annotated[Text, Query(min_length=1, max_length=500)]
) -> schemas.RecordView:
    """Return a record, as the source sent it and as it is served."""
    return await views.read_record(feed, key)


@routes.get("/runs")
async def runs(
    views: Views,
    feed: Annotated[str | None, Query(pattern=NAME)] = None,
    limit: Limit = 20,
    cursor: Cursor = None,
) -> schemas.HarvestRunList:
    """List runs, newest first."""
    time, run_id = page.decode_start(cursor, [datetime, UUID], START)
    runs = await views.list_runs(feed, (time, run_id), limit)
    return schemas.HarvestRunList(runs=list(runs.items), next=runs.next)


@routes.get("/runs/{runId}")
async def run(run_id: RunId, views: Views) -> schemas.HarvestRunDetails:
    """Return a run with its heatmap and its history."""
    return await views.read_run(run_id)


@routes.get("/runs/{runId}/partitions")
async def partitions(run_id: RunId, views: Views) -> schemas.PartitionList:
    """List the partitions of a run with their progress."""
    return await views.list_partitions(run_id)


@routes.get("/runs/{runId}/rejects")
async def rejects(run_id: RunId, views: Views, limit: Limit = 20, cursor: Cursor = None) -> schemas.RejectList:
    """List the records of a run that could not be stored or mapped, with the reasons."""
    (after,) = page.decode_start(cursor, [int], [0])
    return await views.list_rejects(run_id, after, limit)


@routes.post("/runs/{runId}/retry", status_code=202)
async def retry(run_id: RunId, harvest: Service, caller: Operator) -> schemas.RetriedPartitions:
    """H11: resume the failed partitions of a run where they stopped, or its consolidation."""
    return schemas.RetriedPartitions(partitions=await harvest.retry(run_id, caller.subject))


@routes.post("/runs/{runId}/partitions/{partitionId}/retry", status_code=202)
async def retry_partition(
    run_id: RunId, partition_id: PartitionId, harvest: Service, caller: Operator
) -> schemas.RetriedPartitions:
    """H11: resume one failed partition where it stopped."""
    return schemas.RetriedPartitions(partitions=await harvest.retry(run_id, caller.subject, partition_id))


@routes.post("/runs/{runId}/force", status_code=202)
async def force(
    run_id: RunId, action: schemas.HarvestActionRequest, harvest: Service, views: Views, caller: Operator
) -> schemas.HarvestRun:
    """H5: consolidate a run despite its failures, and record actor and reason. The watermark does not move."""
    await harvest.force(run_id, caller.subject, action.reason)
    return await views.read_run(run_id)


@routes.post("/runs/{runId}/cancel", status_code=202)
async def cancel(
    run_id: RunId, action: schemas.HarvestActionRequest, harvest: Service, views: Views, caller: Operator
) -> schemas.HarvestRun:
    """Stop a run that is being planned or fetched. Its unfinished partitions count as failed."""
    await harvest.cancel(run_id, caller.subject, action.reason)
    return await views.read_run(run_id)
