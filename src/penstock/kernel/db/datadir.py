"""The data directory: locked by one process at a time, and marked with its format."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.kernel.db.locks import hold_file_lock
from penstock.kernel.errors import BadConfig, Conflict, Corrupt

FORMAT = 1
_FORMAT_FILE = "FORMAT"


@contextmanager
def lock_data_dir(folder: Path, holder: str) -> Iterator[Path]:
    """Yield *folder*, created if missing and locked by this process; Conflict if locked, or of a newer release."""
    create_folder(folder, 0o755)
    with hold_file_lock(folder / "lock", holder):
        check_format(folder)
        # By rename: a crash must not leave half a file, because the next start could not read the format.
        new = folder / f"{_FORMAT_FILE}.new"
        new.write_text(f"{FORMAT}\n")
        new.replace(folder / _FORMAT_FILE)
        yield folder


def create_folder(folder: Path, mode: int) -> None:
    """Create *folder* if missing; BadConfig DATA_DIR_UNUSABLE if it cannot be created or written to."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # ValueError: a name no file can have
        hint = "choose another folder with --data-dir, or change the owner of this one"
        reason = getattr(error, "strerror", None) or error
        raise BadConfig("DATA_DIR_UNUSABLE", f"cannot use {folder}: {reason}", hint=hint) from error


def check_format(folder: Path) -> None:
    """Raise Conflict DATA_NEWER if a newer release wrote *folder*; change nothing."""
    file = folder / _FORMAT_FILE
    try:
        version = int(file.read_bytes()) if file.exists() else FORMAT
    except ValueError as error:
        hint = f"write the number of the data format into the file; this release uses {FORMAT}"
        raise Corrupt("DATA_FORMAT_UNKNOWN", f"{file} does not contain a number", hint=hint) from error
    if version > FORMAT:
        raise Conflict(
            "DATA_NEWER",
            f"{folder} is in format {version}; this release supports format {FORMAT} and older",
            hint="run the release that wrote the data, or a newer one; nothing was changed",
        )
