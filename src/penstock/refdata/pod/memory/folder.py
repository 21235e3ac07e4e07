"""Where the memory of a pod lies: a folder of its own, gone with it."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time

import structlog

from penstock.kernel.db.datadir import create_folder
from penstock.kernel.db.locks import file_lock
from penstock.kernel.errors import Conflict

_PREFIX, _NEW = "penstock-pod-", "penstock-new-"
_LITTLE = 256  # MB
_LEFT_AFTER = 60.0  # seconds; until then a new one may still be made
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder made in it is ours alone


@contextmanager
def pod_folder(chosen: Path | None, data_dir: Path, holder: str) -> Iterator[Path]:
    """A new folder in *chosen*, else in shared memory, else in *data_dir*; what dead pods left there is removed."""
    parent = chosen or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else data_dir)
    create_folder(parent, 0o700)
    _reap(parent)
    made = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    # Locked before it has its name: others that start now must not take it for a dead one's.
    folder = made.with_name(made.name.replace(_NEW, _PREFIX))
    try:
        with file_lock(made / "lock", holder):
            made.rename(folder)
            _warn_of_little_room(parent)
            yield folder
    finally:
        for left in (made, folder):
            shutil.rmtree(left, ignore_errors=True)


def _warn_of_little_room(parent: Path) -> None:
    free = shutil.disk_usage(parent).free // 1024**2
    if free < _LITTLE:
        hint = "containers give /dev/shm 64 MB: mount a memory-backed volume and name it as refdata.query.memoryDir"
        structlog.get_logger().warning("pod_memory_small", folder=str(parent), free_mb=free, hint=hint)


def _reap(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(Conflict, OSError), file_lock(folder / "lock", "reaper"):  # else it lives
            shutil.rmtree(folder, ignore_errors=True)
    for folder in parent.glob(f"{_NEW}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_mtime < time() - _LEFT_AFTER:
                shutil.rmtree(folder, ignore_errors=True)
