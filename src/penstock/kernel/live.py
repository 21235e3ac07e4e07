"""The journal's tail for those who watch: moves as they are made, as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import structlog
from pydantic import BaseModel

from penstock.kernel import journal
from penstock.kernel.bell import Bell
from penstock.kernel.db import Database
from penstock.kernel.errors import Invalid, Transient
from penstock.kernel.journal import Noted, Position
from penstock.kernel.waiting import happens

EVENT_STREAM = "text/event-stream"
WATCHERS = 100  # event streams of a part one process serves at a time
POLL = 1.0  # seconds after which a watcher looks by itself
KEEP_ALIVE = 15.0
_TAIL = 500
_PAUSE = 0.1  # between two looks: many watchers of a busy part must not take the connections from its workers


class Live:
    """The journal's tail, as far as it tells of some *machines*; the bell rings for *topic* when they moved."""

    def __init__(self, db: Database, bell: Bell, topic: str, machines: Collection[str]) -> None:
        self._db = db
        self._bell = bell
        self._topic = topic
        self._machines = frozenset(machines)
        self._watchers = 0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Room for one more event stream, or Transient TOO_MANY_WATCHERS."""
        if self._watchers >= WATCHERS:
            hint = "close some, or ask another server"
            raise Transient("TOO_MANY_WATCHERS", f"{WATCHERS} event streams are open here", hint=hint)
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    async def latest(self) -> Position:
        """The position after which come the moves that are yet to be made."""
        async with self._db.connection() as connection:
            return await journal.end(connection)

    async def moves(self, position: Position) -> AsyncGenerator[Sequence[Noted], None]:
        """Moves as they are made, after *position*; empty when a while passed without."""
        while not self._bell.is_closed:
            rung = self._bell.next(self._topic)
            try:
                async with self._db.connection() as connection:
                    noted = await journal.tail(connection, position, limit=_TAIL)
            except Transient as error:  # the watcher comes back with the last event it had
                structlog.get_logger().warning("watching_ended", code=error.code, error=error.message)
                return
            if noted:
                position = noted[-1].position
            yield [one for one in noted if one.entry.machine in self._machines]
            if len(noted) < _TAIL:
                await happens(rung, POLL)
                await asyncio.sleep(_PAUSE)


async def stream(
    batches: AsyncIterator[Sequence[Noted]], told: Callable[[Noted], BaseModel | None], about: str
) -> AsyncIterator[str]:
    """Events as text, for moves *told* makes something of; a comment now and then while there are none, so that
    nobody takes the line for dead."""
    yield f": moves of {about}\n\n"
    told_at = monotonic()
    async for moves in batches:
        text = "".join(_event(noted, data) for noted in moves if (data := told(noted)) is not None)
        if not text and monotonic() - told_at > KEEP_ALIVE:
            text = ": nothing moved\n\n"
        if text:
            yield text
            told_at = monotonic()


def position_of(event_id: str | None) -> Position | None:
    """The place in the journal an event's id tells, or Invalid."""
    if event_id is None:
        return None
    parts = event_id.split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise Invalid("BAD_EVENT_ID", "that is no id of an event", hint="send the last `id` received, unchanged")
    return int(parts[0]), int(parts[1]), int(parts[2])


def _event(noted: Noted, data: BaseModel) -> str:
    name = "-".join(map(str, noted.position))
    return f"event: move\nid: {name}\ndata: {data.model_dump_json(by_alias=True)}\n\n"
