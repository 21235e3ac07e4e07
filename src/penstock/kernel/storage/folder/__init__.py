"""Storage in a folder: plain files, safe for concurrent threads and processes of one machine."""

import asyncio
import errno
import shutil
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from penstock.kernel.errors import NotFound
from penstock.kernel.storage import RESERVED, ObjectInfo, StoredObject, validate_path
from penstock.kernel.storage.failures import make_changed_object_error, make_storage_down_error, measure_source
from penstock.kernel.storage.folder.files import FolderFiles

PIECE = 1 << 20
_PROBE = b"penstock"
_HINTS = {
    errno.EACCES: "allow the user that runs Penstock to read and write the folder",
    errno.EPERM: "allow the user that runs Penstock to read and write the folder",
    errno.EDQUOT: "free space or raise the quota",
    errno.ENOSPC: "free space on the disk",
    errno.EROFS: "mount the disk for writing",
}

P = ParamSpec("P")
T = TypeVar("T")


class FolderStorage:
    """The storage port on the folder *root*, which is created at the first write."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._files = FolderFiles(self._root)

    async def put(self, path: str, data: bytes) -> ObjectInfo:
        return await self._run(self._files.put, validate_path(path), lambda out: out.write(data))

    async def create(self, path: str, data: bytes) -> ObjectInfo:
        return await self._run(self._files.create, validate_path(path), data)

    async def replace(self, path: str, data: bytes, *, etag: str) -> ObjectInfo:
        return await self._run(self._files.replace, validate_path(path), data, etag)

    async def put_file(self, path: str, source: Path) -> ObjectInfo:
        return await self._run(self._copy, validate_path(path), source)

    async def get(self, path: str) -> StoredObject:
        return await self._run(self._read, validate_path(path))

    async def stream(self, path: str, *, etag: str | None = None) -> AsyncIterator[bytes]:
        # An open file keeps its content, also if another file is renamed to its name.
        file, info = await self._run(self._files.open, validate_path(path))
        with file:
            if etag not in (None, info.etag):
                raise make_changed_object_error(path)
            while piece := await self._run(file.read, PIECE):
                yield piece

    async def read_info(self, path: str) -> ObjectInfo | None:
        return await self._run(self._read_info, validate_path(path))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        waiting: list[ObjectInfo | str] = [validate_path(prefix) if prefix else ""]
        while waiting:
            entry = waiting.pop()
            if isinstance(entry, ObjectInfo):
                yield entry
            else:
                waiting += await self._run(self._files.scan, entry)

    async def delete(self, path: str) -> None:
        await self._run(self._files.delete, validate_path(path))

    def make_uri(self, path: str) -> str:
        return (self._root / validate_path(path)).as_uri()

    async def check(self) -> None:
        await self._run(self._probe)

    def _copy(self, path: str, source: Path) -> ObjectInfo:
        measure_source(source)
        with source.open("rb") as content:
            return self._files.put(path, lambda out: shutil.copyfileobj(content, out, PIECE))

    def _read(self, path: str) -> StoredObject:
        file, info = self._files.open(path)
        with file:
            return StoredObject(info, file.read())

    def _read_info(self, path: str) -> ObjectInfo | None:
        try:
            file, info = self._files.open(path)
        except NotFound:
            return None
        file.close()
        return info

    def _probe(self) -> None:
        path = f"{RESERVED}/probe-{uuid.uuid4().hex}"
        # `create`, not `put`: a file system without hard links fails here, and not at the first race.
        written = self._files.create(path, _PROBE)
        read = self._read(path).data
        self._files.delete(path)
        if read != _PROBE:
            raise make_storage_down_error(
                str(self._root), "a written object was read with other content", hint="check the disk"
            )
        self._files.remove_stale_drafts(now=written.modified_at)

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await asyncio.to_thread(work, *args, **kwargs)
        except OSError as error:
            hint = _HINTS.get(error.errno or 0, "check the folder and its disk")
            raise make_storage_down_error(str(self._root), error.strerror or str(error), hint=hint) from error
