"""Storage in a bucket: S3 and what speaks it, Google Cloud Storage, Azure Blob Storage."""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import GCSStore

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import Conflict, NotFound, PenstockError, Transient
from penstock.kernel.storage import RESERVED, ObjectInfo, StoredObject, checked_path, is_object_path
from penstock.kernel.storage.failures import changed_object, existing_object, missing_object, source_size, storage_down
from penstock.kernel.storage.objects.bucket import open_bucket

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, UpdateVersion

PIECE = 1 << 20
PART = 8 << 20
_PARTS = 9_000  # S3 takes 10 000 of them
_PARTS_AT_ONCE = 4
_PAGE = 1_000
_PROBE = b"penstock"
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")


class ObjectStorage:
    """The storage port over the bucket and prefix *url* names; conditions are kept by the store itself."""

    def __init__(self, url: str, options: Mapping[str, str], *, clock: Clock | None = None) -> None:
        self._url = url.rstrip("/")
        self._store = open_bucket(url, options)
        self._clock = clock or SystemClock()

    async def put(self, path: str, data: bytes) -> ObjectInfo:
        return await self._put(checked_path(path), data, len(data), "overwrite")

    async def create(self, path: str, data: bytes) -> ObjectInfo:
        return await self._put(checked_path(path), data, len(data), "create")

    async def replace(self, path: str, data: bytes, *, etag: str) -> ObjectInfo:
        try:
            guard = await self._guard(checked_path(path), etag)
            return await self._put(path, data, len(data), guard)
        except (Conflict, NotFound) as error:
            # S3 may answer "exists" when two conditional writes meet.
            raise changed_object(path) from error

    async def put_file(self, path: str, source: Path) -> ObjectInfo:
        size = await asyncio.to_thread(source_size, source)
        return await self._put(checked_path(path), source, size, "overwrite")

    async def get(self, path: str) -> StoredObject:
        with self._reported(checked_path(path)):
            found = await obstore.get_async(self._store, path)
            return StoredObject(_info(found.meta), bytes(await found.bytes_async()))

    async def stream(self, path: str, *, etag: str | None = None) -> AsyncIterator[bytes]:
        with self._reported(checked_path(path)):
            # One request is one content; after a break the client goes on only with the same etag.
            found = await obstore.get_async(self._store, path, options={"if_match": etag} if etag else None)
            async for piece in found.stream(min_chunk_size=PIECE):
                yield bytes(piece)

    async def info(self, path: str) -> ObjectInfo | None:
        try:
            with self._reported(checked_path(path)):
                return _info(await obstore.head_async(self._store, path))
        except NotFound:
            return None

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        folder = checked_path(prefix) + "/" if prefix else ""
        with self._reported(prefix):
            async for page in obstore.list(self._store, prefix or None, chunk_size=_PAGE):
                for found in page:
                    inside = found["path"].startswith(folder) and is_object_path(found["path"])
                    # Consoles show a folder by an empty object "folder/", which the client lists as "folder".
                    is_marker = inside and found["size"] == 0 and await self.info(found["path"]) is None
                    if inside and not is_marker:
                        yield _info(found)

    async def delete(self, path: str) -> None:
        await self._delete(checked_path(path))

    def uri(self, path: str) -> str:
        return f"{self._url}/{checked_path(path)}"

    async def check(self) -> None:
        path = f"{RESERVED}/probe-{uuid.uuid4().hex}"
        await self._put(path, _PROBE, len(_PROBE), "create")
        with self._reported(path):
            found = await obstore.get_async(self._store, path)
            read = bytes(await found.bytes_async())
        await self._delete(path)
        if read != _PROBE:
            raise storage_down(self._url, "what is read is not what was written", hint="check the bucket")

    async def _put(self, path: str, content: bytes | Path, size: int, mode: "PutMode") -> ObjectInfo:
        part = max(PART, size // _PARTS)
        try:
            with self._reported(path):
                written = await obstore.put_async(
                    self._store, path, content, mode=mode, chunk_size=part, max_concurrency=_PARTS_AT_ONCE
                )
        except NotFound as error:
            raise self._down("the bucket is not there") from error
        # The answer tells no time, and asking again could fail after the write has succeeded.
        return ObjectInfo(path, size, self._clock.now(), written["e_tag"] or "")

    async def _guard(self, path: str, etag: str) -> "UpdateVersion":
        """What the store compares: the etag, but Google the generation that bears it."""
        if not isinstance(self._store, GCSStore):
            return {"e_tag": etag}
        with self._reported(path):
            found = await obstore.head_async(self._store, path)
        if found["e_tag"] != etag:
            raise changed_object(path)
        return {"version": found["version"]}

    async def _delete(self, path: str) -> None:
        try:
            with self._reported(path):
                await obstore.delete_async(self._store, path)
        except NotFound:
            return

    @contextmanager
    def _reported(self, path: str) -> Iterator[None]:
        """Failures of the client, in our words."""
        try:
            yield
        except (BaseError, OSError) as error:
            raise self._failure(path, error) from error

    def _failure(self, path: str, error: Exception) -> PenstockError:
        message = str(error)
        if not any(word in message for word in _NO_BUCKET):
            if isinstance(error, FileNotFoundError):
                return missing_object(path)
            if isinstance(error, AlreadyExistsError):
                return existing_object(path)
            if isinstance(error, PreconditionError):
                return changed_object(path)
        # Without the client's inner life, and without queries, which may carry a signature.
        return self._down(re.sub(r"\?\S*", "", message.partition("\n")[0]))

    def _down(self, why: str) -> Transient:
        return storage_down(self._url, why, hint="check endpoint, bucket, region and credentials")


def _info(found: "ObjectMeta") -> ObjectInfo:
    return ObjectInfo(found["path"], found["size"], found["last_modified"], found["e_tag"] or "")
