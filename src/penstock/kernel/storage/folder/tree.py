"""Files below one folder, opened segment by segment, so that no symbolic link can lead out of it."""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.kernel.errors import Invalid

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def open_folder(root: Path, segments: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """Yield the descriptor of a folder below *root*; with *make*, missing folders are created durably.

    FileNotFoundError if it does not exist; Invalid BAD_PATH if the path contains a link or, with *make*, an object.
    """
    if make:
        root.mkdir(parents=True, exist_ok=True)
    folder = os.open(root, _FOLDER)
    try:
        for name in segments:
            inner = _enter(folder, name, make=make)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def open_file(folder: int, name: str) -> int:
    """Return the descriptor of a regular file in *folder*; FileNotFoundError if there is none."""
    status = _read_status(folder, name)
    if status is None or not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a file", name)
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def find_file(folder: int, name: str) -> os.stat_result | None:
    """Return the status of the file *name*, if it exists; Invalid BAD_PATH if it is a folder or a link."""
    status = _read_status(folder, name)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise _make_path_error(name, "a folder of other objects")
    return status


def remove_file(folder: int, name: str) -> None:
    """Delete a regular file durably; other entries with that name are not objects, and remain."""
    status = _read_status(folder, name)
    if status is not None and stat.S_ISREG(status.st_mode):
        os.unlink(name, dir_fd=folder)
        os.fsync(folder)


def remove_empty(root: Path, segments: Sequence[str]) -> None:
    """Delete the folder and its parents up to *root*, as far as they are empty."""
    for depth in range(len(segments), 0, -1):
        try:
            with open_folder(root, segments[: depth - 1]) as above:
                os.rmdir(segments[depth - 1], dir_fd=above)
        except OSError:
            return  # used again, or deleted by another process


def _enter(folder: int, name: str, *, make: bool) -> int:
    _read_status(folder, name)
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
            os.fsync(folder)
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError as error:
        if make:
            raise _make_path_error(name, "an object, not a folder") from error
        raise FileNotFoundError(errno.ENOENT, "not a folder", name) from error


def _read_status(folder: int, name: str) -> os.stat_result | None:
    """Return the status of *name*, if it exists; Invalid BAD_PATH if it is a symbolic link."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):
        raise _make_path_error(name, "a symbolic link")
    return status


def _make_path_error(name: str, kind: str) -> Invalid:
    return Invalid("BAD_PATH", f"{name} is {kind}", hint="use another path for the object")
