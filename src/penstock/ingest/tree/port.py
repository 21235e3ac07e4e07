"""The port to the file tree of ingest, which is a folder or a bucket. Paths are relative to its root."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Protocol

import orjson

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import CurrentPointer, IgnoredEntry, InboxFile, RunFailed, check_supplier_name
from penstock.kernel.errors import Corrupt, Invalid

# Entries beside the inboxes of suppliers.
STRAY_FILE = "file outside of the inbox of a supplier"
STRAY_FOLDER = "folder whose name is not valid for a supplier"


class FileChanged(Exception):
    """A file has changed since it was listed."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in the tree."""

    path: str
    size: int
    since: datetime  # the time at which the file was created or moved here


class FileTree(Protocol):
    """A tree of files with blocking calls. A single process writes for a supplier at a time.

    An error of the storage is raised as Transient STORAGE_DOWN.
    """

    def close(self) -> None:
        """Close the connections of the tree."""

    def prepare(self, supplier: str) -> None:
        """Create the folders of a supplier."""

    def lock(self, supplier: str, holder: str) -> AbstractContextManager[None]:
        """I4: lock *supplier* for a process; Conflict LOCKED, which names the other process, if it is locked."""

    def open_work_folder(self, supplier: str, run_id: str) -> AbstractContextManager[Path]:
        """Create a private local folder for a run; it is removed at the end, leftovers of earlier runs before."""

    def read_clock(self) -> float:
        """Return the time of the clock that dates the files of the tree, which may differ from the local clock."""

    def list_suppliers(self) -> list[str]:
        """Return the names of the suppliers that have a configuration or an inbox."""

    def open_config(self, supplier: str) -> AbstractContextManager[Path]:
        """Provide the configuration of a supplier as a local file, which may not exist."""

    def list_arrivals(self, supplier: str) -> list[InboxFile]:
        """Return the files in the inbox, including unfinished files."""

    def list_ignored(self, supplier: str | None = None) -> list[IgnoredEntry]:
        """Return the entries of an inbox that are not files; without *supplier*, entries that belong to no supplier."""

    def fetch(self, arrival: InboxFile, target: Path | None = None) -> str:
        """Copy a file to *target* and return its sha256; FileChanged if it changes meanwhile."""

    def move(self, arrival: InboxFile, folder: str, suffix: str = "") -> str | None:
        """I2: move a file into *folder* and return its path; None if the file has changed.

        An existing file is never overwritten: the moved file gets another name.
        """

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist."""

    def write(self, path: str, data: bytes) -> None:
        """Write a small file atomically."""

    def store(self, source: Path, path: str) -> None:
        """Store a local file atomically; *source* may not exist afterwards."""

    def open(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Open a file for reading; NotFound OBJECT_NOT_FOUND. It is not changed or removed while it is open."""

    def list_files(self, folder: str) -> Iterator[StoredFile]:
        """Yield every file below *folder*."""

    def list_folders(self, folder: str) -> list[str]:
        """Return the names of the folders in *folder*."""

    def list_runs(self, supplier: str) -> list[str]:
        """Return the ids of the runs of a supplier that have files, the oldest first."""

    def list_states(self, supplier: str) -> list[str]:
        """Return the ids of the runs whose states are stored."""

    def remove(self, path: str) -> bool:
        """Remove a file, or a folder with its content; return False, and keep it, if it is being read."""

    def publish(self, source: Path, supplier: str, run_id: str) -> None:
        """I11: store a local folder, synced to disk, as an immutable state; the current state does not change yet."""

    def read_pointer(self, supplier: str) -> CurrentPointer | None:
        """Return the pointer to the current state; None if there is none."""

    def switch_pointer(self, supplier: str, pointer: CurrentPointer, seen: CurrentPointer | None) -> None:
        """I11: make a state current; RunFailed SUPERSEDED if the current state is no longer *seen*."""

    def make_uri(self, path: str) -> str:
        """Return the location of a file for messages."""


def make_superseded_error(supplier: str, current: CurrentPointer | None) -> RunFailed:
    """Return RunFailed SUPERSEDED, which names the *current* state."""
    state = f"the current state is {current.run_id} (fence {current.fence})" if current else "its state was removed"
    message = f"another run has published {supplier} since this run started: {state}"
    return RunFailed(FailureCode.SUPERSEDED, message, "nothing to do: the next run processes the file again")


def parse_pointer(content: bytes, uri: str) -> CurrentPointer:
    """Return the pointer in *content*, the file at *uri*; Corrupt POINTER_DAMAGED if it is not valid."""
    try:
        document = orjson.loads(content)
        # A later release may add fields.
        return CurrentPointer(**{field.name: document[field.name] for field in fields(CurrentPointer)})
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        hint = "restore it from a backup, or copy the pointer.json of the state from `state_store`"
        raise Corrupt("POINTER_DAMAGED", f"{uri} is not a valid pointer: {error!r}", hint=hint) from error


def is_supplier_name(name: str) -> bool:
    """Return whether *name* is allowed as the name of a supplier."""
    with suppress(Invalid):
        return bool(check_supplier_name(name))
    return False
