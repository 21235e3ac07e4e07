"""Storage in a bucket: S3 and compatible stores, Google Cloud Storage, Azure Blob Storage."""

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
from penstock.kernel.storage import RESERVED, ObjectInfo, StoredObject, is_object_path, validate_path
from penstock.kernel.storage.failures import (
    make_changed_object_error,
    make_existing_object_error,
    make_missing_object_error,
    make_storage_down_error,
    measure_source,
)
from penstock.kernel.storage.objects.bucket import open_bucket

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, UpdateVersion

PIECE = 1 << 20
PART = 8 << 20
_PARTS = 9_000  # the limit of S3 is 10 000
_PARTS_AT_ONCE = 4
_PAGE = 1_000
_PROBE = b"penstock"
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")


class ObjectStorage:
    """The storage port on the bucket and the prefix in *url*; the store itself checks conditional writes."""

    def __init__(self, url: str, options: Mapping[str, str], *, clock: Clock | None = None) -> None:
        self._url = url.rstrip("/")
        self._store = open_bucket(url, options)
        self._clock = clock or SystemClock()

    async def put(self, path: str, data: bytes) -> ObjectInfo:
        return await self._put(validate_path(path), data, len(data), "overwrite")

    async def create(self, path: str, data: bytes) -> ObjectInfo:
        return await self._put(validate_path(path), data, len(data), "create")

    async def replace(self, path: str, data: bytes, *, etag: str) -> ObjectInfo:
        try:
            guard = await self._guard(validate_path(path), etag)
            return await self._put(path, data, len(data), guard)
        except (Conflict, NotFound) as error:
            # S3 may answer "exists" to concurrent conditional writes.
            raise make_changed_object_error(path) from error

    async def put_file(self, path: str, source: Path) -> ObjectInfo:
        size = await asyncio.to_thread(measure_source, source)
        return await self._put(validate_path(path), source, size, "overwrite")

    async def get(self, path: str) -> StoredObject:
        with self._translate_errors(validate_path(path)):
            response = await obstore.get_async(self._store, path)
            return StoredObject(_make_info(response.meta), bytes(await response.bytes_async()))

    async def stream(self, path: str, *, etag: str | None = None) -> AsyncIterator[bytes]:
        with self._translate_errors(validate_path(path)):
            # One request returns one content; after an interruption the client continues only with the same etag.
            response = await obstore.get_async(self._store, path, options={"if_match": etag} if etag else None)
            async for piece in response.stream(min_chunk_size=PIECE):
                yield bytes(piece)

    async def read_info(self, path: str) -> ObjectInfo | None:
        try:
            with self._translate_errors(validate_path(path)):
                return _make_info(await obstore.head_async(self._store, path))
        except NotFound:
            return None

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        folder = validate_path(prefix) + "/" if prefix else ""
        with self._translate_errors(prefix):
            async for page in obstore.list(self._store, prefix or None, chunk_size=_PAGE):
                for meta in page:
                    inside = meta["path"].startswith(folder) and is_object_path(meta["path"])
                    # Consoles show a folder by an empty object "folder/", which the client lists as "folder".
                    is_marker = inside and meta["size"] == 0 and await self.read_info(meta["path"]) is None
                    if inside and not is_marker:
                        yield _make_info(meta)

    async def delete(self, path: str) -> None:
        await self._delete(validate_path(path))

    def make_uri(self, path: str) -> str:
        return f"{self._url}/{validate_path(path)}"

    async def check(self) -> None:
        path = f"{RESERVED}/probe-{uuid.uuid4().hex}"
        await self._put(path, _PROBE, len(_PROBE), "create")
        with self._translate_errors(path):
            response = await obstore.get_async(self._store, path)
            read = bytes(await response.bytes_async())
        await self._delete(path)
        if read != _PROBE:
            raise make_storage_down_error(
                self._url, "a written object was read with other content", hint="check the bucket"
            )

    async def _put(self, path: str, content: bytes | Path, size: int, mode: "PutMode") -> ObjectInfo:
        part = max(PART, size // _PARTS)
        try:
            with self._translate_errors(path):
                written = await obstore.put_async(
                    self._store, path, content, mode=mode, chunk_size=part, max_concurrency=_PARTS_AT_ONCE
                )
        except NotFound as error:
            raise self._make_down_error("the bucket does not exist") from error
        # The answer contains no time, and another request could fail after the write has succeeded.
        return ObjectInfo(path, size, self._clock.now(), written["e_tag"] or "")

    async def _guard(self, path: str, etag: str) -> "UpdateVersion":
        """Return the condition that the store compares: the etag, or on Google the generation with this etag."""
        if not isinstance(self._store, GCSStore):
            return {"e_tag": etag}
        with self._translate_errors(path):
            response = await obstore.head_async(self._store, path)
        if response["e_tag"] != etag:
            raise make_changed_object_error(path)
        return {"version": response["version"]}

    async def _delete(self, path: str) -> None:
        try:
            with self._translate_errors(path):
                await obstore.delete_async(self._store, path)
        except NotFound:
            return

    @contextmanager
    def _translate_errors(self, path: str) -> Iterator[None]:
        """Translate the errors of the client."""
        try:
            yield
        except (BaseError, OSError) as error:
            raise self._translate(path, error) from error

    def _translate(self, path: str, error: Exception) -> PenstockError:
        message = str(error)
        if not any(word in message for word in _NO_BUCKET):
            if isinstance(error, FileNotFoundError):
                return make_missing_object_error(path)
            if isinstance(error, AlreadyExistsError):
                return make_existing_object_error(path)
            if isinstance(error, PreconditionError):
                return make_changed_object_error(path)
        # Without internal details of the client, and without queries of URLs, which may contain a signature.
        return self._make_down_error(re.sub(r"\?\S*", "", message.partition("\n")[0]))

    def _make_down_error(self, reason: str) -> Transient:
        return make_storage_down_error(self._url, reason, hint="check endpoint, bucket, region and credentials")


def _make_info(meta: "ObjectMeta") -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["last_modified"], meta["e_tag"] or "")
