"""What a tree on a disk is made of: copies that are hashed, renames that replace nothing, and what is synced."""

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PIECE = 1 << 20


def copied(content: BinaryIO, target: Path | None) -> str:
    digest = hashlib.sha256()
    with target.open("xb") if target else open(os.devnull, "wb") as out:  # noqa: PTH123
        while piece := content.read(PIECE):
            digest.update(piece)
            out.write(piece)
    return digest.hexdigest()


def free_names(name: str, suffix: str) -> Iterator[str]:
    """The name itself, then others that tell what happened: price.csv, price.csv.failed, price.csv.failed.1 …"""
    yield name
    if suffix:
        yield f"{name}{suffix}"
    for number in range(1, 100_000):
        yield f"{name}{suffix}.{number}"


def rename(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            target.unlink()
            raise
        # An inbox on another disk: whole under its new name before the old one goes.
        draft = target.with_name(f".{uuid.uuid4().hex}.tmp")
        shutil.copy2(source, draft)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.rename(target)
        source.unlink()
    sync_folder(target.parent)
    sync_folder(source.parent)


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
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            yield None
            return
        yield descriptor


def remove_all(place: Path) -> None:
    if not place.is_dir() or place.is_symlink():
        place.unlink(missing_ok=True)
        return
    for folder in [place, *(path for path in place.rglob("*") if path.is_dir() and not path.is_symlink())]:
        folder.chmod(0o755)  # a published state is read-only
    shutil.rmtree(place)
