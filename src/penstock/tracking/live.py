"""T17: moves as they are made, for those who watch."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog

from penstock.kernel import journal
from penstock.kernel.bell import Bell
from penstock.kernel.db import Database
from penstock.kernel.errors import Transient
from penstock.kernel.journal import Noted, Position
from penstock.kernel.waiting import happens
from penstock.tracking.model import STAGE_OF

MOVES = "moves"  # the bell's topic
WATCHERS = 100  # event streams one process serves at a time
POLL = 1.0  # seconds after which a watcher looks by itself
_TAIL = 500
_PAUSE = 0.1  # between two looks: many watchers of a busy pipeline must not take the connections from its workers


class Live:
    """The journal's tail, as far as it tells of the pipeline."""

    def __init__(self, db: Database, bell: Bell) -> None:
        self._db = db
        self._bell = bell
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
        """T17: moves as they are made, after *position*; empty when a while passed without."""
        while not self._bell.is_closed:
            rung = self._bell.next(MOVES)
            try:
                async with self._db.connection() as connection:
                    noted = await journal.tail(connection, position, limit=_TAIL)
            except Transient as error:  # the watcher comes back with the last event it had
                structlog.get_logger().warning("watching_ended", code=error.code, error=error.message)
                return
            if noted:
                position = noted[-1].position
            yield [one for one in noted if one.entry.machine in STAGE_OF]
            if len(noted) < _TAIL:
                await happens(rung, POLL)
                await asyncio.sleep(_PAUSE)
