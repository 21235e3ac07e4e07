"""The tails of journals for those who watch: moves as they are made, as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

import structlog
from pydantic import BaseModel

from penstock.kernel.db.database import Database
from penstock.kernel.db.notifier import Notifier
from penstock.kernel.errors import Invalid, Transient
from penstock.kernel.states import journal
from penstock.kernel.states.journal import Position, StoredEntry
from penstock.kernel.tasks.wait import wait_any_event

EVENT_STREAM = "text/event-stream"
WATCHERS = 100  # event streams of a part one process serves at a time
POLL = 1.0  # seconds after which a watcher looks by itself
KEEP_ALIVE = 15.0
_TAIL = 500
_PAUSE = 0.1  # between two looks: many watchers of a busy part must not take the connections from its workers
_BREATH = 0.01  # between two pages of what was made before

Positions = tuple[Position, ...]  # how far each journal is told
Batch = tuple[int, Sequence[StoredEntry]]  # the number of a journal, and what it noted


@dataclass(frozen=True)
class JournalTail:
    """A journal, as far as it tells of some *machines*."""

    db: Database
    machines: Collection[str]


@dataclass(frozen=True)
class ChangeNotifications:
    """A bell that rings for a topic when something moved; without one, watchers look every second."""

    notifier: Notifier
    topic: str


class LiveEvents:
    """The moves that *tails* tell of, together."""

    def __init__(self, tails: Sequence[JournalTail], notifiers: Sequence[ChangeNotifications]) -> None:
        self._tails = tails
        self.notifiers = notifiers
        self._watchers = 0

    @asynccontextmanager
    async def reserve_slot(self) -> AsyncIterator[None]:
        """Room for one more event stream, or Transient TOO_MANY_WATCHERS."""
        if self._watchers >= WATCHERS:
            hint = "close some, or ask another server"
            raise Transient("TOO_MANY_WATCHERS", f"{WATCHERS} event streams are open here", hint=hint)
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    async def start_positions(self, event_id: str | None, *, last: int = 0, of: Collection[str] = ()) -> Positions:
        """Where to begin: after the event of that id; without one, before the *last* moves that were made, *of* these
        machines when some are named."""
        if event_id is not None:
            return _positions_of(event_id, len(self._tails))
        found = []
        for tail in self._tails:
            async with tail.db.connection() as connection:
                found.append(await journal.position_before_last(connection, _machines(tail, of), last))
        return tuple(found)

    async def stream(
        self,
        start: Positions,
        told: Callable[[StoredEntry], BaseModel | None],
        about: str,
        *,
        of: Collection[str] = (),
        follow: bool = True,
    ) -> AsyncIterator[str]:
        """Events as text, for moves *told* makes something of; a comment now and then while there are none, so that
        nobody takes the line for dead. Not to *follow* is to end with the moves that were made until now."""
        yield f": moves of {about}\n\n"
        told_at, reached = monotonic(), list(start)
        async for place, moves in self.moves(start, of=of, follow=follow):
            text = ""
            for noted in moves:
                reached[place] = noted.position
                if (data := told(noted)) is not None:
                    name = ".".join("-".join(map(str, position)) for position in reached)
                    text += f"event: move\nid: {name}\ndata: {data.model_dump_json(by_alias=True)}\n\n"
            if not text and monotonic() - told_at > KEEP_ALIVE:
                text = ": nothing moved\n\n"
            if text:
                yield text
                told_at = monotonic()

    async def moves(
        self, start: Positions, *, of: Collection[str] = (), follow: bool = True
    ) -> AsyncGenerator[Batch, None]:
        """Moves as they are made, after *start*; empty when a while passed without."""
        reached, ends = list(start), None if follow else await self.start_positions(None)
        while not any(notifier.notifier.is_closed for notifier in self.notifiers):
            notified = [notifier.notifier.next_event(notifier.topic) for notifier in self.notifiers]
            is_all = True
            for place, tail in enumerate(self._tails):
                try:
                    async with tail.db.connection() as connection:
                        noted, reached[place] = await journal.read_after(
                            connection, reached[place], limit=_TAIL, machines=_machines(tail, of)
                        )
                except Transient as error:  # the watcher comes back with the last event it had
                    structlog.get_logger().warning("watching_ended", code=error.code, error=error.message)
                    return
                is_all = is_all and len(noted) < _TAIL
                yield place, noted
            if ends is not None and all(at >= end for at, end in zip(reached, ends, strict=True)):
                return
            if is_all:
                await wait_any_event(notified, POLL)
            await asyncio.sleep(_PAUSE if is_all else _BREATH)


def _machines(tail: JournalTail, of: Collection[str]) -> list[str]:
    return [machine for machine in tail.machines if not of or machine in of]


def _positions_of(event_id: str, count: int) -> Positions:
    """The places in *count* journals that an event's id tells, or Invalid."""
    places = event_id.split(".")
    if len(places) != count:
        raise _bad_id()
    return tuple(map(_position_of, places))


def _position_of(text: str) -> Position:
    parts = text.split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise _bad_id()
    return int(parts[0]), int(parts[1]), int(parts[2])


def _bad_id() -> Invalid:
    return Invalid("BAD_EVENT_ID", "that is no id of an event here", hint="send the last `id` received, unchanged")
