"""One listener's place in a Redis stream, kept as a consumer group of its own."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from redis.asyncio import Redis
from redis.exceptions import ResponseError

EntryId: TypeAlias = tuple[int, int]

BODY = "body"
_CONSUMER = "listener"
_BATCH = 100
_NEWS, _UNACKNOWLEDGED = ">", "0"
_COUNT_AFTER = "return #redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+')"


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """Entries in their order; *has_gap* when some before the last of them may have been trimmed unread."""

    ids: Sequence[str]
    bodies: Sequence[str]
    has_gap: bool


class ConsumerGroup:
    """Reads a stream on one connection; to be entered before it is read."""

    def __init__(self, line: "Redis", stream: str, name: str) -> None:
        self._line, self._stream, self._name = line, stream, name
        self._position: EntryId = (0, 0)
        self._cursor = _UNACKNOWLEDGED  # first what was handed to a connection that did not live to take it

    async def enter(self, *, afresh: bool) -> bool:
        """Stand where the group stood, or *afresh* at the stream's end; whether the group had to be made."""
        made = await self._make()
        if afresh and not made:  # a listener of this name died here
            await self._line.xgroup_destroy(self._stream, self._name)
            made = await self._make()
        await self._line.xgroup_createconsumer(self._stream, self._name, _CONSUMER)
        self._position = await self._delivered()
        return made

    async def read(self, wait: timedelta) -> StreamBatch:
        """What comes next, waiting for it no longer than *wait*."""
        before = self._position
        streams: Any = {self._stream: self._cursor}
        block = max(1, int(wait.total_seconds() * 1000))
        found: Any = await self._line.xreadgroup(self._name, _CONSUMER, streams, count=_BATCH, block=block)
        entries = found[0][1] if found else []
        if not entries:
            # Also a sign of life: Redis before 7.2 does not count a wait for news as one, and others would reap us.
            self._cursor = _UNACKNOWLEDGED if self._cursor == _NEWS else _NEWS
        # Asked after the read: what is not gone now was not gone then.
        gone = await self._gone()
        self._position = max(before, gone, *(_id(entry[0]) for entry in entries))
        bodies = [fields[BODY] for _, fields in entries if fields and BODY in fields]
        return StreamBatch([entry[0] for entry in entries], bodies, has_gap=gone > before)

    async def acknowledge(self, batch: StreamBatch) -> None:
        if batch.ids:
            await self._line.xack(self._stream, self._name, *batch.ids)

    async def _make(self) -> bool:
        try:
            await self._line.xgroup_create(self._stream, self._name, id="$", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
            return False
        return True

    async def _delivered(self) -> EntryId:
        for group in await self._line.xinfo_groups(self._stream):
            if group["name"] == self._name:
                return _id(group["last-delivered-id"])
        raise ResponseError(f"the group {self._name} vanished while it was entered")

    async def _gone(self) -> EntryId:
        """The highest id that may have been trimmed."""
        info: Any = await self._line.xinfo_stream(self._stream)
        if info["first-entry"] is None:
            return _id(info["last-generated-id"])
        time, number = _id(info["first-entry"][0])
        return time, number - 1


async def destroy(line: "Redis", stream: str, name: str) -> None:
    """Leave nothing of the group; it may be gone already, and the stream with it."""
    if await line.exists(stream):
        await line.xgroup_destroy(stream, name)


async def reap(line: "Redis", stream: str, prefix: str, idle: timedelta) -> list[str]:
    """Destroy the groups whose listeners gave no sign of life for *idle*; return their names."""
    reaped = []
    for group in await line.xinfo_groups(stream):
        name = str(group["name"])
        if name.startswith(f"{prefix}:"):
            with suppress(ResponseError):  # another listener was quicker
                consumers = await line.xinfo_consumers(stream, name)
                if all(consumer["idle"] > idle.total_seconds() * 1000 for consumer in consumers):
                    await line.xgroup_destroy(stream, name)
                    reaped.append(name)
    return reaped


async def lag(line: "Redis", stream: str, prefix: str) -> int:
    """How many entries the slowest group has yet to be handed; 0 without a stream."""
    try:
        groups: list[dict[str, Any]] = await line.xinfo_groups(stream)
    except ResponseError as error:
        if "no such key" not in str(error):
            raise
        return 0
    own = [group for group in groups if str(group["name"]).startswith(f"{prefix}:")]
    return max([await _lag_of(line, stream, group) for group in own], default=0)


async def _lag_of(line: "Redis", stream: str, group: dict[str, Any]) -> int:
    if group.get("lag") is not None:
        return int(group["lag"])
    # Redis before 7 does not count for us, and later ones not always.
    counted: Any = await line.eval(_COUNT_AFTER, 1, stream, group["last-delivered-id"])
    return int(counted)


def _id(text: str) -> EntryId:
    time, _, number = text.partition("-")
    return int(time), int(number)
