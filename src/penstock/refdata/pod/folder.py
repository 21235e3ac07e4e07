"""Where the memory of a pod lies: a folder of its own, gone with it."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.kernel.datadir import make_folder
from penstock.kernel.errors import Conflict
from penstock.kernel.locks import file_lock

_PREFIX = "penstock-pod-"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder made in it is ours alone


@contextmanager
def pod_folder(chosen: Path | None, data_dir: Path, holder: str) -> Iterator[Path]:
    """A new folder in *chosen*, else in shared memory, else in *data_dir*; what dead pods left there is removed."""
    parent = chosen or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else data_dir)
    make_folder(parent, 0o700)
    _reap(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        with file_lock(folder / "lock", holder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reap(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(Conflict, OSError):  # it lives, or is somebody else's
            if not (folder / "lock").exists():
                continue  # just being made
            with file_lock(folder / "lock", "reaper"):
                shutil.rmtree(folder, ignore_errors=True)
