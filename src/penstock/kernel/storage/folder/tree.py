"""Files below one folder, reached segment by segment, so that no link ever leads out of it."""

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
    """The descriptor of a folder below *root*; *make* creates what is missing of it, durably.

    FileNotFoundError when there is none; Invalid BAD_PATH when a link is on the way, or an object to *make*.
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
    """The descriptor of a regular file in *folder*; FileNotFoundError when it is none."""
    found = _look(folder, name)
    if found is None or not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a file", name)
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def present_file(folder: int, name: str) -> os.stat_result | None:
    """What lies where an object shall go; Invalid BAD_PATH when that is a folder or a link."""
    found = _look(folder, name)
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise _bad_path(name, "a folder of other objects")
    return found


def remove_file(folder: int, name: str) -> None:
    """Remove a regular file, durably; whatever else has that name is not an object and stays."""
    found = _look(folder, name)
    if found is not None and stat.S_ISREG(found.st_mode):
        os.unlink(name, dir_fd=folder)
        os.fsync(folder)


def remove_empty(root: Path, segments: Sequence[str]) -> None:
    """Remove the folder and those above it, as far as nothing is in them; *root* stays."""
    for depth in range(len(segments), 0, -1):
        try:
            with open_folder(root, segments[: depth - 1]) as above:
                os.rmdir(segments[depth - 1], dir_fd=above)
        except OSError:
            # In use again, or somebody else removed it: both are as good.
            return


def _enter(folder: int, name: str, *, make: bool) -> int:
    _look(folder, name)
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
            os.fsync(folder)
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError as error:
        if make:
            raise _bad_path(name, "an object, not a folder") from error
        raise FileNotFoundError(errno.ENOENT, "not a folder", name) from error


def _look(folder: int, name: str) -> os.stat_result | None:
    """What lies under *name*; Invalid BAD_PATH when it is a symbolic link, wherever that leads."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        raise _bad_path(name, "a symbolic link")
    return found


def _bad_path(name: str, what: str) -> Invalid:
    return Invalid("BAD_PATH", f"{name} is {what}", hint="give the object another path")
