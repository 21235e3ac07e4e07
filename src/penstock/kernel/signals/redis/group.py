"""The position of a listener in a Redis stream, stored as a consumer group."""

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
_NEW, _UNACKNOWLEDGED = ">", "0"
_COUNT_AFTER = "return #redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+')"


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """Entries in order; *has_gap* if entries before the last of them may have been trimmed unread."""

    ids: Sequence[str]
    bodies: Sequence[str]
    has_gap: bool


class ConsumerGroup:
    """A consumer group on one connection; call `join` before `read`."""

    def __init__(self, connection: "Redis", stream: str, name: str) -> None:
        self._connection, self._stream, self._name = connection, stream, name
        self._position: EntryId = (0, 0)
        self._cursor = _UNACKNOWLEDGED  # first the entries that a broken connection received

    async def join(self, *, at_end: bool) -> bool:
        """Continue at the position of the group, or *at_end* of the stream; return whether the group was created."""
        is_created = await self._create()
        if at_end and not is_created:  # left by a dead listener with this name
            await self._connection.xgroup_destroy(self._stream, self._name)
            is_created = await self._create()
        await self._connection.xgroup_createconsumer(self._stream, self._name, _CONSUMER)
        self._position = await self._read_position()
        return is_created

    async def read(self, wait: timedelta) -> StreamBatch:
        """Return the next entries; wait up to *wait* for the first."""
        before = self._position
        streams: Any = {self._stream: self._cursor}
        block = max(1, int(wait.total_seconds() * 1000))
        response: Any = await self._connection.xreadgroup(self._name, _CONSUMER, streams, count=_BATCH, block=block)
        entries = response[0][1] if response else []
        if not entries:
            # Reads of both kinds alternate: Redis before 7.2 does not count a wait for new entries as activity, and
            # the group would be reaped.
            self._cursor = _UNACKNOWLEDGED if self._cursor == _NEW else _NEW
        # After the read: an entry that is not trimmed now was not trimmed then.
        trimmed = await self._read_trimmed()
        self._position = max(before, trimmed, *(_parse_id(entry[0]) for entry in entries))
        bodies = [fields[BODY] for _, fields in entries if fields and BODY in fields]
        return StreamBatch([entry[0] for entry in entries], bodies, has_gap=trimmed > before)

    async def acknowledge(self, batch: StreamBatch) -> None:
        if batch.ids:
            await self._connection.xack(self._stream, self._name, *batch.ids)

    async def _create(self) -> bool:
        try:
            await self._connection.xgroup_create(self._stream, self._name, id="$", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
            return False
        return True

    async def _read_position(self) -> EntryId:
        for group in await self._connection.xinfo_groups(self._stream):
            if group["name"] == self._name:
                return _parse_id(group["last-delivered-id"])
        raise ResponseError(f"the group {self._name} was deleted while it was joined")

    async def _read_trimmed(self) -> EntryId:
        """Return the highest id that may have been trimmed."""
        info: Any = await self._connection.xinfo_stream(self._stream)
        if info["first-entry"] is None:
            return _parse_id(info["last-generated-id"])
        time, number = _parse_id(info["first-entry"][0])
        return time, number - 1


async def destroy(connection: "Redis", stream: str, name: str) -> None:
    """Delete the group; it may be deleted already, and the stream too."""
    if await connection.exists(stream):
        await connection.xgroup_destroy(stream, name)


async def reap(connection: "Redis", stream: str, prefix: str, idle: timedelta) -> list[str]:
    """Delete the groups whose listeners were inactive for *idle*, and return their names."""
    reaped = []
    for group in await connection.xinfo_groups(stream):
        name = str(group["name"])
        if name.startswith(f"{prefix}:"):
            with suppress(ResponseError):  # another listener has deleted it
                consumers = await connection.xinfo_consumers(stream, name)
                if all(consumer["idle"] > idle.total_seconds() * 1000 for consumer in consumers):
                    await connection.xgroup_destroy(stream, name)
                    reaped.append(name)
    return reaped


async def measure_lag(connection: "Redis", stream: str, prefix: str) -> int:
    """Return the number of entries that the slowest group has not received; 0 without a stream."""
    try:
        groups: list[dict[str, Any]] = await connection.xinfo_groups(stream)
    except ResponseError as error:
        if "no such key" not in str(error):
            raise
        return 0
    own = [group for group in groups if str(group["name"]).startswith(f"{prefix}:")]
    return max([await _count_unread(connection, stream, group) for group in own], default=0)


async def _count_unread(connection: "Redis", stream: str, group: dict[str, Any]) -> int:
    if group.get("lag") is not None:
        return int(group["lag"])
    # Redis before 7 does not report the lag, and later versions not always.
    counted: Any = await connection.eval(_COUNT_AFTER, 1, stream, group["last-delivered-id"])
    return int(counted)


def _parse_id(text: str) -> EntryId:
    time, _, number = text.partition("-")
    return int(time), int(number)
