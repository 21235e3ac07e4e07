"""The tails of journals as server-sent events: moves as they are made."""

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
STREAM_LIMIT = 100  # open event streams of a part per process
POLL_INTERVAL = 1.0  # seconds after which a stream polls without a notification
KEEP_ALIVE = 15.0
_PAGE_SIZE = 500
_POLL_PAUSE = 0.1  # between two polls: many streams of a busy part must leave connections to its workers
_PAGE_PAUSE = 0.01  # between two pages of past moves

Positions = tuple[Position, ...]  # how far each journal was read
Batch = tuple[int, Sequence[StoredEntry]]  # the index of a journal, and its next entries


@dataclass(frozen=True)
class JournalTail:
    """The journal of a database, limited to some *machines*."""

    db: Database
    machines: Collection[str]


@dataclass(frozen=True)
class ChangeNotifications:
    """A topic that is notified when something moved; without notifications, streams poll every second."""

    notifier: Notifier
    topic: str


class LiveEvents:
    """The moves of all *tails* together."""

    def __init__(self, tails: Sequence[JournalTail], notifiers: Sequence[ChangeNotifications]) -> None:
        self._tails = tails
        self.notifiers = notifiers
        self._open_streams = 0

    @asynccontextmanager
    async def reserve_slot(self) -> AsyncIterator[None]:
        """Reserve one of the event streams that a process serves, or raise Transient TOO_MANY_STREAMS."""
        if self._open_streams >= STREAM_LIMIT:
            hint = "close some of them, or use another server"
            raise Transient("TOO_MANY_STREAMS", f"{STREAM_LIMIT} event streams are open on this server", hint=hint)
        self._open_streams += 1
        try:
            yield
        finally:
            self._open_streams -= 1

    async def find_start_positions(
        self, event_id: str | None, *, last: int = 0, of: Collection[str] = (), subject_prefix: str = ""
    ) -> Positions:
        """Return the positions after the event with this id; without an id, before the *last* moves.

        Only moves of the machines *of*, if there are any, and of subjects with *subject_prefix* count.
        """
        if event_id is not None:
            return _parse_event_id(event_id, len(self._tails))
        positions = []
        for tail in self._tails:
            async with tail.db.connection() as connection:
                machines = _select_machines(tail, of)
                positions.append(await journal.read_position_before_last(connection, machines, last, subject_prefix))
        return tuple(positions)

    async def stream(
        self,
        start: Positions,
        encode: Callable[[StoredEntry], BaseModel | None],
        about: str,
        *,
        of: Collection[str] = (),
        follow: bool = True,
    ) -> AsyncIterator[str]:
        """Yield the moves after *start* as the text of events; moves that *encode* maps to None are skipped.

        While nothing moves, a comment is sent periodically, so that no proxy takes the connection for dead. Without
        *follow* the stream ends after the moves made so far.
        """
        yield f": moves of {about}\n\n"
        sent_at, positions = monotonic(), list(start)
        async for index, entries in self.iterate_moves(start, of=of, follow=follow):
            text = ""
            for stored in entries:
                positions[index] = stored.position
                if (data := encode(stored)) is not None:
                    event_id = ".".join("-".join(map(str, position)) for position in positions)
                    text += f"event: move\nid: {event_id}\ndata: {data.model_dump_json(by_alias=True)}\n\n"
            if not text and monotonic() - sent_at > KEEP_ALIVE:
                text = ": nothing moved\n\n"
            if text:
                yield text
                sent_at = monotonic()

    async def iterate_moves(
        self, start: Positions, *, of: Collection[str] = (), follow: bool = True
    ) -> AsyncGenerator[Batch, None]:
        """Yield batches of moves after *start* as they are made; an empty batch for each poll without a move."""
        positions, ends = list(start), None if follow else await self.find_start_positions(None)
        while not any(notifier.notifier.is_closed for notifier in self.notifiers):
            notified = [notifier.notifier.get_next_event(notifier.topic) for notifier in self.notifiers]
            is_all = True
            for index, tail in enumerate(self._tails):
                try:
                    async with tail.db.connection() as connection:
                        entries, positions[index] = await journal.read_after(
                            connection, positions[index], limit=_PAGE_SIZE, machines=_select_machines(tail, of)
                        )
                except Transient as error:  # the client reconnects with its last event id
                    structlog.get_logger().warning("event_stream_interrupted", code=error.code, error=error.message)
                    return
                is_all = is_all and len(entries) < _PAGE_SIZE
                yield index, entries
            if ends is not None and all(at >= end for at, end in zip(positions, ends, strict=True)):
                return
            if is_all:
                await wait_any_event(notified, POLL_INTERVAL)
            await asyncio.sleep(_POLL_PAUSE if is_all else _PAGE_PAUSE)


def _select_machines(tail: JournalTail, of: Collection[str]) -> list[str]:
    return [machine for machine in tail.machines if not of or machine in of]


def _parse_event_id(event_id: str, count: int) -> Positions:
    """Return the positions in *count* journals that an event id contains, or raise Invalid BAD_EVENT_ID."""
    positions = event_id.split(".")
    if len(positions) != count:
        raise _make_id_error(event_id)
    return tuple(_parse_position(position, event_id) for position in positions)


def _parse_position(text: str, event_id: str) -> Position:
    parts = text.split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise _make_id_error(event_id)
    return int(parts[0]), int(parts[1]), int(parts[2])


def _make_id_error(event_id: str) -> Invalid:
    hint = "send the `id` of the last received event unchanged"
    return Invalid("BAD_EVENT_ID", f"{event_id[:100]!r} is not an event id of this server", hint=hint)
