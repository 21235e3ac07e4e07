"""The data directory: one process at a time, one format."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.kernel.errors import BadConfig, Conflict
from penstock.kernel.locks import file_lock

FORMAT = 1
_FORMAT_FILE = "FORMAT"


@contextmanager
def owned(folder: Path, holder: str) -> Iterator[Path]:
    """*folder*, made when missing, held by this process alone; Conflict when it is held, or of a newer release."""
    _make(folder)
    with file_lock(folder / "lock", holder):
        check_format(folder)
        (folder / _FORMAT_FILE).write_text(f"{FORMAT}\n")
        yield folder


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        hint = "choose another --data-dir, or change its owner"
        raise BadConfig("DATA_DIR_UNUSABLE", f"cannot use {folder}: {error.strerror}", hint=hint) from error


def check_format(folder: Path) -> None:
    """Conflict DATA_NEWER when a later release wrote *folder*; nothing is changed then."""
    file = folder / _FORMAT_FILE
    found = int(file.read_text()) if file.exists() else FORMAT
    if found > FORMAT:
        raise Conflict(
            "DATA_NEWER",
            f"{folder} is in format {found}, this release knows format {FORMAT} and older",
            hint="run the release that wrote it, or a newer one; nothing was changed",
        )
