"""The data folder of the PostgreSQL of the tests: in memory if there is enough space."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/dev/shm")
_MIN_FREE = 4 << 30
_OURS = "penstock-suite-"


class MemoryFolder:
    """A folder for the lifetime of this process; folders of killed processes are removed by the next one."""

    def __init__(self) -> None:
        parent = _parent_folder()
        _remove_abandoned(parent)
        new = Path(tempfile.mkdtemp(prefix="penstock-new-", dir=parent))
        self._lock = os.open(new, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = new.rename(
            new.with_name(new.name.replace("penstock-new-", _OURS))
        )  # locked before it gets its final name

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _parent_folder() -> Path:
    """Return the parent folder: in memory, because a database has a thousand files, which are slow on a disk."""
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _MIN_FREE:
        return _MEMORY
    return Path(tempfile.gettempdir())


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_OURS}*"):
        with suppress(OSError):  # another process has it open, or removes it too
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
