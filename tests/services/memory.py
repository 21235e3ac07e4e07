"""Where the tests' server keeps its data: in memory, where there is room for it."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30
_OURS = "penstock-suite-"


class MemoryFolder:
    """A folder for as long as this process lives; what killed processes left is removed by the next."""

    def __init__(self) -> None:
        place = _place()
        _remove_what_is_left(place)
        new = Path(tempfile.mkdtemp(prefix="penstock-new-", dir=place))
        self._lock = os.open(new, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = new.rename(new.with_name(new.name.replace("penstock-new-", _OURS)))  # held before it can be seen

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _place() -> Path:
    """A test's database is a thousand files, soon removed again: on a disk that can cost more than the test does."""
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM:
        return _MEMORY
    return Path(tempfile.gettempdir())


def _remove_what_is_left(place: Path) -> None:
    for folder in place.glob(f"{_OURS}*"):
        with suppress(OSError):  # another process has it open, or removes it too
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
