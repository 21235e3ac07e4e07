"""Operations on a disk: copies with a hash, renames without replacement, locks and syncs."""

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from penstock.kernel.errors import Transient

PIECE = 1 << 20
NAME_LIMIT = 255  # bytes, what a file system and the storage port allow
_HERE = -100  # AT_FDCWD
_NO_REPLACE = 1  # RENAME_NOREPLACE
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux has it
_EARLIEST, _LATEST = datetime(1, 1, 2, tzinfo=UTC).timestamp(), datetime(9999, 12, 30, tzinfo=UTC).timestamp()
_HINTS = {
    errno.EACCES: "give the user that runs Penstock read and write access to the tree",
    errno.EPERM: "give the user that runs Penstock read and write access to the tree",
    errno.EDQUOT: "free space, or raise the quota",
    errno.ENOSPC: "free space on the disk, then run again",
    errno.EROFS: "mount the file system for writing",
}


@contextmanager
def translate_errors(path: Path | str) -> Iterator[None]:
    """Turn errors of the disk into Transient STORAGE_DOWN with a hint."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "check the folder and its disk")
        raise Transient("STORAGE_DOWN", f"{error.filename or path}: {error.strerror or error}", hint=hint) from error


def read_pieces(content: BinaryIO) -> Iterator[bytes]:
    """Yield *content* in pieces."""
    while piece := content.read(PIECE):
        yield piece


def copy_pieces(pieces: Iterable[bytes], target: Path | None) -> str:
    """Write *pieces* to *target*, and return their sha256."""
    digest = hashlib.sha256()
    with target.open("xb") if target else open(os.devnull, "wb") as out:  # noqa: PTH123
        for piece in pieces:
            digest.update(piece)
            out.write(piece)
    return digest.hexdigest()


def propose_names(name: str, suffix: str) -> Iterator[str]:
    """Yield the name, then names with the suffix: price.csv, price.csv.failed, price.csv.failed.1 …"""
    yield _limit_length(name, "")
    if suffix:
        yield _limit_length(name, suffix)
    for number in range(1, 100_000):
        yield _limit_length(name, f"{suffix}.{number}")


def _limit_length(name: str, ending: str) -> str:
    raw = os.fsencode(name)
    limit = NAME_LIMIT - len(ending)
    return f"{name if len(raw) <= limit else raw[:limit].decode(errors='ignore')}{ending}"


def move(source: Path, target: Path) -> bool:
    """Move a file to a new name; return False if the name is taken."""
    is_moved = _rename_exclusively(source, target)
    if is_moved is None:
        is_moved = _rename_reserved(source, target)
    if is_moved:
        sync_folder(target.parent)
        sync_folder(source.parent)
    return is_moved


def _rename_exclusively(source: Path, target: Path) -> bool | None:
    """Rename atomically without replacing a file; return None if the file system does not support it."""
    if _renameat2 is None:
        return None
    if _renameat2(_HERE, os.fsencode(source), _HERE, os.fsencode(target), _NO_REPLACE) == 0:
        return True
    error = ctypes.get_errno()
    if error == errno.EEXIST:
        return False
    if error in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
        return None
    raise OSError(error, os.strerror(error), str(source))


def _rename_reserved(source: Path, target: Path) -> bool:
    """Reserve the name with an empty file, then rename: a process that is killed in between loses no file."""
    try:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    except FileExistsError:
        return False
    try:
        source.rename(target)
    except OSError as error:
        try:
            if error.errno != errno.EXDEV:
                raise
            _copy_over(source, target)
        except OSError:
            target.unlink()
            raise
    return True


def _copy_over(source: Path, target: Path) -> None:
    """Copy a file to another disk; it is complete under its new name before the old name is removed."""
    draft = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        shutil.copy2(source, draft)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.rename(target)
    finally:
        draft.unlink(missing_ok=True)
    source.unlink()


def sync(out: BinaryIO) -> None:
    """Write *out* to disk."""
    out.flush()
    os.fsync(out.fileno())


def sync_folder(folder: Path) -> None:
    """Write the entries of *folder* to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_files(path: Path) -> Iterator[int | None]:
    """Lock each file below *path* and yield its descriptor; None for a file that is being read."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if not stat.S_ISREG(file.lstat().st_mode):
            continue
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            continue  # this user cannot read the file, so no reader of Penstock has it open
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            yield None
            return
        yield descriptor


@contextmanager
def make_private_folder(parent: Path, name: str) -> Iterator[Path]:
    """Create the folder *name* in *parent*; *parent* is removed before, with leftovers of killed runs, and after."""
    with translate_errors(parent):
        remove_all(parent)
        folder = parent / name
        folder.mkdir(parents=True)
    try:
        with translate_errors(folder):
            yield folder
    finally:
        with suppress(OSError):  # the next run removes it
            remove_all(parent)


def detach_folder(folder: Path, target: Path) -> Path:
    """Move a folder out of the tree before its removal, so that readers see all of it or none."""
    folder.chmod(0o755)  # a published state is read-only
    return folder.rename(target)


def remove_all(path: Path) -> None:
    """Remove a file, or a folder with its content, if it exists."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for folder in [path, *(inner for inner in path.rglob("*") if inner.is_dir() and not inner.is_symlink())]:
        folder.chmod(0o755)  # a published state is read-only
    shutil.rmtree(path)


def parse_timestamp(seconds: float) -> datetime:
    """Return the time of a timestamp, limited to the range of the calendar."""
    return datetime.fromtimestamp(min(max(seconds, _EARLIEST), _LATEST), UTC)


def read_signature(file: Path) -> str | None:
    """Return the signature of *file*; None if it does not exist."""
    try:
        return format_signature(file.lstat())
    except FileNotFoundError:
        return None


def format_signature(status: os.stat_result) -> str:
    """Return the signature of a file, which changes whenever the file is written."""
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"
