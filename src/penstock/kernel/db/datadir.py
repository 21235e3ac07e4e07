"""The data directory: one process at a time, one format."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.kernel.db.locks import file_lock
from penstock.kernel.errors import BadConfig, Conflict, Corrupt

FORMAT = 1
_FORMAT_FILE = "FORMAT"


@contextmanager
def lock_data_dir(folder: Path, holder: str) -> Iterator[Path]:
    """*folder*, made when missing, held by this process alone; Conflict when it is held, or of a newer release."""
    create_folder(folder, 0o755)
    with file_lock(folder / "lock", holder):
        check_format(folder)
        # By rename: a crash must not leave half a file, or the next start could not tell the format.
        new = folder / f"{_FORMAT_FILE}.new"
        new.write_text(f"{FORMAT}\n")
        new.replace(folder / _FORMAT_FILE)
        yield folder


def create_folder(folder: Path, mode: int) -> None:
    """Have *folder* there to be written to; BadConfig DATA_DIR_UNUSABLE when it cannot be."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # ValueError: a name no file can have
        hint = "choose another --data-dir, or change its owner"
        why = getattr(error, "strerror", None) or error
        raise BadConfig("DATA_DIR_UNUSABLE", f"cannot use {folder}: {why}", hint=hint) from error


def check_format(folder: Path) -> None:
    """Conflict DATA_NEWER when a later release wrote *folder*; nothing is changed then."""
    file = folder / _FORMAT_FILE
    try:
        found = int(file.read_bytes()) if file.exists() else FORMAT
    except ValueError as error:
        hint = f"put the number of its format into it; this release writes {FORMAT}"
        raise Corrupt("DATA_FORMAT_UNKNOWN", f"{file} holds no number", hint=hint) from error
    if found > FORMAT:
        raise Conflict(
            "DATA_NEWER",
            f"{folder} is in format {found}, this release knows format {FORMAT} and older",
            hint="run the release that wrote it, or a newer one; nothing was changed",
        )
