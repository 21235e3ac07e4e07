"""Objects as files: written to a draft, synced, then renamed. A crash leaves the old or the new content."""

import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

from penstock.kernel.storage import RESERVED, ObjectInfo, is_object_path
from penstock.kernel.storage.failures import (
    make_changed_object_error,
    make_existing_object_error,
    make_missing_object_error,
)
from penstock.kernel.storage.folder.tree import find_file, open_file, open_folder, remove_empty, remove_file

STALE_AFTER = timedelta(days=1)
_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class FileDraft:
    """The complete content on disk, not renamed yet."""

    file: Path
    status: os.stat_result


class FolderFiles:
    """The blocking functions of a folder's storage; errors of the disk are OSError."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._drafts = root / RESERVED / "drafts"
        self._locks = root / RESERVED / "locks"

    def put(self, path: str, fill: Callable[[BinaryIO], object]) -> ObjectInfo:
        def rename(draft: FileDraft, folder: int, name: str, _: os.stat_result | None) -> None:
            os.replace(draft.file, name, dst_dir_fd=folder)

        with self._open_draft(fill) as draft, self._hold_lock(path):
            return self._name_draft(path, draft, rename)

    def create(self, path: str, data: bytes) -> ObjectInfo:
        def link(draft: FileDraft, folder: int, name: str, current: os.stat_result | None) -> None:
            if current is not None:
                raise make_existing_object_error(path)
            try:
                # Unlike a rename, a link never replaces a file that another process has just created.
                os.link(draft.file, name, dst_dir_fd=folder)
            except FileExistsError as error:
                raise make_existing_object_error(path) from error

        with self._open_draft(lambda out: out.write(data)) as draft:
            return self._name_draft(path, draft, link)

    def replace(self, path: str, data: bytes, etag: str) -> ObjectInfo:
        def rename_over(draft: FileDraft, folder: int, name: str, current: os.stat_result | None) -> None:
            if current is None or _make_etag(current) != etag:
                raise make_changed_object_error(path)
            os.replace(draft.file, name, dst_dir_fd=folder)

        with self._open_draft(lambda out: out.write(data)) as draft, self._hold_lock(path):
            return self._name_draft(path, draft, rename_over)

    def open(self, path: str) -> tuple[BinaryIO, ObjectInfo]:
        """Return the open object and its metadata; NotFound if it does not exist."""
        *folders, name = path.split("/")
        try:
            with open_folder(self._root, folders) as folder:
                opened = open_file(folder, name)
        except FileNotFoundError as error:
            raise make_missing_object_error(path) from error
        return os.fdopen(opened, "rb"), _make_info(path, os.fstat(opened))

    def scan(self, folder: str) -> list[ObjectInfo | str]:
        """Return the objects and the paths of the folders directly in *folder*, in descending order."""
        segments = folder.split("/") if folder else []
        try:
            with open_folder(self._root, segments) as opened, os.scandir(opened) as entries:
                items = [item for entry in entries if (item := _make_item(entry, [*segments, entry.name]))]
        except FileNotFoundError:
            return []
        # "a.b" is before "a/b", so a folder is sorted with a slash.
        return sorted(items, key=lambda item: item + "/" if isinstance(item, str) else item.path, reverse=True)

    def delete(self, path: str) -> None:
        *folders, name = path.split("/")
        with self._hold_lock(path), suppress(FileNotFoundError), open_folder(self._root, folders) as folder:
            remove_file(folder, name)
        remove_empty(self._root, folders)

    def remove_stale_drafts(self, now: datetime) -> None:
        """Delete the drafts of writers that were killed more than a day ago."""
        before = (now - STALE_AFTER).timestamp()
        for draft in self._drafts.iterdir():
            with suppress(FileNotFoundError):
                if draft.stat().st_mtime < before:
                    draft.unlink()

    def _name_draft(
        self, path: str, draft: FileDraft, act: Callable[[FileDraft, int, str, os.stat_result | None], None]
    ) -> ObjectInfo:
        """Give the draft its name with *act*, durably."""
        *folders, name = path.split("/")
        for _ in range(_ATTEMPTS):
            # A concurrent deletion may remove the empty folder between its creation and its use.
            with suppress(FileNotFoundError), open_folder(self._root, folders, make=True) as folder:
                act(draft, folder, name, find_file(folder, name))
                os.fsync(folder)
                return _make_info(path, draft.status)
        raise FileNotFoundError(f"the folder of {path} was deleted each time it was created")

    @contextmanager
    def _open_draft(self, fill: Callable[[BinaryIO], object]) -> Iterator[FileDraft]:
        """Yield a synced file that is not listed; it is deleted at the end unless it was renamed."""
        self._drafts.mkdir(parents=True, exist_ok=True)
        file = self._drafts / uuid.uuid4().hex
        try:
            with file.open("xb") as out:
                fill(out)
                out.flush()
                # The kernel updates file times in steps of milliseconds, and reuses inode numbers at once:
                # only an explicit time makes the etag unique for this content.
                now = time.time_ns()
                os.utime(out.fileno(), ns=(now, now))
                os.fsync(out.fileno())
                status = os.fstat(out.fileno())
            yield FileDraft(file, status)
        finally:
            file.unlink(missing_ok=True)

    @contextmanager
    def _hold_lock(self, path: str) -> Iterator[None]:
        """Lock *path* among the threads and processes of this machine."""
        self._locks.mkdir(parents=True, exist_ok=True)
        stripe = hashlib.sha256(path.encode()).hexdigest()[:2]
        lock = os.open(self._locks / stripe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _make_item(entry: os.DirEntry[str], segments: list[str]) -> ObjectInfo | str | None:
    """Return the object or the path of the folder; None for links, devices and names that no object can have."""
    path = "/".join(segments)
    if not is_object_path(path):
        return None
    if entry.is_dir(follow_symlinks=False):
        return path
    with suppress(FileNotFoundError):
        if entry.is_file(follow_symlinks=False):
            return _make_info(path, entry.stat(follow_symlinks=False))
    return None


def _make_info(path: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(path, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC), _make_etag(status))


def _make_etag(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
