"""The folder of the memory of a pod, which is removed with the pod."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time

import structlog

from penstock.kernel.db.datadir import create_folder
from penstock.kernel.db.locks import hold_file_lock
from penstock.kernel.errors import Conflict

_PREFIX, _NEW = "penstock-pod-", "penstock-new-"
_LOW_SPACE = 256  # MB
_ABANDONED_AFTER = 60.0  # seconds; a younger folder may still be in creation
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder created in it has mode 0700


@contextmanager
def make_pod_folder(chosen: Path | None, data_dir: Path, holder: str) -> Iterator[Path]:
    """Yield a new folder in *chosen*, else in shared memory, else in *data_dir*; remove folders of dead pods."""
    parent = chosen or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else data_dir)
    create_folder(parent, 0o700)
    _remove_abandoned(parent)
    created = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    # Locked before it gets its final name: a pod that starts now must not remove it.
    folder = created.with_name(created.name.replace(_NEW, _PREFIX))
    try:
        with hold_file_lock(created / "lock", holder):
            created.rename(folder)
            _warn_of_low_space(parent)
            yield folder
    finally:
        for path in (created, folder):
            shutil.rmtree(path, ignore_errors=True)


def _warn_of_low_space(parent: Path) -> None:
    free = shutil.disk_usage(parent).free // 1024**2
    if free < _LOW_SPACE:
        hint = "containers give /dev/shm 64 MB: mount a memory-backed volume and set refdata.query.memoryDir to it"
        structlog.get_logger().warning("memory_space_limited", folder=str(parent), free_mb=free, hint=hint)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with (
            contextlib.suppress(Conflict, OSError),
            hold_file_lock(folder / "lock", "reaper"),
        ):  # locked by a living pod
            shutil.rmtree(folder, ignore_errors=True)
    for folder in parent.glob(f"{_NEW}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_mtime < time() - _ABANDONED_AFTER:
                shutil.rmtree(folder, ignore_errors=True)
