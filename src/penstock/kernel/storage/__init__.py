"""The storage port: objects under deterministic paths, replaced only by whoever saw what they replace."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from penstock.kernel.errors import Invalid

PATH_LIMIT = 900
SEGMENT_LIMIT = 255  # what a file system allows one name
RESERVED = ".penstock"  # the first segment of what a store keeps for itself; never listed


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing tells of an object; *etag* names exactly this content of it."""

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
    """Whole objects only: a reader sees the old content or the new, never a mixture."""

    async def put(self, path: str, data: bytes) -> ObjectInfo:
        """Write or replace, whoever wrote before."""

    async def create(self, path: str, data: bytes) -> ObjectInfo:
        """Write only where nothing is; else Conflict OBJECT_EXISTS. Of many callers one wins."""

    async def replace(self, path: str, data: bytes, *, etag: str) -> ObjectInfo:
        """Write only over the content *etag* names; else Conflict OBJECT_CHANGED. Of many one wins."""

    async def put_file(self, path: str, source: Path) -> ObjectInfo:
        """Write or replace from a file of any size, in bounded memory."""

    async def get(self, path: str) -> StoredObject:
        """The whole object; NotFound OBJECT_NOT_FOUND when there is none."""

    def stream(self, path: str, *, etag: str | None = None) -> AsyncIterator[bytes]:
        """The object in pieces, in bounded memory; all of one content even when it is replaced meanwhile.

        With *etag* just the content it names; else Conflict OBJECT_CHANGED.
        """

    async def info(self, path: str) -> ObjectInfo | None:
        """What is known of the object, or None when there is none."""

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Every object whose path begins with the folder *prefix* (whole segments), ordered by path."""

    async def delete(self, path: str) -> None:
        """Remove it; removing what is not there is a success."""

    def uri(self, path: str) -> str:
        """Where the object is, for people and other programs: file:///… or s3://…"""

    async def check(self) -> None:
        """Raise Transient STORAGE_DOWN with a hint unless objects can be written and read."""


def checked_path(path: str) -> str:
    """*path* itself when it is safe in every store; else Invalid BAD_PATH."""
    if not is_object_path(path):
        raise Invalid(
            "BAD_PATH",
            f"{path!r} is not an object path",
            hint="use segments joined by '/', without '.', '..', '\\', control characters or a leading '/'",
        )
    return path


def is_object_path(path: str) -> bool:
    """Whether an object can have this path in every store."""
    segments = path.split("/")
    plain = all(map(_is_plain, segments)) and "\\" not in path
    return plain and segments[0] != RESERVED and len(path.encode()) <= PATH_LIMIT


def _is_plain(segment: str) -> bool:
    """Printable comes first: a lone surrogate is not, and cannot be encoded."""
    return segment not in ("", ".", "..") and segment.isprintable() and len(segment.encode()) <= SEGMENT_LIMIT
