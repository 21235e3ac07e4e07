"""/api/v1/events and /api/v1/status: all parts together."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import StreamingResponse

from penstock.kernel.http.app import get_service, require_operator
from penstock.kernel.http.auth import Principal
from penstock.kernel.states.event_stream import EVENT_STREAM, LiveEvents
from penstock.overview import schemas
from penstock.overview.contract import EVENTS, LAST_LIMIT, PREFIX, STATUS, Part
from penstock.overview.events import MACHINES, EventHistory, make_encoder
from penstock.overview.status import StatusBoard

routes = APIRouter(prefix=PREFIX, tags=["overview"])
Operator = Annotated[Principal, Depends(require_operator("events and status of all parts"))]


async def _reserve_stream(request: Request, _caller: Operator) -> AsyncIterator[LiveEvents]:
    """Yield the event history with a slot reserved for one more stream."""
    live = get_service(request, EventHistory)
    async with live.reserve_slot():
        yield live


@routes.get(EVENTS, response_class=StreamingResponse, responses={200: {"content": {EVENT_STREAM: {}}}})
async def events(
    live: Annotated[LiveEvents, Depends(_reserve_stream)],
    part: Annotated[list[Part] | None, Query(description="Only moves of these parts. Default: all parts.")] = None,
    subject: Annotated[
        str, Query(max_length=1_000, description="Only moves of subjects with this prefix, e.g. `acme/RATES`.")
    ] = "",
    last: Annotated[
        int,
        Query(
            ge=0,
            le=LAST_LIMIT,
            description="Number of past moves, of these parts and subjects, that the stream starts with.",
        ),
    ] = 0,
    follow: Annotated[
        bool, Query(description="False ends the stream after the past moves; true sends new moves as they are made.")
    ] = True,
    last_event_id: Annotated[
        str | None, Header(description="The `id` of the last received event; the stream resumes after it.")
    ] = None,
) -> StreamingResponse:
    """Stream the moves of all parts as server-sent events named `move`."""
    # The positions are read before the response starts: a client that has its first byte misses no later move.
    machines = [machine.name for name in part or () for machine in MACHINES[name]]
    start = await live.find_start_positions(last_event_id, last=last, of=machines, subject_prefix=subject)
    stream = live.stream(start, make_encoder(subject), "Penstock", of=machines, follow=follow)
    return StreamingResponse(stream, media_type=EVENT_STREAM)


@routes.get(STATUS)
async def status(request: Request, _caller: Operator) -> schemas.StatusReport:
    """Return what is late or broken in all parts, each issue with its next step."""
    return await get_service(request, StatusBoard).read_status()
