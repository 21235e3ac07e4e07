"""R17, R31: the streams of a pod: all items of a version, and the changes of a dictionary as they are loaded."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import islice
from time import monotonic

import orjson

from penstock.kernel.errors import Transient
from penstock.kernel.tasks.wait import wait_event
from penstock.refdata.model import DictionaryKey
from penstock.refdata.pod.serve import responses
from penstock.refdata.pod.serve.handlers import ServedDictionary, StreamResponse, encode_line
from penstock.refdata.pod.serve.router import Router

_PIECE_ITEMS = 200
_HEARTBEAT_INTERVAL = 15.0  # seconds without a change after which a comment is sent
_STREAM_LIMIT = 200  # per process
_STREAM_TIMEOUT = 600.0  # seconds for all items: memory that changes during the stream cannot be freed before its end
Pieces = AsyncGenerator[bytes, None]


class ActiveStreams:
    """The streams of one process; each is sent at the speed of its client."""

    def __init__(self, router: Router, changed: Callable[[], asyncio.Event]) -> None:
        self._router = router
        self._changed = changed
        self._open = 0
        self.is_ending = False

    def open(self, stream: StreamResponse) -> Pieces:
        """Return the pieces of a stream; the first one contains headers."""
        target = stream.address.target
        if stream.media_type == responses.EVENTS:
            return self._count(self._stream_changes(target, stream.since))
        return self._count(self._stream_items(target, stream.min_version))

    async def _count(self, pieces: Pieces) -> Pieces:
        if self._open >= _STREAM_LIMIT:
            raise Transient(
                "TOO_MANY_STREAMS", f"this process already sends {_STREAM_LIMIT} streams", hint="read page by page"
            )
        self._open += 1
        try:
            async for piece in pieces:
                yield piece
        finally:
            self._open -= 1
            await pieces.aclose()

    async def _stream_items(self, target: DictionaryKey, min_version: int) -> Pieces:
        until = monotonic() + _STREAM_TIMEOUT
        with self._router.view.open_all(target) as snapshot:
            if snapshot is None:
                raise _make_not_loaded_error(target)
            header, items = snapshot
            if header.version < min_version:  # replaced after the version was checked
                raise _make_not_loaded_error(target)
            age = self._router.measure_data_age(header)
            yield responses.encode_data_headers(header.mark, responses.MEMORY, age, responses.NDJSON)
            while lines := [encode_line(item) + b"\n" for item in islice(items, _PIECE_ITEMS)]:
                if monotonic() > until:  # abort the connection, so that the client sees an incomplete response
                    raise ConnectionAbortedError("the client reads too slowly")
                yield b"".join(lines)
                await asyncio.sleep(0)  # let other tasks run

    async def _stream_changes(self, target: DictionaryKey, since: int | None) -> Pieces:
        """Send each change with its version; `reset` if changes have expired: the client must read all items again."""
        entry = self._router.find_entry(target)
        if entry is None:
            raise _make_not_loaded_error(target)
        since = entry.version if since is None else since
        yield responses.encode_data_headers(entry.header.mark, responses.MEMORY, entry.age, responses.EVENTS)
        yield b": %d\n\n" % entry.version
        is_behind = entry.version < since  # the client may have read a later version from another pod
        generation = entry.header.generation
        while not self.is_ending and (entry := self._router.find_entry(target)) is not None:
            changed = self._changed()
            if not is_behind or entry.version >= since:
                is_behind = False
                for event in self._encode_changes(entry, since, is_same=generation == entry.header.generation):
                    yield event
                since, generation = entry.version, entry.header.generation
            if not await wait_event(changed, _HEARTBEAT_INTERVAL):
                is_behind = False  # no pod is behind for so long: the version does not exist any more
                yield b":\n\n"

    def _encode_changes(self, entry: ServedDictionary, since: int, *, is_same: bool) -> Iterator[bytes]:
        """Yield the changes after *since*; a new generation with the same version number is a reset."""
        steps = self._router.view.read_changes(entry.header, since)
        if steps is None or not (steps or is_same):
            yield _encode_event("reset", entry.version, {"version": entry.version})
        for step in steps or ():
            change = {"version": step.version, "since": step.since, "keys": [key.decode() for key in step.keys]}
            yield _encode_event("change", step.version, change)


def _encode_event(kind: str, version: int, data: dict[str, object]) -> bytes:
    return b"event: %b\nid: %d\ndata: %b\n\n" % (kind.encode(), version, orjson.dumps(data))


def _make_not_loaded_error(target: DictionaryKey) -> Transient:
    return Transient("NOT_LOADED", f"{target.dict_code} is not loaded any more", hint="try again")
