"""R17, R31: what is sent piece by piece: every item of a version, and every change as it comes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import islice
from time import monotonic

import orjson

from penstock.kernel.errors import Transient
from penstock.kernel.tasks.wait import wait_event
from penstock.refdata.model import DictionaryKey
from penstock.refdata.pod.serve import responses
from penstock.refdata.pod.serve.handlers import ServedDictionary, StreamResponse, as_line
from penstock.refdata.pod.serve.router import Router

_LINES = 200  # items in a piece
_PULSE = 15.0  # seconds after which a feed without news says that it lives
_MOST = 200  # streams of one process
_LONGEST = 600.0  # seconds for all items: as long as they are read, what changes meanwhile cannot be freed
Pieces = AsyncGenerator[bytes, None]


class ActiveStreams:
    """The streams of one process: a few, each as quick as its client takes it."""

    def __init__(self, front: Router, changed: Callable[[], asyncio.Event]) -> None:
        self._front = front
        self._changed = changed
        self._open = 0
        self.is_ending = False

    def begin(self, stream: StreamResponse) -> Pieces:
        """The pieces of a stream; the first of them are headers."""
        target = stream.address.target
        if stream.media_type == responses.EVENTS:
            return self._counted(self._changes(target, stream.since))
        return self._counted(self._items(target, stream.least))

    async def _counted(self, pieces: Pieces) -> Pieces:
        if self._open >= _MOST:
            raise Transient("TOO_MANY_STREAMS", "this pod has no room for one more stream", hint="read page by page")
        self._open += 1
        try:
            async for piece in pieces:
                yield piece
        finally:
            self._open -= 1
            await pieces.aclose()

    async def _items(self, target: DictionaryKey, least: int) -> Pieces:
        until = monotonic() + _LONGEST
        with self._front.view.all(target) as found:
            if found is None:
                raise _gone(target)
            shelf, items = found
            if shelf.version < least:  # in the moment since the barrier let it pass
                raise _gone(target)
            age = self._front.age_of(shelf)
            yield responses.data_head(shelf.mark, responses.MEMORY, age, responses.NDJSON)
            while lines := [as_line(one) + b"\n" for one in islice(items, _LINES)]:
                if monotonic() > until:  # cut off, so that it is not taken for all
                    raise ConnectionAbortedError("the client reads too slowly")
                yield b"".join(lines)
                await asyncio.sleep(0)  # others have their turn

    async def _changes(self, target: DictionaryKey, since: int | None) -> Pieces:
        """Each change under its version; `reset` where not all of them are remembered: whoever follows reads anew."""
        entry = self._front.entry(target)
        if entry is None:
            raise _gone(target)
        since = entry.version if since is None else since
        yield responses.data_head(entry.shelf.mark, responses.MEMORY, entry.age, responses.EVENTS)
        yield b": %d\n\n" % entry.version
        is_behind = entry.version < since  # perhaps whoever asks was told by a pod that is quicker
        generation = entry.shelf.generation
        while not self.is_ending and (entry := self._front.entry(target)) is not None:
            changed = self._changed()
            if not is_behind or entry.version >= since:
                is_behind = False
                for event in self._since(entry, since, is_same=generation == entry.shelf.generation):
                    yield event
                since, generation = entry.version, entry.shelf.generation
            if not await wait_event(changed, _PULSE):
                is_behind = False  # that long no pod is behind: there is no such version any more
                yield b":\n\n"

    def _since(self, entry: ServedDictionary, since: int, *, is_same: bool) -> Iterator[bytes]:
        """What happened after *since*; a version that is not the same, though its number is, is told as a reset."""
        steps = self._front.view.changes(entry.shelf, since)
        if steps is None or not (steps or is_same):
            yield _event("reset", entry.version, {"version": entry.version})
        for step in steps or ():
            told = {"version": step.version, "since": step.since, "keys": [key.decode() for key in step.keys]}
            yield _event("change", step.version, told)


def _event(kind: str, version: int, data: dict[str, object]) -> bytes:
    return b"event: %b\nid: %d\ndata: %b\n\n" % (kind.encode(), version, orjson.dumps(data))


def _gone(target: DictionaryKey) -> Transient:
    return Transient("NOT_LOADED", f"{target.dict_code} has just gone", hint="try again")
