"""H8: the watermark's copy on object storage, for whoever reads it there."""

from datetime import UTC, datetime
from uuid import UUID

import orjson

from penstock.kernel.errors import Conflict, NotFound, PenstockError
from penstock.kernel.storage import Storage

_TRIES = 5


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
    """Write the copy, over nothing but the one that was read: who comes late must not overwrite a newer one."""
    try:
        for _ in range(_TRIES):
            if await _written(storage, path(feed), data):
                return
    except PenstockError as error:
        raise WatermarkNotSaved(f"{error.code}: {error.message}") from error
    raise WatermarkNotSaved("others write it all the time")


async def _written(storage: Storage, place: str, data: bytes) -> bool:
    try:
        known = await storage.get(place)
    except NotFound:
        known = None
    try:
        if known is None:
            await storage.create(place, data)
        elif known.data != data:
            await storage.replace(place, data, etag=known.info.etag)
    except Conflict:
        return False
    return True


def _moment(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
