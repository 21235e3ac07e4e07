"""The storage port: whole objects under deterministic paths, with create-only and conditional writes."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from penstock.kernel.errors import Invalid

PATH_LIMIT = 900
SEGMENT_LIMIT = 255  # the limit of a name in file systems
RESERVED = ".penstock"  # the first segment of internal objects, which are never listed


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The metadata of an object; *etag* identifies its content."""

    path: str
    size: int
    modified_at: datetime
    etag: str


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object with its content."""

    info: ObjectInfo
    data: bytes


class Storage(Protocol):
    """A store of whole objects: a reader sees the old or the new content, never a mixture."""

    async def put(self, path: str, data: bytes) -> ObjectInfo:
        """Create or replace an object unconditionally."""

    async def create(self, path: str, data: bytes) -> ObjectInfo:
        """Create an object; Conflict OBJECT_EXISTS if it exists. Of concurrent callers one succeeds."""

    async def replace(self, path: str, data: bytes, *, etag: str) -> ObjectInfo:
        """Replace an object with this *etag*; else Conflict OBJECT_CHANGED. Of concurrent callers one succeeds."""

    async def put_file(self, path: str, source: Path) -> ObjectInfo:
        """Create or replace an object from a file of any size, in limited memory."""

    async def get(self, path: str) -> StoredObject:
        """Return the whole object; NotFound OBJECT_NOT_FOUND if it does not exist."""

    def stream(self, path: str, *, etag: str | None = None) -> AsyncIterator[bytes]:
        """Yield the object in pieces, in limited memory; all of one content, also if it is replaced meanwhile.

        With *etag*, the content must have this etag; else Conflict OBJECT_CHANGED.
        """

    async def read_info(self, path: str) -> ObjectInfo | None:
        """Return the metadata of the object, or None if it does not exist."""

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield all objects in the folder *prefix* and below, ordered by path."""

    async def delete(self, path: str) -> None:
        """Delete the object; succeed also if it does not exist."""

    def make_uri(self, path: str) -> str:
        """Return the URI of the object for people and other programs: file:///… or s3://…"""

    async def check(self) -> None:
        """Raise Transient STORAGE_DOWN with a hint unless objects can be written and read."""


def validate_path(path: str) -> str:
    """Return *path* if it is safe in every store; else raise Invalid BAD_PATH."""
    if not is_object_path(path):
        raise Invalid(
            "BAD_PATH",
            f"{path!r} is not an object path",
            hint="use segments joined by '/', without '.', '..', '\\', control characters or a leading '/'",
        )
    return path


def is_object_path(path: str) -> bool:
    """Return whether an object can have this path in every store."""
    segments = path.split("/")
    plain = all(map(_is_plain, segments)) and "\\" not in path
    return plain and segments[0] != RESERVED and len(path.encode()) <= PATH_LIMIT


def _is_plain(segment: str) -> bool:
    """Return whether *segment* is safe; a lone surrogate is not printable, and so is never encoded."""
    return segment not in ("", ".", "..") and segment.isprintable() and len(segment.encode()) <= SEGMENT_LIMIT
