"""/api/v1/events and /api/v1/status: all parts together."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import StreamingResponse

from penstock.kernel.http.app import require_operator, service
from penstock.kernel.http.auth import Principal
from penstock.kernel.states.event_stream import EVENT_STREAM, LiveEvents
from penstock.overview import schemas
from penstock.overview.contract import EVENTS, LAST_LIMIT, PREFIX, STATUS, Part
from penstock.overview.events import MACHINES, EventHistory, told
from penstock.overview.status import StatusBoard

routes = APIRouter(prefix=PREFIX, tags=["overview"])
Operator = Annotated[Principal, Depends(require_operator("events and status of all parts"))]


async def _watching(request: Request, _caller: Operator) -> AsyncIterator[LiveEvents]:
    """The journals' tails, with room for one more event stream."""
    live = service(request, EventHistory)
    async with live.reserve_slot():
        yield live


@routes.get(EVENTS, response_class=StreamingResponse, responses={200: {"content": {EVENT_STREAM: {}}}})
async def events(
    live: Annotated[LiveEvents, Depends(_watching)],
    part: Annotated[list[Part] | None, Query(description="Only of these parts.")] = None,
    subject: Annotated[str, Query(max_length=1_000, description="Only subjects that begin so.")] = "",
    last: Annotated[int, Query(ge=0, le=LAST_LIMIT, description="Begin with so many moves already made.")] = 0,
    follow: Annotated[bool, Query(description="False: end with the moves made until now.")] = True,
    last_event_id: Annotated[str | None, Header(description="Go on after this event.")] = None,
) -> StreamingResponse:
    """Every move of every part as it is made, as server-sent events named `move`."""
    # Asked before the first word is sent: who has heard it misses nothing from then on.
    machines = [machine.name for one in part or () for machine in MACHINES[one]]
    start = await live.start_positions(last_event_id, last=last, of=machines)
    stream = live.stream(start, told(subject), "Penstock", of=machines, follow=follow)
    return StreamingResponse(stream, media_type=EVENT_STREAM)


@routes.get(STATUS)
async def status(request: Request, _caller: Operator) -> schemas.StatusReport:
    """What is late or broken, in all parts, and what to do next."""
    return await service(request, StatusBoard).status()
