"""What a tree on a disk is made of: copies that are hashed, renames that replace nothing, and what is synced."""

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
    errno.EACCES: "let the user Penstock runs as read and write the tree",
    errno.EPERM: "let the user Penstock runs as read and write the tree",
    errno.EDQUOT: "free space or raise the quota",
    errno.ENOSPC: "free space on the disk, then run again",
    errno.EROFS: "mount the disk for writing",
}


@contextmanager
def reported(place: Path | str) -> Iterator[None]:
    """Failures of the disk, in our words."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "check the folder and its disk")
        raise Transient("STORAGE_DOWN", f"{error.filename or place}: {error.strerror or error}", hint=hint) from error


def pieces(content: BinaryIO) -> Iterator[bytes]:
    while piece := content.read(PIECE):
        yield piece


def copied(pieces: Iterable[bytes], target: Path | None) -> str:
    """The sha256 of all of *pieces*, written to *target* in the same go."""
    digest = hashlib.sha256()
    with target.open("xb") if target else open(os.devnull, "wb") as out:  # noqa: PTH123
        for piece in pieces:
            digest.update(piece)
            out.write(piece)
    return digest.hexdigest()


def propose_names(name: str, suffix: str) -> Iterator[str]:
    """The name itself, then others that tell what happened: price.csv, price.csv.failed, price.csv.failed.1 …"""
    yield _within_limit(name, "")
    if suffix:
        yield _within_limit(name, suffix)
    for number in range(1, 100_000):
        yield _within_limit(name, f"{suffix}.{number}")


def _within_limit(name: str, ending: str) -> str:
    whole = os.fsencode(name)
    room = NAME_LIMIT - len(ending)
    return f"{name if len(whole) <= room else whole[:room].decode(errors='ignore')}{ending}"


def move(source: Path, target: Path) -> bool:
    """Move a file to a name that nobody has; False when somebody has it."""
    is_moved = _rename_alone(source, target)
    if is_moved is None:
        is_moved = _rename_reserved(source, target)
    if is_moved:
        sync_folder(target.parent)
        sync_folder(source.parent)
    return is_moved


def _rename_alone(source: Path, target: Path) -> bool | None:
    """Rename in one go, replacing nothing; None where that cannot be done."""
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
    """Take the name first: whoever is killed before the rename leaves an empty file there, and loses none."""
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
    """An inbox on another disk: whole under its new name before the old one goes."""
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
    out.flush()
    os.fsync(out.fileno())


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def held(place: Path) -> Iterator[int | None]:
    """A lock on each file below *place*, None for one that somebody reads."""
    for file in [place] if place.is_file() else sorted(place.rglob("*")):
        if not stat.S_ISREG(file.lstat().st_mode):
            continue
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            continue  # what we may not read, nobody reads by our ways
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            yield None
            return
        yield descriptor


@contextmanager
def private(place: Path, name: str) -> Iterator[Path]:
    """A folder *name* in *place*, which is emptied before and after: what is in it is of a run that was killed."""
    with reported(place):
        remove_all(place)
        folder = place / name
        folder.mkdir(parents=True)
    try:
        with reported(folder):
            yield folder
    finally:
        with suppress(OSError):  # the next run does it
            remove_all(place)


def set_aside(folder: Path, place: Path) -> Path:
    """Move a folder to where nobody looks, so that it is there whole or not at all."""
    folder.chmod(0o755)  # a published state is read-only
    return folder.rename(place)


def remove_all(place: Path) -> None:
    if not place.is_dir() or place.is_symlink():
        place.unlink(missing_ok=True)
        return
    for folder in [place, *(path for path in place.rglob("*") if path.is_dir() and not path.is_symlink())]:
        folder.chmod(0o755)  # a published state is read-only
    shutil.rmtree(place)


def moment(seconds: float) -> datetime:
    """When that was; what no calendar has, whoever set it, is as far away as possible."""
    return datetime.fromtimestamp(min(max(seconds, _EARLIEST), _LATEST), UTC)


def read_signature(file: Path) -> str | None:
    try:
        return signature(file.lstat())
    except FileNotFoundError:
        return None


def signature(known: os.stat_result) -> str:
    return f"{known.st_size}-{known.st_mtime_ns}-{known.st_ino}"
