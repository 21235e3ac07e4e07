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
from penstock.kernel.http.app import require_operator, service

NDJSON = "application/x-ndjson"
routes = APIRouter(prefix=PREFIX, tags=["ingest"], dependencies=[Depends(require_operator("suppliers"))])
Supplier = Annotated[str, Path(max_length=64)]
RunId = Annotated[str, Path(max_length=128)]


async def _views(request: Request) -> IngestViews:
    return service(request, IngestViews)


Views = Annotated[IngestViews, Depends(_views)]


@routes.get("/suppliers")
async def suppliers(views: Views) -> schemas.SupplierList:
    """Where every supplier stands."""
    return schemas.SupplierList(suppliers=[schemas.SupplierView(**one.as_dict()) for one in await views.suppliers()])


@routes.get("/suppliers/{supplier}")
async def supplier(supplier: Supplier, views: Views) -> schemas.SupplierView:
    """Where one supplier stands."""
    return schemas.SupplierView(**(await views.supplier(supplier)).as_dict())


@routes.get("/suppliers/{supplier}/moves")
async def moves(supplier: Supplier, views: Views, limit: Limit = 100) -> schemas.FileMoveList:
    """Where the files of a supplier went, the latest first."""
    found = await views.moves(supplier, limit)
    return schemas.FileMoveList(moves=[schemas.FileMove.model_validate(one, from_attributes=True) for one in found])


@routes.get("/runs")
async def runs(
    views: Views,
    supplier: Annotated[str | None, Query(max_length=64)] = None,
    status: IngestRunState | None = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> schemas.IngestRunList:
    """The runs there were, the latest first."""
    moment, run_id = page.after(cursor, [datetime, str], START)
    found = await views.runs(supplier, status, (moment, run_id), limit)
    items = [schemas.IngestRun.model_validate(item, from_attributes=True) for item in found.items]
    return schemas.IngestRunList(runs=items, next=found.next)


@routes.get("/runs/{runId}")
async def run(run_id: Annotated[RunId, Path(alias="runId")], views: Views) -> schemas.IngestRunDetails:
    """A run with its manifest, the files it moved, and its history."""
    row, moved, history = await views.run(run_id)
    known = schemas.IngestRun.model_validate(row, from_attributes=True).model_dump()
    return schemas.IngestRunDetails(
        **known,
        moves=[schemas.FileMove.model_validate(one, from_attributes=True) for one in moved],
        history=[schemas.IngestMove.model_validate(one.entry, from_attributes=True) for one in history],
    )


@routes.get("/runs/{runId}/bad-rows")
async def bad_rows(
    run_id: Annotated[RunId, Path(alias="runId")], views: Views, limit: Limit = 100
) -> schemas.BadRowList:
    """The first bad rows of a run, and how often each reason came."""
    manifest, stats, rows = await views.bad_rows(run_id, limit)
    return schemas.BadRowList(run_id=run_id, bad_rows=manifest["bad_rows"], reasons=stats.get("reasons", {}), rows=rows)


@routes.get("/state/{supplier}")
async def state(supplier: Supplier, views: Views) -> schemas.StateView:
    """Which state of a supplier is current, where it comes from and what it changed."""
    pointer, manifest = await views.state(supplier)
    return schemas.StateView(supplier=supplier, manifest=manifest, **pointer.as_dict())


@routes.get("/state/{supplier}/facts", response_class=StreamingResponse, responses={200: {"content": {NDJSON: {}}}})
async def facts(supplier: Supplier, views: Views) -> StreamingResponse:
    """All facts of the current state, as NDJSON: of one state, whatever is published while they are read."""
    pointer, pieces = await views.facts(supplier)
    headers = {"ETag": f'"{pointer.sha256}"', "X-Run-Id": pointer.run_id, "X-Fence": str(pointer.fence)}
    return StreamingResponse(pieces, media_type=NDJSON, headers=headers)
