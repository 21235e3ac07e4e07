"""The API of ingest: /api/v1/ingest."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import StreamingResponse

from penstock.ingest.api import schemas
from penstock.ingest.api.queries import IngestViews
from penstock.ingest.contract import PREFIX, IngestRunState
from penstock.ingest.run.store import START
from penstock.kernel.db import page
from penstock.kernel.db.page import Cursor, Limit
from penstock.kernel.http.app import get_service, require_operator

NDJSON = "application/x-ndjson"
routes = APIRouter(prefix=PREFIX, tags=["ingest"], dependencies=[Depends(require_operator("suppliers"))])
Supplier = Annotated[str, Path(max_length=64, description="Name of the supplier.")]
RunId = Annotated[str, Path(max_length=128, description="Id of the run.")]


async def _get_views(request: Request) -> IngestViews:
    return get_service(request, IngestViews)


Views = Annotated[IngestViews, Depends(_get_views)]


@routes.get("/suppliers")
async def suppliers(views: Views) -> schemas.SupplierList:
    """Return the status of every supplier."""
    return schemas.SupplierList(
        suppliers=[schemas.SupplierView.from_status(status) for status in await views.list_suppliers()]
    )


@routes.get("/suppliers/{supplier}")
async def supplier(supplier: Supplier, views: Views) -> schemas.SupplierView:
    """Return the status of a supplier."""
    return await views.read(lambda folder: folder.supplier(supplier))


@routes.get("/suppliers/{supplier}/moves")
async def moves(supplier: Supplier, views: Views, limit: Limit = 100) -> schemas.FileMoveList:
    """Return the files of a supplier that were moved out of the inbox, newest first."""
    rows = await views.list_moves(supplier, limit)
    return schemas.FileMoveList(moves=[schemas.FileMove.model_validate(row) for row in rows])


@routes.get("/suppliers/{supplier}/quarantine")
async def quarantine(supplier: Supplier, views: Views, limit: Limit = 100) -> schemas.QuarantineList:
    """I3: return the files of a supplier in quarantine, newest first, with the reason and the run of each."""
    return await views.read(lambda folder: folder.quarantine(supplier, limit))


@routes.get("/runs")
async def runs(
    views: Views,
    supplier: Annotated[str | None, Query(max_length=64)] = None,
    status: IngestRunState | None = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> schemas.IngestRunList:
    """Return runs, newest first."""
    started_at, run_id = page.decode_start(cursor, [datetime, str], START)
    rows = await views.list_runs(supplier, status, (started_at, run_id), limit)
    return schemas.IngestRunList(runs=[schemas.IngestRun.model_validate(row) for row in rows.items], next=rows.next)


@routes.get("/runs/{runId}")
async def run(run_id: Annotated[RunId, Path(alias="runId")], views: Views) -> schemas.IngestRunDetails:
    """Return a run with its manifest, the files that it moved, and its history."""
    row, moves, history = await views.read_run(run_id)
    return schemas.IngestRunDetails(
        **schemas.IngestRun.model_validate(row).model_dump(),
        moves=[schemas.FileMove.model_validate(move) for move in moves],
        history=[schemas.IngestMove.model_validate(stored.entry, from_attributes=True) for stored in history],
    )


@routes.get("/runs/{runId}/bad-rows")
async def bad_rows(
    run_id: Annotated[RunId, Path(alias="runId")], views: Views, limit: Limit = 100
) -> schemas.BadRowList:
    """Return the first bad rows of a run, and the number of bad rows per reason."""
    return await views.read(lambda folder: folder.bad_rows(run_id, limit))


@routes.get("/state/{supplier}")
async def state(supplier: Supplier, views: Views) -> schemas.StateView:
    """Return the published state of a supplier and the manifest of its run."""
    return await views.read(lambda folder: folder.state(supplier))


@routes.get("/state/{supplier}/facts", response_class=StreamingResponse, responses={200: {"content": {NDJSON: {}}}})
async def facts(supplier: Supplier, views: Views) -> StreamingResponse:
    """Stream all facts of the published state as NDJSON; a publication during the download does not mix into it."""
    pointer, chunks = await views.read_facts(supplier)
    headers = {"ETag": f'"{pointer.sha256}"', "X-Run-Id": pointer.run_id, "X-Fence": str(pointer.fence)}
    return StreamingResponse(chunks, media_type=NDJSON, headers=headers)


@routes.get("/state/{supplier}/diff")
async def diff(
    supplier: Supplier,
    views: Views,
    before: Annotated[
        str | None, Query(alias="from", max_length=128, description="Default: the run published before `to`.")
    ] = None,
    after: Annotated[
        str | None, Query(alias="to", max_length=128, description="Default: the run whose state is published.")
    ] = None,
    limit: Annotated[int, Query(ge=0, le=1000, description="Changes shown of each kind.")] = 20,
) -> schemas.StateDiff:
    """I10, I21: compare the facts of two runs of a supplier: added, removed and changed."""
    return await views.compare_runs(supplier, before, after, limit)
