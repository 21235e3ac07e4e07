"""H8: the watermark's copy on object storage, for whoever reads it there."""

import asyncio
from datetime import UTC, datetime
from uuid import UUID

import orjson

from penstock.kernel.errors import Conflict, NotFound, PenstockError
from penstock.kernel.storage import Storage

_TRIES = 5
_PATIENCE = 20.0  # seconds: whoever waits holds the feed meanwhile


class WatermarkNotSaved(Exception):
    """The copy could not be written."""


def path(feed: str) -> str:
    return f"harvest/{feed}/watermark.json"


def document(last_updated_at: datetime, run_id: UUID, completed_at: datetime) -> bytes:
    """The founding document's blob."""
    told = {
        "lastUpdatedAt": _moment(last_updated_at),
        "lastRunId": str(run_id),
        "lastRunCompletedAt": _moment(completed_at),
    }
    return orjson.dumps(told)


async def save(storage: Storage, feed: str, data: bytes) -> None:
    """Write the copy, over nothing but what was read and is older: who comes late must not undo a newer one."""
    try:
        async with asyncio.timeout(_PATIENCE):
            for _ in range(_TRIES):
                if await _written(storage, path(feed), data, over_newer=False):
                    return
    except TimeoutError as error:
        raise WatermarkNotSaved(f"object storage did not answer within {_PATIENCE:g} s") from error
    except PenstockError as error:
        raise WatermarkNotSaved(f"{error.code}: {error.message}") from error
    raise WatermarkNotSaved("others write it all the time")


async def restore(storage: Storage, feed: str, data: bytes | None) -> None:
    """Make the copy what the database says, also when it is ahead: a save whose transaction was lost."""
    async with asyncio.timeout(_PATIENCE):
        if data is None:
            await storage.delete(path(feed))
        else:
            await _written(storage, path(feed), data, over_newer=True)


async def _written(storage: Storage, place: str, data: bytes, *, over_newer: bool) -> bool:
    try:
        known = await storage.get(place)
    except NotFound:
        known = None
    try:
        if known is None:
            await storage.create(place, data)
        elif known.data != data and (over_newer or _reached(known.data) <= _reached(data)):
            await storage.replace(place, data, etag=known.info.etag)
    except Conflict:
        return False
    return True


def _reached(data: bytes) -> str:
    """All moments are written alike, so their texts compare as they do; what is not ours is older than anything."""
    try:
        return str(orjson.loads(data)["lastUpdatedAt"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""


def _moment(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
