"""H8: the copy of the watermark on object storage, for other systems."""

import asyncio
from datetime import UTC, datetime
from uuid import UUID

import orjson

from penstock.kernel.errors import Conflict, NotFound, PenstockError
from penstock.kernel.storage import Storage

_ATTEMPTS = 5
_TIMEOUT = 20.0  # seconds; the feed is locked in the meantime


class WatermarkNotSaved(Exception):
    """The copy could not be written."""


def make_blob_path(feed: str) -> str:
    return f"harvest/{feed}/watermark.json"


def make_document(last_updated_at: datetime, run_id: UUID, completed_at: datetime) -> bytes:
    """Return the blob in the form of the founding document."""
    document = {
        "lastUpdatedAt": _format_time(last_updated_at),
        "lastRunId": str(run_id),
        "lastRunCompletedAt": _format_time(completed_at),
    }
    return orjson.dumps(document)


async def save(storage: Storage, feed: str, data: bytes) -> None:
    """Write the copy with a compare-and-set, and never replace a newer one: this writer may be late."""
    try:
        async with asyncio.timeout(_TIMEOUT):
            for _ in range(_ATTEMPTS):
                if await _write(storage, make_blob_path(feed), data, over_newer=False):
                    return
    except TimeoutError as error:
        raise WatermarkNotSaved(f"object storage did not respond within {_TIMEOUT:g} s") from error
    except PenstockError as error:
        raise WatermarkNotSaved(f"{error.code}: {error.message}") from error
    raise WatermarkNotSaved(f"{make_blob_path(feed)} was changed concurrently in {_ATTEMPTS} attempts")


async def restore(storage: Storage, feed: str, data: bytes | None) -> None:
    """Write the watermark of the database, also over a newer copy, whose transaction was rolled back."""
    async with asyncio.timeout(_TIMEOUT):
        if data is None:
            await storage.delete(make_blob_path(feed))
        else:
            await _write(storage, make_blob_path(feed), data, over_newer=True)


async def _write(storage: Storage, path: str, data: bytes, *, over_newer: bool) -> bool:
    try:
        stored = await storage.get(path)
    except NotFound:
        stored = None
    try:
        if stored is None:
            await storage.create(path, data)
        elif stored.data != data and (over_newer or _read_watermark(stored.data) <= _read_watermark(data)):
            await storage.replace(path, data, etag=stored.info.etag)
    except Conflict:
        return False
    return True


def _read_watermark(data: bytes) -> str:
    """Return the watermark as text, which sorts by time; an invalid blob is older than every watermark."""
    try:
        return str(orjson.loads(data)["lastUpdatedAt"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""


def _format_time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
